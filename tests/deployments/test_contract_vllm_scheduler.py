"""The private vLLM names that the scheduler's modules rest on: one test each, to fail at an upgrade."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from deployments.scheduler import SchedulerSettings, scheduler_class
from deployments.waiting_queue import PolicyRequestQueue

from .scheduler_rig import Driver, request, scheduler, vllm_config


@pytest.fixture
def untouched() -> Any:
    """vLLM's own scheduler with one request half prefilled and one waiting."""
    engine = scheduler({"name": "fcfs"}, cls=Scheduler)
    engine.add_request(request("partly", 600))
    engine.add_request(request("waits", 40))
    engine.schedule()
    return engine


def test_queues_and_running(untouched: Any) -> None:
    """`waiting` and `kv_holding_waiting` are RequestQueues, `running` a list, filled by schedule()."""
    assert isinstance(untouched.waiting, FCFSRequestQueue)
    assert isinstance(untouched.kv_holding_waiting, FCFSRequestQueue)
    assert [r.request_id for r in untouched.waiting] == ["waits"]
    assert [r.request_id for r in untouched.running] == ["partly"]


def test_queue_interface_is_complete() -> None:
    """RequestQueue asks for the methods that our queue has, no more."""
    assert RequestQueue.__abstractmethods__ <= set(vars(PolicyRequestQueue))
    assert not PolicyRequestQueue.__abstractmethods__


def test_inflight_prefills(untouched: Any) -> None:
    """`_inflight_prefills` holds exactly the partly prefilled requests and lets go of them at the last chunk."""
    request = untouched.running[0]
    assert untouched._inflight_prefills == {request}
    assert request.num_computed_tokens == 256
    while request.is_prefill_chunk:
        untouched.schedule()
    assert untouched._inflight_prefills == set()


def test_preempt_request(untouched: Any) -> None:
    """`_preempt_request` frees the blocks, resets the request and puts it in front of `waiting`."""
    assert list(inspect.signature(Scheduler._preempt_request).parameters)[1:] == [
        "request",
        "timestamp",
        "drop_stale_output",
    ]
    victim = untouched.running.pop()
    untouched._preempt_request(victim, 0.0)
    assert victim.status == RequestStatus.PREEMPTED
    assert (victim.num_computed_tokens, victim.num_preemptions) == (0, 1)
    assert victim.num_stale_output_tokens == 256
    assert untouched.waiting.peek_request() is victim
    assert untouched.kv_cache_manager.block_pool.get_num_free_blocks() == 128


def test_block_pool(untouched: Any) -> None:
    """`num_gpu_blocks` counts one null block that is never free."""
    pool = untouched.kv_cache_manager.block_pool
    assert pool.num_gpu_blocks == 129
    untouched.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert pool.get_num_free_blocks() == 128


def test_limits(untouched: Any) -> None:
    """The limits that the policy context carries have these names on the scheduler."""
    assert untouched.block_size == 16
    assert untouched.max_model_len == 2048
    assert untouched.max_num_active_reqs == 16
    assert untouched.max_num_scheduled_tokens == 256


def test_allocate_slots_gates_admission(untouched: Any) -> None:
    """`allocate_slots` is asked by this name with these arguments; None for a waiting request ends the admissions."""
    manager, asked = untouched.kv_cache_manager, []
    inner = manager.allocate_slots
    assert list(inspect.signature(KVCacheManager.allocate_slots).parameters)[1:3] == ["request", "num_new_tokens"]

    def refuse_waiting(request: Any, tokens: int, *args: Any, **kwargs: Any) -> Any:
        asked.append((request.request_id, request.status, tokens))
        assert not args
        if request.status == RequestStatus.RUNNING:
            return inner(request, tokens, **kwargs)
        assert (kwargs["num_new_computed_tokens"], kwargs["num_external_computed_tokens"]) == (0, 0)
        return None

    untouched.schedule()
    manager.allocate_slots = refuse_waiting
    untouched.add_request(request("behind", 10))
    untouched.schedule()
    assert asked == [("partly", RequestStatus.RUNNING, 88), ("waits", RequestStatus.WAITING, 40)]
    assert [r.request_id for r in untouched.running] == ["partly"]
    assert [r.request_id for r in untouched.waiting] == ["waits", "behind"]


def test_running_order_and_limits_are_read_in_each_step(untouched: Any) -> None:
    """schedule() follows the order of `running`, and takes both limits as they are when it is called."""
    untouched.max_num_active_reqs = 1
    assert list(untouched.schedule().num_scheduled_tokens) == ["partly"]
    untouched.max_num_active_reqs = 2
    assert list(untouched.schedule().num_scheduled_tokens) == ["partly", "waits"]
    for r in untouched.running:
        r.append_output_token_ids(7)
    untouched.running.reverse()
    assert list(untouched.schedule().num_scheduled_tokens) == ["waits", "partly"]
    for r in untouched.running:
        r.append_output_token_ids(7)
    untouched.max_num_scheduled_tokens = 1
    output = untouched.schedule()
    assert output.num_scheduled_tokens == {"waits": 1}
    assert output.total_num_scheduled_tokens == 1
    assert output.scheduled_new_reqs == []


