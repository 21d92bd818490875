"""Lengths by name: published means and shares, the paper's table and its code's Zipf, scaling, names and errors."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen import lengths
from loadgen.workloads.length_models import LENGTHS, TIER_BINS, Agents, Lengths, length_model

DRAWS = 100_000


def draw(spec: str, n: int = DRAWS) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of a model that is not one of sessions."""
    model = length_model(spec)
    assert not isinstance(model, Agents)
    return model.draw(n, np.random.default_rng(0))


def bins(total: np.ndarray) -> list[float]:
    """Shares of total lengths in the paper's bins."""
    return [float(((total >= low) & (total < high)).mean()) for low, high, _ in TIER_BINS]


def test_table_of_the_multi_tier_paper() -> None:
    """Total lengths fall into the paper's bins by its shares (the last has what is left), prompts are twice answers."""
    prompts, answers = draw("tier-table")
    assert bins(prompts + answers) == pytest.approx([0.65, 0.22, 0.10, 0.03], abs=0.005)
    assert prompts.sum() / answers.sum() == pytest.approx(2.0, rel=0.02)


def test_zipf_of_the_papers_code() -> None:
    """Zipf(64, 512, 1.2) as the paper's code draws it: 81.5, 11.3, 4.5 and 2.7 %, mean 106 tokens (our facts page)."""
    prompts, answers = draw("tier-zipf")
    total = prompts + answers
    assert bins(np.minimum(total, 511)) == pytest.approx([0.815, 0.113, 0.045, 0.027], abs=0.005)
    assert total.mean() == pytest.approx(106, abs=1.5)
    assert total.min() == 64
    assert total.max() <= 512


def test_long_answers_are_longer_than_prompts() -> None:
    """Means are those of ServeGen's reasoning model, answers exceed prompts."""
    prompts, answers = draw("long-answers")
    assert prompts.mean() == pytest.approx(1268, rel=0.03)
    assert answers.mean() == pytest.approx(1527, rel=0.03)


def test_traces_are_the_tables() -> None:
    """`chat` and `code` draw what the length tables draw."""
    for name in ("chat", "code"):
        expected = lengths.table(name).sample(100, np.random.default_rng(0))
        assert all((a == b).all() for a, b in zip(draw(name, 100), expected, strict=True))


@pytest.mark.parametrize(
    "spec", ["chat", "code", "tier-table", "tier-zipf", "long-answers", "fixed:prompt=600,answer=60"]
)
@pytest.mark.parametrize("context", [256, 1024, 2048])
def test_scaling_keeps_the_ratio_of_prefill_to_decode(spec: str, context: int) -> None:
    """Scaled lengths fit the window, and keep the ratio within 10 % as long as answers have 2 tokens on average."""
    model = length_model(spec)
    assert not isinstance(model, Agents)
    prompts, answers = model.draw(20_000, np.random.default_rng(1))
    p, a = lengths.fit(prompts, answers, context, model.context)
    assert (p + a).max() <= context
    assert min(p.min(), a.min()) >= 1
    if a.mean() > 2:
        assert p.sum() / a.sum() == pytest.approx(prompts.sum() / answers.sum(), rel=0.1)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("sharegpt", "choose one of chat"),
        ("fixed:prompt=1.5", "prompt is '1.5'; give a whole number"),
        ("fixed:prompt=0", "prompt is 0"),
        ("tier-zipf:theta=1", "theta is 1"),
        ("tier-table:ratio=-1", "ratio is -1"),
        ("agents:context=100", "context is 100"),
    ],
)
def test_wrong_specs_are_named(spec: str, complaint: str) -> None:
    """An unknown model and an impossible value are named."""
    with pytest.raises(ValueError, match="lengths") as raised:
        length_model(spec)
    assert complaint in str(raised.value)


@pytest.mark.parametrize("name", LENGTHS)
def test_every_model_has_defaults(name: str) -> None:
    """A bare name is enough, and every model knows its window."""
    model: Lengths | Agents = length_model(name)
    assert model.context >= 512
