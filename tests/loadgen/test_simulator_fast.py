"""Short cuts: the same run through vLLM untouched, through the lean scheduler, and with coasting, is the same run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.scheduler import make_policy
from loadgen.simulator.cluster import Cluster, Fleet, Job, Outage, Outcome
from loadgen.simulator.coast import COASTING
from loadgen.simulator.engine import Shape
from loadgen.simulator.hardware import DEVICES, MODELS
from loadgen.simulator.step_cost import Fitted, Roofline
from policies.scheduling import SCHEDULING

MODEL = MODELS["smollm2-135m"]
COST = Roofline(MODEL, DEVICES["l4-24g"])
TIERS = {"headroom": [0.1, 0.05, 0.0], "aging_s": [1.0, 1.0, 1.0]}


def jobs(count: int, rate: float, seed: int, tiers: int = 1, patience: float | None = None) -> list[Job]:
    """A burst of short and long requests, more than 120 blocks can hold, and five late ones that come alone."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, count))
    due[-5:] += np.arange(1, 6)
    long = rng.random(count) < 0.25
    prompts = np.where(long, rng.integers(200, 700, count), rng.integers(1, 60, count))
    return [
        Job(float(t), int(p), int(a), int(tier), patience=patience if i % 7 == 0 else None)
        for i, (t, p, a, tier) in enumerate(
            zip(due, prompts, rng.integers(1, 120, count), rng.integers(0, tiers, count), strict=True)
        )
    ]


def fleet(policy: str, asynchronous: bool, **more: Any) -> Fleet:
    """Two small replicas under a policy that knows the true lengths if it wants to."""
    spec: dict[str, Any] = {"name": policy}
    if "predictor" in SCHEDULING.parameters(policy):
        spec["predictor"] = "oracle"
    shape = Shape(120, 1024, max_num_seqs=24, max_num_batched_tokens=256, asynchronous=asynchronous)
    return Fleet(MODEL, shape, COST, replicas=2, scheduling=spec, oracle=True, **more)


def play(of: Fleet, work: list[Job], *, fast: bool = True, coast: bool = True) -> tuple[Outcome, Cluster]:
    """One run."""
    cluster = Cluster(of, fast=fast, coast=coast)
    return cluster.run(work), cluster


#: Round numbers: 10 ms a step, 0.5 ms a prompt token, 1 ms a decode, 0.01 ms a KV token that it reads.
ROUND = Fitted(10e-3, 0.5e-3, 0.0, 0.0, 1e-3, 0.01e-3)
#: (due in ms, prompt, answer in tokens), and on two replicas of 20 blocks: (replica, first and last token in ms).
GOLDEN: list[tuple[tuple[int, int, int], tuple[int, float, float]]] = [
    ((0, 100, 40), (0, 60.0, 764.25)),
    ((5, 60, 30), (1, 45.0, 550.34)),
    ((10, 150, 25), (0, 194.06, 560.93)),
    ((12, 40, 60), (1, 131.73, 1134.48)),
    ((20, 30, 50), (0, 194.06, 1143.28)),
    ((25, 200, 10), (1, 201.27, 790.01)),
    ((60, 16, 64), (0, 194.06, 1411.92)),
    ((100, 90, 20), (1, 858.58, 1122.49)),
    ((400, 300, 5), (0, 1591.92, 1648.02)),
    ((1500, 20, 12), (1, 1520.0, 1643.86)),
]


