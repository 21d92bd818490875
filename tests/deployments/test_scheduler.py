"""The policy scheduler over vLLM's real Scheduler and KVCacheManager, under KV pressure, without a model."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from deployments.load_page import LoadPage, LoadPageError
from deployments.scheduler import (
    AsyncPolicyScheduler,
    PolicyScheduler,
    SchedulerSettings,
    make_policy,
    scheduler_class,
    use_policy_scheduler,
)
from deployments.step_control import has_capabilities
from policies.registry import PolicyError
from policies.scheduling import SCHEDULING

from .scheduler_rig import Driver, request, scheduler, tier_spec, trace, vllm_config, walked

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
QUEUE_ONLY = [name for name in SCHEDULING.names() if not has_capabilities(SCHEDULING.make(name))]
POLICIES = pytest.mark.parametrize("policy", QUEUE_ONLY)


@pytest.fixture
def page() -> Iterator[LoadPage]:
    page = LoadPage.create(f"tidegate-test-{uuid.uuid4().hex}")
    yield page
    page.close()


@BOTH
@POLICIES
def test_all_requests_finish_and_all_blocks_return(policy: str, async_scheduling: bool) -> None:
    """Under every policy a burst that forces preemptions ends with every request done and every KV block free."""
    arrivals = trace(seed=1)
    driver = Driver(scheduler({"name": policy}, async_scheduling), async_scheduling)
    driver.run(arrivals)
    assert sorted(driver.finished) == sorted(r.request_id for _, r in arrivals)
    assert all(r.num_output_tokens == r.max_tokens for _, r in arrivals)
    assert driver.scheduler.preemptions > 0
    assert driver.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 128


@BOTH
def test_fcfs_schedules_as_vllm_does(async_scheduling: bool) -> None:
    """Step by step, fcfs gives each request the tokens that vLLM's untouched scheduler gives it."""
    ours = Driver(scheduler({"name": "fcfs"}, async_scheduling), async_scheduling)
    untouched = scheduler({"name": "fcfs"}, async_scheduling, cls=AsyncScheduler if async_scheduling else Scheduler)
    theirs = Driver(untouched, async_scheduling)
    ours.run(trace(seed=2))
    theirs.run(trace(seed=2))
    assert ours.scheduler.preemptions > 0
    assert [list(step.items()) for step in ours.plan] == [list(step.items()) for step in theirs.plan]


@BOTH
@pytest.mark.parametrize("policy", [name for name in QUEUE_ONLY if SCHEDULING.make(name).reorders])
def test_admission_follows_the_policys_own_order(policy: str, async_scheduling: bool) -> None:
    """What a step admits is the head of the waiting set, sorted by the policy's keys as of that step's start."""
    driver = Driver(scheduler({"name": policy}, async_scheduling), async_scheduling)
    engine, own = driver.scheduler, make_policy({"name": policy})
    compared = 0
    for _ in driver.steps(trace(seed=3)):
        context = engine._context()
        # vLLM passes over requests whose output is still in flight from before a preemption.
        ready = [r for r in engine.waiting if not r.num_stale_output_tokens]
        order = [r.request_id for r in sorted(ready, key=lambda r: own.waiting_key(r, context))]
        driver.admitted.clear()
        driver.step()
        assert set(driver.admitted) == set(order[: len(driver.admitted)])  # resumed ones are reported apart
        compared += len(driver.admitted)
    assert compared >= 60


