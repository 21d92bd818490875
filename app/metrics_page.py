"""The reference page of the metrics: `python -m app.metrics_page > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from app.dashboards.alerts import alerts
from app.dashboards.boards import BOARDS
from deployments.metric_series import EXPORTED, MAX_VALUES, Metric
from deployments.metrics import METRICS

_INTRO = f"""\
# Metrics, dashboards and alerts

<!-- Generated: python -m app.metrics_page > docs/metrics.md -->

## One place to scrape

Every process hands its series to the Ray agent of its node, which exports them all on one port: ours
(`ray_tidegate_...`), vLLM's own (`ray_vllm_...`, as in Ray Serve LLM, so that Ray's dashboards for it work) and Ray's
(`ray_serve_...`). Ray keeps the list of these ports for Prometheus: the address is

- `http://DASHBOARD/api/prometheus/sd` (`http_sd_configs`; the dashboard's port, 8265 by default; with a cluster token
  add `authorization`), or
- the file `session_latest/prom_metrics_service_discovery.json` in Ray's temporary folder (`/tmp/ray`; `make serve`
  prints its own) on the head node (`file_sd_configs`).

One node alone: `ray start --metrics-export-port 8080` and `http://NODE:8080/metrics`. The port has no password: keep
it inside.

```bash
python -m app.dashboards export DIR     # dashboards, provisioning, alert rules, a prometheus.yml
prometheus --config.file=DIR/prometheus.yml
GRAFANA_TOKEN=... python -m app.dashboards push --url http://localhost:3000
```

`prometheus.yml` takes Ray's list from `/tmp/ray`; where Ray has another temporary folder, as with `make serve`, name
the file with `--discovery`.

`push` makes the dashboards of a Grafana what they are here, found by their uid; a second push changes nothing. The
token is that of a service account with the role Editor. For the Grafana that is started with Ray's configuration
(`session_latest/metrics/grafana/grafana.ini`) copy `DIR/dashboards/*.json` into
`session_latest/metrics/grafana/dashboards`, or start Ray with
`RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR=DIR/dashboards`; for any other put
`DIR/provisioning/dashboards/tidegate.yml` into its provisioning folder.

## How to read them

- Ray collects every 10 s (`RAY_metrics_report_interval_ms`, set before Ray starts): windows of `rate()` should span
  40 s or more.
- Ray rebuilds histograms from their buckets: `_count` and `_bucket` are exact, `_sum` is an estimate. Use quantiles,
  not means.
- A gauge that is no longer set is dropped after two collections: a replica that is gone is gone from the plots within
  20 s. Counters carry no replica, so that sums stay right when one dies; Ray keeps those of ended processes (label
  `WorkerId`) until the node's agent ends. The same holds for vLLM's counters, which carry `ReplicaId`.
- Label values are few: tiers of the config, words of the code, the served model, tenants of the list of keys.
  Anything else, and everything beyond {MAX_VALUES} values of a label in a process, is `other`.
- Counters begin with 0, so that the first event is seen as an increase.
- Engine and framework are apart: of each TTFT, `first_token_engine_seconds` is the engine's part (of which
  `queue_wait_seconds` in its queue), `first_token_framework_seconds` all the rest, from HTTP parsing to the way back
  through Ray.
- A router disagrees where its policy chose a replica that had more requests, its own calls in flight included, than
  another one: join-the-shortest-queue, which two choices approach, would have gone there. A policy that counts
  requests never does; one that counts tokens and KV does so on purpose, and a high share says how far apart both
  views are. How old the reports were on which it decided is `router_report_age_seconds`; `reports="stale"` counts
  decisions without any fresh report.
- A sequence keeps its promise if TTFT and TPOT are within its tier's `ttft_slo_s` and `tpot_slo_s`. Goodput counts
  tokens of these.
"""

_GROUPS = {
    "ingress": "What clients see, told by the ingresses",
    "router": "Decisions of the routers",
    "replica": "Replicas and moves, told by the replicas",
    "coordinator": "The fleet, told by the coordinator",
    "controller": "Autoscaling, told by Serve's controller",
}
_BOARDS = """\
## Dashboards

`app/dashboards`; each has marks for bursts of moves, scale events and failures.
"""
_ALERTS = """\
## Alerts

Rules of `python -m app.dashboards export`, for 99 % of the sequences within their promises:
"""


def page() -> str:
    """The page as Markdown."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield _INTRO
    for where, title in _GROUPS.items():
        yield f"## {title}\n"
        found = [metric for metric in METRICS if metric.where == where]
        yield from _table(("series", "type", "unit", "labels", "meaning"), map(_row, found))
    yield _BOARDS
    rows = ((board.title, board.help, ", ".join(title for title, _ in board.rows)) for board in BOARDS)
    yield from _table(("dashboard", "what for", "rows"), rows)
    yield _ALERTS
    yield from _table(
        ("alert", "severity", "for", "when"),
        ((f"`{alert.name}`", alert.severity, alert.hold, f"`{alert.expr}`") for alert in alerts()),
    )


def _row(metric: Metric) -> tuple[str, ...]:
    labels = "; ".join(f"`{label}`: {values}" for label, values in metric.labels.items())
    return f"`{EXPORTED}{metric.name}`", metric.kind, metric.unit, labels, metric.help


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    titles = list(head)
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


if __name__ == "__main__":
    print(page(), end="")
