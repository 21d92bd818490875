"""What all experiments of the survey share: its fleets, workloads and accountings, and how a cell is simulated.

Source: Kossmann et al., "Is the GPU half-empty or half-full? Practical scheduling techniques for LLMs".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.experiments.experiment import Figures
from loadgen.metrics import RequestRecord, percentile
from loadgen.simulator.hardware import DEVICES, MODELS, kv_blocks
from loadgen.simulator.step_cost import Roofline
from loadgen.workloads.make import make

if TYPE_CHECKING:
    from loadgen.simulator.cluster import Job, Outcome

PAPER, HONEST = "paper", "honest"
ACCOUNTINGS = (PAPER, HONEST)


@dataclass(frozen=True, slots=True)
class Server:
    """What one server of the survey is: a model on `tp` devices."""

    model: str
    device: str
    tp: int


SERVERS: Mapping[str, Server] = {
    "8b-a100": Server("llama-3-8b", "a100-40g", 1),
    "70b-h100": Server("llama-3-70b-fp8", "h100-80g", 2),
}
# Requests per second that one server is sent: what it can serve by its roofline when all steps are full, so that queues
# come and go with the wandering rate. The rates of the paper are not in our notes.
RATES: Mapping[tuple[str, str], float] = {
    ("8b-a100", "chat"): 7.0,
    ("8b-a100", "code"): 5.6,
    ("70b-h100", "chat"): 8.6,
    ("70b-h100", "code"): 6.2,
}
#: beta of each workload, (mean prompt + mean answer) / mean answer of the Azure traces.
BETAS: Mapping[str, float] = {"chat": 6.47, "code": 74.4}
BATCH_TOKENS = 1024  # most tokens of a step in the survey
PREDICTOR_SIGMA = 0.6  # of log(predicted / true): Kendall's tau about .6 on chat, as the learned ranker has

ALPHAS = (1, 500, 1000)
UNITS = ("tokens", "fraction")  # of memory(r), besides KV blocks
POLICIES: Mapping[str, dict[str, Any]] = {
    "fcfs": {"name": "fcfs"},
    "no-preempt": {"name": "no_preempt"},
    "trail+": {"name": "srpt", "c": 0.0, "predictor": "oracle"},
    "trail": {"name": "srpt", "c": 0.8, "predictor": "oracle"},
    "ltr": {"name": "ltr", "predictor": "oracle"},
    "mlfq": {"name": "mlfq"},
    "pia": {"name": "pia", "predictor": "oracle"},
    "s3": {"name": "s3", "predictor": "oracle"},
    "sarathi": {"name": "sarathi", "token_budget": 512},
    "prefill-first": {"name": "prefill_first"},
    "slo-budget": {"name": "slo_budget", "predictor": "oracle"},
    "guarded-larry": {"name": "guarded_larry"},
    "larry": {"name": "larry"},
    "larry-preemptive": {"name": "larry_preemptive"},
    **{f"larry-{alpha}": {"name": "larry", "alpha": float(alpha)} for alpha in ALPHAS[1:]},
    **{
        f"larry-{'' if alpha == 1 else f'{alpha}-'}{unit}": {
            "name": "larry",
            "alpha": float(alpha),
            "memory_unit": unit,
        }
        for alpha in ALPHAS
        for unit in UNITS
    },
}
ACCOUNTING = (
    "`paper`: synchronous steps, whoever asks for lengths is told the true ones, beta is pinned to the workload's, "
    "replicas report at 10 Hz",
    "`honest`: asynchronous steps as vLLM has them on GPUs today, predicted lengths are off by a lognormal factor "
    f"(sigma {PREDICTOR_SIGMA}), beta follows the traffic, two routers know only their own calls, reports at 10 Hz",
)
FIGURES: Mapping[str, str] = {
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p95_s": "p95",
    "norm_ttft_p50_ms": "TTFT per prompt token p50, ms",
    "norm_ttft_p95_ms": "p95",
    "norm_latency_p50_ms": "latency per answer token p50, ms",
    "norm_latency_p95_ms": "p95",
    "tgt_p50_s": "TGT p50, s",
    "tgt_p95_s": "p95",
    "preempted_pct": "preemptions per 100 requests",
    "served_per_s": "served, 1/s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One cell: `rate` is what each of `servers` is sent, requests/s; `sigma`: error of predicted lengths.

    `report_hz` 0: the routers know all. `memory`: share of the KV cache that there is. `beta`: None follows the
    traffic. What is None comes from the accounting.
    """

    server: str = "8b-a100"
    servers: int = 1
    lengths: str = "chat"
    rate: float
    requests: int
    scheduling: Mapping[str, Any]
    balancing: Mapping[str, Any] | None = None
    accounting: str = HONEST
    batch_tokens: int = BATCH_TOKENS
    report_hz: float = 10.0
    routers: int | None = None
    memory: float = 1.0
    sigma: float | None = None


