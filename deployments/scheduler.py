"""vLLM's v1 scheduler run by a policy: queue order, step control, load figures once per step, live policy changes.

With waiting_queue.py and step_control.py the only module that touches vLLM's scheduler internals (0.32.0; vLLM calls
this interface "not public"). Names used beyond `SchedulerInterface`, each held by
tests/deployments/test_contract_vllm_scheduler.py: `Scheduler.waiting` (a `RequestQueue`), `.kv_holding_waiting`,
`.running`, `.requests`, `._inflight_prefills`, `._preempt_request`, `._free_request`, `._request_blocks_can_be_freed`,
`._handle_blocked_waiting_request`, `.pause_state`, `.requires_kv_delivery`, `.kv_cache_manager.allocate_slots`,
`.kv_cache_manager.block_pool` (`get_num_free_blocks`, `num_gpu_blocks` counting one null block), `.block_size`,
`.max_model_len`, `.max_num_active_reqs`, `.max_num_scheduled_tokens`; `SchedulerOutput.num_scheduled_tokens`,
`.total_num_scheduled_tokens`, `.scheduled_new_reqs` (`req_id`, `num_computed_tokens`); `Request.status`, `.priority`,
`.num_computed_tokens`, `.is_prefill_chunk`, `.num_stale_output_tokens`, `.drop_stale_output`;
`VllmConfig.additional_config` taking an object with `compute_hash`; `SchedulerConfig.scheduler_cls`,
`.async_scheduling`, `.policy`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import sub
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from deployments.full_steps import FullSteps
from deployments.hints import extra_argument, hints_of, load_predictor, tiers_of
from deployments.load_page import Figures, LoadPage
from deployments.migration.kv_scheduler import MigrationMixin
from deployments.parent import end_with_parent
from deployments.resume import ResumeMixin
from deployments.step_control import StepControl, has_capabilities
from deployments.step_log import log_steps
from deployments.waiting_queue import PolicyRequestQueue
from policies.predictors import UsesPredictor
from policies.registry import PolicyError
from policies.scheduling import SCHEDULING, SchedulingPolicy
from policies.scheduling.tiered import Tiered
from policies.tiers import SINGLE, Tiers
from policies.types import SchedulerContext

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

WALK_S = 0.5  # between two sums of the running requests' KV blocks

logger = init_logger(f"vllm.{__name__}")  # vLLM configures its own logger tree only, also in the EngineCore process


@dataclass(frozen=True)
class SchedulerSettings:
    """Goes into `VllmConfig.additional_config`: the policy at start-up, the name of the load page if any, the tiers.

    `policy` is `{"name": ..., **parameters}`. `tiers` is `{"headroom": [...], "aging_s": [...], "ttft_slo_s": [...],
    "tpot_slo_s": [...]}` with one entry per tier, null for one that does not age or promises nothing; None is one tier.
    An object rather than a dict, because vLLM makes a dict's content a part of the key of its compile cache: another
    alpha would compile the model again. `step_log` is the file to log every step to (step_log.py), None: no log.
    """

    policy: dict[str, Any] = field(default_factory=lambda: {"name": "fcfs"})
    page: str | None = None
    tiers: dict[str, Any] | None = None
    step_log: str | None = None

    def compute_hash(self) -> str:
        """Constant: nothing in here changes the model's graph."""
        return type(self).__qualname__


