"""PiA, S3 and the SLO budget: their definitions, and what holds whatever arrives."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.registry import PolicyError
from policies.scheduling import SCHEDULING
from policies.scheduling.pia import COLLECTED, PiA
from policies.scheduling.s3 import S3
from policies.scheduling.slo_budget import SloBudget
from policies.types import Hints
from tests.policies.scheduling_rig import Asked, Replica, context, order, running

# Answers of up to six buckets of 50, guessed right, too long, or too short; the longest alone fills 24 KV blocks.
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 120), st.integers(1, 260), st.sampled_from([0.2, 0.5, 1.0, 1.5])),
    min_size=1,
    max_size=25,
).map(
    lambda rows: [
        Asked(
            f"r{i:02}", eighths / 8, prompt, max_tokens=answer, hints=Hints(output_tokens=max(1, int(answer * error)))
        )
        for i, (eighths, prompt, answer, error) in enumerate(rows)
    ]
)


class Watched(Replica):
    """A replica that shows each batch, as it stands after admissions, to a function."""

    def __init__(self, policy: Any, see: Any, **sizes: int) -> None:
        super().__init__(policy, **sizes)
        self.see = see

    def _compute(self, plan: Any, ctx: Any) -> None:
        self.see(self.running, ctx)
        super()._compute(plan, ctx)


@settings(max_examples=30)  # whole runs
@given(ARRIVALS, st.integers(1, 30), st.booleans(), st.sampled_from([24, 64, 400]), st.sampled_from([4, 32]))
def test_pia_batches_are_static(arrivals: list[Asked], group_size: int, collect: bool, blocks: int, seqs: int) -> None:
    """A batch is of one group, and once a member has left it nobody joins before the last one has left too.

    All requests end, whatever the guesses and however small the cache.
    """
    policy = PiA(group_size=group_size, collect=collect, predictor="oracle")
    batch: set[tuple[str, int]] = set()
    left = False

    def see(members: list[Asked], ctx: Any) -> None:
        nonlocal batch, left
        now = {(r.request_id, r.num_preemptions) for r in members}  # who was preempted comes back as somebody else
        if not batch & now:
            batch, left = now, False
        left = left or bool(batch - now)
        assert not (left and now - batch), "someone joined a batch that had begun to end"
        batch |= now
        assert len({policy.waiting_key(r, ctx)[0] for r in members}) <= 1

    asked = {r.request_id: r for r in arrivals}
    replica = Watched(policy, see, blocks=blocks, seqs=seqs)
    replica.run(arrivals)
    assert sorted(replica.finished) == sorted(asked)
    if not collect:
        assert replica.choices == []
    assert not policy._groups
    assert not policy._members
    assert not policy._collected


def test_pia_never_mixes_lengths_beyond_a_small_remainder() -> None:
    """20 short requests are a batch that the longer bucket cannot join; 3 short ones take longer ones in."""
    short = [Asked(f"s{i:02}", 0.0, 10, max_tokens=40) for i in range(20)]
    long = [Asked(f"l{i:02}", 0.0, 10, max_tokens=140) for i in range(20)]

    def first_batch(requests: list[Asked]) -> set[str]:
        replica = Replica(PiA(), blocks=1000, seqs=32, budget=4096)
        replica.waiting = requests
        replica.step()
        return {r.request_id[0] for r in replica.running}

    assert first_batch(short + long) == {"s"}
    assert first_batch(short[:3] + long) == {"s", "l"}


@pytest.mark.parametrize(("answer", "size"), [(50, 256), (51, 128), (150, 64), (200, 32), (250, 16), (900, 16)])
def test_pia_batch_sizes(answer: int, size: int) -> None:
    """The longer the answers, the smaller the batch, by the paper's table."""
    replica = Replica(PiA(), blocks=10_000, seqs=1000, budget=100_000)
    replica.waiting = [Asked(f"r{i:03}", 0.0, 1, max_tokens=answer) for i in range(256)]
    replica.step()
    assert len(replica.running) == size


def test_pia_collects_the_misjudged() -> None:
    """A request that fills its bucket while others wait is broken off and resumed last of its group."""
    policy = PiA(predictor="oracle")
    liar = Asked("liar", 0.0, 10, max_tokens=120, hints=Hints(output_tokens=20))
    others = [Asked(f"r{i:02}", 0.0, 10, max_tokens=100, hints=Hints(output_tokens=100)) for i in range(40)]
    replica = Replica(policy, blocks=1000, seqs=16, budget=4096)
    replica.waiting = [liar, *others]
    for _ in range(60):
        replica.step()
    assert replica.choices == []  # merged with the longer bucket, whose 100 tokens it may fill
    while replica.waiting or replica.running:
        replica.step()
    assert replica.choices == ["liar"]
    assert liar.num_output_tokens == 120
    assert replica.finished[-1] == "liar"


