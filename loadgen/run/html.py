"""The report of one or more runs: one HTML file with tables and plots, which loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from loadgen.run import plots, results
from loadgen.run.plots import RunFiles

STYLE = """
:root{--ink:#1b1f24;--paper:#fff;--line:#d8dde3;--soft:#57606a}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--line:#30363d;--soft:#9198a1}}
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
body{max-width:1120px;margin:24px auto;padding:0 16px}
h1{font-size:22px}h2{font-size:17px;margin-top:28px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;margin:8px 0}
td,th{border-bottom:1px solid var(--line);padding:3px 10px;text-align:right}
td:first-child,th:first-child{text-align:left}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:18px}.wide{overflow-x:auto}
svg{width:100%;height:auto}svg text{fill:var(--ink);font:11px system-ui,sans-serif}
svg .title{font-size:12.5px;font-weight:600}svg .small{font-size:10px;fill:var(--soft)}
.grid{stroke:var(--line);stroke-width:.6}.event{stroke:#d55e00;stroke-dasharray:4 3}
pre{white-space:pre-wrap;font-size:12px}p,summary{color:var(--soft)}
"""


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


def page(runs: Sequence[RunFiles]) -> str:
    """The report: of one run by tier; of several, each beside the others and as a capacity curve."""
    one = runs[0]
    if len(runs) == 1:
        title, groups = f"Run {one.name}", one.by_tier()
        drawn = [*plots.waits(groups), *plots.violins(groups), *plots.timelines(one)]
    else:
        title = f"{len(runs)} runs"
        groups = {run.name: [line.record() for line in run.lines] for run in runs}
        drawn = [*plots.capacity(runs), *plots.waits(groups), *plots.violins(groups)]
    body = [f"<h1>{escape(title)}</h1>", *(_head(run) for run in runs)]
    body.append(f'<h2>Plots</h2><div class="plots">{"".join(f"<div>{plot.svg()}</div>" for plot in drawn)}</div>')
    for run in runs:
        conditions = {k: v for k, v in run.found.items() if not isinstance(v, list) or len(v) < 20}
        text = escape(json.dumps(conditions, indent=1))
        body.append(f"<details><summary>{escape(run.name)}: run.json</summary><pre>{text}</pre></details>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _head(run: RunFiles) -> str:
    found = run.found
    groups = {**found["tiers"], "all": found}
    outcomes = _table(
        ("tier", "asked", *found["outcomes"], "in SLO", "goodput/s"),
        (
            (t, g["asked"], *g["outcomes"].values(), _share(g["within_slo"]), g["request_goodput"])
            for t, g in groups.items()
        ),
    )
    names = ("ttft_ms", "normalized_ttft_ms", "tpot_ms", "itl_ms", "tgt_s", "e2el_ms")
    waits = _table(
        ("tier", *(f"{name.replace('_', ' ')} {p}" for name in names for p in ("p50", "p99"))),
        ((t, *(g[f"{p}_{name}"] for name in names for p in ("p50", "p99"))) for t, g in groups.items()),
    )
    sent, lag = found["arrivals"], found["lag"]
    bursts = ", ".join(
        f"{what} {_number(sent[key])}"
        for what, key in (("gap CV", "gap_cv"), ("dispersion in 1 s", "iod_1s"), ("peak over mean", "peak_1s"))
    )
    late = _number((lag["p99_s"] or 0.0) * 1e3)
    notes = [
        f"{found['model_id']}, {found['date']}: {found['asked']} requests at {_number(sent['rate'])}/s ({bursts}), "
        f"{_number(found['output_throughput'])} answer tokens/s; sent late by {late} ms (p99)."
    ]
    if lag["client_was_late"]:
        notes.append("The client could not keep its times: the waits include its own lag.")
    if found["interrupted"]:
        notes.append(f"The run was interrupted; {found['not_sent']} requests were not sent.")
    if exact := found["exact"]:
        notes.append(
            f"Against the reference: {exact['equal']} answers equal, {exact['prefix']} cut but agreeing, "
            f"{exact['different']} different, {exact['unknown']} not comparable."
        )
    if counted := {k: v for k, v in (found["server_counters"] or {}).items() if v}:
        notes.append("The server counted: " + ", ".join(f"{k} {v:g}" for k, v in counted.items()) + ".")
    paragraphs = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<h2>{escape(run.name)}</h2>{paragraphs}<div class=wide>{outcomes}</div><div class=wide>{waits}</div>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(_number(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)
