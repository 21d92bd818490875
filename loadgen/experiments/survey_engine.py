"""The survey on one server: LARRY beside its baselines, alpha, the rate a server can take, all schedulers it names."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.experiments import plots
from loadgen.experiments.experiment import Claim, Condition, Experiment, Figures, grid
from loadgen.experiments.results import Results
from loadgen.experiments.survey import (
    ACCOUNTING,
    ACCOUNTINGS,
    ALPHAS,
    BATCH_TOKENS,
    FIGURES,
    POLICIES,
    RATES,
    SERVERS,
    UNITS,
    Play,
    play,
)
from loadgen.svg import Plot

REQUESTS = 400
WORKLOADS = ("chat", "code")
LOADS = (0.6, 0.8, 1.0, 1.2)  # times RATES
SETTINGS = {
    "requests": REQUESTS,
    "arrivals": "functions (wandering between 20/45 and 80/45 of the mean rate)",
    "tokens per step": BATCH_TOKENS,
    "requests per second and server": ", ".join(f"{s} {w} {rate:g}" for (s, w), rate in RATES.items()),
}
# Smallest and largest gain that our notes give, over all its set-ups; they do not name the baseline of each.
GAINS = {
    "ttft_p50_s": ("TTFT p50", (1.8, 2.1)),
    "ttft_p95_s": ("TTFT p95", (1.2, 1.4)),
    "norm_latency_p50_ms": ("normalised latency p50", (1.3, 1.5)),
    "norm_latency_p95_ms": ("normalised latency p95", (3.3, 5.5)),
    "norm_ttft_p50_ms": ("the same, if TTFT per prompt token is meant, p50", (1.3, 1.5)),
    "norm_ttft_p95_ms": ("the same, p95", (3.3, 5.5)),
}


def _one(condition: Condition, seed: int, scale: float) -> Figures:
    """A server under a scheduler."""
    server, workload = str(condition["server"]), str(condition["workload"])
    what = Play(
        server=server,
        lengths=workload,
        rate=RATES[server, workload] * float(condition.get("load", 1.0)),
        requests=round(REQUESTS * scale),
        scheduling=POLICIES[str(condition["scheduler"])],
        accounting=str(condition["accounting"]),
    )
    return play(what, seed)


def _why(figure: str) -> str:
    return "our notes do not say what it is normalised by" if figure.startswith("norm_latency") else ""


def _gains_by_load() -> list[Claim]:
    found = []
    for at in _ONE:
        for load in LOADS:
            larry, fcfs = ({**at, "load": load, "scheduler": name} for name in ("larry", "fcfs"))
            where = f"{at['workload']}, {at['accounting']}, load {load:g}"
            found += [
                Claim(f"LARRY against FCFS, {where}: {name}, times lower", figure, larry, fcfs, paper)
                for figure, (name, paper) in GAINS.items()
                if figure.startswith("ttft")
            ]
    return found


def _gains(accounting: str) -> list[Claim]:
    found = []
    for server in SERVERS:
        for workload in WORKLOADS:
            at = {"server": server, "workload": workload, "accounting": accounting}
            larry, fcfs = {**at, "scheduler": "larry"}, {**at, "scheduler": "fcfs"}
            where = f"{server} x1, {workload}, {accounting}"
            found += [
                Claim(f"LARRY against FCFS, {where}: {name}, times lower", figure, larry, fcfs, paper, _why(figure))
                for figure, (name, paper) in GAINS.items()
            ]
            found.append(
                Claim(f"LARRY, {where}: preemptions per 100 requests", "preempted_pct", larry, None, (0.0, 0.1))
            )
    return found


def _draw_engine(results: Results) -> Mapping[str, Plot]:
    drawn = {}
    for server in SERVERS:
        for figure, title in (("ttft_p50_s", "TTFT p50"), ("norm_ttft_p95_ms", "TTFT per prompt token p95")):
            groups = [
                (f"{w}, {a}", {"server": server, "workload": w, "accounting": a})
                for w in WORKLOADS
                for a in ACCOUNTINGS
            ]
            series = [(s, {"scheduler": s}) for s in BASELINES]
            name = f"{server}-{figure.removesuffix('_s').removesuffix('_ms').replace('_', '-')}"
            unit = "s" if figure.endswith("_s") else "ms"
            drawn[name] = plots.places(
                results, figure, groups, series, title=f"{title}, {server}", y_title=unit, log_y=True
            )
    return drawn


def _draw_alpha(results: Results) -> Mapping[str, Plot]:
    groups = [(f"{w}, {a}", {"workload": w, "accounting": a}) for w in WORKLOADS for a in ACCOUNTINGS]
    series = [(name, {"scheduler": name}) for name in ("fcfs", "larry", *(f"larry-{alpha}" for alpha in ALPHAS[1:]))]
    return {
        f"ttft-{p}": plots.places(
            results, f"ttft_{p}_s", groups, series, title=f"TTFT {p} by alpha", y_title="s", log_y=True
        )
        for p in ("p50", "p95")
    }


def _draw_capacity(results: Results) -> Mapping[str, Plot]:
    drawn = {}
    for workload in WORKLOADS:
        for figure, title, unit in (
            ("ttft_p95_s", "TTFT p95", "s"),
            ("norm_ttft_p50_ms", "TTFT per prompt token p50", "ms"),
        ):
            series = [
                (f"{s}, {a}", {"scheduler": s, "workload": workload, "accounting": a})
                for s in ("fcfs", "larry")
                for a in ACCOUNTINGS
            ]
            name = f"{workload}-{figure.removesuffix('_s').removesuffix('_ms').replace('_', '-')}"
            drawn[name] = plots.curve(
                results,
                "load",
                figure,
                series,
                title=f"{title}, {workload}",
                x_title=f"load, times {RATES['8b-a100', workload]:g} requests/s",
                y_title=unit,
                log_y=True,
            )
    return drawn


def _draw_all(results: Results) -> Mapping[str, Plot]:
    half = (len(EVERYBODY) + 1) // 2
    series = [(a, {"accounting": a}) for a in ACCOUNTINGS]
    drawn = {}
    for part, names in (("a", EVERYBODY[:half]), ("b", EVERYBODY[half:])):
        groups = [(name, {"scheduler": name}) for name in names]
        for figure, title in (("ttft_p50_s", "TTFT p50"), ("norm_latency_p50_ms", "latency per answer token p50")):
            name = f"{figure.split('_p50')[0].replace('_', '-')}-{part}"
            unit = figure.rpartition("_")[2]
            drawn[name] = plots.places(results, figure, groups, series, title=title, y_title=unit, log_y=True)
    return drawn


def _larry(alpha: int, unit: str = "") -> str:
    return "-".join(filter(None, ("larry", "" if alpha == 1 else str(alpha), unit)))


BASELINES = ("fcfs", "no-preempt", "trail+", "larry")
EVERYBODY = (
    *("fcfs", "prefill-first", "sarathi", "no-preempt", "pia", "s3", "mlfq"),
    *("trail", "trail+", "ltr", "slo-budget", "guarded-larry", "larry"),
)
_MEMORY = "Our notes do not say in what unit the paper counts memory(r). Ours is the KV block of 16 tokens"
_RESERVE = (
    "`no-preempt` and `s3` reserve up to max_tokens, which in the simulator is the true length of the answer: "
    "they are flattered in both accountings"
)
_ONE = [{"server": "8b-a100", **condition} for condition in grid(workload=WORKLOADS, accounting=ACCOUNTINGS)]

EXPERIMENTS = (
    Experiment(
        name="larry-engine",
        title="LARRY and its baselines on one server",
        source="survey: TTFT, normalised latency and TGT of FCFS, no-preempt, TRAIL+ and LARRY on one server",
        conditions=grid(server=list(SERVERS), workload=WORKLOADS, accounting=ACCOUNTINGS, scheduler=BASELINES),
        cell=_one,
        figures=FIGURES,
        settings=SETTINGS,
        claims=[claim for accounting in ACCOUNTINGS for claim in _gains(accounting)],
        plots=_draw_engine,
        remarks=(
            *ACCOUNTING,
            "How much LARRY gains depends on the queue, and so on the load (larry-capacity), which wanders: where a "
            "seed's arrivals bunch into an overload the gain is ten times that of the others. Hence the wide intervals",
            "By how much the paper loads its servers is not in our notes",
            _MEMORY,
            _RESERVE,
        ),
    ),
    Experiment(
        name="larry-alpha",
        title="How much alpha matters to LARRY, and the unit of memory",
        source="survey: LARRY with alpha 1, 500 and 1000; its figures are not in our notes",
        conditions=[
            *({**at, "scheduler": name} for at in _ONE for name in ("fcfs", *(_larry(alpha) for alpha in ALPHAS))),
            *({**at, "scheduler": _larry(alpha, unit)} for at in _ONE[1:2] for unit in UNITS for alpha in ALPHAS),
        ],
        cell=_one,
        figures=FIGURES,
        settings=SETTINGS,
        plots=_draw_alpha,
        remarks=(_MEMORY, "`larry` is alpha 1, `larry-500-tokens` alpha 500 with memory in tokens, and so on"),
    ),
    Experiment(
        name="larry-capacity",
        title="What load one server takes, with FCFS and with LARRY",
        source="survey: capacity curves; their figures are not in our notes",
        conditions=[{**at, "scheduler": s, "load": x} for at in _ONE for s in ("fcfs", "larry") for x in LOADS],
        cell=_one,
        figures=FIGURES,
        settings=SETTINGS,
        claims=_gains_by_load(),
        plots=_draw_capacity,
        remarks=("`load` is a multiple of the rate under settings. Well below 1 there is no queue to order",),
    ),
    Experiment(
        name="schedulers",
        title="All schedulers that the survey names, on one server",
        source="survey: the schedulers that it goes through; their figures side by side are not in our notes",
        conditions=[{**at, "scheduler": name} for at in _ONE[:2] for name in EVERYBODY],
        cell=_one,
        figures=FIGURES,
        settings=SETTINGS,
        plots=_draw_all,
        remarks=(
            _RESERVE,
            "`mlfq` is FastServe without its swapping to the host: preempted requests are computed again",
            "`trail` is TRAIL with c = 0.8, `trail+` with c = 0, `sarathi` has 512 tokens per step",
        ),
    ),
)
