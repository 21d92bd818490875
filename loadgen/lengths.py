"""Prompt and answer lengths of the SW-Chat and SW-Code traces, drawn from conditional quantile tables.

The chat trace is a mixture (prompts of about 700-1315 tokens have answers of about 400 tokens, all others of about
100), so the answer is drawn from a table of its own for each twentieth of the prompt distribution. Source of the
data: Azure LLM inference traces 2023 (Patel et al., "Splitwise", ISCA 2024), CC-BY 4.0; credit in the table file.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TABLES = Path(__file__).parent / "data" / "lengths.json"
# Each is one token of most vocabularies, after a space.
WORDS = ("river", "stone", "lamp", "cloud", "table", "winter", "paper", "garden", "music", "window", "bread", "train")
TRACE_CONTEXT = 8192  # tokens; the trace's models had this window, 99.95 % of its requests fit

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LengthTable:
    """Quantiles of one trace, in tokens: `outputs[b]` belongs to the b-th of equally likely prompt classes."""

    name: str
    p_input: npt.NDArray[np.float64]
    q_input: npt.NDArray[np.float64]
    p_output: npt.NDArray[np.float64]
    outputs: npt.NDArray[np.float64]
    mean_input: float
    mean_output: float

    def sample(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Draw n (prompt, answer) lengths, tokens, at least 1 each; independent from one request to the next."""
        u, v = rng.random(n), rng.random(n)
        prompts = np.interp(u, self.p_input, self.q_input)
        classes = len(self.outputs)
        which = np.minimum((u * classes).astype(np.int64), classes - 1)
        answers = np.empty(n)
        for b in range(classes):
            chosen = which == b
            answers[chosen] = np.interp(v[chosen], self.p_output, self.outputs[b])
        return _whole(prompts), _whole(answers)

    def scaled(self, n: int, context: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Draw n lengths for a model with a window of `context` tokens: both sides times context/8192.

        One factor for both keeps the prefill:decode ratio (chat 5.5:1, code 73:1), which cutting the prompts would
        not. The few that still do not fit lose prompt tokens.
        """
        return fit(*self.sample(n, rng), context, TRACE_CONTEXT)


def fit(prompts: IntArray, answers: IntArray, context: int, native: int) -> tuple[IntArray, IntArray]:
    """Lengths that were meant for a window of `native` tokens, for one of `context`: both sides times context/native.

    Never enlarged. The few that still do not fit lose prompt tokens, and answers longer than the window lose theirs.
    """
    if context < 2:
        raise ValueError(f"context: {context} tokens cannot hold a prompt and an answer; give at least 2")
    factor = min(1.0, context / native)
    prompts, answers = _whole(prompts * factor), _whole(answers * factor)
    answers = np.minimum(answers, context - 1)
    return np.minimum(prompts, context - answers), answers


def _whole(lengths: npt.NDArray[Any]) -> IntArray:
    whole: IntArray = np.maximum(np.rint(lengths), 1).astype(np.int64)
    return whole


def words(count: int, rng: np.random.Generator) -> str:
    """A text of so many random words, about one token each."""
    return " ".join(rng.choice(WORDS, count))


@functools.cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(TABLES.read_text())["tables"]
    return tables


def names() -> list[str]:
    """Names of the length tables."""
    return sorted(_tables())


def table(name: str) -> LengthTable:
    """The table `name` ("chat" or "code"); ValueError with the choices if there is none of that name."""
    try:
        t = _tables()[name]
    except KeyError:
        raise ValueError(f"lengths: no table {name!r}; choose one of {', '.join(names())}") from None
    return LengthTable(
        name=name,
        p_input=np.asarray(t["p_input"]),
        q_input=np.asarray(t["q_input"], float),
        p_output=np.asarray(t["p_output"]),
        outputs=np.asarray(t["q_output_by_input_bin"], float),
        mean_input=t["trace"]["mean_input"],
        mean_output=t["trace"]["mean_output"],
    )