@BOTH
def test_larry_lets_small_requests_pass_a_full_engine(async_scheduling: bool) -> None:
    """Behind a request that fills the engine, the smallest is admitted first under larry, the oldest under fcfs."""
    first = {}
    for policy in ("fcfs", "larry"):
        driver = Driver(scheduler({"name": policy}, async_scheduling, seqs=1), async_scheduling)
        sizes = (("full", 300), ("long", 600), ("middle", 100), ("short", 20))
        driver.run([(0, request(name, size, arrival=i / 10)) for i, (name, size) in enumerate(sizes)])
        first[policy] = driver.admitted
    assert first["fcfs"] == ["full", "long", "middle", "short"]
    assert first["larry"] == ["short", "middle", "full", "long"]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(QUEUE_ONLY),
    async_scheduling=st.booleans(),
    tiers=st.sampled_from([None, tier_spec(None, 40.0, 20.0, 10.0)]),
)
def test_figures_equal_a_walk_over_all_requests(
    seed: int, policy: str, async_scheduling: bool, tiers: dict[str, Any] | None
) -> None:
    """After every schedule and every output, aborts included, the page shows what walking all requests gives."""
    name = f"tidegate-test-{uuid.uuid4().hex}"
    page, rng = LoadPage.create(name), random.Random(seed)
    engine = scheduler({"name": policy}, async_scheduling, page=name, blocks=96, tiers=tiers)
    driver = Driver(engine, async_scheduling, step_s=1.0)
    page.unlink()  # so that a failing example leaves no file
    arrivals = trace(seed, count=40, tiers=4)
    looks = tickets = 0

    def look() -> None:
        nonlocal looks, tickets
        looks += 1
        figures = page.read()
        assert figures is not None
        naive = walked(engine, [r for _, r in arrivals])
        if not looks % 2:  # after an output that freed nothing the page still shows the end of schedule()
            for key in ("free_blocks", "running", "waiting", "running_by_tier", "waiting_by_tier"):
                assert getattr(figures, key) == naive[key]
        else:
            assert {key: getattr(figures, key) for key in naive} == naive
        tickets = figures.admitted

    for _ in driver.steps(arrivals):
        if engine.requests and rng.random() < 0.1:
            engine.finish_requests(rng.choice(list(engine.requests)), RequestStatus.FINISHED_ABORTED)
        looks = 0 if engine.has_requests() else 1
        driver.step(look)
    idle = page.read()
    assert idle is not None
    assert (idle.running, idle.waiting, idle.queued_tokens, idle.head_blocks) == (0, 0, 0, 0)
    assert idle.free_blocks == idle.total_blocks == 96
    assert page.admitted_since(0)[0] == [r.sampling_params.extra_args["tidegate"]["ticket"] for _, r in arrivals]
    assert tickets == len(arrivals)
    engine.shutdown()
    page.close()


def test_a_ticket_is_logged_with_the_figures_that_count_it(page: LoadPage) -> None:
    """Before a step the ticket is not on the page; after it, ticket and request are there together."""
    engine = scheduler({"name": "larry"}, page=page.name)
    engine.add_request(request("a", 20, ticket=2**32 - 1))
    engine.add_request(request("no ticket", 20))
    before = page.read()
    Driver(engine).step()
    after = page.read()
    assert before is not None
    assert after is not None
    assert (before.admitted, before.running) == (0, 0)
    assert (after.admitted, after.running) == (1, 2)
    assert page.admitted_since(0) == ([2**32 - 1], 1)


@pytest.mark.parametrize("ticket", ["text", -1, 2**32, 1.5, None])
def test_a_malformed_ticket_is_ignored(page: LoadPage, ticket: object) -> None:
    """What a client smuggles into a request's extra arguments cannot stop the engine."""
    engine = scheduler({"name": "larry"}, page=page.name)
    bad = request("a", 20)
    bad.sampling_params.extra_args = {"tidegate": {"ticket": ticket}}
    odd = request("b", 20)
    odd.sampling_params.extra_args = {"tidegate": ticket}
    Driver(engine).run([(0, bad), (0, odd)])
    assert page.admitted_since(0) == ([], 0)


def test_policy_changes_at_the_next_step(page: LoadPage) -> None:
    """A spec written to the page orders the queue from the very next step, alpha alone as well as another policy."""
    engine = scheduler({"name": "larry", "alpha": 1e6}, page=page.name, seqs=1)
    driver = Driver(engine)
    engine.add_request(request("runs", 20, output=40))
    driver.step()
    for i, size in enumerate((500, 100, 20)):
        engine.add_request(request(f"w{size}", size, output=1, arrival=float(i)))

    def head_after(spec: dict[str, object]) -> str:
        version = page.set_policy(spec)
        driver.step()
        figures = page.read()
        assert figures is not None
        assert figures.policy_version == version
        return engine.waiting.peek_request().request_id

    driver.step()
    assert engine.waiting.peek_request().request_id == "w500"
    assert head_after({"name": "larry", "alpha": 0.01}) == "w20"
    assert head_after({"name": "fcfs"}) == "w500"
    assert head_after({"name": "guarded_larry", "guard_s": 1000.0}) == "w20"


