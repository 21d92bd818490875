"""The scheduler as a move's destination, over vLLM's real Scheduler and KVCacheManager: no worker, no model."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from policies.scheduling import SCHEDULING

from .kv_rig import BOTH, LEASE_S, Engine, moved
from .scheduler_rig import BLOCK, request, tier_spec, trace


def test_a_reservation_takes_blocks_grows_and_gives_all_back() -> None:
    """Blocks are out of the pool until released, a second release does nothing, and the load figures tell so."""
    engine = Engine()
    assert engine.call("reserve", move="m", blocks=5, lease_s=LEASE_S) == {"held": 5}
    assert engine.call("reserve", move="m", blocks=9, lease_s=LEASE_S) == {"held": 9}
    assert engine.call("reserve", move="m", blocks=3, lease_s=LEASE_S) == {"held": 9}
    assert engine.scheduler.figures().free_blocks == 128 - 9
    assert engine.call("leases") == {"reserved": ["m"], "parked": []}
    for _ in range(2):
        assert engine.call("release", move="m") == {}
        assert engine.free == 128


def test_a_reservation_without_room_is_refused_and_changes_nothing() -> None:
    """No blocks: each running request keeps the one that it may open next; no slot: none is taken from anybody."""
    engine = Engine(blocks=20, seqs=2)
    engine.scheduler.add_request(request("a", 64, 90))
    engine.steps(1)
    assert engine.call("reserve", move="m", blocks=16, lease_s=LEASE_S) == {"error": "refused", "reason": "no_blocks"}
    assert engine.call("leases")["reserved"] == []
    assert engine.call("reserve", move="m", blocks=10, lease_s=LEASE_S) == {"held": 10}
    assert engine.call("reserve", move="m", blocks=16, lease_s=LEASE_S)["reason"] == "no_blocks"
    assert engine.call("reserve", move="n", blocks=1, lease_s=LEASE_S)["reason"] == "no_slot"
    assert engine.call("reserve", move="n", blocks=0, lease_s=LEASE_S) == {"held": 0}  # a place in the queue
    assert engine.free == 20 - 4 - 10


@pytest.mark.parametrize("ticked_by", ["step", "call"])
def test_a_lease_ends_by_itself(ticked_by: str) -> None:
    """A reservation is gone at the next step or call after its lease; a word in time renews it."""
    engine = Engine()
    engine.scheduler.add_request(request("a", 20, 90))
    engine.steps(1)
    engine.call("reserve", move="m", blocks=5, lease_s=LEASE_S)
    engine.now = 9.0
    assert engine.call("write", move="m", first=0, blocks=2, at=0, lease_s=LEASE_S) == {}
    engine.now = 18.9
    engine.steps(1)
    assert engine.free == 128 - 2 - 5
    engine.now = 19.0
    if ticked_by == "step":
        engine.steps(1)
    else:
        engine.call("leases")
    assert engine.free == 128 - 2
    answer = engine.call("write", move="m", first=2, blocks=1, at=0, lease_s=LEASE_S)
    assert answer == {"error": "refused", "reason": "expired"}


def test_writes_fill_the_reserved_blocks_in_order() -> None:
    """The workers are told the reservation's own blocks and where the bytes lie; beyond it nothing is written."""
    engine = Engine()
    engine.call("reserve", move="m", blocks=4, lease_s=LEASE_S)
    engine.call("write", move="m", first=0, blocks=3, at=0, lease_s=LEASE_S)
    engine.call("write", move="m", first=3, blocks=1, at=7, lease_s=LEASE_S)
    blocks = [block.block_id for block in engine.scheduler._reservations["m"].blocks]
    assert engine.workers.calls == [("migration_import", blocks[:3], 0), ("migration_import", blocks[3:], 7)]
    answer = engine.call("write", move="m", first=3, blocks=2, at=0, lease_s=LEASE_S)
    assert answer == {"error": "refused", "reason": "no_blocks"}
    engine.workers.error = "torn"
    assert engine.call("write", move="m", first=0, blocks=1, at=0, lease_s=LEASE_S)["reason"] == "copy_failed"


@BOTH
@pytest.mark.parametrize("tiers", [None, tier_spec(None, 40.0)], ids=["one tier", "two tiers"])
@pytest.mark.parametrize("policy", SCHEDULING.names())
def test_an_adopted_request_runs_in_the_next_step_under_every_policy(
    policy: str, tiers: dict[str, Any] | None, async_scheduling: bool
) -> None:
    """With one token, on the reserved blocks, before all that wait, whatever gate or step of prompts there is."""
    engine = Engine(policy, async_scheduling, seqs=4, tiers=tiers)
    for i in range(8):
        engine.scheduler.add_request(request(f"r{i}", 50 + 40 * i, 60, tier=i % 2, arrival=i / 100))
    engine.steps(6)
    running = len(engine.scheduler.running)
    while engine.call("reserve", move="m", blocks=8, lease_s=1e6).get("reason") == "no_slot":
        engine.scheduler.finish_requests(engine.scheduler.running[0].request_id, RequestStatus.FINISHED_ABORTED)
    assert running >= 1
    engine.call("write", move="m", first=0, blocks=6, at=0, lease_s=1e6)
    engine.steps(3)  # the seat stays free meanwhile
    assert len(engine.scheduler.running) < 4
    blocks = [block.block_id for block in engine.scheduler._reservations["m"].blocks]
    free = engine.free
    adopt = {"move": "m", "computed": 99, "first": 6, "blocks": 1, "at": 0}
    engine.scheduler.add_request(moved("moved", 90, 10, 20, adopt, tier=1, arrival=1.0))
    assert engine.free == free + 1  # eight were reserved, 100 tokens need seven
    engine.check_figures()
    (plan,) = engine.steps(1)
    assert plan["moved"] == 1
    assert engine.scheduler.kv_cache_manager.get_block_ids("moved")[0] == blocks[:7]
    engine.drain()
    assert engine.free == 128
    assert "moved" in engine.driver.finished


