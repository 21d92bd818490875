"""Prompt and answer lengths by name: the two Azure traces, the multi-tier paper's, long answers, agents, fixed.

Every model has a native context window (tokens); lengths are scaled from it to the window asked for, by one factor for
prompts and answers, so that the ratio of prefill to decode survives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from loadgen import lengths
from loadgen.lengths import TRACE_CONTEXT, IntArray
from loadgen.workloads.specs import build, within

# The paper's table 1, tokens of prompt and answer together; its shares sum to .99 and the last bin gets the rest.
TIER_BINS = ((64, 128, 0.65), (128, 256, 0.22), (256, 384, 0.10), (384, 512, 0.03))


class Lengths(Protocol):
    """Something that draws lengths."""

    @property
    def context(self) -> int:
        """The window that the lengths are meant for, tokens."""
        ...

    def draw(self, n: int, rng: np.random.Generator, /) -> tuple[IntArray, IntArray]:
        """n (prompt, answer) lengths in tokens, at least 1 each."""
        ...


@dataclass(frozen=True, slots=True)
class Chat:
    """SW-Chat: Azure conversation 2023, mean 1155/211 tokens."""

    context: ClassVar[int] = TRACE_CONTEXT

    def draw(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """n lengths."""
        return lengths.table("chat").sample(n, rng)


@dataclass(frozen=True, slots=True)
class Code:
    """SW-Code: Azure code 2023, mean 2048/28 tokens."""

    context: ClassVar[int] = TRACE_CONTEXT

    def draw(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """n lengths."""
        return lengths.table("code").sample(n, rng)


@dataclass(frozen=True, slots=True)
class TierTable:
    """The multi-tier paper's table 1: total length by its bins, uniform inside each; prompt `ratio` times the answer.

    The paper does not say how the total is split; 2:1 is what its code does.
    """

    ratio: float = 2.0
    context: ClassVar[int] = 512

    def __post_init__(self) -> None:
        within("ratio", self.ratio, 0, above=True)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """n lengths."""
        low, high, share = np.asarray(TIER_BINS).T
        chosen = rng.choice(len(share), n, p=share / share.sum())
        return split(rng.integers(low[chosen].astype(int), high[chosen].astype(int)), self.ratio)


@dataclass(frozen=True, slots=True)
class TierZipf:
    """What the multi-tier paper's code draws instead of its table: Vidur's Zipf generator, theta 1.2, 64-512 tokens.

    The generator is the quick one of Gray et al., "Quickly Generating Billion-Record Synthetic Databases" (SIGMOD
    1994), with Vidur's sums, which leave out the last term: exact Zipf would have 83 % instead of 81.5 % below 128.
    """

    theta: float = 1.2
    low: int = 64
    high: int = 512
    ratio: float = 2.0
    context: ClassVar[int] = 512

    def __post_init__(self) -> None:
        within("theta", self.theta, 0, above=True)
        if self.theta == 1:
            raise ValueError("theta is 1, where the generator is not defined; give 0.99 or 1.01")
        within("low", self.low, 2)
        within("high", self.high, self.low + 2)
        within("ratio", self.ratio, 0, above=True)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """n lengths."""
        items = self.high - self.low + 1
        zeta = float(np.sum(np.arange(1, items, dtype=float) ** -self.theta))
        eta = (1.0 - (2.0 / items) ** (1.0 - self.theta)) / (1.0 - 1.0 / zeta)
        u = rng.random(n)
        rank = (items * (eta * u - eta + 1.0) ** (1.0 / (1.0 - self.theta))).astype(np.int64)
        rank = np.where(u * zeta < 1.0 + 0.5**self.theta, 1, rank)
        rank = np.where(u * zeta < 1.0, 0, rank)
        return split(self.low + np.clip(rank, 0, items - 1), self.ratio)


@dataclass(frozen=True, slots=True)
class LongAnswers:
    """Reasoning: answers longer than prompts, mean 1268/1527 tokens as deepseek-r1 in ServeGen; lognormal.

    Only the means are ServeGen's; the coefficients of variation are ours.
    """

    prompt: float = 1268.0
    answer: float = 1527.0
    prompt_cv: float = 1.5
    answer_cv: float = 1.0
    context: int = 32768

    def __post_init__(self) -> None:
        for name in ("prompt", "answer", "prompt_cv", "answer_cv"):
            within(name, getattr(self, name), 0, above=True)
        within("context", self.context, 2)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """n lengths."""
        prompts, answers = (
            lognormal(self.prompt, self.prompt_cv, n, rng),
            lognormal(self.answer, self.answer_cv, n, rng),
        )
        return prompts, answers


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same lengths for every request."""

    prompt: int = 512
    answer: int = 128
    context: int = TRACE_CONTEXT

    def __post_init__(self) -> None:
        within("prompt", self.prompt, 1)
        within("answer", self.answer, 1)
        within("context", self.context, 2)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """n times the same."""
        return np.full(n, self.prompt, np.int64), np.full(n, self.answer, np.int64)


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions of tool calls: each turn's prompt is all that came before plus a tool's result; answers are short.

    A session has `turns` turns on average (geometric), every one `gap` seconds on average after the one before; its
    prompt begins with `system` tokens that all sessions of one of `kinds` kinds of agent share. Means are those of
    Mooncake's toolagent trace, 8596/182 tokens; the rest is ours. A turn is due at its time even if the one before has
    not been answered: the load is open.
    """

    system: int = 2048
    user: int = 248
    tool: int = 718
    answer: int = 182
    turns: float = 8.0
    gap: float = 6.0
    kinds: int = 4
    context: int = 131072

    def __post_init__(self) -> None:
        for name in ("system", "user", "tool", "answer", "kinds"):
            within(name, getattr(self, name), 1)
        within("turns", self.turns, 1)
        within("gap", self.gap, 0, above=True)
        within("context", self.context, self.system + self.user + self.answer)


def lognormal(mean: float, cv: float, n: int, rng: np.random.Generator) -> IntArray:
    """n lognormal whole numbers, at least 1."""
    sigma = math.sqrt(math.log1p(cv * cv))
    drawn: IntArray = np.maximum(np.rint(rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma, n)), 1).astype(
        np.int64
    )
    return drawn


def split(total: npt.NDArray[Any], ratio: float) -> tuple[IntArray, IntArray]:
    """Total lengths as (prompt, answer), the prompt `ratio` times the answer, at least 1 each."""
    answers = np.maximum(np.rint(total / (1.0 + ratio)), 1).astype(np.int64)
    return np.maximum(total.astype(np.int64) - answers, 1), answers


LENGTHS: dict[str, type[Any]] = {
    "chat": Chat,
    "code": Code,
    "tier-table": TierTable,
    "tier-zipf": TierZipf,
    "long-answers": LongAnswers,
    "agents": Agents,
    "fixed": Fixed,
}


def length_model(text: str) -> Lengths | Agents:
    """The lengths that `text` names, `fixed:prompt=64,answer=32` say; ValueError says what is wrong."""
    model: Lengths | Agents = build("lengths", text, LENGTHS)
    return model
