"""The scheduler as a move's source: candidates, export, park and unpark, without worker and model."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import RequestStatus

from deployments.migration.engine_kv import KVRefused
from policies.migration.refusals import REFUSALS

from .kv_rig import BOTH, LEASE_S, Engine, moved
from .scheduler_rig import request, tier_spec


@BOTH
def test_only_computed_full_blocks_are_exported(async_scheduling: bool) -> None:
    """Never the block being filled, nor tokens of a step that is still in flight; what is left and held is told."""
    engine = Engine(async_scheduling=async_scheduling)
    engine.scheduler.add_request(request("a", 100, 60))
    engine.steps(3)  # tokens 100, 101 (and in flight, 102)
    ids = engine.scheduler.kv_cache_manager.get_block_ids("a")[0]
    assert engine.call("export", request="a", first=0, blocks=4, at=3) == {"copied": 4, "left": 2, "held": 7}
    assert engine.call("export", request="a", first=4, blocks=16, at=8) == {"copied": 2, "left": 0, "held": 7}
    assert engine.call("export", request="a", first=6, blocks=16, at=0) == {"copied": 0, "left": 0, "held": 7}
    assert engine.workers.calls == [("migration_export", ids[:4], 3), ("migration_export", ids[4:6], 8)]
    engine.workers.error = "torn"
    assert engine.call("export", request="a", first=0, blocks=4, at=0) == {"error": "refused", "reason": "copy_failed"}


def test_export_says_why_there_is_nothing() -> None:
    """A request that waits, was preempted or is parked is not running; one that ended, or never was, is gone."""
    engine = Engine(seqs=1)
    for name in ("a", "b"):
        engine.scheduler.add_request(request(name, 40, 30))
    engine.steps(1)
    assert engine.call("export", request="b", first=0, blocks=4, at=0)["error"] == "not_running"
    engine.call("park", request="a", first=0, at=0, lease_s=LEASE_S)
    for op in ("export", "park"):
        extra = {"blocks": 4} if op == "export" else {"lease_s": LEASE_S}
        assert engine.call(op, request="a", first=0, at=0, **extra)["error"] == "not_running"
    engine.call("unpark", request="a")
    engine.scheduler._preempt_request(engine.scheduler.running.pop(), 0.0)
    assert engine.call("export", request="a", first=0, blocks=4, at=0)["error"] == "not_running"
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    for name in ("a", "never"):
        assert engine.call("export", request=name, first=0, blocks=4, at=0)["error"] == "gone"
        assert engine.call("park", request=name, first=0, at=0, lease_s=LEASE_S)["error"] == "gone"
    assert engine.call("unpark", request="a") == {}


def parked(engine: Engine, name: str, first: int = 0, lease_s: float = LEASE_S) -> dict[str, Any]:
    """Park a request; makes the step that it waits for if one is in flight."""
    answer = engine.call("park", request=name, first=first, at=5, lease_s=lease_s)
    if isinstance(answer, Future):
        engine.driver.step()
        answer = answer.result(timeout=0)
    return answer


@BOTH
def test_a_parked_request_stands_still_and_goes_on(async_scheduling: bool) -> None:
    """All its KV is copied out, the partial block too; others go on; unparked it ends as if nothing had been."""
    engine = Engine(async_scheduling=async_scheduling)
    one, other = request("a", 100, 40), request("b", 30, 90)
    for each in (one, other):
        engine.scheduler.add_request(each)
    engine.steps(5)
    answer = parked(engine, "a", first=4)
    assert answer["computed"] == one.num_tokens - 1 == 100 + len(answer["output"]) - 1
    assert (answer["first"], answer["copied"], answer["held"]) == (4, 3, 7)
    ids = engine.scheduler.kv_cache_manager.get_block_ids("a")[0]
    assert engine.workers.calls[-1] == ("migration_export", ids[4:7], 5)
    assert all("a" not in step and step["b"] == 1 for step in engine.steps(4))
    figures = engine.scheduler.figures()
    assert (figures.running, figures.waiting) == (2, 0)
    engine.call("unpark", request="a")
    assert all("a" in step for step in engine.steps(2))
    engine.drain()
    assert (one.num_output_tokens, other.num_output_tokens, engine.free) == (40, 90, 128)
    assert one.num_preemptions == 0


@BOTH
def test_a_parked_request_keeps_its_seat(async_scheduling: bool) -> None:
    """Nobody is let in for it, and it runs at once when it comes back."""
    engine = Engine("larry", async_scheduling, seqs=2)
    for name in ("a", "b", "c"):
        engine.scheduler.add_request(request(name, 40, 50))
    engine.steps(3)
    name = engine.scheduler.running[0].request_id
    parked(engine, name)
    engine.steps(3)
    assert len(engine.scheduler.running) == 1
    assert engine.call("reserve", move="m", blocks=1, lease_s=LEASE_S)["reason"] == "no_slot"
    engine.call("unpark", request=name)
    assert name in engine.steps(1)[0]


@BOTH
@pytest.mark.parametrize("ticked_by", ["step", "call"])
def test_a_park_ends_with_its_lease(ticked_by: str, async_scheduling: bool) -> None:
    """An engine whose executor is gone takes the request up again, in a step or, idle, at the next call."""
    engine = Engine(async_scheduling=async_scheduling)
    one = request("a", 40, 20)
    engine.scheduler.add_request(one)
    if ticked_by == "step":
        engine.scheduler.add_request(request("b", 40, 60))
    engine.steps(3)
    parked(engine, "a")
    engine.now = 9.9
    engine.steps(2)
    assert engine.call("leases")["parked"] == ["a"]
    engine.now = 10.0
    if ticked_by == "call":
        engine.steps(2)  # what was in flight; then there is nothing to schedule
        assert not engine.scheduler.has_unfinished_requests()
        engine.call("leases")
    engine.drain()
    assert (one.num_output_tokens, engine.free) == (20, 128)


@BOTH
def test_a_waiting_request_is_parked_without_kv(async_scheduling: bool) -> None:
    """It leaves the queue, holds nothing, keeps the tokens of before a preemption, and comes back into the queue."""
    engine = Engine("larry", async_scheduling, seqs=1)
    first, second = request("a", 40, 30), request("b", 60, 30)
    engine.scheduler.add_request(first)
    engine.steps(4)
    engine.scheduler.add_request(second)
    engine.steps(1)
    answer = engine.call("park", request="b", first=0, at=0, lease_s=LEASE_S)
    assert answer == {"held": 0, "computed": 0, "output": [], "first": 0, "copied": 0}
    figures = engine.scheduler.figures()
    assert (figures.running, figures.waiting) == (1, 1)
    engine.check_figures()
    engine.scheduler._preempt_request(engine.scheduler.running.pop(), 0.0)
    answer = parked(engine, "a")
    assert (answer["held"], answer["output"]) == (0, [7] * first.num_output_tokens)
    for name in ("a", "b"):
        engine.call("unpark", request=name)
    engine.drain()
    assert (first.num_output_tokens, second.num_output_tokens, engine.free) == (30, 30, 128)


@BOTH
def test_an_adopted_request_can_move_on_before_its_first_step(async_scheduling: bool) -> None:
    """It is parked out of the queue of KV holders and comes back there, still unknown to the worker."""
    engine = Engine(async_scheduling=async_scheduling)
    engine.call("reserve", move="m", blocks=7, lease_s=LEASE_S)
    engine.call("write", move="m", first=0, blocks=7, at=0, lease_s=LEASE_S)
    one = moved("a", 90, 10, 20, {"move": "m", "computed": 99})
    engine.scheduler.add_request(one)
    answer = engine.call("park", request="a", first=0, at=0, lease_s=LEASE_S)
    assert (answer["held"], answer["computed"], answer["copied"]) == (7, 99, 7)
    engine.call("unpark", request="a")
    assert engine.steps(1) == [{"a": 1}]
    assert engine.driver.admitted == ["a"]  # as a new request, not as a resumed one
    engine.drain()
    assert (one.num_output_tokens, engine.free) == (20, 128)


@BOTH
@pytest.mark.parametrize("held", [True, False])
def test_an_abort_frees_a_parked_request(held: bool, async_scheduling: bool) -> None:
    """Client gone, or moved away: its blocks are free at once and nothing of it is left."""
    engine = Engine(async_scheduling=async_scheduling, seqs=1)
    for name in ("a", "b"):
        engine.scheduler.add_request(request(name, 40, 30))
    engine.steps(3)
    answer = engine.call("park", request="a" if held else "b", first=0, at=0, lease_s=LEASE_S)
    engine.scheduler.finish_requests("a" if held else "b", RequestStatus.FINISHED_ABORTED)
    if isinstance(answer, Future):
        assert answer.result(timeout=0)["error"] == "gone"
    assert engine.call("leases")["parked"] == []
    engine.check_figures()
    engine.drain()
    assert engine.driver.finished == ["b" if held else "a"]
    assert engine.free == 128


def test_a_request_that_ends_while_it_is_to_be_parked_is_gone() -> None:
    """Its last token was in flight: the answer says so and the token is delivered."""
    engine = Engine(async_scheduling=True)
    engine.scheduler.add_request(request("a", 40, 2))
    engine.steps(2)
    answer = engine.call("park", request="a", first=0, at=0, lease_s=LEASE_S)
    assert not answer.done()
    engine.drain()
    assert answer.result(timeout=0)["error"] == "gone"
    assert (engine.driver.finished, engine.free) == (["a"], 128)


def test_unpark_before_the_step_in_flight_has_ended() -> None:
    """The request goes on, and who wanted it parked learns that it is not."""
    engine = Engine(async_scheduling=True)
    one = request("a", 40, 20)
    engine.scheduler.add_request(one)
    engine.steps(4)
    answer = engine.call("park", request="a", first=0, at=0, lease_s=LEASE_S)
    engine.call("unpark", request="a")
    assert answer.result(timeout=0)["error"] == "not_running"
    engine.drain()
    assert (one.num_output_tokens, engine.free) == (20, 128)


@BOTH
def test_a_park_that_cannot_be_copied_out_is_taken_back(async_scheduling: bool) -> None:
    """The request runs on and the answer is a refusal."""
    engine = Engine(async_scheduling=async_scheduling)
    one = request("a", 40, 20)
    engine.scheduler.add_request(one)
    engine.steps(3)
    engine.workers.error = "torn"
    assert parked(engine, "a") == {"error": "refused", "reason": "copy_failed"}
    assert engine.call("leases")["parked"] == []
    engine.drain()
    assert (one.num_output_tokens, engine.free) == (20, 128)


def test_candidates_tell_place_size_and_what_is_left() -> None:
    """Head and rest of the queue with what they will need, prefills, decodes with what they hold; none parked."""
    engine = Engine("fcfs", seqs=3, budget=64, tiers=tier_spec(None, 40.0))
    for i, (name, prompt) in enumerate((("decode", 30), ("parked", 20), ("prefill", 200), ("head", 50), ("rest", 70))):
        engine.scheduler.add_request(request(name, prompt, 40, arrival=float(i), tier=i // 4))
    engine.steps(2)
    engine.call("park", request="parked", first=0, at=0, lease_s=LEASE_S)
    assert engine.call("candidates")["requests"] == [
        ("decode", 0, 2, "decode", 38, None),
        ("prefill", 0, 5, "prefill", 40, None),
        ("head", 0, 4, "head", 40, None),
        ("rest", 1, 5, "waiting", 40, None),
    ]


@pytest.mark.parametrize(
    ("attribute", "value", "name"),
    [
        ("lora_request", "adapter", "lora"),
        ("mm_features", ["image"], "multimodal"),
        ("prompt_token_ids", None, "prompt_embeds"),
        ("sampling_params", SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(attribute: str, value: Any, name: str) -> None:
    """By candidates, and by export and park too, should somebody ask for it all the same."""
    engine = Engine()
    engine.scheduler.add_request(one := request("a", 40, 20))
    setattr(one, attribute, value)
    assert engine.call("candidates")["requests"][0][-1] == name
    assert engine.call("export", request="a", first=0, blocks=1, at=0) == {"error": "refused", "reason": name}
    assert engine.call("park", request="a", first=0, at=0, lease_s=LEASE_S) == {"error": "refused", "reason": name}


@pytest.mark.parametrize("trait", ["other_attention", "pipeline_parallel", "speculative", "kv_connector"])
def test_an_engine_of_another_kind_refuses_every_move(trait: str) -> None:
    """Both as source and as destination."""
    engine = Engine()
    assert engine.scheduler._engine_traits == dict.fromkeys(engine.scheduler._engine_traits, False)
    assert set(engine.scheduler._engine_traits) <= set(REFUSALS)
    engine.scheduler._engine_traits[trait] = True
    engine.scheduler.add_request(request("a", 40, 20))
    assert engine.call("candidates")["requests"][0][-1] == trait
    assert engine.call("reserve", move="m", blocks=1, lease_s=LEASE_S) == {"error": "refused", "reason": trait}
    with pytest.raises(KVRefused, match=trait):
        engine.scheduler._movable("a")
