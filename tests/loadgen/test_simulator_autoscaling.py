"""Autoscaling in virtual time: start-up, windows, drains, zero and back, replica-seconds, short cuts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadgen.simulator.cluster import Autoscaling, Cluster, Fleet, Job, Migration, Outage
from loadgen.simulator.engine import Shape
from loadgen.simulator.hardware import MODELS
from loadgen.simulator.step_cost import Fitted
from policies.registry import PolicyError

MODEL = MODELS["smollm2-135m"]
TENTH = Fitted(0.1, 0, 0, 0, 0, 0)  # every step takes a tenth of a second
QUICK = Autoscaling(up_s=1.0, down_s=10.0, startup_s=5.0)


def fleet(scaling: Autoscaling | None = QUICK, **more: Any) -> Fleet:
    """One replica of 200 blocks at the start, four at most."""
    shape = Shape(200, 1024, max_num_seqs=16, max_num_batched_tokens=256, asynchronous=False)
    return replace(Fleet(MODEL, shape, TENTH, balancing={"name": "least_requests"}, autoscaling=scaling), **more)


def wave(seconds: float, rate: float, tokens: int = 50, begin: float = 0.0) -> list[Job]:
    """Requests at a steady rate."""
    return [Job(float(t), 100, tokens) for t in np.arange(begin, begin + seconds, 1 / rate)]


def targets(outcome: Any) -> list[int]:
    """What the autoscaler wanted, one after the other."""
    return [step.target for step in outcome.scaling]


def test_fleet_grows_with_the_load_and_shrinks_after_it() -> None:
    """Replicas come a start-up time after they are wanted, and go when the load has been low for the window."""
    jobs = [*wave(30.0, 8.0), *wave(90.0, 0.5, begin=30.0)]
    outcome = Cluster(fleet(migration=Migration())).run(jobs)
    grown = [step for step in outcome.scaling if step.target > 1]
    assert max(targets(outcome)) > 1
    assert outcome.scaling[-1].target == 1
    assert grown[0].reason == "busy"
    stays = Cluster(fleet()).run(jobs)  # without moves it is the requests that come then that go there
    (first, *_) = [r.due for r, where in zip(stays.records, stays.replica, strict=True) if where > 0]
    (wanted, *_) = [step.at for step in stays.scaling if step.target > 1]
    assert wanted + 5.0 <= first < wanted + 5.3
    assert all(r.outcome == "ok" for r in outcome.records)
    assert outcome.moves.get("drain", {}).get("done", 0) + outcome.moves.get("balance", {}).get("done", 0) > 0
    assert 120.0 < outcome.replica_s < 4 * outcome.duration


def test_replica_seconds_count_start_up_and_drain() -> None:
    """A fleet that never changes costs its size times the run; one more replica from its decision to its end."""
    still = Cluster(fleet(replace(QUICK, most=1))).run(wave(10.0, 1.0))
    assert still.replica_s == pytest.approx(still.duration)
    assert Cluster(fleet(None, replicas=2)).run(wave(10.0, 1.0)).replica_s == pytest.approx(2 * still.duration, rel=0.1)
    grows = Cluster(fleet(replace(QUICK, most=2, down_s=1000.0))).run(wave(40.0, 8.0))
    (at,) = [step.at for step in grows.scaling if step.target == 2]
    assert grows.replica_s == pytest.approx(2 * grows.duration - at)


def test_a_drain_by_migration_is_shorter() -> None:
    """A replica that is stopped ends at once if its requests can move, else with the last of them."""
    jobs = [*wave(20.0, 4.0, tokens=20), *[Job(20.5, 100, 700) for _ in range(2)]]
    scaling = replace(QUICK, down_s=5.0)
    stays, moves = (Cluster(fleet(scaling, replicas=2, migration=way)).run(jobs) for way in (None, Migration()))
    assert moves.replica_s < stays.replica_s - 10.0
    assert moves.moves["drain"]["done"] >= 1
    assert {r.outcome for r in (*stays.records, *moves.records)} == {"ok"}


def test_to_zero_and_back() -> None:
    """An idle fleet ends; the next request starts a replica at once, waits for it, and is answered."""
    scaling = replace(QUICK, least=0, down_s=10.0, to_zero_s=20.0)
    outcome = Cluster(fleet(scaling)).run([Job(0.0, 100, 10), Job(100.0, 100, 10), Job(101.0, 100, 10)])
    assert targets(outcome) == [1, 0, 1]
    assert outcome.scaling[1].at == pytest.approx(21.0, abs=1.1)
    assert outcome.scaling[2].at == 100.0
    assert outcome.scaling[2].reason == "cold_start"
    assert outcome.records[1].ttft == pytest.approx(5.1)
    assert outcome.records[2].ttft == pytest.approx(4.2)  # it comes while the step of the other runs
    assert outcome.replica == [0, 1, 1]
    assert outcome.replica_s == pytest.approx(outcome.scaling[1].at + 1.0 + outcome.duration - 100.0, abs=1.1)


def test_nobody_waits_for_ever() -> None:
    """A request without a replica is turned away when the cold start takes too long; its client may leave before."""
    scaling = replace(QUICK, least=0, startup_s=50.0, cold_start_s=20.0)
    jobs = [Job(0.0, 10, 1), Job(0.0, 10, 1, patience=5.0)]
    outcome = Cluster(fleet(scaling, replicas=0)).run(jobs)
    assert [(r.outcome, r.reason) for r in outcome.records] == [("shed", "no_replica"), ("unfinished", "")]
    assert outcome.duration == 20.0


def test_a_dead_replica_is_replaced() -> None:
    """Serve starts another: the target stays, and the requests go on after its start-up time."""
    outcome = Cluster(fleet(outages=(Outage(0, 3.05),))).run([Job(0.0, 100, 60)])
    assert targets(outcome) == [1]
    assert outcome.replica == [1]
    # 30 tokens by then; the rest after 5 s of start-up and a prefill.
    assert outcome.records[0].latency == pytest.approx(3.05 + 5.0 + 0.1 * 30, abs=0.11)


def test_serves_default_policy_counts_requests() -> None:
    """`ongoing` wants as many replicas as put `target_ongoing_requests` on each, whatever these cost."""
    scaling = replace(QUICK, policy={"name": "ongoing", "target_ongoing_requests": 5.0})
    outcome = Cluster(fleet(scaling)).run(wave(60.0, 3.0))  # 15 at a time, of 5 s each
    assert max(targets(outcome)) in (3, 4)
    short = Cluster(fleet(scaling)).run(wave(60.0, 3.0, tokens=5))  # 1.5 at a time
    assert targets(short) == [1]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_an_engine_finds_out_what_it_can_compute(asynchronous: bool) -> None:
    """256 tokens in a tenth of a second, less those that it decodes; nothing while it can take all that comes."""
    shape = Shape(2000, 1024, max_num_seqs=64, max_num_batched_tokens=256, asynchronous=asynchronous)
    found = []
    for rate in (10.0, 40.0):
        cluster = Cluster(fleet(None, shape=shape))
        cluster.run(wave(20.0, rate, tokens=2))
        found.append(cluster.replicas[0].figures().full_rate)
    assert found[0] == 0.0
    assert 2400 < found[1] < 2560


def test_a_fleet_that_cannot_compute_more_grows_though_it_has_memory() -> None:
    """3000 prompt tokens/s for a replica that computes 2500: help comes long before its memory is full, and goes."""
    shape = Shape(4000, 1024, max_num_seqs=256, max_num_batched_tokens=256, asynchronous=False)
    jobs = [*wave(60.0, 30.0, tokens=5), *wave(60.0, 2.0, tokens=5, begin=60.0)]
    outcome = Cluster(fleet(shape=shape, migration=Migration())).run(jobs)
    assert [step.reason for step in outcome.scaling[:2]] == ["start", "saturated"]
    assert outcome.scaling[1].at < 10.0
    assert "busy" not in {step.reason for step in outcome.scaling}
    settled = [r.ttft for r in outcome.records if 30.0 < r.due < 60.0]
    assert max(settled) < 1.0
    assert targets(outcome)[-1] == 1


def test_promises_scale_up() -> None:
    """First tokens later than promised ask for a replica, though the KV cache would do."""
    tiers = {"headroom": [0.0], "aging_s": [30.0], "ttft_slo_s": [0.3]}
    shape = Shape(200, 1024, max_num_seqs=2, max_num_batched_tokens=256, asynchronous=False)
    jobs = wave(30.0, 0.6)
    scaling = replace(QUICK, policy={"name": "freeness", "scale_down_steps": 1e6})
    late = Cluster(fleet(scaling, shape=shape, tiers=tiers)).run(jobs)
    assert "ttft" in {step.reason for step in late.scaling}
    patient = Cluster(fleet(scaling, shape=shape)).run(jobs)
    assert "ttft" not in {step.reason for step in patient.scaling}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_short_cuts_change_nothing(asynchronous: bool) -> None:
    """Bit for bit as through vLLM's own code, with moves and a death, and again when run twice."""
    whole = fleet(replace(QUICK, least=0, down_s=3.0, startup_s=2.0), migration=Migration(), report_s=0.2)
    whole = replace(whole, shape=replace(whole.shape, asynchronous=asynchronous), outages=(Outage(0, 4.0),))
    jobs = [*wave(8.0, 8.0), Job(40.0, 100, 10)]
    plain, coasting = Cluster(whole, fast=False).run(jobs), Cluster(whole).run(jobs)
    assert coasting == plain
    assert Cluster(whole).run(jobs) == coasting
    assert 0 in targets(plain)
    assert {r.outcome for r in plain.records} == {"ok"}


def test_what_does_not_fit_is_said() -> None:
    """Bounds, times and policies that cannot be are refused by name."""
    with pytest.raises(ValueError, match="keeps 1 to 4"):
        Cluster(fleet(replicas=5))
    with pytest.raises(ValueError, match="least, most"):
        Autoscaling(least=3, most=2)
    with pytest.raises(ValueError, match="startup_s must be >= 0"):
        Autoscaling(startup_s=-1.0)
    with pytest.raises(ValueError, match="interval_s must be > 0"):
        Autoscaling(interval_s=0.0)
    with pytest.raises(PolicyError, match="freeness, ongoing"):
        Cluster(fleet(replace(QUICK, policy={"name": "nothing"})))
    with pytest.raises(PolicyError, match="target_ongoing_requests must be a number > 0"):
        Cluster(fleet(replace(QUICK, policy={"name": "ongoing", "target_ongoing_requests": 0})))
