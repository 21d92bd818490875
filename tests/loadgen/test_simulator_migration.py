"""Moves in virtual time: timelines worked out by hand, conservation, short cuts, failures, the reasons to move."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.settings import MigrationSettings
from loadgen.simulator.cluster import Cluster, Drain, Fleet, Job, Migration, Outage, Outcome, Transfer
from loadgen.simulator.engine import Shape
from loadgen.simulator.hardware import DEVICES, MODELS
from loadgen.simulator.step_cost import Fitted, Roofline
from loadgen.simulator.transfer import migration
from policies.migration.events import Limits
from policies.migration.pairing import Pairing
from policies.migration.victims import Victims

MODEL = MODELS["smollm2-135m"]
SECOND = Fitted(1.0, 0, 0, 0, 0, 0)  # every step takes one
COST = Roofline(MODEL, DEVICES["l4-24g"])
TIERS = {"headroom": [0.1, 0.05, 0.0], "aging_s": [math.inf] * 3}
PIPELINES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
PATIENT = Limits(
    reserve_s=5.0, stage_s=50.0, park_s=5.0, commit_s=5.0, lease_s=80.0, keep_s=200.0
)  # steps take a second here
BY_DRAIN = MigrationSettings(enabled=False, limits=PATIENT)  # nothing moves but what drains


def fleet(asynchronous: bool = False, **more: Any) -> Fleet:
    """Two replicas of 200 blocks whose steps take a second each, taken in turn, unless told otherwise."""
    shape = Shape(200, 1024, max_num_seqs=16, max_num_batched_tokens=256, asynchronous=asynchronous)
    basis = Fleet(MODEL, shape, SECOND, replicas=2, balancing={"name": "round_robin"})
    return replace(basis, **{"migration": Migration(BY_DRAIN), **more})


def pressed(asynchronous: bool, **more: Any) -> Fleet:
    """Four small replicas of an L4 with every reason to move, whose steps are short."""
    shape = Shape(160, 1024, max_num_seqs=24, max_num_batched_tokens=256, asynchronous=asynchronous)
    return replace(Fleet(MODEL, shape, COST, replicas=4, migration=Migration()), **more)


def burst(count: int, seed: int, *, tiers: int = 1, patience: float | None = None, rate: float = 150.0) -> list[Job]:
    """Short and long prompts, answers of up to 300 tokens, Poisson; some clients leave."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, count))
    long = rng.random(count) < 0.25
    prompts = np.where(long, rng.integers(200, 700, count), rng.integers(1, 60, count))
    answers = rng.integers(1, 300, count)
    return [
        Job(float(t), int(p), int(a), int(tier), patience=patience if i % 7 == 0 else None)
        for i, (t, p, a, tier) in enumerate(zip(due, prompts, answers, rng.integers(0, tiers, count), strict=True))
    ]


def done(outcome: Outcome, reason: str) -> int:
    """Moves that went well."""
    return outcome.moves.get(reason, {}).get("done", 0)


@PIPELINES
def test_a_moved_request_keeps_its_tokens_and_its_cache(asynchronous: bool) -> None:
    """It pays no prefill and no preemption: later by no more than its pause, which is messages, copy and two steps."""
    jobs = [Job(0.0, 100, 20)]
    stays = Cluster(fleet(asynchronous)).run(jobs)
    cluster = Cluster(fleet(asynchronous, drains=(Drain(0, 5.5),)))
    moved = cluster.run(jobs)
    assert (stays.replica, moved.replica) == ([0], [1])
    assert moved.moves == {"drain": {"done": 1}}
    assert moved.records[0].ttft == stays.records[0].ttft
    (pause,) = moved.pauses
    # Message and hand-over, 120 tokens of 22.5 KiB each over 8 GB/s, then the destination's own first step.
    assert 1.005 < pause < 1.006
    assert moved.records[0].latency == pytest.approx(stays.records[0].latency + pause - 1.0, abs=1e-9)
    assert sum(moved.preemptions) == 0
    # Seven or eight full blocks of 16 tokens at least, and the one that is not full.
    assert 7 * 16 * MODEL.kv_bytes <= moved.moved_bytes <= 9 * 16 * MODEL.kv_bytes
    for replica in cluster.replicas:
        assert not replica.scheduler.requests
        assert replica.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 200


def test_a_slow_link_makes_the_copy_longer_not_the_pause() -> None:
    """Full blocks go over while the request decodes; what is left for the pause does not grow with the request."""
    jobs = [Job(0.0, 900, 100)]
    pauses, begun = [], []
    for bandwidth in (8e9, 2e6):  # a block takes 0.18 s at the lower one
        transfer = Transfer(bandwidth=bandwidth, handover_s=0.0, message_s=0.0)
        outcome = Cluster(fleet(drains=(Drain(0, 10.5),), migration=Migration(BY_DRAIN, transfer))).run(jobs)
        assert done(outcome, "drain") == 1
        pauses += outcome.pauses
        begun.append(outcome.moved_bytes)
    assert begun[1] >= begun[0]
    assert pauses[0] < 1.001
    assert pauses[1] < 1.0 + 4 * 16 * MODEL.kv_bytes / 2e6  # last_stage_blocks, one that fills meanwhile, the last one


