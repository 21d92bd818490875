"""The virtual fleet: timelines worked out by hand, determinism, conservation, stale reports, admission, leaving."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadgen.metrics import summarise
from loadgen.simulator.cluster import Cluster, Fleet, Job, Outage, Outcome
from loadgen.simulator.engine import Shape
from loadgen.simulator.hardware import DEVICES, MODELS
from loadgen.simulator.step_cost import Fitted, Roofline
from policies.registry import PolicyError

MODEL = MODELS["smollm2-135m"]
SECOND = Fitted(1.0, 0, 0, 0, 0, 0)  # every step takes one
TIERS = {"headroom": [0.1, 0.05, 0.0], "aging_s": [math.inf] * 3}
SYNC, ASYNC = False, True


def fleet(asynchronous: bool = ASYNC, blocks: int = 200, **more: Any) -> Fleet:
    """One replica whose steps take a second each, unless told otherwise."""
    shape = Shape(blocks, 1024, max_num_seqs=16, max_num_batched_tokens=256, asynchronous=asynchronous)
    return replace(Fleet(MODEL, shape, SECOND), **more)


def burst(count: int, seed: int, tiers: int = 1, rate: float = 200.0) -> list[Job]:
    """Random requests, Poisson."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Job(float(t), int(p), int(a), int(tier))
        for t, p, a, tier in zip(
            due, rng.integers(1, 400, count), rng.integers(1, 60, count), rng.integers(0, tiers, count), strict=True
        )
    ]


def times(outcome: Outcome) -> list[tuple[float, float]]:
    """When each request got its first and its last token."""
    return [(r.due + r.ttft, r.due + r.latency) for r in outcome.records]


@pytest.mark.parametrize(("asynchronous", "second"), [(SYNC, (2.0, 3.0)), (ASYNC, (3.0, 4.0))], ids=["sync", "async"])
def test_timeline_of_two_requests(asynchronous: bool, second: tuple[float, float]) -> None:
    """Who comes while a step runs is in the next one, or, where that is scheduled already, in the one after it."""
    outcome = Cluster(fleet(asynchronous)).run([Job(0.0, 100, 3), Job(0.5, 100, 2)])
    assert times(outcome) == [(1.0, 3.0), second]
    assert outcome.duration == max(3.0, second[1])


def test_long_prompt_takes_several_steps() -> None:
    """A prompt of 600 tokens is three chunks of at most 256, and the idle fleet waits for the next request."""
    outcome = Cluster(fleet(SYNC)).run([Job(0.0, 600, 1), Job(10.0, 10, 1)])
    assert times(outcome) == [(3.0, 3.0), (11.0, 11.0)]
    assert outcome.steps == [4]
    assert outcome.busy_s == [4.0]


def test_full_cache_makes_a_request_wait() -> None:
    """A prompt that does not fit beside the first waits until that has ended."""
    outcome = Cluster(fleet(SYNC, blocks=10)).run([Job(0.0, 100, 5), Job(0.1, 100, 1)])
    assert times(outcome) == [(1.0, 5.0), (6.0, 6.0)]


@pytest.mark.parametrize("asynchronous", [SYNC, ASYNC], ids=["sync", "async"])
def test_same_seed_same_run(asynchronous: bool) -> None:
    """Two runs of the same fleet are equal in every record; another seed of the routers gives another run."""
    whole = fleet(
        asynchronous,
        replicas=3,
        cost=Roofline(MODEL, DEVICES["l4-24g"]),
        scheduling={"name": "larry"},
        balancing={"name": "p2c"},
        tiers=TIERS,
        routers=2,
        report_s=0.05,
        bounds=(6, (None, None, 3)),
    )
    work = burst(150, seed=3, tiers=3)
    first, again = Cluster(whole).run(work), Cluster(whole).run(work)
    assert first == again
    assert Cluster(replace(whole, seed=1)).run(work) != first


