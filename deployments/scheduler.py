"""vLLM's v1 scheduler with a policy's queue order, load figures once per step, and live policy changes.

With waiting_queue.py the only module that touches vLLM's scheduler internals (0.32.0; vLLM calls this interface "not
public"). Names used beyond `SchedulerInterface`, each held by tests/deployments/test_contract_vllm_scheduler.py:
`Scheduler.waiting` (a `RequestQueue`), `.kv_holding_waiting`, `.running`, `._inflight_prefills`, `._preempt_request`,
`.kv_cache_manager.block_pool` (`get_num_free_blocks`, `num_gpu_blocks` counting one null block), `.block_size`,
`.max_model_len`, `.max_num_active_reqs`, `.max_num_scheduled_tokens`; `Request.num_computed_tokens`,
`.num_stale_output_tokens`; `VllmConfig.additional_config` taking an object with `compute_hash`;
`SchedulerConfig.scheduler_cls`, `.async_scheduling`, `.policy`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from deployments.load_page import Figures, LoadPage
from deployments.parent import end_with_parent
from deployments.waiting_queue import PolicyRequestQueue
from policies.registry import PolicyError
from policies.scheduling import SCHEDULING, SchedulingPolicy
from policies.types import SchedulerContext

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger(f"vllm.{__name__}")  # vLLM configures its own logger tree only, also in the EngineCore process


@dataclass(frozen=True)
class SchedulerSettings:
    """Goes into `VllmConfig.additional_config`: the policy at start-up and the name of the load page, if any.

    `policy` is `{"name": ..., **parameters}`. An object rather than a dict, because vLLM makes a dict's content a
    part of the key of its compile cache: another alpha would compile the model again.
    """

    policy: dict[str, Any] = field(default_factory=lambda: {"name": "fcfs"})
    page: str | None = None

    def compute_hash(self) -> str:
        """Constant: nothing in here changes the model's graph."""
        return type(self).__qualname__


def make_policy(spec: dict[str, Any]) -> SchedulingPolicy:
    """The scheduling policy of a spec `{"name": ..., **parameters}`; PolicyError says what is wrong with it."""
    parameters = dict(spec)
    return SCHEDULING.make(parameters.pop("name", ""), **parameters)


def scheduler_class(async_scheduling: bool) -> str:
    """Dotted path for `scheduler_cls` that matches vLLM's resolved `async_scheduling`."""
    return f"{__name__}.{'AsyncPolicyScheduler' if async_scheduling else 'PolicyScheduler'}"


def use_policy_scheduler(vllm_config: VllmConfig, settings: SchedulerSettings) -> None:
    """Put our scheduler into a finished engine config: only there it is known whether scheduling will be async.

    Raises PolicyError for a bad policy spec, ValueError where the config already asks for something else.
    """
    make_policy(settings.policy)
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is not None:
        raise ValueError(f"scheduler_cls is already {scheduler.scheduler_cls!r}: remove it, or serve without policies")
    if vllm_config.additional_config:
        raise ValueError("additional_config is not supported: remove it from the engine arguments")
    scheduler.scheduler_cls = scheduler_class(bool(scheduler.async_scheduling))
    vllm_config.additional_config = settings