def test_pia_leaves_the_batch_of_another_policy_alone() -> None:
    """Put into force while requests run, PiA preempts none of them and admits none beside them."""
    policy, strangers = PiA(predictor="oracle"), [running("x", 10, 400, max_tokens=500)]
    waiting = Asked("r", 0.0, 10)
    assert policy.select_preemptions([waiting], strangers, context(1)) == []
    assert not policy.admit(waiting, strangers, context(1))
    assert policy.admit(waiting, [], context(1))


def test_pia_bound_on_overtaking() -> None:
    """Groups keep the order of arrival: the last request of a group is never behind the first of the next."""
    policy, ctx = PiA(group_size=4), context(10)
    requests = [Asked(f"r{i}", float(i), 10, max_tokens=500 - 50 * i) for i in range(8)]
    for request in requests:
        policy.waiting_key(request, ctx)
    assert [r.request_id for r in order(policy, requests, ctx)] == ["r3", "r2", "r1", "r0", "r7", "r6", "r5", "r4"]
    assert policy.bucket(requests[0]) == 10
    assert COLLECTED > policy.bucket(requests[0])


@settings(max_examples=30)  # whole runs
@given(ARRIVALS, st.integers(1, 64), st.sampled_from([24, 64, 400]), st.sampled_from(["oracle", "max_tokens"]))
def test_s3_reservations_fit(arrivals: list[Asked], buckets: int, blocks: int, predictor: str) -> None:
    """After each admission the reservations fit the cache together; all requests end, and each is evicted at most
    log2(buckets) times, rounded up: never if max_tokens is what is reserved.
    """
    policy = S3(buckets=buckets, predictor=predictor)
    before: set[str] = set()

    def see(batch: list[Asked], ctx: Any) -> None:
        nonlocal before
        names = {r.request_id for r in batch}
        if names - before:
            assert sum(policy.reservation(r, ctx) for r in batch) <= ctx.total_blocks
        before = names

    replica = Watched(policy, see, blocks=blocks)
    replica.run(arrivals)
    assert len(replica.finished) == len(arrivals)
    most = math.ceil(math.log2(buckets)) if predictor == "oracle" else 0
    assert all(replica.choices.count(r.request_id) <= most for r in arrivals)
    assert policy._total == 0
    assert not policy._reserved
    assert not policy._overruns


@settings(max_examples=30)  # whole runs
@given(ARRIVALS, st.sampled_from([32, 64]))
def test_s3_with_true_lengths_never_preempts(arrivals: list[Asked], blocks: int) -> None:
    """Where no prediction is too short, memory never runs out and nobody is evicted."""
    for request in arrivals:
        request.hints = Hints(output_tokens=request.max_tokens)
    replica = Replica(S3(predictor="oracle", buckets=64), blocks=blocks)
    replica.run(arrivals)
    assert replica.choices == []
    assert replica.shortages == []


def test_s3_takes_the_largest_that_fits() -> None:
    """Decreasing first-fit: a reservation that does not fit beside the running ones stands behind those that do."""
    policy, ctx = S3(), context(3, total=100)
    sizes = {"small": 100, "large": 700, "huge": 1500}  # 38, 75 and 100 blocks with 500 of answer
    requests = [Asked(name, 0.0, tokens, max_tokens=500) for name, tokens in sizes.items()]
    assert [r.request_id for r in order(policy, requests, ctx)] == ["huge", "large", "small"]
    policy.on_scheduled(running("r", 400, max_tokens=100), 1, ctx)
    assert [r.request_id for r in order(policy, requests, ctx)] == ["small", "huge", "large"]
    policy.on_finished(running("r", 400))
    assert [r.request_id for r in order(policy, requests, ctx)] == ["huge", "large", "small"]


def test_s3_doubles_after_an_overrun() -> None:
    """A request that fills its bucket is evicted once per doubling, and reserves up to max_tokens at the end."""
    policy, ctx = S3(buckets=8, predictor="oracle"), context(1)
    hints, limit = Hints(output_tokens=100), 1500  # a bucket of 512 tokens
    assert policy.allowance(running("r", 10, 1, max_tokens=limit, hints=hints), ctx) == 512
    assert policy.select_preemptions([], [running("r", 10, 511, max_tokens=limit, hints=hints)], ctx) == []
    grown = running("r", 10, 512, max_tokens=limit, hints=hints)
    assert policy.select_preemptions([], [grown], ctx) == [grown]
    assert policy.allowance(grown, ctx) == 1024
    grown.num_output_tokens = 1024
    assert policy.select_preemptions([], [grown], ctx) == [grown]
    assert policy.allowance(grown, ctx) == limit
    assert policy.select_preemptions([], [running("r", 10, 1499, max_tokens=limit, hints=hints)], ctx) == []


# Eighths and powers of two, so that sums of floats are exact and ties do happen.
EIGHTHS = st.integers(1, 80).map(lambda n: n / 8)
SLO_REQUESTS = st.lists(
    st.tuples(
        EIGHTHS,
        st.integers(1, 4000),
        st.integers(0, 300),
        st.integers(1, 400),
        st.none() | EIGHTHS,
        st.none() | EIGHTHS,
        st.booleans(),
    ),
    min_size=2,
    max_size=20,
).map(
    lambda rows: [
        Asked(
            f"r{i:02}",
            1_000_000 + arrival,
            prompt,
            done,
            max_tokens=done + guess,
            num_computed_tokens=prompt // 2 if half else 0,
            hints=Hints(output_tokens=guess, ttft_slo_s=ttft, tpot_slo_s=tpot),
        )
        for i, (arrival, prompt, done, guess, ttft, tpot, half) in enumerate(rows)
    ]
)


