"""Each capability of a policy, over vLLM's real Scheduler under KV pressure, with a policy that has only that one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

from deployments.scheduler import make_policy
from policies.scheduling import FCFS
from policies.types import Request, SchedulerContext

from .scheduler_rig import Driver, request, scheduler, tier_spec, trace

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def driver_of(policy: Any, async_scheduling: bool, **config: Any) -> Driver:
    """A driver of a scheduler that runs `policy`, with a clock of one second a step."""
    driver = Driver(scheduler({"name": "fcfs"}, async_scheduling, **config), async_scheduling, step_s=1.0)
    driver.scheduler.use_policy(policy)
    return driver


def assert_all_done(driver: Driver, arrivals: Sequence[tuple[int, Any]], blocks: int = 128) -> None:
    """Every request ended once with all of its tokens, and every KV block is free."""
    assert sorted(driver.finished) == sorted(r.request_id for _, r in arrivals)
    assert all(r.num_output_tokens == r.max_tokens for _, r in arrivals)
    assert driver.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks


class LatestFirst(FCFS):
    """Running requests in the reverse order of their arrival."""

    def running_key(self, request: Request, ctx: SchedulerContext) -> tuple[float | str, ...]:
        return (-request.arrival_time,)


@BOTH
def test_running_order_is_that_of_tokens_and_of_victims(async_scheduling: bool) -> None:
    """Running requests get tokens in the policy's order, and the last in that order is preempted first."""
    driver = driver_of(LatestFirst(), async_scheduling)
    engine, arrivals = driver.scheduler, trace(seed=5)
    preempted = 0
    for _ in driver.steps(arrivals):
        before = sorted(engine.running, key=lambda r: -r.arrival_time)
        driver.step()
        if driver.plan and engine.running:
            known = {r.request_id for r in before}
            got = [name for name in driver.plan[-1] if name in known]
            assert got == [r.request_id for r in before if r.request_id in got]
        lost = [r for r in before if r.status == RequestStatus.PREEMPTED]
        assert lost == before[len(before) - len(lost) :] or any(r.is_finished() for r in before)
        preempted += len(lost)
    assert preempted > 0
    assert_all_done(driver, arrivals)