def test_a_waiting_request_moves_without_its_cache() -> None:
    """A request without blocks costs no bytes, and gets its first token where it went."""
    shape = Shape(12, 1024, max_num_seqs=16, max_num_batched_tokens=256, asynchronous=False)
    jobs = [Job(0.0, 150, 8), Job(0.0, 10, 1), Job(0.5, 100, 3)]
    moving = Migration(replace(BY_DRAIN, pairing=Pairing(share=1.0)))
    outcome = Cluster(fleet(shape=shape, drains=(Drain(0, 1.2),), migration=moving)).run(jobs)
    assert outcome.replica[2] == 1
    assert outcome.moves["drain"]["done"] >= 1
    assert outcome.records[2].ttft < 4.0  # behind the first it would have waited for 8 s


def test_without_migration_a_drain_only_closes_the_door() -> None:
    """Requests go on to their ends at a replica that drains; new ones go elsewhere, until it serves again."""
    jobs = [Job(0.0, 10, 9), Job(2.0, 10, 2), Job(2.1, 10, 2), Job(6.0, 10, 1), Job(6.1, 10, 1)]
    outcome = Cluster(fleet(migration=None, drains=(Drain(0, 1.5, 5.0),))).run(jobs)
    assert outcome.replica[:3] == [0, 1, 1]
    assert set(outcome.replica[3:]) == {0, 1}
    assert outcome.moves == {}


def test_what_cannot_move_is_sent_again() -> None:
    """A request that no other replica has room for is handed back after a minute, and pays for a prefill elsewhere."""
    shape = Shape(20, 1024, max_num_seqs=16, max_num_batched_tokens=256, asynchronous=False)
    busy = Job(0.0, 100, 100)  # has a third of the blocks that the destination may lend, or more
    outcome = Cluster(fleet(shape=shape, drains=(Drain(0, 5.5),))).run([busy, busy])
    assert outcome.moves["drain"]["handed_back"] == 1
    assert outcome.replica == [1, 1]
    assert [r.outcome for r in outcome.records] == ["ok", "ok"]


@PIPELINES
@pytest.mark.parametrize("tiers", [1, 3])
def test_short_cuts_change_nothing(asynchronous: bool, tiers: int) -> None:
    """Bit for bit as through vLLM's own code: moves, drains, a replica that dies, clients that leave, rare reports."""
    whole = pressed(
        asynchronous,
        balancing={"name": "round_robin"},
        tiers=TIERS if tiers > 1 else None,
        drains=(Drain(1, 0.5, 1.5),),
        outages=(Outage(2, 1.0, 1.2),),
        report_s=0.05 if tiers > 1 else 0.0,
    )
    jobs = burst(90, 1, tiers=tiers, patience=1.0)
    plain, coasting = Cluster(whole, fast=False).run(jobs), Cluster(whole).run(jobs)
    assert coasting == plain
    assert done(plain, "drain") > 0
    assert sum(ended.get("done", 0) for ended in plain.moves.values()) > done(plain, "drain")


@PIPELINES
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_every_request_ends_once_and_no_block_is_lost(asynchronous: bool, seed: int) -> None:
    """Whatever moves, drains, dies and leaves: each request has one end, and idle replicas have all their blocks."""
    at = 0.3 + 0.2 * seed
    whole = pressed(
        asynchronous,
        balancing={"name": "random"},
        tiers=TIERS,
        drains=(Drain(0, at, at + 0.5), Drain(1, at + 0.1)),
        outages=(Outage(2, at + 0.05, at + 0.4), Outage(3, at + 0.6, at + 0.8), Outage(1, at + 0.3, at + 0.5)),
        seed=seed,
    )
    jobs = burst(150, seed, tiers=3, patience=0.8)
    cluster = Cluster(whole)
    outcome = cluster.run(jobs)
    assert {r.outcome for r in outcome.records} <= {"ok", "unfinished", "shed"}
    for record, job in zip(outcome.records, jobs, strict=True):
        if record.outcome == "ok":
            assert (record.prompt_len, record.output_len) == (job.prompt_tokens, job.output_tokens)
            assert 0 < record.ttft <= record.latency
    for replica in cluster.replicas:
        assert not replica.scheduler.requests
        assert replica.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 160
    assert sum(sum(ended.values()) for ended in outcome.moves.values()) > 3


def test_same_seed_same_moves() -> None:
    """Two runs with moves are equal in everything."""
    whole = pressed(True, balancing={"name": "random"}, tiers=TIERS)
    jobs = burst(100, 5, tiers=3)
    first = Cluster(whole).run(jobs)
    assert Cluster(whole).run(jobs) == first
    assert sum(sum(ended.values()) for ended in first.moves.values()) > 0


