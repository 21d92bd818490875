"""Which replica a request goes to: each policy against its definition, ties and chance included."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.balancing import BALANCING, SAL, PowerOfTwoChoices
from policies.fleet import FleetTable
from policies.types import Call, EmptyFleetError

from .balancing_rig import FEW, MANY, assert_frequencies, chosen, fleet


@pytest.mark.parametrize("name", BALANCING.names())
def test_choices_repeat_with_the_seed(name: str) -> None:
    """One seed, one sequence of choices; whatever is chosen is a column."""
    table = fleet([(10, 0, 1)] * 7)
    first, again = (chosen(BALANCING.make(name), table, 200, seed=5) for _ in range(2))
    assert first == again
    assert set(first) <= set(range(7))
    other = chosen(BALANCING.make(name), table, 200, seed=6)
    assert name == "round_robin" or other != first


@pytest.mark.parametrize("name", BALANCING.names())
def test_one_or_no_replica(name: str) -> None:
    """A single replica is always chosen; an empty fleet is an error that says so."""
    assert set(chosen(BALANCING.make(name), fleet([(0, 99, 3)]), 5)) == {0}
    with pytest.raises(EmptyFleetError, match="no replica"):
        BALANCING.make(name).choose(FleetTable(), Call(100), np.random.default_rng(0))


@pytest.mark.parametrize("width", [FEW, MANY])
def test_random_is_uniform(width: int) -> None:
    """Each replica is as likely, whatever its load."""
    table = fleet([(i, i * 100, i % 3) for i in range(width)])
    assert_frequencies(chosen(BALANCING.make("random"), table, 4000), dict.fromkeys(range(width), 1 / width))


@pytest.mark.parametrize("name", ["sal", "least_requests", "infaas_pp", "llumnix", "tiered_sal"])
@pytest.mark.parametrize("width", [FEW, MANY])
def test_ties_are_uniform(name: str, width: int) -> None:
    """Of equally loaded replicas each is as likely; more loaded ones are never chosen."""
    tied = set(range(1, width, 2))
    table = fleet([(500, 0 if i in tied else 1, 0 if i in tied else 1) for i in range(width)])
    assert_frequencies(chosen(BALANCING.make(name), table, 4000), dict.fromkeys(tied, 1 / len(tied)))


@pytest.mark.parametrize("name", ["sal", "least_requests"])
@pytest.mark.parametrize("tied", [(0, 1), (0, MANY - 1), (MANY - 2, MANY - 1), (7, 8)])
def test_two_equals_are_found(name: str, tied: tuple[int, int]) -> None:
    """Two equally loaded replicas share the requests, wherever their columns are."""
    table = fleet([(500, 0 if i in tied else 1, 0 if i in tied else 1) for i in range(MANY)])
    assert_frequencies(chosen(BALANCING.make(name), table, 400), dict.fromkeys(tied, 0.5))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**32))
def test_round_robin_is_fair(width: int, rounds: int, seed: int) -> None:
    """In any number of whole rounds each replica is chosen equally often, in turn, from wherever it starts."""
    choices = chosen(BALANCING.make("round_robin"), fleet([(1, 0, 0)] * width), width * rounds, seed=seed)
    assert set(Counter(choices).values()) == {rounds}
    assert choices == [(choices[0] + i) % width for i in range(len(choices))]


def test_round_robin_survives_a_shrinking_fleet() -> None:
    """Columns that vanish between two choices are never chosen."""
    policy, rng = BALANCING.make("round_robin"), np.random.default_rng(0)
    for width in (9, 4, 4, 2, 1, 5):
        assert 0 <= policy.choose(fleet([(1, 0, 0)] * width), Call(10), rng) < width


def test_p2c_takes_the_better_of_two() -> None:
    """Two different replicas are drawn, each pair as likely, and the one with fewer own calls in flight wins."""
    inflight = [4, 0, 3, 1, 2]
    table = fleet([(100, 0, calls) for calls in inflight])
    pairs = len(inflight) * (len(inflight) - 1) / 2
    beats = {i: sum(calls < other for other in inflight) / pairs for i, calls in enumerate(inflight)}
    choices = chosen(PowerOfTwoChoices(), table, 4000)
    assert_frequencies(choices, beats)
    assert 0 not in choices  # the worst of all is the worse of any two


def test_p2c_ties_are_uniform() -> None:
    """Equal replicas are equally likely, although the first of a pair wins ties."""
    table = fleet([(100, 0, 2)] * FEW)
    assert_frequencies(chosen(PowerOfTwoChoices(), table, 4000), dict.fromkeys(range(FEW), 1 / FEW))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(0, 2**32))
def test_least_requests_is_argmin(requests: list[int], seed: int) -> None:
    """The replica with the fewest requests is chosen, whoever sent them."""
    table = fleet([(1, 0, 0)] * len(requests), requests)
    (choice,) = chosen(BALANCING.make("least_requests"), table, 1, seed=seed)
    assert requests[choice] == min(requests)


@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 20_000), st.integers(0, 3)), min_size=1, max_size=MANY),
    st.lists(st.tuples(st.integers(0, MANY - 1), st.integers(0, 4000)), max_size=8),
    st.integers(0, 8192),
    st.sampled_from([0.5, 1.0, 6.5, 74.375]),
    st.sampled_from([512, 1024, 8192]),
    st.integers(0, 2**32),
)
def test_sal_is_argmin_of_its_load(
    figures: list[tuple[int, int, int]],
    uncovered: list[tuple[int, int]],
    prompt: int,
    beta: float,
    batch: int,
    seed: int,
) -> None:
    """SAL chooses a least max(beta * (memory - free), queued / batch), own uncovered calls counted in both."""
    table = fleet(figures, batch=batch)
    own = [0] * len(figures)
    for ticket, (replica, tokens) in enumerate(uncovered, start=10**6):
        if replica < len(figures):
            table.dispatch(ticket, f"r{replica}", tokens)
            own[replica] += tokens
    loads = [
        max(
            Fraction(beta) * (prompt - (16 * free - own[i])),
            Fraction(queued + own[i] + prompt, batch),
        )
        for i, (free, queued, _) in enumerate(figures)
    ]
    (choice,) = chosen(SAL(beta=beta), table, 1, seed=seed, prompt=prompt)
    assert loads[choice] == min(loads)


@given(st.integers(FEW, 16), st.integers(0, 4000), st.integers(0, 2**32))
def test_sal_counts_alike_for_few_and_many(few: int, prompt: int, seed: int) -> None:
    """The list and the array way of computing loads give the same numbers to the last bit."""
    rng = np.random.default_rng(seed)
    table = fleet([(int(rng.integers(0, 300)), int(rng.integers(0, 9999)), 0) for _ in range(few)], batch=1000)
    policy = SAL()
    assert policy.few_loads(table, prompt) == policy.loads(table, prompt).tolist()


def test_sal_spreads_a_burst_between_reports() -> None:
    """A burst that no report shows yet is spread evenly: own calls count at once."""
    table, policy, rng = fleet([(500, 0, 0)] * 4), SAL(), np.random.default_rng(3)
    for ticket in range(100):
        table.dispatch(10**6 + ticket, table.ids[policy.choose(table, Call(50), rng)], 50)
    assert table.inflight.tolist() == [25] * 4


def test_sal_prefers_a_queue_to_missing_memory() -> None:
    """Missing memory weighs beta per token: a prompt that does not fit goes to the longer queue that has room."""
    table = fleet([(10, 0, 0), (500, 8000, 0)])
    assert set(chosen(SAL(beta=6.47), table, 10, prompt=1000)) == {1}
    assert set(chosen(SAL(beta=6.47), table, 10, prompt=100)) == {0}


@pytest.mark.parametrize(("mean_in", "mean_out", "beta"), [(1154.7, 211.1, 6.47), (2047.8, 27.9, 74.4)])
def test_beta_of_the_papers_workloads(mean_in: float, mean_out: float, beta: float) -> None:
    """Fed with lengths of the Azure 2023 traces' means (SW-Chat, SW-Code), beta converges to the known values."""
    rng, policy = np.random.default_rng(11), SAL()
    for prompt, output in zip(rng.exponential(mean_in, 20_000), rng.exponential(mean_out, 20_000), strict=True):
        policy.observe(round(prompt), max(1, round(output)))
    assert policy.beta == pytest.approx(beta, rel=0.2)