@pytest.mark.parametrize("policy", ["fcfs", "srpt", "prefill_first"])
def test_every_request_ends_once(policy: str) -> None:
    """Under pressure every request ends with its whole answer, and replicas are left without requests and blocks."""
    work = burst(150, seed=4)
    spec = {"name": policy} | ({"predictor": "oracle"} if policy == "srpt" else {})
    cluster = Cluster(fleet(blocks=40, replicas=2, scheduling=spec, oracle=True))
    outcome = cluster.run(work)
    assert [(r.prompt_len, r.output_len) for r in outcome.records] == [(j.prompt_tokens, j.output_tokens) for j in work]
    assert all(r.outcome == "ok" and 0 < r.ttft <= r.latency for r in outcome.records)
    assert sum(outcome.preemptions) > 0
    for replica in cluster.replicas:
        assert replica.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 40
        assert not replica.scheduler.requests
    assert summarise(outcome.records)["completed"] == 150


def test_stale_reports_mislead_the_balancer() -> None:
    """Three routers that see only their own calls between old reports leave more to one replica than fresh ones do."""
    fresh = fleet(replicas=4, routers=3, balancing={"name": "least_requests"}, stale_s=math.inf)
    work = [Job(0.5 * i, 100, 10) for i in range(120)]
    spread = []
    for report_s in (0.0, 20.0):
        outcome = Cluster(replace(fresh, report_s=report_s)).run(work)
        shares = np.array([outcome.replica[i : i + 12] for i in range(0, 120, 12)])
        spread.append(np.mean([np.bincount(part, minlength=4).std() for part in shares]))
    assert spread[1] > 1.3 * spread[0]


def test_reports_arrive_at_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one report in ten seconds a router's table shows the replica as it was at the last of them."""
    cluster = Cluster(fleet(report_s=10.0, stale_s=math.inf))
    (router,) = cluster.routers
    choose = router.choose
    seen: list[tuple[float, float]] = []

    def look(*call: Any, **more: Any) -> str:
        seen.append((float(router.table.free_tokens[0]), float(router.table.requests[0])))
        return choose(*call, **more)

    monkeypatch.setattr(router, "choose", look)
    cluster.run([Job(1.0, 64, 30), Job(2.0, 16, 30), Job(11.0, 16, 5)])
    # First nothing; then its own call, which no report has covered yet. At 10 s both run: prompt, ten or eleven tokens,
    # and those of the step that is scheduled ahead; in whole blocks.
    assert seen == [(3200.0, 0.0), (3200.0 - 64, 1.0), (3200.0 - 16 * (5 + 2), 2.0)]


def test_tiers_go_first() -> None:
    """On a full replica a request of the highest tier overtakes those of lower ones that came before it."""
    work = [Job(0.0, 150, 8, 1), *(Job(0.1, 100, 4, 2) for _ in range(4)), Job(0.2, 100, 4, 0)]
    outcome = Cluster(fleet(SYNC, blocks=12, tiers=TIERS)).run(work)
    lower = [r.ttft for r, job in zip(outcome.records, work, strict=True) if job.tier == 2]
    assert outcome.records[-1].ttft < min(lower)


def test_admission_refuses_and_sheds() -> None:
    """A queue of two is full for its own tier (429) and gives way to a higher one: a request without a token leaves."""
    work = [Job(0.0, 100, 9, 1), *(Job(0.1, 100, 1, 1) for _ in range(3)), Job(0.2, 100, 1, 0)]
    outcome = Cluster(fleet(SYNC, blocks=8, tiers=TIERS, bounds=(2, (None, None, None)))).run(work)
    assert [r.reason for r in outcome.records] == ["", "shed", "queue_full", "queue_full", ""]
    refused = [r for r in outcome.records if r.outcome == "shed"]
    assert {r.status for r in refused} == {429}
    assert all(r.retry_after is not None and r.retry_after >= 1 for r in refused)


