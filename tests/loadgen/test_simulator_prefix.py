"""Prefix caching in the virtual fleet: what is found is what there is to find, and short cuts find the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from deployments.scheduler import SchedulerSettings
from loadgen.simulator import engine
from loadgen.simulator.cluster import Cluster, Drain, Fleet, Job, Migration, Outage, Outcome
from loadgen.simulator.command import jobs
from loadgen.simulator.hardware import DEVICES, MODELS
from loadgen.simulator.prefixes import Contents
from loadgen.simulator.step_cost import Fitted, Roofline
from loadgen.workloads import readers
from policies.scheduling import SCHEDULING

MODEL = MODELS["smollm2-135m"]
SECOND = Fitted(1.0, 0, 0, 0, 0, 0)  # every step takes one
TIERS = {"headroom": [0.1, 0.05, 0.0], "aging_s": [1.0, 1.0, 1.0]}
TRACE = Path(__file__).parents[3] / "shared" / "workloads" / "mooncake_conversation_trace.jsonl"


def fleet(asynchronous: bool = True, blocks: int = 120, **more: Any) -> Fleet:
    """A small replica with prefix caching; one of a job's blocks is 40 tokens, so two and a half of its own."""
    shape = engine.Shape(blocks, 1024, 16, 24, 256, asynchronous=asynchronous, prefix_caching=True)
    return replace(Fleet(MODEL, shape, Roofline(MODEL, DEVICES["l4-24g"]), block_tokens=40, oracle=True), **more)


def families(count: int, rate: float, seed: int, tiers: int = 1, patience: float | None = None) -> list[Job]:
    """Requests of nine families: prompts of a family begin alike, for some of their length or all of it."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, count))
    due[-5:] += np.arange(1, 6)
    made = []
    for i, t in enumerate(due):
        family, prompt = int(rng.integers(9)), int(rng.integers(1, 600 if rng.random() < 0.3 else 120))
        same = int(rng.integers(0, prompt // 40 + 2))
        blocks = (*(100 * family + k for k in range(same)), *(10_000 + 100 * i + k for k in range(prompt // 40 - same)))
        answer, tier = int(rng.integers(1, 120)), int(rng.integers(tiers))
        made.append(
            Job(float(t), prompt, answer, tier, family, patience=patience if i % 7 == 0 else None, blocks=blocks)
        )
    return made


def play(of: Fleet, work: list[Job], *, fast: bool = True, coast: bool = True) -> tuple[Outcome, Cluster]:
    """One run."""
    cluster = Cluster(of, fast=fast, coast=coast)
    return cluster.run(work), cluster


def test_equal_content_has_equal_hashes() -> None:
    """Blocks of two requests are equal up to where their content differs, by vLLM's hashes of tokens and by ours."""
    asked = [
        (100, (1, 2, 3)),
        (120, (1, 2, 3)),
        (100, (1, 2, 4)),
        (100, (1, 2)),
        (100, (1, 2)),
        (100, (2, 1, 3)),
        (50, ()),
    ]
    found = []
    for plain in (False, True):
        contents = Contents(16, 40, plain=plain)
        hashes: list[list[bytes]] = []
        for number, (prompt, blocks) in enumerate(asked):
            request = engine.request(str(number), prompt, 40, content=contents.of(number, prompt, blocks))
            request.append_output_token_ids([request.answer] * 30)
            assert len(request.block_hashes) == (prompt + 30) // 16
            hashes.append(request.block_hashes)
        found.append([[sum(x == y for x, y in zip(a, b, strict=False)) for b in hashes] for a in hashes])
    assert found[0] == found[1]
    # 100 tokens are 6 full blocks; (1, 2) is 80 of them, 5 blocks; the rest of a prompt is nobody else's.
    assert found[0][0] == [8, 6, 5, 5, 5, 0, 0]
    assert found[0][3][4] == 5


