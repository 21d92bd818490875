"use strict";
const EVERY_MS = 1000, SVG = "http://www.w3.org/2000/svg", TALL = 150, COLOURS = 8;
const $ = (id) => document.getElementById(id);
let token = sessionStorage.getItem("tidegate-token") || "", status = null, heardAt = 0, asking = false;

// Elements: text is only ever set as text, so nothing that a replica reports can become markup.
function make(tag, attributes = {}, ...children) {
  const svg = ["g", "rect", "path", "text", "line", "circle", "title", "clipPath", "polygon"].includes(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const whole = (number) => Math.round(number).toLocaleString("en");
const percent = (part, of) => (of ? `${Math.round((100 * part) / of)} %` : "–");
const colour = (tier) => `t${tier % COLOURS}`;
const number = (value) => (value === null ? "–" : value.toFixed(2).replace("-", "−"));
const clock = (t) => new Date(1000 * t).toLocaleTimeString("en-GB");

async function ask(path, body) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const more = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(12000), ...more });
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error ? content.error.message : `HTTP ${answer.status}`);
  return content;
}

async function look() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    status = await ask("/status.json");
    heardAt = Date.now();
    draw();
  } catch (error) {
    say($("live"), heardAt ? `no answer since ${clock(heardAt / 1000)}: ${error.message}` : error.message, "bad");
  } finally {
    asking = false;
  }
}

function say(element, text, kind = "") {
  if (element.textContent !== text) element.textContent = text;
  element.classList.remove("good", "bad");
  if (kind) element.classList.add(kind);
}

let drawnTiers = null;
function draw() {
  const tiers = JSON.stringify(status.tiers);
  if (drawnTiers !== null && drawnTiers !== tiers) return location.reload(); // the fleet was deployed anew with others
  drawnTiers = tiers;
  say($("live"), `live, ${clock(status.t)}`, "good");
  say($("about"), `${status.model} · application ${status.application} · ${status.serve_status}`);
  say($("node"), `This page runs on Ray node ${status.node}, the cluster's head.`);
  notice();
  totals();
  legend();
  picture();
  table();
  events();
  settings();
}

function notice() {
  const problems = [];
  for (const [name, source] of [["The coordinator", status.coordinator], ["Serve", status.serve]])
    if (!source.answers)
      problems.push(`${name} does not answer (${source.problem}). ` +
        (source.since ? `What it said at ${clock(source.since)} is shown.` : "Nothing is known from it."));
  if (status.serve_message && status.serve_status !== "RUNNING") problems.push(status.serve_message);
  say($("notice"), problems.join(" "));
  $("notice").hidden = !problems.length;
}

function totals() {
  const all = status.totals, target = status.targets.EngineReplica;
  const moves = Object.values(status.migration.moves).reduce((sum, by) => sum + (by.done || 0), 0);
  const rows = [["replicas serving", all.serving, `of ${target ?? all.replicas}`], ["requests running", whole(all.running), ""],
    ["requests waiting", whole(all.waiting), ""], ["KV cache used", percent(all.used_blocks, all.total_blocks), ""],
    ["moving now", status.moving.reduce((sum, pair) => sum + pair.count, 0), ""], ["moved by policy", whole(moves), ""]];
  $("totals").replaceChildren(...rows.map(([name, value, more]) =>
    make("div", { "data-total": name }, make("dt", {}, name), make("dd", {}, String(value), " ", make("small", {}, more)))));
}

function legend() {
  const tiers = status.tiers.map((tier, i) => make("li", {}, make("i", { class: colour(i) }), tier.name));
  $("legend").replaceChildren(...tiers, make("li", {}, make("i", { class: "dash" }), "headroom begins"));
}