def make_policy(spec: dict[str, Any], tiers: Tiers = SINGLE) -> SchedulingPolicy:
    """The scheduling policy of a spec `{"name": ..., **parameters}`, within tiers if there are several.

    Loads the ranker that `predictor_path` names. Raises PolicyError, which says what is wrong with the spec.
    """
    parameters = dict(spec)
    policy = SCHEDULING.make(parameters.pop("name", ""), **parameters)
    if isinstance(policy, UsesPredictor) and policy.predictor_path is not None:
        policy.use_predictor(load_predictor(policy.predictor_path))
    return Tiered(policy, tiers) if len(tiers) > 1 else policy


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
        self.tiers = tiers_of(settings.tiers)
        self.queue_policy = make_policy(settings.policy, self.tiers)
        self.policy_spec = settings.policy
        super().__init__(vllm_config, *args, **kwargs)
        self._tier_spec = settings.tiers
        self._by_tier = [0] * len(self.tiers)  # unfinished requests, waiting or running
        self._tier_blocks, self._walked_at = (0,) * len(self.tiers), -math.inf
        self.preemptions = 0
        self.steps = 0
        self._full_steps = FullSteps()
        self._policy_version = 0
        self._tickets: list[int] = []
        self._stale: list[Request] = []  # preempted while output was in flight: they grow in the queue
        self.waiting: PolicyRequestQueue = PolicyRequestQueue(self.queue_policy, self._context())
        self._control: StepControl | None = None
        self._take_control()
        self._page = LoadPage.open(settings.page) if settings.page else None
        end_with_parent()
        self._published = (-1, -1, -1)
        self._publish()
        if settings.step_log:
            log_steps(self, settings.step_log)

    def use_policy(self, policy: SchedulingPolicy) -> None:
        """Schedule by another policy from the next step on; it learns the lengths of the requests that are here."""
        if isinstance(policy, Tiered) and isinstance(self.queue_policy, Tiered):
            policy.take_over(self.queue_policy)
        self.queue_policy = policy
        predictor = getattr(policy, "predictor", None)
        if predictor is not None:
            for request in self.requests.values():
                request.hints = hints_of(request, self._tier_spec, predictor)
        self.waiting.use_policy(policy)
        self._take_control()

    def figures(self) -> Figures:
        """Load now, from running sums: its cost does not grow with the queue, with the batch only twice a second."""
        waiting, head, pool = self.waiting, self.waiting.head, self.kv_cache_manager.block_pool
        queued, waiting_by_tier = waiting.tokens, waiting.by_tier[: len(self._by_tier)]
        for request in self._inflight_prefills:
            queued += request.num_tokens - request.num_computed_tokens
        if self.kv_holding_waiting:  # remote KV and paused input sessions only: nearly always empty
            for request in self.kv_holding_waiting:
                waiting_by_tier[request.priority] += 1
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
            full_rate=self._full_steps.rate,
            running_by_tier=tuple(map(sub, self._by_tier, waiting_by_tier)),
            waiting_by_tier=tuple(waiting_by_tier),
            blocks_by_tier=self._blocks_by_tier(),
        )

    def _blocks_by_tier(self) -> tuple[int, ...]:
        """KV blocks of the running requests of each tier; only people look at it, so the batch is rarely walked."""
        if not (self.running and isinstance(self._page, LoadPage)):
            self._tier_blocks, self._walked_at = (0,) * len(self.tiers), -math.inf
        elif (now := self.clock()) - self._walked_at >= WALK_S:
            blocks = [0] * len(self.tiers)
            for request in self.running:
                blocks[request.priority] -= -request.num_computed_tokens // self.block_size
            self._tier_blocks, self._walked_at = tuple(blocks), now
        return self._tier_blocks

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step of vLLM's scheduler over the queue in the policy's order, and within its other bounds if any."""
        self._take_up_policy()
        context = self._context()
        if self._page is not None and (grace_s := self._page.grace_s(context.now)):
            context = replace(context, grace_s=grace_s)
        self.queue_policy.on_step(context)
        self.waiting.begin_step(context)
        if self._control is None:
            output = super().schedule(throttle_prefills)
        else:
            output = self._control.run(partial(super().schedule, throttle_prefills), context)
        self.steps += 1
        self._full_steps.step(context.now, *self._filled(output))
        self._publish()
        return output

    def _filled(self, output: SchedulerOutput) -> tuple[int, bool]:
        """Prompt tokens of a step, found in the prefix cache ones included, and whether it was full.

        Full: prompts stay behind for lack of budget; a step that memory or a policy's gate kept small is not.
        """
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        tokens = total - len(scheduled)  # one token of each decodes, but for as few as prompts are in a step
        if not tokens:
            return 0, False
        for new in output.scheduled_new_reqs:
            if scheduled.get(new.req_id, 0) > 1:  # else it came with its KV
                tokens += new.num_computed_tokens
        behind = self.waiting.tokens > 0 or any(r.num_tokens > r.num_computed_tokens for r in self._inflight_prefills)
        return tokens, behind and 2 * total >= self.max_num_scheduled_tokens

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
        """Queue a request with its tier and hints; its ticket is logged with the first figures that count it."""
        request.priority = self.tiers.clamp(request.priority)
        if request.request_id not in self.requests:  # else: the next part of a streamed input
            request.hints = hints_of(request, self._tier_spec, getattr(self.queue_policy, "predictor", None))
            self._by_tier[request.priority] += 1
        super().add_request(request)
        ticket = extra_argument(request, "ticket")
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
        if self._control is not None:
            self._control.preempted(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._by_tier[request.priority] -= 1
        if self._control is not None:
            self._control.finished(request)
        return super()._free_request(request, delay_free_blocks)

    def _take_control(self) -> None:
        if self._control is not None:
            self._control.release()
        policy = self.queue_policy
        self._control = StepControl(self, policy, self._context()) if has_capabilities(policy) else None

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
            self.use_policy(make_policy(spec, self.tiers))
            self.policy_spec = spec
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


class PolicyScheduler(ResumeMixin, MigrationMixin, PolicySchedulerMixin, Scheduler):
    """Synchronous scheduling: CPU, or GPU with async scheduling off."""

    runs_async = False


class AsyncPolicyScheduler(ResumeMixin, MigrationMixin, PolicySchedulerMixin, AsyncScheduler):
    """Asynchronous scheduling: vLLM's default on GPU, one step scheduled ahead of the one that runs."""

    runs_async = True