@given(st.integers(1, 400), st.integers(0, 9000), st.integers(1, 4000))
def test_beta_forgets_its_prior_by_halves(half_life: int, prompt: int, output: int) -> None:
    """After half_life equal requests beta is half prior, half observed; after ten half-lives the prior is gone."""
    policy, seen = SAL(prior_beta=6.0, half_life=half_life), (prompt + output) / output
    assert policy.beta == 6.0
    for _ in range(half_life):
        policy.observe(prompt, output)
    assert policy.beta == pytest.approx((6.0 + seen) / 2)
    for _ in range(9 * half_life):
        policy.observe(prompt, output)
    assert policy.beta == pytest.approx(seen + (6.0 - seen) / 1024)


def test_beta_follows_a_change_of_traffic() -> None:
    """When chat turns into code completion, beta leaves the old value within a few half-lives."""
    policy = SAL(half_life=100)
    for _ in range(1000):
        policy.observe(1155, 211)
    assert policy.beta == pytest.approx(6.47, rel=0.01)
    for _ in range(1000):
        policy.observe(2048, 28)
    assert policy.beta == pytest.approx(74, rel=0.05)


def test_beta_stays_where_it_is_pinned() -> None:
    """A pinned beta does not learn, and a request without output teaches nothing."""
    pinned, learning = SAL(beta=3.0), SAL(prior_beta=4.0)
    pinned.observe(1000, 10)
    learning.observe(1000, 0)
    assert pinned.beta == 3.0
    assert learning.beta == 4.0
