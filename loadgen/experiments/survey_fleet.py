"""The survey on several servers: SAL beside its baselines, with each scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.experiments import plots
from loadgen.experiments.experiment import Claim, Condition, Experiment, Figures, grid
from loadgen.experiments.results import Results
from loadgen.experiments.survey import (
    ACCOUNTING,
    BATCH_TOKENS,
    FIGURES,
    HONEST,
    PAPER,
    POLICIES,
    RATES,
    Play,
    play,
    sal,
)
from loadgen.svg import Plot

REQUESTS = 150  # per server
COUNTS = {"8b-a100": 8, "70b-h100": 4}
BALANCERS = ("random", "round-robin", "p2c", "sal")
SCHEDULERS = ("fcfs", "no-preempt", "larry")
# As in our notes, over all set-ups of the paper; they do not name the baseline of each.
GAINS = {
    "ttft_p50_s": ("TTFT p50", (1.0, 1.5)),
    "ttft_p95_s": ("TTFT p95", (1.2, 1.3)),
    "tgt_p50_s": ("TGT p50", (1.1, 1.3)),
    "tgt_p95_s": ("TGT p95", (1.1, 1.3)),
}
_TOKENS = "the time of a token depends on the batch, full wherever there is a queue; balancing evens out queues"
SETTINGS = {
    "requests per server": REQUESTS,
    "servers": ", ".join(f"{count} x {server}" for server, count in COUNTS.items()),
    "arrivals": "functions (wandering between 20/45 and 80/45 of the mean rate)",
    "tokens per step": BATCH_TOKENS,
    "requests per second and server": ", ".join(f"{s} {w} {rate:g}" for (s, w), rate in RATES.items()),
}


def cell(condition: Condition, seed: int, scale: float) -> Figures:
    """A fleet under a balancer and a scheduler."""
    server, workload, accounting = (str(condition[axis]) for axis in ("server", "workload", "accounting"))
    balancer, servers = str(condition["balancer"]), COUNTS[server]
    what = Play(
        server=server,
        servers=servers,
        lengths=workload,
        rate=RATES[server, workload],
        requests=round(REQUESTS * servers * scale),
        scheduling=POLICIES[str(condition["scheduler"])],
        balancing=sal(workload, accounting) if balancer == "sal" else {"name": balancer.replace("-", "_")},
        accounting=accounting,
    )
    return play(what, seed)


def _claims() -> list[Claim]:
    found = []
    for server, workload, accounting in _PLACES:
        at = {"server": server, "workload": workload, "accounting": accounting}
        ours = {**at, "balancer": "sal", "scheduler": "larry"}
        where = f"{server} x{COUNTS[server]}, {workload}, {accounting}"
        for balancer, scheduler in (("round-robin", "larry"), ("round-robin", "fcfs")):
            baseline = {**at, "balancer": balancer, "scheduler": scheduler}
            found += [
                Claim(
                    f"SAL + LARRY against {balancer} + {scheduler.upper()}, {where}: {name}, times lower",
                    figure,
                    ours,
                    baseline,
                    paper,
                    _TOKENS if figure.startswith("tgt") else "",
                )
                for figure, (name, paper) in GAINS.items()
            ]
    return found


def _draw(results: Results) -> Mapping[str, Plot]:
    drawn = {}
    for server, workload in ((s, "chat") for s in COUNTS):
        at = {"server": server, "workload": workload, "accounting": PAPER}
        drawn[f"{server}-{workload}-ttft-p50"] = plots.places(
            results,
            "ttft_p50_s",
            [(f"{s}", {**at, "scheduler": s}) for s in SCHEDULERS],
            [(b, {"balancer": b}) for b in BALANCERS],
            title=f"TTFT p50, {server} x{COUNTS[server]}, {workload}",
            y_title="s",
            log_y=True,
        )
    return drawn


_PLACES = [("8b-a100", "chat", PAPER), ("70b-h100", "chat", PAPER), ("70b-h100", "chat", HONEST)]

EXPERIMENTS = (
    Experiment(
        name="sal-routers",
        title="SAL and its baselines on fleets, with each scheduler",
        source="survey: balancers x schedulers on 8 servers with the 8B model and 4 with the 70B model",
        conditions=[
            *grid(
                accounting=[PAPER],
                server=list(COUNTS),
                workload=["chat"],
                balancer=BALANCERS,
                scheduler=SCHEDULERS,
            ),
            *grid(
                accounting=[HONEST],
                server=["70b-h100"],
                workload=["chat"],
                balancer=BALANCERS,
                scheduler=("fcfs", "larry"),
            ),
        ],
        cell=cell,
        figures=FIGURES,
        settings=SETTINGS,
        claims=_claims(),
        plots=_draw,
        remarks=(
            *ACCOUNTING,
            "Our notes give one range over all set-ups and do not say against which pair: two that it may be are here",
        ),
    ),
)