// One vessel for each replica, filled by tier; what is there stays there, so that levels move rather than jump.
const vessels = new Map();
function picture() {
  const svg = $("fleet"), width = Math.max(260, $("picture").clientWidth), fleet = status.replicas;
  const wide = fleet.length > 12 || width < 500 ? 104 : 150, columns = Math.max(1, Math.min(fleet.length, Math.floor(width / wide)));
  const step = width / columns, high = TALL + 138, rows = Math.ceil(fleet.length / columns);
  svg.setAttribute("viewBox", `0 0 ${width} ${Math.max(1, rows * high)}`);
  $("empty").hidden = fleet.length > 0;
  svg.style.display = fleet.length ? "block" : "none";
  for (const [id, vessel] of vessels) if (!fleet.some((replica) => replica.id === id)) { vessel.group.remove(); vessels.delete(id); }
  const places = new Map(), body = Math.min(150, step - 20);
  fleet.forEach((replica, i) => {
    const x = (i % columns) * step + step / 2, y = Math.floor(i / columns) * high + 52;
    places.set(replica.id, { x, y });
    vessel(svg, replica, x, y, body);
  });
  arrows(svg, places, body);
  $("fleet-text").textContent = fleet.map((r) => `${r.id} ${r.state}: ${percent(r.used_blocks, r.total_blocks)} of its KV cache used, ` +
    `${r.running} running, ${r.waiting} waiting.`).concat(status.moving.map((m) => `${m.count} moving from ${m.source} to ${m.destination}.`)).join(" ");
}

function vessel(svg, replica, x, y, body) {
  let known = vessels.get(replica.id);
  if (!known) {
    const clip = `clip-${vessels.size}-${replica.id.replace(/[^\w-]/g, "_")}`;
    known = { group: make("g", { "data-replica": replica.id }), water: make("g", { "clip-path": `url(#${clip})` }), layers: [], marks: make("g") };
    known.clip = make("rect", { rx: 12, height: TALL });
    known.glass = make("rect", { rx: 12, height: TALL, class: "glass" });
    known.rim = make("rect", { rx: 12, height: TALL, class: "rim" });
    known.surface = make("path", { class: "surface" });
    const clipPath = make("clipPath", { id: clip }, known.clip);
    known.group.append(clipPath, known.glass, known.water, known.rim, known.marks);
    known.layers = [...status.tiers.map((_, i) => make("rect", { class: `layer ${colour(i)}`, "data-tier": i })), make("rect", { class: "layer other" })];
    known.water.append(...known.layers, known.surface);
    vessels.set(replica.id, known);
    svg.append(known.group);
  }
  known.group.setAttribute("class", replica.state);
  known.group.setAttribute("transform", `translate(${x - body / 2} ${y})`);
  for (const rect of [known.clip, known.glass, known.rim]) rect.setAttribute("width", body);
  fill(known, replica, body);
  marks(known.marks, replica, body);
}

// From the bottom: the highest tier first. Shared blocks count for each request, so layers are scaled to what is used.
function fill(known, replica, body) {
  const scale = TALL / Math.max(1, replica.total_blocks), sum = replica.tiers.reduce((all, tier) => all + tier.blocks, 0);
  const shrink = sum > replica.used_blocks ? replica.used_blocks / sum : 1;
  let level = TALL, top = null;
  known.layers.forEach((rect, i) => {
    const blocks = i < replica.tiers.length ? replica.tiers[i].blocks * shrink : Math.max(0, replica.used_blocks - sum);
    level -= blocks * scale;
    for (const [name, value] of Object.entries({ x: 0, width: body, y: level, height: blocks * scale })) rect.setAttribute(name, value);
    rect.setAttribute("data-blocks", i < replica.tiers.length ? replica.tiers[i].blocks : Math.round(blocks));
    if (blocks > 0) top = rect;
  });
  known.surface.setAttribute("class", `surface ${top ? top.getAttribute("class").replace("layer", "") : ""}`);
  const waves = Math.ceil(body / 40) + 2;
  known.surface.setAttribute("d", top ? `M0 ${level + 1}${"q10-6 20 0t20 0".repeat(waves)}V${level + 3}H0z` : "");
}

