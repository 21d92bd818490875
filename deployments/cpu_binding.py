"""Which cores a CPU engine runs on, and in which process its worker lives; to be settled before vLLM is imported."""

from __future__ import annotations

import os
from typing import Any

CORES_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def bound_cores(local_rank: int, threads: int, cores: int) -> str:
    """Cores of the replica with this rank on its node, as vLLM's VLLM_CPU_OMP_THREADS_BIND wants them."""
    return ",".join(str((local_rank * threads + thread) % cores) for thread in range(threads))


def bind_cpu(engine_args: dict[str, Any], cores: str) -> dict[str, Any]:
    """Bind the engine that this process is about to start to `cores` ("0,2"); returns its AsyncEngineArgs keywords.

    An engine of one worker keeps it in its own process (deployments.cpu_executor). OpenMP reads its environment when
    torch is loaded, so the EngineCore must be spawned with it; Ray has set its own number of threads.
    """
    os.environ[CORES_VARIABLE] = cores
    if any((engine_args.get(f"{kind}_parallel_size") or 1) > 1 for kind in ("tensor", "pipeline")):
        return engine_args
    os.environ["OMP_NUM_THREADS"] = str(len(cores.split(",")))
    return {**engine_args, "distributed_executor_backend": "deployments.cpu_executor.InProcessExecutor"}
