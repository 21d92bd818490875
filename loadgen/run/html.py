"""The report of one or more runs: one HTML file with tables and plots, which loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from loadgen.run import plots, results
from loadgen.run.plots import RunFiles
from loadgen.svg import Plot

#: Colours of the outcomes, and of a good figure.
PAINT = {
    "ok": "#009e73",
    "shed": "#e69f00",
    "error": "#d00000",
    "cut": "#cc79a7",
    "cancelled": "#56b4e9",
    "unfinished": "#8a8f98",
}
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#f6f7f9;--card:#fff;--line:#d8dde3;--soft:#57606a}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--card:#161b22;--line:#30363d;--soft:#9198a1}}
*{box-sizing:border-box}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
body{max-width:1160px;margin:0 auto;padding:16px}
h1{font-size:24px;margin:8px 0 0}h2{font-size:18px;margin:32px 0 8px}h3{font-size:15px;margin:20px 0 4px}
p{margin:4px 0}p,summary,.soft{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:10px;margin:14px 0}
.card,.plots>div,.wide{background:var(--card);border:1px solid var(--line);border-radius:8px}
.card{padding:8px 12px}.card b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto;margin:8px 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;width:100%;font-size:14px}
td,th{padding:4px 10px;text-align:right;white-space:nowrap}td{border-top:1px solid var(--line)}
th{font-weight:600;color:var(--soft)}
td:first-child,th:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
td.text{text-align:left;white-space:pre-wrap;min-width:14em;overflow-wrap:anywhere}
.bar{display:flex;gap:8px;align-items:center;margin:4px 0}.bar>span{flex:0 0 5em}.bar>div{display:flex;flex:1}
.bar i{height:18px;min-width:2px}.key{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:12.5px;color:var(--soft)}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px}
.plots>div{padding:10px 12px}.plots .key{padding-left:11%}
svg{width:100%;height:auto;display:block}svg text{fill:var(--ink);font:11px system-ui,sans-serif}
svg .title{font-size:13px;font-weight:600}svg .small{font-size:10.5px;fill:var(--soft)}
.grid{stroke:var(--line);stroke-width:.6}.event{stroke:#d55e00;stroke-dasharray:4 3}
@media(max-width:600px){body{padding:10px}svg .title{font-size:17px}svg .small{font-size:14px}}
@media(max-width:600px){.plots>div{padding:8px 4px}}
pre{white-space:pre-wrap;font-size:12px;overflow-wrap:anywhere}
"""
WAITS = (
    ("TTFT, ms", "ttft_ms"),
    ("TTFT per prompt token, ms", "normalized_ttft_ms"),
    ("TPOT, ms", "tpot_ms"),
    ("between tokens, ms", "itl_ms"),
    ("generation, s", "tgt_s"),
    ("end to end, ms", "e2el_ms"),
)
SHARES = ("p50", "p95", "p99")


def load(folder: Path) -> RunFiles:
    """Read a run's folder; ValueError if it is none."""
    path = folder / results.RUN
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("bench") != "run":
        raise ValueError(f"{path}: not a result of `python -m loadgen run`")
    return RunFiles(folder.resolve().name, found, results.read_answers(folder)[1])


def load_all(folders: Sequence[Path]) -> list[RunFiles]:
    """Each folder once, those of equal names under their whole paths; ValueError if one is no run."""
    runs = [(folder, load(folder)) for folder in dict.fromkeys(folders)]
    names = [run.name for _, run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(folder)) for folder, run in runs]


