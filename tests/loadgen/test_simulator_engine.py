"""Engines without weights: vLLM's own classes, the product's mixins, and the names of vLLM that the simulator uses."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from deployments.scheduler import AsyncPolicyScheduler, PolicyScheduler, SchedulerSettings
from loadgen.simulator import engine
from loadgen.simulator.hardware import MODELS
from loadgen.simulator.lean import Lean, lean

MODEL = MODELS["qwen2.5-7b"]


def one(fast: bool = True, asynchronous: bool = False, **shape: Any) -> Any:
    """A scheduler of 50 blocks."""
    limits = engine.Shape(50, 2048, max_num_batched_tokens=256, asynchronous=asynchronous, **shape)
    (scheduler,) = engine.schedulers(MODEL, limits, SchedulerSettings({"name": "larry"}), 1, fast=fast)
    return scheduler


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_scheduler_is_the_product(fast: bool, asynchronous: bool) -> None:
    """It is the product's scheduler over vLLM's, sync or async, with the limits asked for."""
    scheduler = one(fast, asynchronous)
    product = AsyncPolicyScheduler if asynchronous else PolicyScheduler
    assert type(scheduler) is (lean(product) if fast else product)
    assert isinstance(scheduler, AsyncScheduler if asynchronous else Scheduler)
    assert isinstance(scheduler.kv_cache_manager, KVCacheManager)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 50
    assert (scheduler.max_model_len, scheduler.block_size) == (2048, 16)
    assert (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens) == (256, 256)
    assert scheduler.queue_policy.name == "larry"


def test_short_cuts_are_next_to_vllm() -> None:
    """In the order of classes every mixin of the product comes before the short cuts, and vLLM's class right after."""
    for product in (PolicyScheduler, AsyncPolicyScheduler):
        order = lean(product).__mro__
        place = order.index(Lean)
        assert set(product.__bases__[:-1]) <= set(order[:place])
        assert order[place + 1] is product.__bases__[-1]


def test_longest_request() -> None:
    """The longest request is bounded by the window and by the cache."""
    assert engine.Shape(50, 2048).longest == 800
    assert engine.Shape(5000, 2048).longest == 2048


def test_request_generates_its_length() -> None:
    """A request knows its length, ticket, tier and arrival; only with the oracle do policies know its answer's."""
    scheduler = one()
    scheduler.add_request(engine.request("a", 10, 20, 1.5, tier=0, ticket=7))
    scheduler.add_request(engine.request("b", 10, 20, 2.5, oracle=True))
    first, second = scheduler.requests["a"], scheduler.requests["b"]
    assert (first.num_prompt_tokens, first.max_tokens, first.arrival_time) == (10, 20, 1.5)
    assert (first.hints.output_tokens, second.hints.output_tokens) == (None, 20)


def test_private_names_of_vllm() -> None:
    """What the short cuts and coasting touch is there, of the kind that they expect."""
    scheduler = one(fast=False)
    (blocks,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    assert blocks.block_size == 16
    assert not scheduler.kv_cache_manager.enable_caching
    assert not scheduler.num_lookahead_tokens
    assert scheduler.connector is None
    assert scheduler.kv_cache_manager.empty_kv_cache_blocks.get_block_ids() == ([],)
    assert CachedRequestData.make_empty().req_ids == []
    assert list(inspect.signature(Scheduler.update_from_output).parameters) == [
        "self",
        "scheduler_output",
        "model_runner_output",
    ]
    request = engine.request("a", 20, 5)
    scheduler.add_request(request)
    assert list(scheduler.schedule().num_scheduled_tokens.items()) == [("a", 20)]
    assert scheduler.running == [request]
    assert request.status is RequestStatus.RUNNING
    assert len(blocks.req_to_blocks["a"]) == 2
    assert (request.num_computed_tokens, request.num_in_flight_tokens, request.is_prefill_chunk) == (20, 20, False)
    assert (request.num_stale_output_tokens, request.num_output_placeholders) == (0, 0)
    assert request.drop_stale_output is False
    assert (request._output_token_ids, len(request._all_token_ids)) == ([], 20)
    assert not scheduler._inflight_prefills
    assert not scheduler.kv_holding_waiting


def test_vllm_is_quiet_only_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    """Making engines logs nothing below errors, and leaves vLLM's logger as it was."""
    before = logging.getLogger("vllm").level
    with caplog.at_level(logging.INFO):
        one()
    assert [record.message for record in caplog.records if record.levelno < logging.ERROR] == []
    assert logging.getLogger("vllm").level == before
