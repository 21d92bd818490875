"""The private vLLM names that live migration rests on: one test each, to fail at an upgrade."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import UtilityOutput, core
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

from deployments import worker
from deployments.migration import kv_scheduler

from .scheduler_rig import Driver, request, scheduler


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.fixture
def untouched() -> Any:
    """vLLM's own scheduler with one running request of four blocks and one that waits."""
    engine = scheduler({"name": "fcfs"}, cls=Scheduler, seqs=2)
    engine.max_num_active_reqs = 1
    for name in ("runs", "waits"):
        engine.add_request(request(name, 60))
    Driver(engine).step()
    return engine


def test_utility_methods_are_found_by_name_and_may_answer_later() -> None:
    """EngineCoreProc looks the method up on itself, and sends a Future's result once it has one."""
    assert EngineCore.tidegate_kv is kv_scheduler.tidegate_kv
    answered: list[Any] = []
    answer, output = Future[Any](), UtilityOutput(7)
    EngineCoreProc._invoke_utility_method("tidegate_kv", lambda: answer, output, answered.append)
    assert answered == []
    answer.set_result({"held": 3})
    assert [out.result.result for out in answered] == [{"held": 3}]
    calls: list[Any] = []
    engine_core = SimpleNamespace(
        scheduler=SimpleNamespace(on_kv_call=lambda *args: calls.append(args)), model_executor="executor"
    )
    args = EngineCoreProc._convert_msgspec_args(kv_scheduler.tidegate_kv, ("park", {"request": "a"}))
    kv_scheduler.tidegate_kv(engine_core, *args)
    assert calls == [("executor", "park", {"request": "a"})]


def test_utility_calls_run_between_two_steps() -> None:
    """The input queue is emptied by the loop itself, before and not within a step."""
    loop = inspect.getsource(core)
    loop = loop[loop.index("def run_busy_loop(self)") :]
    assert 0 < loop.index("self._process_input_queue()") < loop.index("self._process_engine_step()")
    assert "self._handle_client_request(*req)" in inspect.getsource(EngineCoreProc._process_input_queue)


def test_names_of_the_front_end() -> None:
    """What EngineKV asks of AsyncLLM."""
    assert parameters(AsyncMPClient.call_utility_async) == ["self", "method", "args"]
    assert parameters(AsyncLLM.collective_rpc)[:4] == ["self", "method", "timeout", "args"]
    assert isinstance(AsyncLLM.errored, property)
    assert isinstance(AsyncLLM.dead_error.fget(None), EngineDeadError)
    processor = OutputProcessor(None, log_stats=False)
    assert processor.external_req_ids == {}
    assert processor.request_states == {}
    assert "parent_req" in parameters(RequestState.__init__)
    made: Any = SimpleNamespace(request_id="a#0.1", external_req_id=None)
    InputProcessor.assign_request_id(made)
    assert made.external_req_id == "a#0.1"
    assert made.request_id.startswith("a#0.1-")


def test_requests_with_computed_tokens_wait_apart_and_first(untouched: Any) -> None:
    """A WAITING request with computed tokens goes to `kv_holding_waiting`, drained before `waiting`, as a new one."""
    untouched.max_num_active_reqs = 2
    moved = request("moved", 60)
    assert Scheduler._holds_kv_blocks(moved) is False
    moved.num_computed_tokens = 59
    assert Scheduler._holds_kv_blocks(moved) is True
    manager = untouched.kv_cache_manager.coordinator.single_type_managers[0]
    manager.req_to_blocks["moved"] = blocks = untouched.kv_cache_manager.block_pool.get_new_blocks(4)
    manager.num_cached_block["moved"] = 0
    untouched.kv_cache_manager.cache_blocks(moved, 59)
    untouched.add_request(moved)
    assert list(untouched.kv_holding_waiting) == [moved]
    output = untouched.schedule()
    assert output.num_scheduled_tokens == {"runs": 1, "moved": 1}
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens) == ("moved", 59)
    assert new.block_ids == ([block.block_id for block in blocks],)
    untouched.finish_requests("moved", RequestStatus.FINISHED_ABORTED)
    assert manager.req_to_blocks.get("moved") is None
    assert "moved" not in manager.num_cached_block
    assert all(block.ref_cnt == 0 for block in blocks)


def test_a_running_request_may_miss_steps(untouched: Any) -> None:
    """One that is out of `running` for some steps is not scheduled, ends like any other, and needs no resumption."""
    request = untouched.running.pop()
    untouched.max_num_active_reqs = 0
    assert untouched.schedule().num_scheduled_tokens == {}
    untouched.running.append(request)
    output = untouched.schedule()
    assert output.num_scheduled_tokens == {"runs": 1}
    assert output.scheduled_cached_reqs.resumed_req_ids == set()
    assert output.scheduled_cached_reqs.all_token_ids["runs"] == [7] * 61  # the V1 worker in async mode needs them
    untouched.running.clear()
    assert untouched.finish_requests("runs", RequestStatus.FINISHED_ABORTED) == [request]
    assert untouched.kv_cache_manager.block_pool.get_num_free_blocks() == 128


def test_in_flight_tokens_are_counted(untouched: Any) -> None:
    """`num_computed_tokens` is ahead of the workers by `num_in_flight_tokens` until the output is taken in."""
    untouched.schedule()
    request = untouched.running[0]
    assert (request.num_computed_tokens, request.num_in_flight_tokens) == (61, 1)


