"""The CPU engine's worker in the EngineCore's own process: what it relies on in vLLM, and what decides for it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from deployments.cpu_binding import CORES_VARIABLE, bind_cpu
from deployments.cpu_executor import NICENESS, InProcessExecutor


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "before")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")


def test_one_worker_lives_in_the_engine_core() -> None:
    """An engine of one worker gets our executor and as many OpenMP threads as cores."""
    arguments = bind_cpu({"model": "m"}, "1,3")
    parallel = SimpleNamespace(distributed_executor_backend=arguments["distributed_executor_backend"])
    assert Executor.get_class(SimpleNamespace(parallel_config=parallel)) is InProcessExecutor
    assert arguments["model"] == "m"
    assert (os.environ[CORES_VARIABLE], os.environ["OMP_NUM_THREADS"]) == ("1,3", "2")


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_several_workers_stay_with_vllm(kind: str) -> None:
    """With tensor or pipeline parallelism vLLM starts and binds the worker processes."""
    arguments = {f"{kind}_parallel_size": 2}
    assert bind_cpu(arguments, "0,1") == arguments
    assert (os.environ[CORES_VARIABLE], os.environ["OMP_NUM_THREADS"]) == ("0,1", "7")


def test_it_binds_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is on its cores, and nice, before vLLM makes the worker: OpenMP's threads inherit both."""
    allowed = sorted(os.sched_getaffinity(0))
    seen: list[set[int]] = []
    given: list[int] = []
    monkeypatch.setenv(CORES_VARIABLE, str(allowed[-1]))
    monkeypatch.setattr(UniProcExecutor, "_init_executor", lambda self: seen.append(os.sched_getaffinity(0)))
    monkeypatch.setattr(os, "nice", given.append)
    try:
        InProcessExecutor._init_executor(object.__new__(InProcessExecutor))
    finally:
        os.sched_setaffinity(0, allowed)
    assert seen == [{allowed[-1]}]
    assert given == [NICENESS]