function marks(group, replica, body) {
  const text = (x, y, words, kind = "", anchor = "middle") => make("text", { x, y, class: kind, "text-anchor": anchor }, words);
  const parts = [];
  const line = TALL * (replica.headroom_blocks / Math.max(1, replica.total_blocks));
  if (line > 0) parts.push(make("line", { x1: 0, x2: body, y1: line, y2: line, class: "line", "data-headroom": replica.headroom_blocks }));
  const drops = [];
  replica.tiers.forEach((tier, i) => { for (let n = 0; n < tier.waiting && drops.length < (body < 110 ? 3 : 9); n++) drops.push(i); });
  drops.forEach((tier, i) => parts.push(make("circle", { cx: 8 + i * 10, cy: -11, r: 4, class: colour(tier) })));
  if (replica.waiting) parts.push(text(8 + drops.length * 10, -7, `${replica.waiting} waiting`, "soft", "start"));
  const unusual = replica.state !== "serving";
  parts.push(text(body / 2, TALL + 20, replica.id, "big"));
  parts.push(text(body / 2, TALL + 37, `${percent(replica.used_blocks, replica.total_blocks)} of KV`));
  parts.push(text(body / 2, TALL + 53, `${replica.running} running`));
  parts.push(text(body / 2, TALL + 69, unusual ? replica.state : `φ ${number(replica.phi)}${replica.blocked ? " · blocked" : ""}`, unusual ? "warn" : "soft"));
  group.replaceChildren(...parts);
}

function arrows(svg, places, body) {
  svg.querySelectorAll(".moves").forEach((old) => old.remove());
  const group = make("g", { class: "moves" });
  status.moving.forEach((pair) => {
    const from = places.get(pair.source), to = places.get(pair.destination);
    if (!from || !to) return;
    // In one row from top to top; between rows from the side, so that the names below stay readable.
    const side = to.x === from.x ? 1 : Math.sign(to.x - from.x), level = from.y === to.y, lift = Math.min(34, 16 + Math.abs(from.x - to.x) / 20);
    const [ax, ay] = level ? [from.x, from.y - 4] : [from.x + (side * body) / 2, from.y + TALL / 2], [bx, by] = [to.x, to.y - 6];
    const [cx, cy] = level ? [ax, ay - lift] : [ax + side * 30, ay], dy = level ? by - lift : by - 60;
    group.append(make("path", { class: "arrow", d: `M${ax} ${ay}C${cx} ${cy} ${bx} ${dy} ${bx} ${by}`,
      "data-move": `${pair.source}>${pair.destination}` }, make("title", {}, `${pair.count} moving from ${pair.source} to ${pair.destination}`)),
      make("polygon", { class: "head", points: `${bx - 6},${by - 8} ${bx + 6},${by - 8} ${bx},${by + 2}` }),
      make("text", { x: level ? (ax + bx) / 2 : bx + 10, y: level ? ay - lift * 0.75 - 6 : by - 12, "text-anchor": level ? "middle" : "start",
        class: "soft" }, `${pair.count} moving`));
  });
  svg.append(group);
}

// Rows stay the same elements, so that a click or the focus is not lost while figures change.
const rows = new Map();
function table() {
  const body = $("replicas").tBodies[0], names = new Set(status.replicas.map((replica) => replica.id));
  for (const [id, row] of rows) if (!names.has(id)) { row.element.remove(); rows.delete(id); }
  status.replicas.forEach((replica, i) => {
    if (!rows.has(replica.id)) rows.set(replica.id, newRow(replica.id));
    const row = rows.get(replica.id);
    if (body.children[i] !== row.element) body.insertBefore(row.element, body.children[i] || null);
    fillRow(row, replica);
  });
}

function newRow(id) {
  const row = { state: make("span"), button: make("button", { type: "button", "data-drain": id }), draining: false };
  row.cells = [1, 1, 1, 1, 1, 0, 1, 1].map((figure) => make("td", figure ? { class: "n" } : {}));
  row.element = make("tr", { "data-row": id }, make("th", { scope: "row" }, id), make("td", {}, row.state), make("td", {}, row.button), ...row.cells);
  row.button.onclick = () => act(row.draining ? "undrain" : "drain", { replica: id }, `${id} ${row.draining ? "takes requests again" : "drains"}`);
  return row;
}