def test_blocks_need_a_size() -> None:
    """Jobs that say what they consist of do not go with a fleet that does not know how long that is."""
    with pytest.raises(ValueError, match="block_tokens"):
        Cluster(fleet(block_tokens=0)).run([Job(0.0, 100, 1, blocks=(1, 2, 3))])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_hits_spare_prefill(asynchronous: bool) -> None:
    """A prompt of three chunks is one step when all but its last block is cached, and waits only for its own."""
    one = replace(fleet(asynchronous), cost=SECOND, block_tokens=16)
    prompt = tuple(range(40))
    outcome, _ = play(one, [Job(0.0, 640, 1, blocks=prompt), Job(10.0, 640, 1, blocks=prompt), Job(20.0, 640, 1)])
    assert [record.ttft for record in outcome.records] == [3.0, 1.0, 3.0]
    # The last token is always computed: 639 of 640 could be known, in whole blocks 624.
    assert (outcome.prefix_queries, outcome.prefix_hits) == ([3 * 640], [624])
    without = replace(one, shape=replace(one.shape, prefix_caching=False))
    outcome, _ = play(without, [Job(0.0, 640, 1, blocks=prompt), Job(10.0, 640, 1, blocks=prompt)])
    assert [record.ttft for record in outcome.records] == [3.0, 3.0]
    assert (outcome.prefix_queries, outcome.prefix_hits) == ([0], [0])


def test_a_small_cache_forgets() -> None:
    """What was not used for longest makes room: a prompt that nobody asked for while others came is not found."""
    one = replace(fleet(False, blocks=50), cost=SECOND, block_tokens=16)
    a, b, c = (tuple(range(100 * k, 100 * k + 20)) for k in range(3))
    work = [Job(10.0 * i, 320, 1, blocks=blocks) for i, blocks in enumerate((a, b, a, c, b, a))]
    outcome, _ = play(one, work)
    # The second a finds 19 blocks of 20; c takes the last ten of b, b what it lacks from the end of a.
    assert outcome.prefix_hits == [304 + 160 + 160]
    assert play(replace(one, shape=replace(one.shape, kv_blocks=80)), work)[0].prefix_hits == [3 * 304]


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", SCHEDULING.names())
def test_fast_path_equals_vllm(policy: str, asynchronous: bool) -> None:
    """Every record, step, preemption and hit of every policy is bit for bit that of vLLM with its own hashes."""
    spec: dict[str, Any] = {"name": policy}
    if "predictor" in SCHEDULING.parameters(policy):
        spec["predictor"] = "oracle"
    two = fleet(asynchronous, replicas=2, scheduling=spec)
    work = families(80, 150.0, seed=1)
    plain, _ = play(two, work, fast=False)
    assert play(two, work, coast=False)[0] == plain
    assert play(two, work)[0] == plain
    assert 0 < sum(plain.prefix_hits) < sum(plain.prefix_queries)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["fcfs", "larry", "mlfq"])
def test_fast_path_equals_vllm_in_a_whole_fleet(policy: str, asynchronous: bool) -> None:
    """So it is with tiers, routers, rare reports, a bounded queue, clients that leave and a replica that dies."""
    work = families(200, 300.0, seed=2, tiers=3, patience=0.3)
    whole = fleet(
        asynchronous,
        replicas=2,
        scheduling={"name": policy},
        balancing={"name": "tiered_sal", "affinity_tokens": 500},
        tiers=TIERS,
        routers=2,
        report_s=0.1,
        bounds=(4, (None, None, 2)),
        outages=(Outage(1, 0.2, 0.35), Outage(0, 1.5, 1.8)),
    )
    plain, _ = play(whole, work, fast=False)
    assert play(whole, work)[0] == plain
    assert sum(plain.prefix_hits) > 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("policy", "tiers"), [("fcfs", 1), ("larry", 3), ("mlfq", 3)])
def test_fast_path_equals_vllm_where_requests_move(policy: str, tiers: int, asynchronous: bool) -> None:
    """So it is where requests take their cache to replicas that share and forget blocks of their own, drain and die."""
    whole = fleet(
        asynchronous,
        replicas=4,
        scheduling={"name": policy},
        balancing={"name": "round_robin"},
        tiers=TIERS if tiers > 1 else None,
        migration=Migration(),
        drains=(Drain(1, 0.4, 1.2),),
        outages=(Outage(2, 0.8, 1.0),),
        report_s=0.05 if tiers > 1 else 0.0,
    )
    work = families(160, 150.0, seed=5, tiers=tiers, patience=0.8)
    plain, cluster = play(whole, work, fast=False)
    assert play(whole, work, coast=False)[0] == plain
    assert play(whole, work)[0] == plain
    done = {reason: ended.get("done", 0) for reason, ended in plain.moves.items()}
    assert done["drain"] > 0
    assert sum(done.values()) > done["drain"]
    assert plain.moved_bytes > 0
    assert 0 < sum(plain.prefix_hits) < sum(plain.prefix_queries)
    for replica in cluster.replicas:
        replica.check_idle()