def test_clients_leave() -> None:
    """A client whose patience ends is gone, running or waiting, with its reason; its blocks serve others."""
    work = [
        Job(0.0, 100, 50, patience=5.5),
        Job(0.1, 100, 2, patience=3.0, left="cancelled"),
        Job(0.2, 100, 2, patience=100.0),
    ]
    outcome = Cluster(fleet(SYNC, blocks=12)).run(work)
    assert [r.outcome for r in outcome.records] == ["unfinished", "cancelled", "ok"]
    assert [r.latency for r in outcome.records[:2]] == [5.5, 3.0]
    assert outcome.records[0].ttft == 1.0
    assert times(outcome)[2] == (7.0, 8.0)


@pytest.mark.parametrize("asynchronous", [SYNC, ASYNC], ids=["sync", "async"])
def test_requests_of_a_dead_replica_go_on_elsewhere(asynchronous: bool) -> None:
    """They keep their tokens and arrival, and pay with a prefill; the replica serves again when its outage is over."""
    two = fleet(asynchronous, replicas=2, balancing={"name": "round_robin"}, outages=(Outage(0, 3.5, 20.0),))
    cluster = Cluster(two)
    outcome = cluster.run([Job(0.0, 100, 6), Job(0.0, 100, 6), Job(30.0, 10, 1), Job(30.0, 10, 1)])
    # Three tokens by 3.5 s, the fourth with the next step that is not scheduled yet.
    assert sorted(times(outcome)[:2]) == [(1.0, 6.0), (1.0, 8.0 if asynchronous else 7.0)]
    assert outcome.replica[:2] == [1, 1]
    assert sorted(outcome.replica[2:]) == [0, 1]
    assert outcome.busy_s[0] == 3.5 + 1.0
    assert all(
        replica.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 200 for replica in cluster.replicas
    )


def test_nobody_left() -> None:
    """Without any replica requests end with 503: one that was under way, one that comes, one that waited first."""
    outcome = Cluster(fleet(SYNC, outages=(Outage(0, 2.5),))).run([Job(0.0, 10, 9), Job(2.2, 10, 1), Job(5.0, 10, 1)])
    assert [(r.outcome, r.status, r.reason) for r in outcome.records] == [("shed", 503, "no_replica")] * 3


@pytest.mark.parametrize(
    ("outages", "complaint"),
    [
        ((Outage(1, 0.0),), "name a replica below 1"),
        ((Outage(0, 2.0, 2.0),), "an end after the begin"),
        ((Outage(0, 5.0, 6.0), Outage(0, 2.0)), "the replica is down already"),
    ],
)
def test_impossible_outages(outages: tuple[Outage, ...], complaint: str) -> None:
    """Outages of replicas that there are not, that end before they begin, or that overlap are refused."""
    with pytest.raises(ValueError, match=complaint):
        Cluster(fleet(outages=outages)).run([Job(0.0, 1, 1)])


@pytest.mark.parametrize(
    ("work", "complaint"),
    [
        ([Job(1.0, 1, 1), Job(0.5, 1, 1)], "sort them by `due`"),
        ([Job(0.0, 0, 1)], "0 \\+ 1 tokens: give 1 at least"),
        ([Job(0.0, 1000, 100)], "the engine takes 1024: scale the workload"),
        ([Job(0.0, 1, 1, 1)], "job 0 is of tier 1, the fleet has 1"),
    ],
)
def test_jobs_that_cannot_be_played(work: list[Job], complaint: str) -> None:
    """Jobs that the fleet can never finish are refused before anything runs."""
    with pytest.raises(ValueError, match=complaint):
        Cluster(fleet()).run(work)


def test_unknown_policies_are_named() -> None:
    """A policy that there is not is refused with the choices."""
    with pytest.raises(PolicyError, match="larry"):
        Cluster(fleet(scheduling={"name": "nothing"}))
    with pytest.raises(PolicyError, match="sal"):
        Cluster(fleet(balancing={"name": "nothing"}))