@BOTH
def test_an_adopted_request_generates_what_is_left(async_scheduling: bool) -> None:
    """It computes one token per step from where it was, to its original length, and every block comes back."""
    engine = Engine("larry", async_scheduling)
    engine.call("reserve", move="m", blocks=9, lease_s=LEASE_S)
    engine.call("write", move="m", first=0, blocks=7, at=0, lease_s=LEASE_S)
    one = moved("a", 100, 5, 30, {"move": "m", "computed": 104})
    engine.driver.run([(0, one)])
    assert [step["a"] for step in engine.driver.plan if step] == [1] * 25
    assert one.num_output_tokens == 30
    assert engine.free == 128


@pytest.mark.parametrize(
    ("lost", "first_step"),
    [("reservation", 105), ("last write", 105 - 96), ("copy", 105 - 96), ("hole", 105), ("kv", 105)],
)
def test_what_did_not_arrive_is_computed_anew(lost: str, first_step: int) -> None:
    """Expired reservation, missing or failed last blocks, a gap before them, nothing sent: never unwritten KV."""
    engine = Engine()
    engine.call("reserve", move="m", blocks=9, lease_s=LEASE_S)
    written = {"reservation": 7, "hole": 0, "kv": 0}.get(lost, 6)
    engine.call("write", move="m", first=0, blocks=written, at=0, lease_s=LEASE_S)
    adopt: dict[str, Any] = {"move": "m", "computed": 0 if lost == "kv" else 104}
    if lost in ("copy", "hole"):
        adopt |= {"first": 6, "blocks": 1, "at": 0}
    if lost == "copy":
        engine.workers.error = "torn"
    if lost == "reservation":
        engine.now = 11.0
        engine.call("leases")
    one = moved("a", 100, 5, 8, adopt)
    engine.scheduler.add_request(one)
    assert engine.steps(1) == [{"a": first_step}]
    engine.drain()
    assert (one.num_output_tokens, engine.free) == (8, 128)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(SCHEDULING.names()),
    async_scheduling=st.booleans(),
    tiers=st.sampled_from([None, tier_spec(None, 40.0, 20.0)]),
)
def test_no_block_and_no_request_is_lost_whatever_is_asked(
    seed: int, policy: str, async_scheduling: bool, tiers: dict[str, Any] | None
) -> None:
    """Random reservations, writes, exports, parks, aborts and adoptions under KV pressure: all ends, all comes back."""
    rng = random.Random(seed)
    engine = Engine(policy, async_scheduling, blocks=96, seqs=6, tiers=tiers)
    arrivals = trace(seed, count=30, tiers=3)
    requests, aborted, number = {r.request_id: r for _, r in arrivals}, set(), 0
    moves: dict[str, int] = {}

    def act() -> None:
        nonlocal number
        here = list(engine.scheduler.requests)
        kind = rng.choice(("reserve", "write", "release", "export", "park", "unpark", "adopt", "abort", "time"))
        move = rng.choice(list(moves) or ["none"])
        name = rng.choice(here or ["none"])
        if kind == "reserve":
            number += 1
            blocks = rng.randrange(0, 12)
            if "held" in engine.call("reserve", move=f"m{number}", blocks=blocks, lease_s=rng.uniform(1, 30)):
                moves[f"m{number}"] = 0
        elif kind == "write" and move in moves:
            if not engine.call("write", move=move, first=moves[move], blocks=2, at=0, lease_s=20.0):
                moves[move] += 2
        elif kind == "release":
            engine.call("release", move=move)
            moves.pop(move, None)
        elif kind == "export":
            engine.call("export", request=name, first=rng.randrange(3), blocks=4, at=0)
        elif kind == "park":
            engine.call("park", request=name, first=rng.randrange(3), at=0, lease_s=rng.uniform(1, 10))
        elif kind == "unpark":
            engine.call("unpark", request=name)
        elif kind == "adopt" and move in moves:
            written = moves.pop(move)
            computed = max(0, written * BLOCK - rng.randrange(1, 9))
            adopt = {"move": move, "computed": computed}
            one = moved(f"x{number}-{move}", max(1, computed - 3), 4, 10, adopt, tier=rng.randrange(3))
            requests[one.request_id] = one
            engine.scheduler.add_request(one)
        elif kind == "abort" and here and rng.random() < 0.3:
            aborted.add(name)
            engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        engine.now += rng.random()

    for _ in engine.driver.steps(arrivals):
        if engine.driver.number < 300:
            for _ in range(rng.randrange(3)):
                act()
                engine.check_figures()
        else:
            engine.now += 100.0
            engine.call("leases")
        engine.driver.step()
        engine.check_figures()
    engine.now += 100.0
    engine.call("leases")
    engine.drain()
    assert set(engine.driver.finished) == set(requests) - aborted
    assert all(r.num_output_tokens == r.max_tokens for name, r in requests.items() if name not in aborted)
    assert engine.free == 96