def play(what: Play, seed: int) -> Figures:
    """Simulate it; the workload depends on lengths, rate, servers, requests and seed only."""
    from loadgen.simulator.cluster import Cluster, Fleet  # imports vLLM
    from loadgen.simulator.engine import Shape

    honest = what.accounting == HONEST
    server = SERVERS[what.server]
    model, device = MODELS[server.model], DEVICES[server.device]
    shape = Shape(
        kv_blocks=int(kv_blocks(model, device, server.tp) * what.memory),
        max_model_len=model.context,
        max_num_batched_tokens=what.batch_tokens,
        asynchronous=honest,
    )
    fleet = Fleet(
        model,
        shape,
        Roofline(model, device, server.tp),
        replicas=what.servers,
        scheduling=dict(what.scheduling),
        balancing=dict(what.balancing or sal(what.lengths, what.accounting)),
        routers=what.routers or (2 if honest and what.servers > 1 else 1),
        report_s=1 / what.report_hz if what.report_hz else 0.0,
        oracle=True,
        seed=seed,
    )
    sigma = what.sigma if what.sigma is not None else (PREDICTOR_SIGMA if honest else 0.0)
    work = jobs(what, shape.longest, sigma, seed)
    return figures(Cluster(fleet).run(work))


def sal(lengths: str, accounting: str) -> dict[str, Any]:
    """SAL as an accounting has it: beta known beforehand, or learned."""
    return {"name": "sal", "beta": BETAS[lengths]} if accounting == PAPER and lengths in BETAS else {"name": "sal"}


def jobs(what: Play, longest: int, sigma: float, seed: int) -> list[Job]:
    """The requests of a seed, those at the same place the same under every policy."""
    from loadgen.simulator.cluster import Job

    arrivals = f"functions:rate={what.rate * what.servers:g}"
    made = make(what.requests, lengths_model=what.lengths, arrivals=arrivals, context=longest, seed=seed)
    off = np.random.default_rng([seed, 7]).lognormal(0.0, sigma, what.requests) if sigma else np.ones(what.requests)
    return [
        Job(r.due, r.prompt_tokens, r.output_tokens, told=max(1, round(r.output_tokens * float(factor))))
        for r, factor in zip(made.requests, off, strict=True)
    ]


def figures(outcome: Outcome) -> dict[str, float]:
    """What is kept of a run: waits of all requests, none left out, and how often one was preempted."""
    records = outcome.records
    first, per_prompt = [r.ttft for r in records], [r.ttft * 1e3 / r.prompt_len for r in records]
    per_answer, tgt = [r.latency * 1e3 / r.output_len for r in records], _generating(records)
    found: dict[str, float] = {}
    for name, values in (
        ("ttft_{}_s", first),
        ("norm_ttft_{}_ms", per_prompt),
        ("norm_latency_{}_ms", per_answer),
        ("tgt_{}_s", tgt),
    ):
        found |= {name.format(f"p{p}"): percentile(values, p) for p in (50, 95)}
    found["preempted_pct"] = 100 * sum(outcome.preemptions) / len(records)
    found["served_per_s"] = len(records) / (outcome.duration - records[0].due)
    return found


def _generating(records: Sequence[RequestRecord]) -> list[float]:
    return [r.tgt for r in records if r.output_len > 1]