@given(SLO_REQUESTS, st.integers(0, 10_000), st.sampled_from(["oracle", "max_tokens"]), st.booleans())
def test_slo_budget_is_its_definition(requests: list[Asked], later: int, predictor: str, runs: bool) -> None:
    """At any time the order is that of deadline - now - service, for waiting and for running requests."""
    policy = SloBudget(ttft_slo_s=2, tpot_slo_s=0.25, step_s=0.0625, predictor=predictor)
    ctx = context(5, now=1_000_000.0 + later, budget=512)

    def budget(r: Asked) -> Fraction:
        guess = r.max_tokens if predictor == "max_tokens" else r.hints.output_tokens or 0
        length = max(guess, r.num_output_tokens + 1)
        ttft, tpot = (
            Fraction(own or default) for own, default in ((r.hints.ttft_slo_s, 2), (r.hints.tpot_slo_s, 0.25))
        )
        steps = -((r.num_computed_tokens - r.num_tokens) // 512) + length - r.num_output_tokens
        return Fraction(r.arrival_time) + ttft + (length - 1) * tpot - Fraction(ctx.now) - Fraction(0.0625) * steps

    expected = sorted(requests, key=lambda r: (budget(r), r.arrival_time, r.request_id))
    key = policy.running_key if runs else policy.waiting_key
    assert sorted(requests, key=lambda r: key(r, ctx)) == expected
    assert [policy.budget(r, ctx) for r in requests] == [float(budget(r)) for r in requests]
    assert len({key(r, ctx) for r in requests}) == len(requests)


@given(SLO_REQUESTS)
def test_slo_budget_bound_on_overtaking(requests: list[Asked]) -> None:
    """s stands before r only if it came at most slack(r) - slack(s) seconds after r."""
    policy, ctx = SloBudget(step_s=0.0625, ttft_slo_s=2, tpot_slo_s=0.25), context(5)
    queue = order(policy, requests, ctx)
    slack = {r.request_id: policy.deadline(r) - r.arrival_time - policy.service(r, ctx) for r in requests}
    for place, late in enumerate(queue):
        for early in queue[place + 1 :]:
            assert late.arrival_time - early.arrival_time <= slack[early.request_id] - slack[late.request_id]


def test_slo_budget_learns_the_step() -> None:
    """Without step_s the estimate approaches the engine's steps, in eighths of an octave; pauses do not count."""
    policy, now = SloBudget(), 1000.0
    for _ in range(200):
        policy.on_step(context(1, now=now, run=4))
        now += 0.2
    assert policy.step_s == pytest.approx(0.2, rel=0.06)
    before = policy.step_s
    policy.on_step(context(1, now=now, run=0))  # idle until the next request, an hour later
    policy.on_step(context(1, now=now + 3600, run=4))
    policy.on_step(context(1, now=now + 7200, run=4))  # paused for an hour with work at hand
    assert policy.step_s == before
    pinned = SloBudget(step_s=0.5)
    pinned.on_step(context(1, now=1.0, run=4))
    pinned.on_step(context(1, now=1.1, run=4))
    assert pinned.step_s == 0.5


def test_slo_budget_epoch_follows_its_estimate() -> None:
    """Keys are recomputed exactly when the estimate moves to another eighth of an octave."""
    policy, ctx = SloBudget(), context(1, run=4)
    seen = {policy.order_epoch(ctx)}
    for i in range(100):
        policy.on_step(context(1, now=1000 + 0.06 * i, run=4))
        seen.add(policy.order_epoch(ctx))
    assert 2 <= len(seen) <= 4  # from 0.05 to 0.06 s


@settings(max_examples=30)  # whole runs
@given(ARRIVALS, st.sampled_from([24, 64]))
def test_slo_budget_serves_everyone(arrivals: list[Asked], blocks: int) -> None:
    """Under memory pressure, with guesses of any quality, every request ends."""
    replica = Replica(SloBudget(predictor="oracle"), blocks=blocks)
    replica.run(arrivals)
    assert len(replica.finished) == len(arrivals)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("pia", "group_size", 0),
        ("pia", "collect", "no"),
        ("pia", "predictor", "learned"),  # without a file
        ("s3", "buckets", 0),
        ("s3", "predictor", "guess"),
        ("slo_budget", "ttft_slo_s", 0),
        ("slo_budget", "tpot_slo_s", None),
        ("slo_budget", "step_s", -1),
    ],
)
def test_bad_parameters_are_named(name: str, field: str, value: Any) -> None:
    """The error says which parameter is wrong."""
    with pytest.raises(PolicyError) as refused:
        SCHEDULING.make(name, **{field: value})
    assert refused.value.field.startswith(field)