def test_block_pool(untouched: Any) -> None:
    """Blocks are taken and given back as objects with an id; a request's ids are listed per cache group."""
    assert parameters(BlockPool.get_new_blocks) == ["self", "num_blocks"]
    assert parameters(BlockPool.free_blocks) == ["self", "ordered_blocks"]
    assert parameters(KVCacheManager.cache_blocks) == ["self", "request", "num_computed_tokens"]
    assert parameters(KVCacheManager.free) == ["self", "request"]
    (ids,) = untouched.kv_cache_manager.get_block_ids("runs")
    assert len(ids) == 4
    assert untouched.kv_cache_manager.get_block_ids("waits") == ([],)
    untouched.kv_cache_manager.free(untouched.requests["waits"])  # has none
    assert untouched.kv_cache_manager.block_pool.get_num_free_blocks() == 124


def test_what_says_which_engines_cannot(untouched: Any) -> None:
    """The names by which unlike kinds of engines are known."""
    assert (untouched.connector, untouched.ec_connector) == (None, None)
    assert (untouched.dcp_world_size, untouched.pcp_world_size) == (1, 1)
    assert (untouched.num_spec_tokens, untouched.use_eagle) == (0, False)
    assert untouched.num_waiting_for_streaming_input == 0
    assert untouched.deferred_waiting == set()
    assert len(untouched.kv_cache_config.kv_cache_groups) == 1


def test_grammar_requests_are_blocked_statuses() -> None:
    """A parked request that waits for its grammar comes back as one that the scheduler passes over."""
    assert Scheduler._is_blocked_waiting_status(RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)
    assert not Scheduler._is_blocked_waiting_status(RequestStatus.PREEMPTED)


def test_names_of_the_worker() -> None:
    """Rank, runner and its KV caches, in both runners; none of our methods is one of vLLM's."""
    assert "self.rank" in inspect.getsource(WorkerBase.__init__)
    assert "self.kv_caches: list[torch.Tensor]" in inspect.getsource(GPUModelRunner.__init__)
    for runner in (GPUModelRunner, V2Runner):
        source = inspect.getsource(inspect.getmodule(runner) or runner)
        for name in ("self.kv_caches", "self.kv_cache_config =", "self.attn_groups", "self.compilation_config ="):
            assert name in source, (runner, name)
    ours = {name for name in vars(worker.WorkerExtension) if not name.startswith("__")}
    assert ours == {f"migration_{name}" for name in ("info", "open", "export", "import")}
    assert not any(hasattr(WorkerBase, name) for name in ours)


class Runner:
    """A model runner's KV caches: three layers of six blocks, each kept as `rows` rows."""

    def __init__(self, rows: int = 1, dtype: torch.dtype = torch.float32) -> None:
        caches = [torch.arange(6 * 8, dtype=torch.float32).add(100 * i).to(dtype) for i in range(3)]
        self.kv_caches = [cache.view(6 * rows, 2, 4 // rows) for cache in caches]
        self.kv_caches.append(self.kv_caches[0])  # a layer that shares the first one's
        self.kv_cache_config = SimpleNamespace(num_blocks=6)
        self.attn_groups = [[SimpleNamespace(backend=SimpleNamespace(get_name=lambda: "ATTENTION"))]]
        self.compilation_config = SimpleNamespace(static_forward_context={"layer": SimpleNamespace(isa="vec")})


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_come_out_and_go_in_as_they_lie(rows: int, dtype: torch.dtype, tmp_path: Any) -> None:
    """Blocks copied from one worker's cache to other places of another's hold the same, all others stay."""
    from deployments.migration.segments import Segments

    source, destination = worker.WorkerExtension(), worker.WorkerExtension()
    for each, runner in ((source, Runner(rows, dtype)), (destination, Runner(rows, dtype))):
        each.model_runner, each.rank = runner, 0
        info = each.migration_info()
        assert (info["rank"], info["blocks"]) == (0, 6)
        assert info["block_bytes"] == 3 * 8 * dtype.itemsize
    out, into = (Segments(f"tidegate-test-{id(source)}-{way}", [info["block_bytes"]], 6) for way in ("out", "in"))
    try:
        for each in (source, destination):
            assert each.migration_open(out.names, into.names) == {}
    finally:
        out.unlink()
        into.unlink()
    assert source.migration_export([4, 1], 3) == {}
    into.take(1)
    at = into.take(2)
    into.write(at, 2, out.read(3, 2))
    before = [cache.clone() for cache in destination.model_runner.kv_caches]
    assert destination.migration_import([0, 3], at) == {}
    for theirs, mine, was in zip(
        source.model_runner.kv_caches, destination.model_runner.kv_caches, before, strict=True
    ):
        theirs, mine, was = (cache.reshape(6, -1) for cache in (theirs, mine, was))
        assert torch.equal(mine[[0, 3]], theirs[[4, 1]])
        assert torch.equal(mine[[1, 2, 4, 5]], was[[1, 2, 4, 5]])


def test_a_worker_reports_and_never_raises() -> None:
    """An error is an answer: raised on one rank it would leave the answers of the others in their queues."""
    broken = worker.WorkerExtension()
    assert broken.migration_info()["err"].startswith("AttributeError")
    assert broken.migration_export([1], 0)["err"].startswith("AttributeError")
    broken.model_runner, broken.rank = Runner(), 0
    broken.model_runner.kv_caches[1] = broken.model_runner.kv_caches[1].to(torch.bfloat16)
    assert "not 6 blocks" in broken.migration_info()["err"]
