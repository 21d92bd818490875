"""Length tables: what is drawn has the statistics of the trace."""

from pathlib import Path

import numpy as np
import pytest

from loadgen import lengths
from loadgen.derive_lengths import CLASSES, derive, read_trace, write

DRAWS = 100_000
# Means of the traces as their data sheet states them (tokens).
PUBLISHED = {"chat": (1154.7, 211.1), "code": (2047.8, 27.9)}
TRACES = Path(__file__).parents[3] / "shared" / "workloads"


def ks_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference of two empirical distribution functions."""
    grid = np.union1d(a, b)
    fa, fb = (np.searchsorted(np.sort(x), grid, side="right") / len(x) for x in (a, b))
    return float(np.abs(fa - fb).max())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_mean_lengths_are_those_of_the_trace(name: str) -> None:
    """Drawn means are within 2 % (input) and 4 % (output) of the published ones."""
    prompts, answers = lengths.table(name).sample(DRAWS, np.random.default_rng(0))
    mean_in, mean_out = PUBLISHED[name]
    assert prompts.mean() == pytest.approx(mean_in, rel=0.02)
    assert answers.mean() == pytest.approx(mean_out, rel=0.04)


def test_chat_answers_depend_on_the_prompt_class() -> None:
    """Prompts of 750-1300 tokens get answers about four times as long as the others: the trace is a mixture."""
    prompts, answers = lengths.table("chat").sample(DRAWS, np.random.default_rng(1))
    middle = (prompts > 750) & (prompts < 1300)
    assert answers[middle].mean() > 3 * answers[~middle].mean()


def test_scaling_keeps_the_prefill_decode_ratio() -> None:
    """Lengths for a small window fit it and have the trace's ratio of prompt to answer tokens within 3 %."""
    prompts, answers = lengths.table("chat").scaled(DRAWS, 2048, np.random.default_rng(2))
    assert (prompts + answers).max() <= 2048
    assert min(prompts.min(), answers.min()) >= 1
    mean_in, mean_out = PUBLISHED["chat"]
    assert prompts.sum() / answers.sum() == pytest.approx(mean_in / mean_out, rel=0.03)


def test_a_tiny_window_still_gives_possible_requests() -> None:
    """Even a window of 2 tokens leaves room for a prompt and an answer."""
    prompts, answers = lengths.table("code").scaled(1000, 2, np.random.default_rng(3))
    assert set(prompts) == {1}
    assert set(answers) == {1}
    with pytest.raises(ValueError, match="context"):
        lengths.table("code").scaled(1, 1, np.random.default_rng(3))


def test_sampling_is_reproducible() -> None:
    """One seed gives one sequence, another seed another."""
    table = lengths.table("chat")
    a, b, c = (table.sample(50, np.random.default_rng(seed)) for seed in (7, 7, 8))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_unknown_table_names_the_choices() -> None:
    """Asking for a table that does not exist says which ones do."""
    with pytest.raises(ValueError, match="chat, code"):
        lengths.table("poems")


def test_credit_travels_with_the_table() -> None:
    """The committed table names its source, the licence with a link, and what was done to the data."""
    text = lengths.TABLES.read_text()
    for part in ("Splitwise", "creativecommons.org/licenses/by/4.0", "quantiles computed from"):
        assert part in text


def test_derived_table_reproduces_made_up_data(tmp_path: Path) -> None:
    """Deriving and sampling returns the distribution it was derived from, conditional part included."""
    rng = np.random.default_rng(4)
    prompts = rng.integers(10, 2000, 20_000)
    answers = np.where(prompts < 1000, rng.integers(5, 50, 20_000), rng.integers(300, 400, 20_000))
    write({"made_up": derive(prompts, answers, classes=20)}, tmp_path / "table.json")
    lengths._tables.cache_clear()
    original = lengths.TABLES
    try:
        lengths.TABLES = tmp_path / "table.json"
        drawn_in, drawn_out = lengths.table("made_up").sample(20_000, rng)
    finally:
        lengths.TABLES = original
        lengths._tables.cache_clear()
    assert ks_distance(drawn_in, prompts) < 0.03
    assert ks_distance(drawn_in + drawn_out, prompts + answers) < 0.03
    assert drawn_out[drawn_in < 900].max() <= 50


@pytest.mark.skipif(not TRACES.exists(), reason="the trace files are not part of the repository")
@pytest.mark.parametrize(("name", "file"), [("chat", "conv"), ("code", "code")])
def test_drawn_lengths_follow_the_trace_itself(name: str, file: str) -> None:
    """Distributions of prompts, answers and totals are within 0.03 (KS) of the trace file's."""
    trace_in, trace_out = read_trace(TRACES / f"AzureLLMInferenceTrace_{file}.csv")
    drawn_in, drawn_out = lengths.table(name).sample(DRAWS, np.random.default_rng(5))
    assert len(lengths.table(name).outputs) == CLASSES[name]
    for drawn, traced in ((drawn_in, trace_in), (drawn_out, trace_out), (drawn_in + drawn_out, trace_in + trace_out)):
        assert ks_distance(drawn, traced) < 0.03