def page(runs: Sequence[RunFiles]) -> str:
    """The report: of one run by tier; of several, each beside the others and as a capacity curve."""
    one = runs[0]
    if len(runs) == 1:
        title, groups = f"Run {one.name}", one.by_tier()
        drawn = {"Over time": plots.timelines(one)}
    else:
        title = f"{len(runs)} runs"
        groups = {run.name: [line.record() for line in run.lines] for run in runs}
        drawn = {"Capacity": plots.capacity(runs)}
    drawn = {"Waits": [*plots.waits(groups), *plots.violins(groups)], **drawn}
    body = [f"<h1>{escape(title)}</h1>"]
    if len(runs) > 1:
        body.append(_side_by_side(runs))
        drawn = dict(reversed(drawn.items()))
        body += _plots(drawn)
    body += [_head(run, alone=len(runs) == 1) for run in runs]
    if len(runs) == 1:
        body += _plots(drawn)
    for run in runs:
        conditions = {k: v for k, v in run.found.items() if not isinstance(v, list) or len(v) < 20}
        text = escape(json.dumps(conditions, indent=1))
        body.append(f"<details><summary>{escape(run.name)}: run.json</summary><pre>{text}</pre></details>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _plots(sections: dict[str, list[Plot]]) -> list[str]:
    return [
        f'<h2>{heading}</h2><div class="plots">{"".join(map(_plot, drawn))}</div>'
        for heading, drawn in sections.items()
    ]


def _plot(plot: Plot) -> str:
    key = _key(plot.legend) if len(plot.legend) > 1 else ""
    return f"<div>{plot.svg(legend=False)}{key}</div>"


def _key(entries: Iterable[tuple[str, str]]) -> str:
    told = "".join(f'<span><i style="background:{paint}"></i>{escape(name)}</span>' for name, paint in entries)
    return f'<div class="key">{told}</div>'


def _head(run: RunFiles, alone: bool) -> str:
    found = run.found
    parts = [] if alone else [f"<h2>{escape(run.name)}</h2>"]
    sent, lag = found["arrivals"], found["lag"]
    bursts = ", ".join(
        f"{what} {_number(sent[key])}"
        for what, key in (("gap CV", "gap_cv"), ("dispersion in 1 s", "iod_1s"), ("peak over mean", "peak_1s"))
    )
    notes = [
        f"{found['model_id']} at {found['arguments'].get('url')}, {found['date']}: {found['asked']} requests at "
        f"{_number(sent['rate'])}/s ({bursts})."
    ]
    if lag["client_was_late"]:
        notes.append("The client could not keep its times: the waits include its own lag.")
    if found["interrupted"]:
        notes.append(f"The run was interrupted; {found['not_sent']} requests were not sent.")
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    parts.append(_cards(found))
    groups = {**{f"tier {t}": g for t, g in found["tiers"].items()}, "all": found}
    parts.append(f"<h3>How the requests ended</h3>{_bars(groups)}")
    slo = found["within_slo"] is not None
    parts.append(
        _table(
            ("", "asked", *found["outcomes"], *(("in SLO", "goodput/s") if slo else ())),
            (
                (name, g["asked"], *g["outcomes"].values())
                + ((_share(g["within_slo"]), g["request_goodput"]) if slo else ())
                for name, g in groups.items()
            ),
        )
    )
    parts.append("<h3>How long they waited, from when they were due</h3>")
    parts.append(_waits(groups))
    if found["hooks"]:
        parts.append("<h3>What was done meanwhile</h3>" + _hooks(found["hooks"]))
    if counted := {k: v for k, v in (found["server_counters"] or {}).items() if v}:
        parts.append("<h3>What the server counted</h3>" + _table(("counter", "in this run"), counted.items()))
    return "".join(parts)


def _cards(found: dict[str, Any]) -> str:
    def pair(name: str) -> str:
        return f"{_number(found[f'p50_{name}'])} / {_number(found[f'p99_{name}'])}"

    cards = [
        ("ended well", _share(found["completed"] / found["asked"] if found["asked"] else None)),
        ("TTFT p50 / p99, ms", pair("ttft_ms")),
        ("TPOT p50 / p99, ms", pair("tpot_ms")),
        ("answer tokens/s", _number(found["output_throughput"])),
    ]
    if found["within_slo"] is not None:
        cards.append(("within SLO", _share(found["within_slo"])))
    if exact := found["exact"]:
        wrong = exact["different"]
        told = f"{wrong} differ" if wrong else f"{exact['equal']} equal"
        rest = ", ".join(
            f"{exact[kind]} {what}"
            for kind, what in (("prefix", "cut but agreeing"), ("unknown", "not comparable"))
            if exact[kind]
        )
        cards.append(("answers against the reference" + (f"; {rest}" if rest else ""), told))
    cards.append(("sent late, p99, ms", _number((found["lag"]["p99_s"] or 0.0) * 1e3)))
    told = "".join(f'<div class="card"><b>{escape(value)}</b>{escape(name)}</div>' for name, value in cards)
    return f'<div class="cards">{told}</div>'


def _bars(groups: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, group in groups.items():
        parts = "".join(
            f'<i style="flex:{count};background:{PAINT[outcome]}" title="{count} {outcome}"></i>'
            for outcome, count in group["outcomes"].items()
            if count
        )
        rows.append(f'<div class="bar"><span>{escape(name)}</span><div>{parts}</div></div>')
    seen = [outcome for outcome in PAINT if any(g["outcomes"][outcome] for g in groups.values())]
    return "".join(rows) + _key((outcome, PAINT[outcome]) for outcome in seen)


def _waits(groups: dict[str, dict[str, Any]]) -> str:
    top = "".join(f'<th colspan="{len(SHARES)}">{escape(title)}</th>' for title, _ in WAITS)
    rows = ((name, *(g[f"{p}_{wait}"] for _, wait in WAITS for p in SHARES)) for name, g in groups.items())
    return _table(("", *(SHARES * len(WAITS))), rows, f"<tr><th></th>{top}</tr>")


def _side_by_side(runs: Sequence[RunFiles]) -> str:
    names = (("TTFT p50, ms", "p50_ttft_ms"), ("p99", "p99_ttft_ms"), ("TPOT p50, ms", "p50_tpot_ms"))
    heads = ("run", "sent/s", "asked", "ended well", "in SLO", "goodput/s", "answer tokens/s", *(n for n, _ in names))
    rows = (
        (
            *(run.name, run.found["arrivals"]["rate"], run.found["asked"], run.found["completed"]),
            *(_share(run.found["within_slo"]), run.found["request_goodput"], run.found["output_throughput"]),
            *(run.found[key] for _, key in names),
        )
        for run in runs
    )
    return _table(heads, rows)


def _hooks(hooks: Sequence[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{_number(h['began'])}</td><td>{_number(h.get('ended'))}</td><td>{escape(str(h['status']))}</td>"
        f'<td class="text">{escape(h["command"])}</td><td class="text">{escape(h.get("output") or "")}</td></tr>'
        for h in hooks
    )
    heads = "".join(f"<th>{head}</th>" for head in ("began, s", "ended, s", "status"))
    return (
        f'<div class="wide"><table><tr>{heads}<th style="text-align:left">command</th>'
        f'<th style="text-align:left">output</th></tr>{rows}</table></div>'
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], above: str = "") -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(_number(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>{above}<tr>{top}</tr>{body}</table></div>'


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)
