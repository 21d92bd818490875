"""Every scheduling policy that is registered, with and without tiers, over vLLM's real Scheduler under KV pressure."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.request import RequestStatus

from deployments.hints import hints_of, tiers_of
from deployments.load_page import LoadPage
from deployments.scheduler import make_policy
from policies.predictors import LearnedPredictor
from policies.registry import PolicyError
from policies.scheduling import SCHEDULING
from policies.scheduling.tiered import TICKS
from policies.types import Hints

from .scheduler_rig import Driver, request, scheduler, tier_spec, trace

BOTH = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
POLICIES = pytest.mark.parametrize("policy", SCHEDULING.names())
FOUR = tier_spec(None, 30.0, 20.0, 10.0)
TIERS = pytest.mark.parametrize("tiers", [None, FOUR], ids=["one-tier", "four-tiers"])
BLOCKS = 72


def driver_of(policy: dict[str, Any], async_scheduling: bool, **config: Any) -> Driver:
    """A driver with a clock of a second a step."""
    return Driver(scheduler(policy, async_scheduling, **config), async_scheduling, step_s=1.0)


def play(driver: Driver, arrivals: list[tuple[int, Any]]) -> Iterable[int]:
    """Play all to the end; after each step the limits of the engine hold, at the end nothing is left of anyone."""
    engine = driver.scheduler
    pool = engine.kv_cache_manager.block_pool
    managers = engine.kv_cache_manager.coordinator.single_type_managers
    for number in driver.steps(arrivals):
        assert number < 3000, "no progress"
        yield number
        driver.step()
        held = sum(len(blocks) for manager in managers for blocks in manager.req_to_blocks.values())
        assert held + pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert len(engine.running) <= engine.max_num_active_reqs
        assert not driver.plan or sum(driver.plan[-1].values()) <= engine.max_num_scheduled_tokens
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert len(driver.finished) == len(set(driver.finished))
    figures = engine.figures()
    assert (figures.running, figures.waiting, figures.queued_tokens) == (0, 0, 0)
    assert set(figures.running_by_tier + figures.waiting_by_tier) == {0}


@BOTH
@TIERS
@POLICIES
def test_every_policy_finishes_everything(policy: str, tiers: dict[str, Any] | None, async_scheduling: bool) -> None:
    """A burst beyond the KV cache ends with every request done once, every block free, and no limit ever exceeded."""
    arrivals = trace(seed=1, count=28, span=20, tiers=4)
    driver = driver_of({"name": policy}, async_scheduling, blocks=BLOCKS, tiers=tiers)
    for _ in play(driver, arrivals):
        pass
    assert sorted(driver.finished) == sorted(r.request_id for _, r in arrivals)
    assert all(r.num_output_tokens == r.max_tokens for _, r in arrivals)


@BOTH
@TIERS
def test_policies_may_change_under_load(tiers: dict[str, Any] | None, async_scheduling: bool) -> None:
    """Through all policies in turn, with aborts in between, no request is lost and no block leaks."""
    arrivals = trace(seed=2, count=60, span=90, tiers=4)
    driver = driver_of({"name": "fcfs"}, async_scheduling, blocks=BLOCKS, tiers=tiers)
    engine, rng = driver.scheduler, random.Random(0)
    names = SCHEDULING.names() * 20
    rng.shuffle(names)
    aborted: list[str] = []
    for number in play(driver, arrivals):
        if number % 5 == 4:
            engine.use_policy(make_policy({"name": names.pop()}, engine.tiers))
        if number % 19 == 18 and engine.requests:
            aborted.append(rng.choice(sorted(engine.requests)))
            engine.finish_requests(aborted[-1], RequestStatus.FINISHED_ABORTED)
    assert sorted(driver.finished + aborted) == sorted(r.request_id for _, r in arrivals)
    assert len(aborted) > 5


@BOTH
@pytest.mark.parametrize("policy", SCHEDULING.names())
@pytest.mark.parametrize("full", ["slots", "blocks"])
def test_a_full_batch_of_the_lowest_tier_makes_way(full: str, policy: str, async_scheduling: bool) -> None:
    """A request of the highest tier is admitted within two steps of its arrival into an engine full of the lowest."""
    seqs, blocks = (6, 512) if full == "slots" else (64, 80)
    driver = driver_of({"name": policy}, async_scheduling, blocks=blocks, seqs=seqs, budget=512, tiers=FOUR)
    engine = driver.scheduler
    low = [request(f"low{i}", 100 + i, 60, arrival=0.0, tier=3) for i in range(12)]
    arrivals = [(0, r) for r in low] + [(8, request("critical", 200, 4, arrival=8.0))]
    steps = preempted = 0
    for number in play(driver, arrivals):
        if number == 8:
            driver.admitted.clear()
            steps, preempted = len(driver.plan), engine.preemptions
        if number == 10:
            assert engine.preemptions > preempted
            assert any("critical" in step for step in driver.plan[steps : steps + 2])
            assert "critical" in driver.admitted
    assert len(driver.finished) == 13


@BOTH
def test_a_higher_tier_waits_for_help_as_long_as_its_grace(async_scheduling: bool) -> None:
    """With room elsewhere (the page says so) nobody makes way for three steps; once that is past, one does."""
    page = LoadPage.create(f"tidegate-test-{uuid.uuid4().hex}")
    page.set_grace(2.5, until=40.0)
    driver = driver_of({"name": "fcfs"}, async_scheduling, seqs=2, page=page.name, tiers=FOUR)
    arrivals = [(0, request(f"low{i}", 10, 200, arrival=0.0, tier=3)) for i in range(2)]
    arrivals += [(20, request("early", 10, 4, arrival=20.0)), (60, request("late", 10, 4, arrival=60.0))]
    preempted, entered = dict[int, int](), dict[str, int]()
    for number in play(driver, arrivals):
        preempted[number] = driver.scheduler.preemptions
        for name in driver.admitted:
            entered.setdefault(name, number - 1)
    assert (preempted[23], preempted[24]) == (0, 1)
    assert entered["early"] in (23, 24)
    assert (preempted[60], preempted[61]) == (1, 2)
    assert entered["late"] in (60, 61)
    page.close()


@BOTH
def test_nobody_is_preempted_for_an_equal_or_twice_for_one(async_scheduling: bool) -> None:
    """Where only slots are short, each arrival of a higher tier displaces at most one runner, of a lower tier."""
    rng = random.Random(3)
    arrivals = [
        (step, request(f"r{step}", rng.randint(1, 40), rng.randint(5, 30), arrival=float(step), tier=rng.randrange(4)))
        for step in range(80)
    ]
    driver = driver_of({"name": "fcfs"}, async_scheduling, blocks=1024, seqs=4, tiers=FOUR)
    for _ in play(driver, arrivals):
        pass
    engine = driver.scheduler
    assert 0 < engine.preemptions <= sum(r.priority < 3 for _, r in arrivals)
    assert not any(r.num_preemptions for _, r in arrivals if r.priority == 0)
    assert len(driver.finished) == 80


@BOTH
@pytest.mark.parametrize("aging_s", [4.0, 10.0])
def test_the_lowest_tier_waits_no_longer_than_its_aging_allows(aging_s: float, async_scheduling: bool) -> None:
    """Under a stream of top-tier work that fills the engine, tier p enters within p * aging_s and one service time."""
    service = 3  # tokens of each answer; a step is a second
    arrivals = [(step, request(f"top{step}", 10, service, arrival=float(step))) for step in range(2, 100)]
    arrivals += [(1, request(f"tier{p}", 10, service, arrival=1.0, tier=p)) for p in (1, 2, 3)]
    arrivals.sort(key=lambda pair: pair[0])
    arrivals.insert(0, (0, request("first", 10, service, arrival=0.0)))
    tiers = tier_spec(None, aging_s, aging_s, aging_s)
    driver = driver_of({"name": "fcfs"}, async_scheduling, seqs=1, tiers=tiers)
    entered: dict[str, int] = {}
    for number in play(driver, arrivals):
        for name in driver.admitted:
            entered.setdefault(name, number)
    for p in (1, 2, 3):
        due = 1 + p * aging_s
        slack = aging_s / TICKS + 1 + (service + 2) * p  # who aged before it is served before it
        assert due <= entered[f"tier{p}"] <= due + slack
    assert all(r.num_preemptions == 0 for _, r in arrivals)


def test_tiers_are_clamped() -> None:
    """A priority beyond the tiers means the last one, below 0 the first; without tiers all are equal."""
    for spec, expected in ((FOUR, [0, 0, 2, 3]), (None, [0, 0, 0, 0])):
        engine = scheduler({"name": "fcfs"}, tiers=spec)
        requests = [request(f"r{tier}", 10, tier=tier) for tier in (-5, 0, 2, 99)]
        for made in requests:
            engine.add_request(made)
        assert [made.priority for made in requests] == expected


def test_hints_come_from_the_request_and_its_tier() -> None:
    """A request carries the true length that its extra arguments give, and the promises of its tier."""
    spec = {**FOUR, "ttft_slo_s": [0.5, 1.0, None, None], "tpot_slo_s": [0.1, None, None, 2.0]}
    engine = scheduler({"name": "larry"}, tiers=spec)
    made = [request(f"r{tier}", 10, tier=tier, ticket=1) for tier in range(4)]
    made[1].sampling_params.extra_args["tidegate"]["output_tokens"] = 17
    for one in made:
        engine.add_request(one)
    assert [one.hints for one in made] == [
        Hints(ttft_slo_s=0.5, tpot_slo_s=0.1),
        Hints(output_tokens=17, ttft_slo_s=1.0),
        Hints(),
        Hints(tpot_slo_s=2.0),
    ]


@pytest.mark.parametrize("tokens", [0, -3, 1.5, True, "9", None, [4]])
def test_a_malformed_length_is_no_hint(tokens: object) -> None:
    """What a client smuggles in as its answer's length cannot reach a policy."""
    made = request("a", 10, ticket=1)
    made.sampling_params.extra_args["tidegate"]["output_tokens"] = tokens
    assert hints_of(made, None, None) == Hints()