def test_free_request_is_called_once_however_a_request_ends() -> None:
    """`_free_request` hears of the end by the last token and by an abort, of running and of waiting requests."""
    freed = []

    class Watched(Scheduler):
        def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
            freed.append(request.request_id)
            return super()._free_request(request, delay_free_blocks)

    assert list(inspect.signature(Scheduler._free_request).parameters) == ["self", "request", "delay_free_blocks"]
    driver = Driver(scheduler({"name": "fcfs"}, cls=Watched, seqs=2))
    for name, output in (("ends", 2), ("runs", 50), ("waits", 50)):
        driver.scheduler.add_request(request(name, 20, output))
    for _ in range(3):
        driver.step()
    assert freed == ["ends"]
    driver.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert sorted(freed) == ["ends", "runs", "waits"]


def test_pause_state_and_blocked_requests(untouched: Any) -> None:
    """The names by which a step finds out what can be preempted and what is ready to enter."""
    waiting = untouched.waiting.peek_request()
    assert untouched.pause_state == PauseState.UNPAUSED
    assert untouched.requires_kv_delivery is False
    assert untouched._request_blocks_can_be_freed(untouched.running[0]) is True
    assert untouched._handle_blocked_waiting_request(waiting) is True
    assert waiting.drop_stale_output is False
    waiting.status = RequestStatus.WAITING_FOR_STREAMING_REQ
    assert untouched._handle_blocked_waiting_request(waiting) is False


def test_requests_take_attributes() -> None:
    """A Request lets itself be given hints and another priority, and keeps the priority that it was made with."""
    made = request("a", 10, tier=3)
    assert made.priority == 3
    made.priority, made.hints = 1, "hints"
    assert (made.priority, made.hints) == (1, "hints")


def test_an_empty_step_hands_on_finished_ids_once(untouched: Any) -> None:
    """A step without a token carries the ids of finished requests, and the next one does not carry them again."""
    untouched.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert untouched.schedule().finished_req_ids == {"partly", "waits"}
    assert untouched.schedule().finished_req_ids == set()


def test_overridden_signatures() -> None:
    """The methods that we wrap take the arguments that we pass on, in both scheduler classes."""
    for cls in (Scheduler, AsyncScheduler):
        assert list(inspect.signature(cls.schedule).parameters) == ["self", "throttle_prefills"]
        assert list(inspect.signature(cls.update_from_output).parameters) == [
            "self",
            "scheduler_output",
            "model_runner_output",
        ]
        assert list(inspect.signature(cls.add_request).parameters) == ["self", "request"]
        assert list(inspect.signature(cls.shutdown).parameters) == ["self"]
    assert next(iter(inspect.signature(Scheduler).parameters)) == "vllm_config"


def test_preempted_output_in_flight_is_stale() -> None:
    """With async scheduling a preempted request still receives the token in flight and grows while it waits."""
    driver = Driver(scheduler({"name": "fcfs"}, True, cls=AsyncScheduler), True)
    engine = driver.scheduler
    engine.add_request(request("a", 20))
    for _ in range(3):
        driver.step()
    victim = engine.running.pop()
    before = victim.num_tokens
    engine._preempt_request(victim, 0.0)
    assert victim.num_stale_output_tokens > 0
    driver.scheduler.update_from_output(*driver.in_flight.popleft())
    assert victim.num_tokens == before + 1
    assert victim.num_stale_output_tokens == 0


def test_additional_config_takes_an_object_with_a_hash() -> None:
    """VllmConfig keeps our settings object as it is and asks it for its hash."""
    settings = SchedulerSettings({"name": "larry"})
    config = vllm_config(False, settings)
    assert config.additional_config is settings
    assert settings.compute_hash() == SchedulerSettings({"name": "fcfs"}, "page").compute_hash()
    assert isinstance(config, VllmConfig)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_scheduler_cls_is_resolved_from_a_path(async_scheduling: bool) -> None:
    """`scheduler_cls` takes a dotted path and gives the class."""
    config = vllm_config(async_scheduling, SchedulerSettings())
    config.scheduler_config.scheduler_cls = scheduler_class(async_scheduling)
    made = config.scheduler_config.get_scheduler_cls()
    assert issubclass(made, AsyncScheduler if async_scheduling else Scheduler)
    assert issubclass(made, AsyncScheduler) == async_scheduling