function fillRow(row, r) {
  const tiers = r.tiers.map((tier, i) => [status.tiers[i].name, tier]).filter(([, tier]) => tier.running || tier.waiting)
    .map(([name, tier]) => `${name} ${tier.running} + ${tier.waiting}`).join(", ") || "–";
  const texts = [`${r.running} / ${r.max_num_seqs}`, String(r.waiting),
    `${whole(r.used_blocks)} / ${whole(r.total_blocks)}, ${percent(r.used_blocks, r.total_blocks)}`, whole(r.headroom_blocks),
    number(r.phi), tiers, whole(r.queued_tokens), `${r.report_age_s.toFixed(1)} s`];
  row.cells.forEach((cell, i) => { if (cell.textContent !== texts[i]) cell.textContent = texts[i]; });
  row.draining = r.state === "draining";
  row.state.className = `state ${r.state}`;
  row.state.textContent = r.state;
  const order = row.draining ? "Undrain" : "Drain";
  if (row.button.textContent !== order) row.button.textContent = order;
  row.button.setAttribute("aria-label", `${order} replica ${r.id}`);
  row.button.disabled = !token || r.state === "dead";
}

let shown = "";
function events() {
  const key = status.events.slice(0, 100).map((event) => `${event.number}.${event.count}`).join();
  if (key === shown) return;
  shown = key;
  $("events").replaceChildren(...status.events.slice(0, 100).map((event) => make("li", {},
    make("time", { datetime: new Date(1000 * event.t).toISOString() }, clock(event.t)), make("span", { class: event.kind }, event.text))));
  if (!status.events.length) $("events").append(make("li", {}, "–", make("span", {}, "nothing happened since the coordinator started")));
}

function settings() {
  const off = !status.actions ? "No token is set on the server: this page is there to read (docs/operations.md)." : "";
  $("token-form").hidden = Boolean(off);
  for (const section of ["scheduling", "balancing"]) {
    const form = $(section), choice = form.elements.policy, now = status.settings[section], choices = status.settings.choices[section];
    if (!choice.options.length) {
      choice.append(...Object.keys(choices).map((name) => make("option", { value: name }, name)));
      choice.onchange = () => parameters(form, choices[choice.value], {});
      choice.value = now.policy;
      parameters(form, choices[now.policy], now);
    }
    say(nowOf(section), `${Object.entries(now).filter(([, v]) => v !== null).map(([k, v]) => (k === "policy" ? v : `${k} ${v}`)).join(", ")}`);
    form.firstElementChild.disabled = !token || status.settings.changeable !== null;
  }
  const migration = status.migration, form = $("migration");
  say(nowOf("migration"), !migration.enabled ? "off by the configuration; drains and moves by hand go on" : migration.paused ? "paused" : "on");
  form.querySelector("button").textContent = migration.paused ? "Go on" : "Pause";
  form.firstElementChild.disabled = !token || !migration.enabled;
  if (off && !$("said").textContent) say($("said"), off);
}

const nowOf = (section) => document.querySelector(`[data-now="${section}"]`);

function parameters(form, defaults, now) {
  form.querySelector(".parameters").replaceChildren(...Object.entries(defaults).map(([name, value]) => {
    const given = now[name] ?? value;
    return make("label", {}, `${name} `, make("input", { name, value: given === null ? "" : typeof given === "string" ? given : JSON.stringify(given) }));
  }));
}

async function act(action, body, done) {
  say($("said"), "…");
  try {
    await ask(`/actions/${action}`, body);
    say($("said"), done, "good");
  } catch (error) {
    say($("said"), `Not done: ${error.message}`, "bad");
  }
  await look();
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("tidegate-token", token);
  $("token").value = "";
  say($("said"), token ? "The token is used for actions from now on." : "No token: actions are off.");
  heardAt ? draw() : look();
});
for (const section of ["scheduling", "balancing"])
  $(section).addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = { policy: event.target.elements.policy.value };
    for (const input of event.target.querySelectorAll(".parameters input")) {
      if (input.value.trim() === "") continue;
      try { wanted[input.name] = JSON.parse(input.value); } catch { wanted[input.name] = input.value; }
    }
    act("settings", { [section]: wanted }, `${section}: ${wanted.policy} is being put in force`);
  });
$("migration").addEventListener("submit", (event) => {
  event.preventDefault();
  const paused = !status.migration.paused;
  act("migration", { paused }, paused ? "moves by policy are paused" : "moves by policy go on");
});
document.addEventListener("visibilitychange", look);
window.addEventListener("resize", () => status && picture());
setInterval(look, EVERY_MS);
look();