def test_runs_are_under_pressure() -> None:
    """The compared runs preempt, and lose cached blocks: an endless cache would have found more."""
    work = families(110, 150.0, seed=1)
    tight, cluster = play(fleet(replicas=2), work)
    assert min(tight.preemptions) > 0
    endless, _ = play(fleet(blocks=5000, replicas=2), work)
    assert sum(tight.prefix_hits) < sum(endless.prefix_hits)
    calls = sum(replica.scheduler.steps for replica in cluster.replicas)
    assert calls < 0.8 * sum(tight.steps)


def test_affinity_keeps_families_together() -> None:
    """With sessions that stay on their replicas, four replicas find more than with requests spread by load alone."""
    work = families(400, 40.0, seed=3)
    shares = []
    for bound in (0, 1e6):
        many = fleet(blocks=400, replicas=4, balancing={"name": "sal", "affinity_tokens": bound})
        outcome, _ = play(many, work)
        shares.append(sum(outcome.prefix_hits) / sum(outcome.prefix_queries))
    assert shares[1] > 1.1 * shares[0]


def ideal_hits(work: Sequence[Job], unit: int, size: int) -> int:
    """Prompt tokens that a cache without end has when they are asked for: whole blocks, never the last token."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    found = 0
    for job in work:
        # What a block and all before it consist of: the numbers that reach into it, up to its end.
        ends = range(size, job.prompt_tokens + 1, size)
        prefixes = [(job.blocks[: -(-end // unit)], end) for end in ends]
        known = list(takewhile(seen.__contains__, prefixes))
        found += max((end for _, end in known if end < job.prompt_tokens), default=0)
        seen.update(prefixes)
    return found


def test_an_endless_cache_finds_all_there_is() -> None:
    """One replica that never forgets finds exactly what was in earlier prompts."""
    work = [replace(job, prompt_tokens=40 * len(job.blocks)) for job in families(150, 50.0, seed=4) if job.blocks]
    outcome, _ = play(fleet(blocks=8000), work)
    assert outcome.prefix_queries == [sum(job.prompt_tokens for job in work)]
    assert outcome.prefix_hits == [ideal_hits(work, 40, 16)]
    assert outcome.prefix_hits[0] > 0.1 * outcome.prefix_queries[0]


@pytest.mark.skipif(not TRACE.exists(), reason="the trace file is not part of the repository")
def test_mooncake_trace_in_an_endless_cache() -> None:
    """The conversation trace, scaled to a window of 8192, hits as often as its hash ids say that it can."""
    workload = readers.read(TRACE).scaled(8192).first(400)
    work = jobs(workload)
    shape = engine.Shape(30_000, 8192, prefix_caching=True)
    one = Fleet(MODEL, shape, Fitted(0.02, 0, 0, 0, 0, 0), block_tokens=workload.block_tokens)
    outcome, _ = play(one, work)
    assert outcome.prefix_hits == [ideal_hits(work, workload.block_tokens, 16)]
    assert 0.05 < outcome.prefix_hits[0] / outcome.prefix_queries[0] < 0.5


def test_private_names_of_vllm() -> None:
    """What counts hits is where it is expected, and switched on with caching only."""
    shape = engine.Shape(50, 2048, prefix_caching=True)
    (scheduler,) = engine.schedulers(MODEL, shape, SchedulerSettings(), 1)
    assert isinstance(scheduler, Scheduler)
    assert scheduler.kv_cache_manager.enable_caching
    assert scheduler.kv_cache_manager.prefix_cache_stats.queries == 0
    assert not scheduler.log_stats
    block = scheduler.kv_cache_manager.block_pool.free_block_queue.fake_free_list_head.next_free_block
    assert (block.block_id, block.ref_cnt, block.block_hash) == (1, 0, None)
    (plain,) = engine.schedulers(MODEL, replace(shape, prefix_caching=False), SchedulerSettings(), 1)
    assert plain.kv_cache_manager.prefix_cache_stats is None
