"""What the survey leaves out: wrong beta, report rate, batch limit, long answers, scarce memory, wrong predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.experiments import plots
from loadgen.experiments.experiment import Condition, Experiment, Figures, grid
from loadgen.experiments.results import Results
from loadgen.experiments.survey import BATCH_TOKENS, BETAS, FIGURES, HONEST, POLICIES, RATES, Play, play
from loadgen.svg import Plot

REQUESTS = 400  # and on several servers 150 for each
EACH = 150
SERVERS = 4
WORKLOADS = ("chat", "code")
ERRORS = (0.1, 0.3, 1.0, 3.0, 10.0)
BETA_MEMORY = (1.0, 0.2)  # share of the KV cache
RATES_HZ = (1, 2, 5, 10, 30, 100)
LIMITS = (512, 1024, 2048, 4096)
MEMORY = (0.1, 0.2, 0.5, 1.0)
SIGMAS = (0.0, 0.3, 0.6, 1.2)
LONG_RATE = 2.0  # requests/s and server; the window of 8192 halves and halves again what is meant for 32768
_LEFT_OUT = "nothing: the survey leaves it out"
_HONEST = "All is in `honest` accounting (see larry-engine)"


def _settings(**more: object) -> dict[str, object]:
    return {
        "server": "8b-a100",
        "requests": EACH * SERVERS if "servers" in more else REQUESTS,
        "arrivals": "functions",
        "requests per second and server": ", ".join(f"{w} {RATES['8b-a100', w]:g}" for w in WORKLOADS),
        "tokens per step": BATCH_TOKENS,
        **more,
    }


def _play(condition: Condition, scale: float, seed: int, **more: Any) -> Figures:
    lengths = str(condition.get("workload", "chat"))
    return play(
        Play(
            lengths=lengths,
            rate=more.pop("rate", None) or RATES["8b-a100", lengths],
            requests=round((EACH * more["servers"] if "servers" in more else REQUESTS) * scale),
            scheduling=POLICIES[str(condition.get("scheduler", "larry"))],
            accounting=HONEST,
            **more,
        ),
        seed,
    )


def _beta(condition: Condition, seed: int, scale: float) -> Figures:
    error = float(condition["error"])
    beta = {} if error == 0 else {"beta": BETAS[str(condition["workload"])] * error}
    memory = float(condition["memory"])
    return _play(condition, scale, seed, servers=SERVERS, memory=memory, balancing={"name": "sal", **beta})


def _reports(condition: Condition, seed: int, scale: float) -> Figures:
    balancing = {"name": str(condition["balancer"])}
    return _play(condition, scale, seed, servers=SERVERS, balancing=balancing, report_hz=float(condition["hz"]))


def _batch(condition: Condition, seed: int, scale: float) -> Figures:
    return _play(condition, scale, seed, batch_tokens=int(condition["tokens"]))


def _long(condition: Condition, seed: int, scale: float) -> Figures:
    balancing = {"name": str(condition["balancer"]).replace("-", "_")}
    load = LONG_RATE * float(condition["load"])
    return _play(
        {**condition, "workload": "long-answers"}, scale, seed, servers=SERVERS, balancing=balancing, rate=load
    )


def _scarce(condition: Condition, seed: int, scale: float) -> Figures:
    share = float(condition["memory"])
    return _play(condition, scale, seed, memory=share)


def _predicted(condition: Condition, seed: int, scale: float) -> Figures:
    return _play(condition, scale, seed, sigma=float(condition["sigma"]))


def _draw_beta(results: Results) -> Mapping[str, Plot]:
    groups = [("learned" if e == 0 else f"x {e:g}", {"error": e}) for e in (0.0, *ERRORS)]
    series: list[tuple[str, Condition]] = [
        (f"{w}, memory x {m:g}", {"workload": w, "memory": m}) for w in WORKLOADS for m in BETA_MEMORY
    ]
    return {
        f"ttft-{p}": plots.places(
            results, f"ttft_{p}_s", groups, series, title=f"TTFT {p} by error of beta", y_title="s", log_y=True
        )
        for p in ("p50", "p95")
    }


def _draw_reports(results: Results) -> Mapping[str, Plot]:
    series = [(b, {"balancer": b}) for b in ("sal", "p2c")]
    return {
        f"ttft-{p}": plots.curve(
            results,
            "hz",
            f"ttft_{p}_s",
            series,
            title=f"TTFT {p} by rate of reports",
            x_title="reports per second and replica",
            y_title="s",
            log_x=True,
            log_y=True,
        )
        for p in ("p50", "p95")
    }


def _draw_batch(results: Results) -> Mapping[str, Plot]:
    series = [(f"{s}, {w}", {"scheduler": s, "workload": w}) for s in ("fcfs", "larry") for w in WORKLOADS]
    return {
        name: plots.curve(
            results,
            "tokens",
            figure,
            series,
            title=f"{title} by tokens per step",
            x_title="most tokens of a step",
            y_title="s",
            log_x=True,
            log_y=True,
        )
        for name, figure, title in (("ttft-p50", "ttft_p50_s", "TTFT p50"), ("tgt-p50", "tgt_p50_s", "TGT p50"))
    }


def _draw_scarce(results: Results) -> Mapping[str, Plot]:
    series = [(s, {"scheduler": s}) for s in _SCARCE]
    return {
        name: plots.curve(
            results,
            "memory",
            figure,
            series,
            title=f"{title} by memory",
            x_title="share of the KV cache that there is",
            y_title=unit,
            log_x=True,
            log_y=unit == "s",
        )
        for name, figure, title, unit in (
            ("ttft-p50", "ttft_p50_s", "TTFT p50", "s"),
            ("preempted", "preempted_pct", "preemptions per 100 requests", "%"),
        )
    }


def _draw_predicted(results: Results) -> Mapping[str, Plot]:
    series = [(s, {"scheduler": s}) for s in _PREDICTING]
    return {
        "ttft-p50": plots.curve(
            results,
            "sigma",
            "ttft_p50_s",
            series,
            title="TTFT p50 by error of predicted lengths",
            x_title="sigma of log(predicted / true)",
            y_title="s",
        )
    }


_SCARCE = ("fcfs", "no-preempt", "trail", "larry", "larry-preemptive")
_PREDICTING = ("trail+", "trail", "ltr", "larry")
_LONG = ("fcfs", "no-preempt", "trail+", "larry")

EXPERIMENTS = (
    Experiment(
        name="beta-error",
        title="SAL with a beta that is wrong, 4 servers",
        source=_LEFT_OUT,
        conditions=grid(workload=WORKLOADS, memory=BETA_MEMORY, error=(0.0, *ERRORS)),
        cell=_beta,
        figures=FIGURES,
        settings=_settings(servers=SERVERS, scheduler="larry"),
        plots=_draw_beta,
        remarks=(
            _HONEST,
            "error 0 stands for beta that follows the traffic from 6.47 on",
            "with all of the memory no prompt waits for it, and beta, which weighs missing memory, decides nothing",
        ),
    ),
    Experiment(
        name="report-rate",
        title="Balancing by reports of 1 to 100 per second, 4 servers",
        source=_LEFT_OUT,
        conditions=grid(balancer=("sal", "p2c"), hz=RATES_HZ),
        cell=_reports,
        figures=FIGURES,
        settings=_settings(servers=SERVERS, scheduler="larry", workload="chat"),
        plots=_draw_reports,
        remarks=(
            _HONEST,
            "At 1 Hz all reports are near the age at which a router falls back to p2c (1 s): see `stale_s`",
            "`p2c` goes by the router's own calls, so the rate should not matter to it",
        ),
    ),
    Experiment(
        name="batch-limit",
        title="From 512 to 4096 tokens per step, one server",
        source=_LEFT_OUT,
        conditions=grid(workload=WORKLOADS, scheduler=("fcfs", "larry"), tokens=LIMITS),
        cell=_batch,
        figures=FIGURES,
        settings={k: v for k, v in _settings().items() if k != "tokens per step"},
        plots=_draw_batch,
        remarks=(_HONEST,),
    ),
    Experiment(
        name="long-answers",
        title="Answers longer than prompts (reasoning), 4 servers",
        source=_LEFT_OUT,
        conditions=[
            *grid(load=(1.0,), balancer=["sal"], scheduler=_LONG),
            *grid(load=(1.0,), balancer=("round-robin", "p2c"), scheduler=["larry"]),
        ],
        cell=_long,
        figures=FIGURES,
        settings=_settings(servers=SERVERS, workload="long-answers, scaled to a window of 8192", rate=LONG_RATE),
        remarks=(_HONEST,),
    ),
    Experiment(
        name="scarce-memory",
        title="So little memory that requests are preempted, one server",
        source=_LEFT_OUT,
        conditions=grid(scheduler=_SCARCE, memory=MEMORY),
        cell=_scarce,
        figures=FIGURES,
        settings=_settings(workload="chat"),
        plots=_draw_scarce,
        remarks=(_HONEST, "`memory` is the share of the device's KV cache, 1 is 156,000 tokens"),
    ),
    Experiment(
        name="length-error",
        title="What wrong predictions of lengths cost, one server",
        source=f"{_LEFT_OUT}; its TRAIL+ knows the true lengths",
        conditions=grid(scheduler=_PREDICTING, sigma=SIGMAS),
        cell=_predicted,
        figures=FIGURES,
        settings=_settings(workload="chat"),
        plots=_draw_predicted,
        remarks=(_HONEST, "LARRY asks for no lengths: it is the measure"),
    ),
)
