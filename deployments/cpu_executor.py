"""vLLM's CPU worker inside the EngineCore process.

vLLM puts the one worker of a CPU engine into a process of its own, and both spin while they wait for each other: two
busy processes per engine. In one process an engine starts in two thirds of the time, and two engines on two cores
together generated 1.1 to 1.5 times as many tokens (1 to 32 streams, one run). vLLM insists on the other way because
OpenMP's environment must be set before torch is loaded; deployments.cpu_binding does that.

Private names, contract-tested: `UniProcExecutor._init_executor`, `distributed_executor_backend` as a dotted path.
"""

from __future__ import annotations

import os

from vllm import envs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

NICENESS = 5  # an engine takes all the CPU it gets; ingress and proxy need little, but at once


class InProcessExecutor(UniProcExecutor):
    """Runs the model in the EngineCore's own process, on the cores that it is bound to, behind ingress and proxy."""

    def _init_executor(self) -> None:
        os.nice(NICENESS)
        os.sched_setaffinity(0, {int(core) for core in envs.VLLM_CPU_OMP_THREADS_BIND.split(",")})
        super()._init_executor()