class AtMost(FCFS):
    """Takes requests in while fewer than `limit` run."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def admit(self, request: Request, running: Sequence[Request], ctx: SchedulerContext) -> bool:
        return len(running) < self.limit


@BOTH
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_gate_holds_back_what_would_fit(limit: int, async_scheduling: bool) -> None:
    """No more run than the gate allows, but an idle engine takes a request whatever the gate says."""
    driver = driver_of(AtMost(limit), async_scheduling)
    arrivals = trace(seed=6, count=20)
    most = 0
    for _ in driver.steps(arrivals):
        driver.step()
        most = max(most, len(driver.scheduler.running))
    assert most == max(limit, 1)
    assert_all_done(driver, arrivals)


class Whims(FCFS):
    """Preempts at random, keeps count of everything it hears."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.victims: list[str] = []
        self.tokens: Counter[str] = Counter()
        self.preempted: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()

    def select_preemptions(
        self, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> Sequence[Request]:
        assert waiting
        assert (len(waiting), len(running)) == (ctx.num_waiting, ctx.num_running)
        some = min(len(running), self.rng.choice((0, 0, 0, 0, 1, 2)))
        victims = self.rng.sample(list(running), some)
        self.victims += [request.request_id for request in victims]
        return victims

    def on_scheduled(self, request: Request, tokens: int, ctx: SchedulerContext) -> None:
        self.tokens[request.request_id] += tokens

    def on_preempted(self, request: Request, ctx: SchedulerContext) -> None:
        self.preempted[request.request_id] += 1

    def on_finished(self, request: Request) -> None:
        self.finished[request.request_id] += 1


@BOTH
def test_victims_lose_their_place_and_sit_the_step_out(async_scheduling: bool) -> None:
    """Victims are preempted before the step and not resumed in it, and the policy hears everything exactly once."""
    policy = Whims()
    driver = driver_of(policy, async_scheduling)
    engine, arrivals = driver.scheduler, trace(seed=7)
    aborted: list[str] = []
    for number in driver.steps(arrivals):
        if number % 11 == 10 and engine.requests:
            aborted.append(next(iter(engine.requests)))
            engine.finish_requests(aborted[-1], RequestStatus.FINISHED_ABORTED)
        start = len(policy.victims)
        steps = len(driver.plan)

        def look(start: int = start, steps: int = steps) -> None:
            if len(driver.plan) == steps:  # right after schedule()
                for name in policy.victims[start:]:
                    assert engine.requests[name].status == RequestStatus.PREEMPTED

        driver.step(look)
        if len(driver.plan) > steps:
            assert not set(policy.victims[start:]) & set(driver.plan[-1])
    assert len(policy.victims) > 20
    assert sorted(driver.finished + aborted) == sorted(r.request_id for _, r in arrivals)
    assert engine.kv_cache_manager.block_pool.get_num_free_blocks() == 128
    assert policy.finished == Counter(r.request_id for _, r in arrivals)
    assert policy.preempted == Counter({r.request_id: r.num_preemptions for _, r in arrivals if r.num_preemptions})
    assert policy.preempted.total() == engine.preemptions > len(policy.victims)
    assert policy.tokens == sum((Counter(step) for step in driver.plan), Counter())


def test_a_victim_that_does_not_run_is_a_broken_policy() -> None:
    """Choosing a waiting request as a victim raises, it does not corrupt the queue."""
    policy = Whims()
    policy.select_preemptions = lambda waiting, running, ctx: waiting[:1]  # type: ignore[method-assign]
    driver = driver_of(policy, False)
    driver.scheduler.add_request(request("a", 20))
    with pytest.raises(RuntimeError, match="Whims"):
        driver.step()


class Moody(FCFS):
    """Another token budget in every step, the engine's own in some."""

    def __init__(self) -> None:
        self.budgets: list[int] = []

    def step_budget(self, ctx: SchedulerContext) -> int:
        self.budgets.append((10**9, 40, 0, 1, 100)[len(self.budgets) % 5])
        return self.budgets[-1]


@BOTH
def test_step_budget_bounds_each_step(async_scheduling: bool) -> None:
    """A step has at most the policy's tokens, at least 1, never more than the engine's; the engine's own stays."""
    policy = Moody()
    driver = driver_of(policy, async_scheduling)
    arrivals = trace(seed=8, count=30)
    driver.run(arrivals)
    assert len(policy.budgets) == len(driver.plan)
    used = [sum(step.values()) for step in driver.plan]
    assert all(tokens <= min(max(budget, 1), 256) for tokens, budget in zip(used, policy.budgets, strict=True))
    assert {40, 1, 100, 256} <= set(used)
    assert driver.scheduler.max_num_scheduled_tokens == 256
    assert_all_done(driver, arrivals)


class PromptsFirst(FCFS):
    """A step of prompts whenever the head fits, or whatever it is told to answer."""

    def __init__(self, answer: bool | None = None) -> None:
        self.answer = answer

    def admits_now(self, head: Request, ctx: SchedulerContext) -> bool:
        return ctx.blocks(head.num_tokens) <= ctx.free_blocks if self.answer is None else self.answer


@BOTH
@pytest.mark.parametrize("answer", [None, True, False])
def test_prompts_and_decodes_have_steps_of_their_own(answer: bool | None, async_scheduling: bool) -> None:
    """A step with an admission holds prompts only, each whole unless longer than the budget: then alone, in chunks."""
    driver = driver_of(PromptsFirst(answer), async_scheduling)
    engine, arrivals = driver.scheduler, trace(seed=9)
    kinds: Counter[str] = Counter()
    for _ in driver.steps(arrivals):
        steps, running = len(driver.plan), [r for r in engine.running if not r.is_prefill_chunk]
        decoding = {r.request_id for r in running}
        driver.step()
        if len(driver.plan) == steps or not driver.plan[-1]:
            continue
        step = driver.plan[-1]
        assert not step.keys() & decoding or step.keys() <= decoding
        if step.keys() & decoding:
            assert set(step.values()) == {1}
            kinds["decodes"] += 1
            continue
        chunks = [n for n in step if (r := engine.requests.get(n)) and r.is_prefill_chunk]
        assert not chunks or sum(step.values()) == 256
        assert not chunks or list(step)[-1:] == chunks
        assert len(step) == 1 or not set(chunks) & set(driver.admitted[-len(step) :])
        kinds["chunks" if chunks else "prompts"] += 1
    assert min(kinds.values()) > 5
    assert len(kinds) == 3
    assert engine.max_num_active_reqs == 16
    assert_all_done(driver, arrivals)


@BOTH
def test_an_empty_prompt_step_loses_nothing(async_scheduling: bool) -> None:
    """If no prompt goes after all, finished requests are announced once, and the next step decodes."""
    driver = driver_of(PromptsFirst(True), async_scheduling, blocks=40)
    engine, announced = driver.scheduler, []
    schedule = engine.schedule

    def watched(*args: Any) -> Any:
        output = schedule(*args)
        announced.extend(output.finished_req_ids)
        return output

    engine.schedule = watched
    arrivals = [(i, request(f"r{i}", 300, 30, arrival=float(i))) for i in range(6)]
    driver.run(arrivals)
    empty = [i for i, step in enumerate(driver.plan) if not step]
    assert len(empty) > 10
    assert all(driver.plan[i + 1] for i in empty if i + 1 < len(driver.plan) and len(driver.plan) - i > 3)
    assert sorted(announced) == sorted(r.request_id for _, r in arrivals)
    assert_all_done(driver, arrivals, blocks=40)


@BOTH
def test_policies_follow_one_another_without_a_trace(async_scheduling: bool) -> None:
    """Changing between all capabilities every few steps loses no request, and fcfs after them is vLLM untouched."""
    driver = driver_of(FCFS(), async_scheduling)
    engine, arrivals = driver.scheduler, trace(seed=10)
    policies = [LatestFirst(), AtMost(3), Whims(), Moody(), PromptsFirst(True), make_policy({"name": "larry"})]
    for number in driver.steps(arrivals):
        if number % 7 == 3:
            engine.use_policy(policies[number // 7 % len(policies)])
        driver.step()
    assert_all_done(driver, arrivals)
    engine.use_policy(FCFS())
    assert engine._control is None
    assert engine.kv_cache_manager.allocate_slots.__func__ is KVCacheManager.allocate_slots


@BOTH
def test_a_higher_tier_need_not_wait_for_the_prompts_of_a_lower_one(async_scheduling: bool) -> None:
    """With a long background prompt half computed, a critical one gets the whole next step, and nothing is lost."""
    engine = scheduler({"name": "fcfs"}, async_scheduling, tiers=tier_spec(None, None))
    driver = Driver(engine, async_scheduling, step_s=1.0)
    arrivals = [(0, request("low", 700, 4, tier=1)), (1, request("top", 256, 4, arrival=1.0))]
    for _ in driver.steps(arrivals):
        driver.step()
    assert driver.plan[0] == {"low": 256}
    assert driver.plan[1] == {"top": 256}
    assert engine.preemptions == 0
    assert_all_done(driver, arrivals)
