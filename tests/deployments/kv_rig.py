"""The scheduler's half of a move without worker and model: what is asked of the workers is written down."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from .scheduler_rig import Driver, scheduler

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
LEASE_S = 10.0


class Workers:
    """Stands for the model executor: notes what is to be copied, and fails at it if told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: str | None = None

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self.calls.append((method, *args))
        return [{"err": self.error} if self.error else {}]


class Engine:
    """A scheduler, the driver of its steps and a clock for its leases."""

    def __init__(self, policy: str = "fcfs", async_scheduling: bool = False, **config: Any) -> None:
        self.scheduler = scheduler({"name": policy}, async_scheduling, **config)
        self.driver = Driver(self.scheduler, async_scheduling, step_s=1.0)
        self.workers, self.now = Workers(), 0.0
        self.scheduler.lease_clock = lambda: self.now

    def call(self, op: str, **payload: Any) -> Any:
        return self.scheduler.on_kv_call(self.workers, op, payload)

    def steps(self, count: int) -> list[dict[str, int]]:
        """Make steps; what each scheduled."""
        before = len(self.driver.plan)
        for _ in range(count):
            self.driver.step()
        return self.driver.plan[before:]

    def drain(self) -> None:
        self.driver.run([])

    @property
    def free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def check_figures(self) -> None:
        figures = self.scheduler.figures()
        assert (sum(figures.running_by_tier), sum(figures.waiting_by_tier)) == (figures.running, figures.waiting)
        assert min(*figures.running_by_tier, *figures.waiting_by_tier) >= 0
        assert figures.max_num_seqs == self.scheduler.max_num_active_reqs


def moved(
    name: str,
    prompt: int,
    output: int,
    max_tokens: int,
    adopt: dict[str, Any] | None,
    tier: int = 0,
    arrival: float = 0,
) -> Request:
    """A request that has generated `output` tokens elsewhere and brings what `adopt` says."""
    ours = {"output": [7] * output} | ({} if adopt is None else {"adopt": adopt})
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"tidegate": ours})
    return Request(name, [7] * prompt, params, None, arrival_time=arrival, priority=tier)