def test_balance_brings_replicas_together() -> None:
    """A replica that was down when all came takes its share by moves, and the fleet is done sooner."""
    jobs = [Job(0.01 * i, 100, 200) for i in range(24)]
    whole = pressed(False, replicas=2, balancing={"name": "round_robin"}, outages=(Outage(1, 0.0, 0.3),))
    moved, stayed = Cluster(whole).run(jobs), Cluster(replace(whole, migration=None)).run(jobs)
    assert done(moved, "balance") > 0
    assert set(stayed.replica) == {0}
    assert moved.replica.count(1) >= 4
    assert moved.duration < stayed.duration


def test_a_higher_tier_makes_room_by_a_move() -> None:
    """Where another replica has room, a runner of a lower tier moves there instead of being preempted."""
    shape = Shape(24, 1024, max_num_seqs=16, max_num_batched_tokens=256, asynchronous=False)
    cost = Fitted(0.02, 0, 0, 0, 0, 0)
    pairing = Pairing(threshold=100.0, share=1.0)  # balance never
    settings = MigrationSettings(pairing=pairing, victims=Victims(cooldown_s=0.0, min_remaining=0))
    whole = fleet(shape=shape, cost=cost, tiers=TIERS, migration=Migration(settings), outages=(Outage(1, 0.0, 0.5),))
    lower = [Job(0.0, 100, 150, 2)] * 2  # on the first, which they have nearly filled by 1.4 s
    for filler in ([], [Job(1.4, 5, 1, 2)]):  # one of these makes the last request the first replica's
        jobs = [*lower, *filler, Job(1.4, 150, 5, 0)]
        without = Cluster(replace(whole, migration=None)).run(jobs)
        if without.replica[-1] == 0:
            break
    moved = Cluster(whole).run(jobs)
    assert without.replica[-1] == moved.replica[-1] == 0
    assert done(moved, "tier") == 1
    assert sum(without.preemptions) > 0
    assert sum(moved.preemptions) == 0
    assert moved.records[-1].ttft < 0.5


@PIPELINES
@pytest.mark.parametrize("dies", [0, 1], ids=["source", "destination"])
def test_a_death_in_the_middle_of_a_move(asynchronous: bool, dies: int) -> None:
    """Whichever replica dies, and at whatever moment of the move, the request goes on with its tokens elsewhere."""
    slow = Transfer(bandwidth=2e6)
    for at in np.arange(5.6, 12.0, 0.35):
        cluster = Cluster(
            fleet(
                asynchronous,
                replicas=3,
                drains=(Drain(0, 5.5), Drain(2, 0.0, 6.0)),
                outages=(Outage(dies, float(at)),),
                migration=Migration(BY_DRAIN, slow),
            )
        )
        outcome = cluster.run([Job(0.0, 100, 20)])
        assert outcome.records[0].outcome == "ok", at
        assert outcome.records[0].ttft == 1.0
        assert outcome.replica[0] != dies
        assert outcome.duration < 26.0


def test_slowdown_while_a_move_copies() -> None:
    """Steps of both replicas take longer by the share that was said, and no longer once the move is over."""
    jobs = [Job(0.0, 100, 30), Job(0.0, 100, 30)]
    plain = fleet(drains=(Drain(0, 5.5),))
    base = Cluster(plain).run(jobs)
    slowed = Cluster(replace(plain, migration=Migration(BY_DRAIN, Transfer(slowdown=0.5)))).run(jobs)
    assert base.records[1].latency < slowed.records[1].latency < base.records[1].latency + 5.0


def test_flat_settings() -> None:
    """Options name every setting by its key in the documentation; others are refused."""
    made = migration({"threshold": 0.3, "cooldown_s": 2.0, "request_cooldown_s": 9.0, "tick_s": 0.5, "bandwidth": 1e9})
    assert made.settings.pairing == Pairing(threshold=0.3, cooldown_s=2.0)
    assert made.settings.victims == Victims(cooldown_s=9.0)
    assert (made.settings.tick_s, made.transfer.bandwidth) == (0.5, 1e9)
    with pytest.raises(ValueError, match="no setting speed"):
        migration({"speed": 1})
    with pytest.raises(ValueError, match="bandwidth must be a number > 0"):
        migration({"bandwidth": 0})
    with pytest.raises(ValueError, match="message_s must be"):
        Cluster(fleet(migration=Migration(BY_DRAIN, Transfer(message_s=0.5))))


def test_impossible_drains() -> None:
    """A drain of a replica that there is not, or that ends before it begins, is refused."""
    for drain in (Drain(2, 0.0), Drain(0, 2.0, 1.0)):
        with pytest.raises(ValueError, match="name a replica below 2"):
            Cluster(fleet(drains=(drain,))).run([Job(0.0, 1, 1)])