@pytest.mark.parametrize("short_cuts", [(False, False), (True, False), (True, True)], ids=["plain", "lean", "coast"])
def test_golden_trace(short_cuts: tuple[bool, bool]) -> None:
    """A small trace with waiting and preemptions is played as it was when it was written down."""
    shape = Shape(20, 512, max_num_seqs=8, max_num_batched_tokens=128)
    two = Fleet(MODEL, shape, ROUND, replicas=2, balancing={"name": "round_robin"})
    work = [Job(due / 1e3, prompt, answer) for (due, prompt, answer), _ in GOLDEN]
    fast, coast = short_cuts
    outcome, _ = play(two, work, fast=fast, coast=coast)
    played = [
        (replica, round((r.due + r.ttft) * 1e3, 6), round((r.due + r.latency) * 1e3, 6))
        for replica, r in zip(outcome.replica, outcome.records, strict=True)
    ]
    assert played == [expected for _, expected in GOLDEN]
    assert (outcome.preemptions, outcome.steps) == ([2, 1], [99, 74])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", SCHEDULING.names())
def test_fast_path_equals_vllm(policy: str, asynchronous: bool) -> None:
    """Every record, step, busy second and preemption of every policy is bit for bit that of vLLM's own code."""
    work = jobs(100, 150.0, seed=1)
    plain, _ = play(fleet(policy, asynchronous), work, fast=False)
    lean, _ = play(fleet(policy, asynchronous), work, coast=False)
    coasting, _ = play(fleet(policy, asynchronous), work)
    assert lean == plain
    assert coasting == plain


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["fcfs", "larry", "mlfq"])
def test_fast_path_equals_vllm_in_a_whole_fleet(policy: str, asynchronous: bool) -> None:
    """So it is with tiers, routers, rare reports, a bounded queue, clients that leave and a replica that dies."""
    work = jobs(200, 300.0, seed=2, tiers=3, patience=0.3)
    whole = fleet(policy, asynchronous, tiers=TIERS, routers=2, report_s=0.1, bounds=(2, (None, None, 2)))
    whole = replace(whole, outages=(Outage(1, 0.2, 0.35), Outage(0, 1.5, 1.8)))
    plain, _ = play(whole, work, fast=False)
    assert play(whole, work)[0] == plain
    outcomes = {record.outcome for record in plain.records}
    assert outcomes == {"ok", "shed", "unfinished"}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_runs_are_under_pressure(asynchronous: bool) -> None:
    """The compared runs preempt and idle: else they would show little."""
    outcome, cluster = play(fleet("fcfs", asynchronous), jobs(100, 150.0, seed=1))
    assert min(outcome.preemptions) > 0
    assert sum(outcome.busy_s) < 0.8 * 2 * outcome.duration
    assert {replica.scheduler.__class__.__name__ for replica in cluster.replicas} == {
        "LeanAsyncPolicyScheduler" if asynchronous else "LeanPolicyScheduler"
    }


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_coasting_spares_the_scheduler(asynchronous: bool) -> None:
    """A lone long answer is a few calls of the scheduler, not one for each token; so is a whole batch of them."""
    for count in (1, 16):
        work = [Job(0.0, 20, 100 + i) for i in range(count)]
        outcome, cluster = play(fleet("fcfs", asynchronous), work)
        assert max(outcome.steps) >= 100
        assert sum(replica.scheduler.steps for replica in cluster.replicas) < 20


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["fcfs", "larry"])
def test_coasting_beside_a_queue_that_cannot_move(policy: str, asynchronous: bool) -> None:
    """With a queue whose head does not fit, or for which no seat is free, most steps are spared all the same."""
    for prompt, seats in ((400, "memory"), (5, "seats")):
        work = [Job(0.001 * i, prompt, 60 + i) for i in range(60)]
        outcome, cluster = play(fleet(policy, asynchronous), work)
        calls = sum(replica.scheduler.steps for replica in cluster.replicas)
        assert calls < 0.6 * sum(outcome.steps), seats


def test_tiers_do_not_keep_a_policy_from_coasting() -> None:
    """Policies of COASTING exist, and within tiers they have the same name."""
    for name in COASTING:
        assert make_policy({"name": name}).name == name
    outcome, cluster = play(fleet("larry", True, tiers=TIERS), [Job(0.0, 20, 100, 2)])
    assert sum(replica.scheduler.steps for replica in cluster.replicas) < 20
    assert sum(outcome.steps) >= 100