def test_no_tiers_are_one_tier() -> None:
    """Without a spec there is one tier and no wrapper; null in a spec means that a tier never ages."""
    assert len(tiers_of(None)) == 1
    assert tiers_of(FOUR).aging_s == (float("inf"), 30.0, 20.0, 10.0)
    assert type(make_policy({"name": "larry"}, tiers_of(None))) is SCHEDULING._factories["larry"]
    assert make_policy({"name": "larry"}, tiers_of(FOUR)).name == "larry"


def ranker() -> LearnedPredictor:
    """A ranker that predicts about twice the prompt's length."""
    knots = np.log(np.array([1.0, 1000.0]))
    flat = np.zeros(2)
    return LearnedPredictor(np.log(2.0), knots, knots, knots, flat, np.zeros(4), 8)


@TIERS
def test_a_learned_predictor_is_loaded_and_asked(tmp_path: Path, tiers: dict[str, Any] | None) -> None:
    """A policy with `predictor_path` gets the ranker of that file, which is asked about old and new requests alike."""
    path = tmp_path / "ranker.npz"
    np.savez(path, allow_pickle=False, **ranker().to_arrays())
    engine = scheduler({"name": "fcfs"}, tiers=tiers)
    first, second = request("first", 20, 500), request("second", 30, 500)
    engine.add_request(first)
    assert first.hints.predicted_tokens is None
    spec = {"name": "srpt", "predictor": "learned", "predictor_path": str(path)}
    engine.use_policy(make_policy(spec, engine.tiers))
    engine.add_request(second)
    assert first.hints.predicted_tokens == pytest.approx(40)
    assert second.hints.predicted_tokens == pytest.approx(60)
    driver = Driver(engine)
    driver.run([])
    assert sorted(driver.finished) == ["first", "second"]


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04 cut off", "pickle", "other arrays"])
def test_a_bad_ranker_file_is_refused(tmp_path: Path, content: bytes | str | None) -> None:
    """A missing, damaged or foreign file names the parameter at fault and says what would do; nothing is unpickled."""
    path = tmp_path / "ranker.npz"
    if content == "pickle":
        np.savez(path, weights=np.array([object()], dtype=object), allow_pickle=True)
    elif content == "other arrays":
        np.savez(path, a=np.zeros(3))
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(PolicyError, match="train-predictor") as refused:
        make_policy({"name": "srpt", "predictor": "learned", "predictor_path": str(path)})
    assert refused.value.field == "predictor_path"
