"""What all experiments of the multi-tier paper share: its fleet, systems and accountings, and how a cell is simulated.

Source: "Beyond Binary Priorities" (arXiv 2608.16336), section 5, and the code that it came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deployments.step_content import Step
from loadgen.experiments.experiment import Figures
from loadgen.metrics import percentile
from loadgen.simulator.hardware import DEVICES, Model
from loadgen.simulator.step_cost import Roofline, StepCost
from loadgen.workloads.make import make
from policies.tiers import decaying_headroom

if TYPE_CHECKING:
    from loadgen.simulator.cluster import Fleet, Job, Outcome
    from loadgen.simulator.engine import Shape
    from loadgen.simulator.transfer import Migration

PAPER, HONEST = "paper", "honest"
ACCOUNTINGS = (PAPER, HONEST)
MODEL = Model(32, 4096, 32, 32, 128, 11008, 32000, context=4096)  # Llama-2-7B
DEVICE = "a100-80g"
REPLICAS = 4
BLOCKS, BLOCK_SIZE, SEQUENCES, STEP_TOKENS = 128, 16, 64, 4096  # of the paper's replicas
PRICED = 32  # decodes: the paper's times are for batches up to that size, and larger ones cost no more
LIMIT_S = 60.0  # the paper's bursts end then, whatever is left
WITHOUT_END = 32_768  # KV blocks: no batch of the paper's workloads needs them
PREFILL_TOKENS = BLOCKS * BLOCK_SIZE  # of a step, as its blocks are taken by prefills alone and given back at its end
MOST_DECODES = 1024  # of a step: about what the paper's bursts come to, so that prefills keep their tokens
LONGEST = 512  # tokens of a request, by table 1
LENGTHS = "tier-table"
TICK_S, GAP = 0.05, 0.15  # of the paper's migration: theta = 0.3 blocks per request, at 64 sequences and 128 blocks
AGING_S = 30.0
NO_MIX = "none"

BASELINE, MULTI_TIER, PRODUCT = "infaas+vllm", "multi-tier", "product"


@dataclass(frozen=True, slots=True)
class System:
    """What decides in a fleet. `tiers`: engines order by tier. `headroom`: KV cache is kept free for tiers present."""

    balancing: str
    scheduling: Mapping[str, Any]
    tiers: bool = False
    headroom: bool = False
    migration: bool = False
    aging: bool = False


_FCFS = {"name": "fcfs"}
SYSTEMS: Mapping[str, System] = {
    BASELINE: System("infaas_cost", {"name": "prefill_first"}),
    "infaas+orca": System("infaas_cost", {"name": "no_preempt"}),
    "infaas+sarathi": System("infaas_cost", {"name": "sarathi", "token_budget": 512}),
    MULTI_TIER: System("llumnix", _FCFS, tiers=True, headroom=True, migration=True, aging=True),
    # Its parts, one after the other.
    "infaas": System("infaas_cost", _FCFS),
    "infaas, tiers in queues": System("infaas_cost", _FCFS, tiers=True),
    "freeness": System("llumnix", _FCFS),
    "freeness, tiers in queues": System("llumnix", _FCFS, tiers=True),
    "and headroom": System("llumnix", _FCFS, tiers=True, headroom=True),
    "and migration": System("llumnix", _FCFS, tiers=True, headroom=True, migration=True),
    PRODUCT: System("tiered_sal", {"name": "larry"}, tiers=True, headroom=True, migration=True, aging=True),
}
ACCOUNTING = (
    "`paper`: what its code counts. It frees all blocks after every step and takes none for decodes, so its system has "
    "KV cache without end and its 128 blocks of 16 tokens only bound the prefill of a step (here: 2,048 tokens beside "
    "1,024 decodes); the baselines hold blocks and have 64 sequences. More than 32 decodes cost no more than 32; moves "
    "are free; routers know all; lambda = 2.5/(K-1) without a cap; no aging; of "
    "bursts, what has not ended after 60 s is left out",
    "`honest`: all systems have the same 128 blocks and 64 sequences, hold KV cache until a request ends, pay for each "
    "decode, schedule asynchronously, hear of replicas at 10 Hz; moves take the time of a 64 Gb/s network; headroom is "
    "capped at 35 % and a request is lifted by a tier for every 30 s that it waits",
)
FIGURES: Mapping[str, str] = {
    "ended_pct": "ended, %",
    "ttft_mean_s": "TTFT mean, s",
    "ttft_p99_s": "p99",
    "e2e_mean_s": "E2E mean, s",
    "e2e_p50_s": "p50",
    "e2e_p99_s": "p99",
    "top_ttft_p50_s": "tier 0: TTFT p50, s",
    "top_ttft_p99_s": "p99",
    "last_ttft_p50_s": "last tier: TTFT p50, s",
    "last_ttft_max_s": "longest",
    "replica_s": "replica-seconds",
    "moves": "moves",
    "preempted_pct": "preemptions per 100 requests",
}


@dataclass(frozen=True, slots=True)
class Clamped:
    """Step times in which decodes beyond `most` are free, as in the paper's code."""

    cost: StepCost
    most: int = PRICED

    def seconds(self, step: Step) -> float:
        """Seconds of the step."""
        if step.decodes > self.most:
            context = round(step.context_tokens * self.most / step.decodes)
            step = step._replace(decodes=self.most, context_tokens=context)
        return self.cost.seconds(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One cell: `requests` at `rate` per second to all replicas together, of `tiers` tiers mixed as `mix` says.

    `limit_s`: in the paper's accounting, what has not ended by then is left out.
    """

    system: str
    accounting: str
    mix: str = NO_MIX
    tiers: int = 1
    requests: int
    rate: float
    lengths: str = LENGTHS
    limit_s: float = math.inf


def play(what: Play, seed: int) -> Figures:
    """Simulate it; the requests depend on everything but system and accounting, and the tiers alone on the mix."""
    from loadgen.simulator.cluster import Cluster  # imports vLLM

    system = SYSTEMS[what.system]
    work = jobs(what, seed)
    sent = work if system.tiers else [replace(job, tier=0) for job in work]
    outcome = Cluster(fleet(what, seed)).run(sent)
    return figures(work, outcome, what.limit_s if what.accounting == PAPER else math.inf)


def fleet(what: Play, seed: int) -> Fleet:
    """The four replicas of the paper under a system, as an accounting has them."""
    from loadgen.simulator.cluster import Fleet

    system, paper = SYSTEMS[what.system], what.accounting == PAPER
    cost: StepCost = Roofline(MODEL, DEVICES[DEVICE])
    return Fleet(
        MODEL,
        shape(what),
        Clamped(cost) if paper else cost,
        replicas=REPLICAS,
        scheduling=dict(system.scheduling),
        balancing={"name": system.balancing},
        tiers=_tiers(system, what.tiers, paper) if system.tiers else None,
        report_s=0.0 if paper else 0.1,
        seed=seed,
        migration=_migration(paper) if system.migration else None,
    )


def shape(what: Play) -> Shape:
    """The engine of a replica: without limits for the paper's system in the paper's accounting."""
    from loadgen.simulator.engine import Shape

    paper, tokens = what.accounting == PAPER, PREFILL_TOKENS + MOST_DECODES
    if paper and what.system == MULTI_TIER:
        return Shape(WITHOUT_END, LONGEST, BLOCK_SIZE, tokens, tokens, asynchronous=False)
    return Shape(BLOCKS, LONGEST, BLOCK_SIZE, SEQUENCES, STEP_TOKENS, asynchronous=not paper)


def _tiers(system: System, count: int, paper: bool) -> dict[str, Any]:
    shares: Sequence[float] = (0.0,) * count
    if system.headroom and count > 1:
        shares = decaying_headroom(count, decay="auto", cap=1.0) if paper else decaying_headroom(count)
    return {"headroom": list(shares), "aging_s": [AGING_S if system.aging and not paper else None] * count}


def _migration(paper: bool) -> Migration:
    from deployments.settings import MigrationSettings
    from loadgen.simulator.transfer import Migration, Transfer
    from policies.migration.pairing import Pairing
    from policies.migration.victims import Victims

    if not paper:
        return Migration()
    settings = MigrationSettings(
        tick_s=TICK_S,
        tier_grace_s=0.0,
        pairing=Pairing(threshold=GAP, share=1.0, cooldown_s=0.0),
        victims=Victims(cooldown_s=0.0, min_remaining=0),
    )
    return Migration(settings, Transfer(bandwidth=1e15, message_s=0.0, handover_s=0.0))


def jobs(what: Play, seed: int) -> list[Job]:
    """The requests of a seed with their tiers."""
    from loadgen.simulator.cluster import Job

    made = make(
        what.requests,
        lengths_model=what.lengths,
        arrivals=f"poisson:rate={what.rate:g}",
        tier_mix=None if what.mix == NO_MIX else what.mix,
        tier_count=what.tiers,
        seed=seed,
    )
    return [Job(r.due, r.prompt_tokens, r.output_tokens, r.tier or 0) for r in made.requests]


def figures(work: Sequence[Job], outcome: Outcome, limit: float) -> dict[str, float]:
    """Waits of all requests that ended within `limit` seconds, of the highest and of the lowest tier; what it took."""
    last = max(job.tier for job in work)
    ended = [(job.tier, r) for job, r in zip(work, outcome.records, strict=True) if r.due + r.latency <= limit]
    first, whole = [r.ttft for _, r in ended], [r.latency for _, r in ended]
    top, low = ([r.ttft for tier, r in ended if tier == which] for which in (0, last))
    return {
        "ended_pct": 100 * len(ended) / len(work),
        "ttft_mean_s": _mean(first),
        "ttft_p99_s": percentile(first, 99),
        "e2e_mean_s": _mean(whole),
        "e2e_p50_s": percentile(whole, 50),
        "e2e_p99_s": percentile(whole, 99),
        "top_ttft_p50_s": percentile(top, 50),
        "top_ttft_p99_s": percentile(top, 99),
        "last_ttft_p50_s": percentile(low, 50),
        "last_ttft_max_s": max(low, default=math.nan),
        "replica_s": REPLICAS * (min(outcome.duration, limit) - work[0].due),
        "moves": float(sum(moved.get("done", 0) for moved in outcome.moves.values())),
        "preempted_pct": 100 * sum(outcome.preemptions) / len(work),
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