class PolicySchedulerMixin(Scheduler):
    """Adds the policy and the load figures to a vLLM scheduler class.

    Comes before the vLLM class in the bases, so that `super()` means that class, Scheduler or AsyncScheduler.
    `clock` (wall-clock seconds, comparable to `Request.arrival_time`) may be replaced on the instance.
    """

    clock: Callable[[], float] = staticmethod(time.time)
    runs_async: ClassVar[bool]

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        config, settings = vllm_config.scheduler_config, vllm_config.additional_config
        if bool(config.async_scheduling) != self.runs_async:
            raise ValueError(
                f"{type(self).__name__} does not match async_scheduling={config.async_scheduling}: "
                f"set scheduler_cls to {scheduler_class(bool(config.async_scheduling))}"
            )
        if config.policy != "fcfs":
            raise ValueError(f"vLLM's own policy={config.policy!r} cannot be combined with ours: leave it at 'fcfs'")
        if not isinstance(settings, SchedulerSettings):
            raise ValueError(f"{type(self).__name__} needs additional_config=SchedulerSettings(...)")
        super().__init__(vllm_config, *args, **kwargs)
        self.queue_policy = make_policy(settings.policy)
        self.preemptions = 0
        self.steps = 0
        self._policy_version = 0
        self._tickets: list[int] = []
        self._stale: list[Request] = []  # preempted while output was in flight: they grow in the queue
        self.waiting: PolicyRequestQueue = PolicyRequestQueue(self.queue_policy, self._context())
        self._page = LoadPage.open(settings.page) if settings.page else None
        end_with_parent()
        self._published = (-1, -1, -1)
        self._publish()

    def use_policy(self, policy: SchedulingPolicy) -> None:
        """Order the queue by another policy from the next step on."""
        self.queue_policy = policy
        self.waiting.use_policy(policy)

    def figures(self) -> Figures:
        """Load now, from running sums: its cost does not grow with the queue or the batch."""
        waiting, head, pool = self.waiting, self.waiting.head, self.kv_cache_manager.block_pool
        queued = waiting.tokens
        for request in self._inflight_prefills:
            queued += request.num_tokens - request.num_computed_tokens
        for request in self.kv_holding_waiting:  # remote KV and paused input sessions only: nearly always empty
            if request not in self._inflight_prefills:
                queued += request.num_tokens - request.num_computed_tokens
        return Figures(
            t=self.clock(),
            free_blocks=pool.get_num_free_blocks(),
            total_blocks=pool.num_gpu_blocks - 1,
            block_size=self.block_size,
            running=len(self.running),
            waiting=len(waiting) + len(self.kv_holding_waiting),
            queued_tokens=queued,
            head_blocks=-(-head.num_tokens // self.block_size) if head else 0,
            batch_tokens=self.max_num_scheduled_tokens,
            max_num_seqs=self.max_num_active_reqs,
            preemptions=self.preemptions,
            steps=self.steps,
            policy_version=self._policy_version,
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step of vLLM's scheduler over the queue in the policy's order."""
        self._take_up_policy()
        context = self._context()
        self.queue_policy.on_step(context)
        self.waiting.begin_step(context)
        output = super().schedule(throttle_prefills)
        self.steps += 1
        self._publish()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step's tokens; figures are published again only if something finished."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._stale:
            for request in self._stale:
                self.waiting.refresh(request)
            self._stale = [request for request in self._stale if request.num_stale_output_tokens > 0]
        if self._page is not None and self._state() != self._published:
            self._publish()
        return outputs

    def add_request(self, request: Request) -> None:
        """Queue a request; its ticket is logged with the first figures that count it."""
        super().add_request(request)
        extra = request.sampling_params.extra_args if request.sampling_params else None
        hints = extra.get("tidegate") if extra else None
        ticket = hints.get("ticket") if isinstance(hints, dict) else None
        if self._page is not None and isinstance(ticket, int) and 0 <= ticket < 1 << 32:
            self._tickets.append(ticket)

    def shutdown(self) -> None:
        """Release the load page with the rest."""
        if self._page is not None:
            self._page.close()
            self._page = None
        super().shutdown()

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output=drop_stale_output)
        self.preemptions += 1
        if request.num_stale_output_tokens > 0:
            self._stale.append(request)

    def _context(self) -> SchedulerContext:
        pool = self.kv_cache_manager.block_pool
        return SchedulerContext(
            now=self.clock(),
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            total_blocks=pool.num_gpu_blocks - 1,
            free_blocks=pool.get_num_free_blocks(),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_active_reqs,
            token_budget=self.max_num_scheduled_tokens,
        )

    def _take_up_policy(self) -> None:
        changed = self._page.policy_if_changed(self._policy_version) if self._page is not None else None
        if changed is None:
            return
        self._policy_version, spec = changed
        try:
            self.use_policy(make_policy(spec))
        except PolicyError as error:  # the replica checks first; a running engine must not die of a setting
            logger.error("Policy %s refused, %s stays in force: %s", spec, self.queue_policy.name, error)

    def _state(self) -> tuple[int, int, int]:
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return free, len(self.running), len(self.waiting)

    def _publish(self) -> None:
        if self._page is not None:
            self._published = self._state()
            self._page.write(self.figures(), self._tickets)
            self._tickets.clear()


class PolicyScheduler(PolicySchedulerMixin, Scheduler):
    """Synchronous scheduling: CPU, or GPU with async scheduling off."""

    runs_async = False


class AsyncPolicyScheduler(PolicySchedulerMixin, AsyncScheduler):
    """Asynchronous scheduling: vLLM's default on GPU, one step scheduled ahead of the one that runs."""

    runs_async = True