def test_back_to_fcfs_preempted_requests_come_first() -> None:
    """Changing from a reordering policy to fcfs restores vLLM's order: preempted ones, then by arrival."""
    engine = scheduler({"name": "larry"}, blocks=40)
    driver = Driver(engine)
    for i in range(3):
        engine.add_request(request(f"old{i}", 200, output=100, arrival=float(i)))
    while not engine.preemptions:
        driver.step()
    preempted = [r.request_id for r in engine.waiting if r.status == RequestStatus.PREEMPTED]
    for i, size in enumerate((600, 20)):
        engine.add_request(request(f"new{i}", size, arrival=10.0 + i))
    engine.use_policy(make_policy({"name": "fcfs"}))
    assert [r.request_id for r in engine.waiting] == [*preempted, "new0", "new1"]


def test_a_refused_policy_changes_nothing(page: LoadPage) -> None:
    """A spec that cannot be made leaves the policy before it in force and the engine running."""
    driver = Driver(scheduler({"name": "larry", "alpha": 3}, page=page.name))
    page.set_policy({"name": "larry", "alpha": -1})
    driver.run([(0, request("a", 20))])
    assert driver.scheduler.queue_policy.alpha == 3
    assert driver.finished == ["a"]


def test_clock_is_injected() -> None:
    """The policy's `now` and the figures' time are the clock's, not the machine's."""
    engine = scheduler({"name": "larry"})
    engine.clock = lambda: 12.5
    Driver(engine).run([(0, request("a", 20))])
    assert engine.figures().t == 12.5
    assert engine.waiting._context.now == 12.5


@BOTH
def test_wrong_scheduler_class_fails_fast(async_scheduling: bool) -> None:
    """A scheduler that does not match the resolved async setting refuses to start and names the one that does."""
    wrong = PolicyScheduler if async_scheduling else AsyncPolicyScheduler
    with pytest.raises(ValueError, match=scheduler_class(async_scheduling)):
        scheduler({"name": "fcfs"}, async_scheduling, cls=wrong)


def test_bad_start_up_settings_fail_fast() -> None:
    """An unknown policy, a missing page, vLLM's priority policy and a plain dict each stop the start with a reason."""
    with pytest.raises(PolicyError, match="larry"):
        scheduler({"name": "lary"})
    with pytest.raises(PolicyError, match="Choose one of"):
        scheduler({})
    with pytest.raises(LoadPageError, match="create it"):
        scheduler({"name": "fcfs"}, page="tidegate-test-none")
    with pytest.raises(ValueError, match="priority"):
        scheduler({"name": "fcfs"}, policy="priority")
    with pytest.raises(ValueError, match="SchedulerSettings"):
        PolicyScheduler(vllm_config(False, {"policy": {"name": "fcfs"}}))


@BOTH
def test_use_policy_scheduler_matches_the_config(async_scheduling: bool) -> None:
    """A resolved config gets the class that fits it, and a config with another scheduler is refused."""
    config = vllm_config(async_scheduling, {})
    use_policy_scheduler(config, SchedulerSettings({"name": "larry"}))
    expected = AsyncPolicyScheduler if async_scheduling else PolicyScheduler
    assert config.scheduler_config.get_scheduler_cls() is expected
    with pytest.raises(ValueError, match="already"):
        use_policy_scheduler(config, SchedulerSettings())
    with pytest.raises(ValueError, match="additional_config"):
        use_policy_scheduler(vllm_config(async_scheduling, {"a": 1}), SchedulerSettings())


def test_settings_do_not_enter_the_compile_cache_key() -> None:
    """Another alpha or page gives the same hash of the engine config, so nothing is compiled again."""
    hashes = {
        vllm_config(False, SchedulerSettings({"name": "larry", "alpha": alpha}, page)).compute_hash()
        for alpha, page in ((1, None), (500, "a"), (1000, "b"))
    }
    assert len(hashes) == 1
