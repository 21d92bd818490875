"""Policies that are first come, first served, and differ in whom they let in: no_preempt, prefill_first, sarathi."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.scheduling.capabilities import BudgetsTokens, GatesAdmission, OrdersRunning, PrefillsFirst
from policies.scheduling.fcfs import FCFS
from policies.scheduling.no_preempt import NoPreempt
from policies.scheduling.prefill_first import PrefillFirst
from policies.scheduling.sarathi import Sarathi
from tests.policies.scheduling_rig import Asked, Replica, context, running

# (arrival in tenths of a second, prompt, answer); blocks of 16 tokens, at most 15 for one request.
BURSTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 180), st.integers(1, 60)), min_size=1, max_size=15).map(
    lambda rows: [Asked(f"r{i:02}", at / 10, prompt, max_tokens=answer) for i, (at, prompt, answer) in enumerate(rows)]
)


@settings(max_examples=50)
@given(BURSTS, st.integers(15, 40), st.integers(1, 16))
def test_no_preempt_never_preempts(burst: list[Asked], blocks: int, seqs: int) -> None:
    """However little memory there is, nothing is preempted and all is served in the order of arrival."""
    replica = Replica(NoPreempt(), blocks=blocks, seqs=seqs)
    replica.run(burst)
    assert replica.shortages == replica.choices == []
    admitted = list(dict.fromkeys(name for step in replica.served for name in step))
    assert admitted == [r.request_id for r in sorted(burst, key=lambda r: (r.arrival_time, r.request_id))]


def test_fcfs_preempts_where_no_preempt_does_not() -> None:
    """The same burst makes plain FCFS run out of blocks: the reservation is what prevents it."""
    plain, reserved = Replica(FCFS(), blocks=40), Replica(NoPreempt(), blocks=40)
    for replica in (plain, reserved):
        replica.run([Asked(f"r{i}", 0.0, 100, max_tokens=200) for i in range(6)])
        assert len(replica.finished) == 6
    assert plain.shortages
    assert not reserved.shortages


@given(st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 4096)), max_size=30), st.integers(64, 600))
def test_no_preempt_reservations_never_exceed_the_cache(lengths: list[tuple[int, int]], total: int) -> None:
    """The sum of blocks(min(max_model_len, prompt + max_tokens)) over all that were admitted is at most M."""
    policy, ctx = NoPreempt(), context(5, total=total)
    assert isinstance(policy, GatesAdmission)
    inside: list[Asked] = []
    for i, (prompt, answer) in enumerate(lengths):
        request = Asked(f"r{i}", 0.0, prompt, max_tokens=answer)
        need = min(-(-min(4096, prompt + answer) // 16), total)
        fits = sum(policy.reservation(r, ctx) for r in inside) + need <= total
        assert policy.admit(request, inside, ctx) == fits
        if fits:
            inside.append(request)
    assert sum(policy.reservation(r, ctx) for r in inside) <= total
    assert inside or not lengths


def test_no_preempt_lets_the_largest_run_alone() -> None:
    """A request that could fill more than the cache waits until the replica is empty, then runs."""
    policy, ctx = NoPreempt(), context(1, total=100)
    huge = Asked("huge", 0.0, 1000, max_tokens=3000)
    assert not policy.admit(huge, [running("small", 5)], ctx)
    assert policy.admit(huge, [], ctx)


def test_prefill_first_takes_whole_prompts() -> None:
    """Prompts are taken while the watermark stays free and the step's token budget holds them whole."""
    policy, ctx = PrefillFirst(watermark=0.1), context(3, total=100, free=50, run=1, budget=512)
    decoding, new = running("old", 400), Asked("new", 0.0, 300)
    assert isinstance(policy, PrefillsFirst)
    assert isinstance(policy, GatesAdmission)
    assert policy.admit(Asked("a", 0.0, 16 * 40), [decoding], ctx)  # over the budget, but alone; leaves 10 blocks
    assert not policy.admit(Asked("a", 0.0, 16 * 40 + 1), [decoding], ctx)  # one block too many
    assert policy.admit(Asked("b", 0.0, 212), [decoding, new], ctx)
    assert not policy.admit(Asked("b", 0.0, 213), [decoding, new], ctx)  # 300 + 213 > 512
    tight = context(3, total=100, free=42, run=1, budget=512)
    assert policy.admit(Asked("c", 0.0, 16 * 13), [decoding, new], tight)  # 42 - 19 - 13 leaves 10
    assert not policy.admit(Asked("c", 0.0, 16 * 13 + 1), [decoding, new], tight)


@given(
    st.integers(1, 1600), st.integers(0, 100), st.integers(0, 8), st.sampled_from([0, 0.01, 0.3]), st.integers(1, 2048)
)
def test_prefill_first_steps_agree_with_admission(
    prompt: int, free: int, run: int, watermark: float, budget: int
) -> None:
    """A step is one of prompts exactly if the head has a slot and would be admitted: no step is lost."""
    policy = PrefillFirst(watermark=watermark)
    ctx = context(1, total=100, free=free, run=run, seqs=8, budget=budget)
    head, inside = Asked("head", 0.0, prompt), [running(f"r{i}", 16 * i + 3) for i in range(run)]
    assert policy.admits_now(head, ctx) == (run < 8 and policy.admit(head, inside, ctx))


def test_prefill_first_halts_decodes() -> None:
    """While prompts can be taken in, running answers get no token; they go on when no prompt waits."""
    replica = Replica(PrefillFirst(), blocks=200, budget=64)
    replica.run([Asked(f"r{i}", i * 0.05, 60, max_tokens=4) for i in range(3)])
    assert replica.served[:4] == [["r0"], ["r1"], ["r2"], ["r0", "r1", "r2"]]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=20),
)
def test_sarathi_serves_decodes_first(rows: list[tuple[int, int, int]]) -> None:
    """Decodes stand before prompts that were begun, each in the order of arrival."""
    policy = Sarathi()
    assert isinstance(policy, OrdersRunning)
    batch = [
        Asked(f"r{i:02}", float(at), prompt, num_computed_tokens=min(done, prompt - 1))
        for i, (at, prompt, done) in enumerate(rows)
    ]
    batch.sort(key=lambda request: policy.running_key(request, context(0)))
    begun = [request.num_tokens - request.num_computed_tokens > 1 for request in batch]
    assert begun == sorted(begun)
    for partial in (False, True):
        arrivals = [
            request.arrival_time for request, is_partial in zip(batch, begun, strict=True) if is_partial == partial
        ]
        assert arrivals == sorted(arrivals)


@settings(max_examples=50)
@given(BURSTS, st.integers(1, 200))
def test_sarathi_keeps_its_budget(burst: list[Asked], budget: int) -> None:
    """No step computes more than token_budget tokens, and running answers get theirs before any prompt."""
    policy = Sarathi(token_budget=budget)
    assert isinstance(policy, BudgetsTokens)
    replica = Replica(policy, blocks=400, budget=2048)
    todo = {request.request_id: request for request in burst}
    computed = dict.fromkeys(todo, 0)
    replica.waiting = list(burst)
    while replica.waiting or replica.running:
        decodes = [r.request_id for r in replica.running if r.num_tokens - r.num_computed_tokens == 1]
        replica.step()
        served = replica.served[-1]
        assert set(decodes) <= set(served) or len(served) == budget
        progress = {name: request.num_computed_tokens for name, request in todo.items()}
        assert sum(progress[name] - computed[name] for name in todo) <= budget
        computed = progress
