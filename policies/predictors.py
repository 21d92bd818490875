"""How long will the answer be? What policies that go by length may believe, and the ranker that learns it from a log.

Source of the idea that a rank is enough to schedule by: Fu et al., "Efficient LLM Scheduling by Learning to Rank"
(NeurIPS 2024). Ours is smaller: a linear model on hashed tokens, cheap enough to be asked about every request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from policies.registry import PolicyError, choice
from policies.types import Request

Floats = NDArray[np.float64]

PREDICTORS = ("oracle", "max_tokens", "learned")
FORMAT = 1  # of the arrays; a ranker file of another one must be trained again
_REMEDY = "`max_tokens` needs nothing, `learned` a trained ranker, `oracle` a hint in each request (evaluation only)."
_TRAIN = "Train the ranker again: `python -m loadgen train-predictor`."


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request that ended by itself: a line of a fleet's request log (JSON), and what the ranker learns from.

    `{"prompt_token_ids": [1, 2, 3], "max_tokens": 256, "output_tokens": 17}`: the prompt after templating, the limit
    that was in force, and the tokens generated (1 <= output_tokens <= max_tokens). `kind` is optional: any label, such
    as a tenant; whole kinds can be held out when the ranker is judged. Requests that a client broke off do not belong
    here: their length says nothing.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    output_tokens: int
    kind: str | None = None


class LengthPredictor(Protocol):
    """Guesses from a prompt how many tokens will be generated."""

    def predict(self, prompt_token_ids: Sequence[int], max_tokens: int) -> float:
        """Tokens, 1 <= guess <= max_tokens."""


@runtime_checkable
class UsesPredictor(Protocol):
    """A policy that goes by predicted lengths; who makes it loads `predictor_path`, if set, and hands in the ranker.

    `predictor` is that ranker or None; whoever queues requests asks it once, at arrival, and keeps its answer in
    `hints.predicted_tokens`.
    """

    predictor_path: str | None
    predictor: LengthPredictor | None

    def use_predictor(self, predictor: LengthPredictor) -> None:
        """Predict with this from now on."""


class Predicts:
    """The half of a policy that knows lengths: its parameters `predictor` and `predictor_path`, and the ranker."""

    predictor: LengthPredictor | None = None

    def __init__(self, predictor: str, predictor_path: str | None) -> None:
        self.predictor_name = choice("predictor", predictor, PREDICTORS, _REMEDY)
        if (predictor == "learned") != (predictor_path is not None) or predictor_path == "":
            raise PolicyError(
                "predictor_path must name the ranker's file (.npz) when predictor is `learned`, and must be left out"
                f" otherwise; got predictor `{predictor}`, predictor_path {predictor_path!r}.",
                "predictor_path",
            )
        self.predictor_path = predictor_path

    def use_predictor(self, predictor: LengthPredictor) -> None:
        """Predict with this from now on."""
        self.predictor = predictor

    def predicted_length(self, request: Request) -> float:
        """Tokens that the request is believed to generate in all."""
        return predicted_length(request, self.predictor_name)


def predicted_length(request: Request, predictor: str) -> float:
    """Tokens that the request is believed to generate in all; max_tokens where the predictor knows nothing of it."""
    known: float | None = None
    if predictor == "oracle":
        known = request.hints.output_tokens
    elif predictor == "learned":
        known = request.hints.predicted_tokens
    return request.max_tokens if known is None else known


def token_buckets(prompt_token_ids: Sequence[int], window: int, buckets: int) -> NDArray[np.uint64]:
    """Which hash buckets the prompt's tokens and pairs of neighbours fall into: ascending, each once.

    Only the first and the last `window` tokens are looked at (the request itself stands at one end of a long prompt);
    `buckets` is a power of two.
    """
    if len(prompt_token_ids) > 2 * window:
        ids = np.array([*prompt_token_ids[:window], *prompt_token_ids[-window:]], dtype=np.uint64)
    else:
        ids = np.array(prompt_token_ids, dtype=np.uint64)
    # Fibonacci hashing: the high bits of a product modulo 2^64 are well mixed.
    mixed = ids * np.uint64(0x9E3779B97F4A7C15)
    pairs = (mixed[:-1] ^ (ids[1:] + np.uint64(0x632BE59BD9B4E019))) * np.uint64(0xD1342543DE82EF95)
    found = np.concatenate((mixed, pairs)) >> np.uint64(65 - buckets.bit_length())
    found.sort()
    fresh = np.ones(found.size, np.bool_)  # numpy.unique does the same, four times as slowly
    np.not_equal(found[1:], found[:-1], out=fresh[1:])
    once: NDArray[np.uint64] = found[fresh]
    return once


@dataclass(frozen=True, slots=True, eq=False)
class LearnedPredictor:
    """log(tokens) = intercept + f(prompt length) + g(max_tokens) + sum of token weights / sqrt(their number).

    f and g are piecewise linear in the logarithm: values at ascending `knots` (log tokens), constant beyond the ends.
    `weights` has one number per hash bucket (a power of two); `window` as in token_buckets. The guess is bounded by 1
    and max_tokens.
    """

    intercept: float
    prompt_knots: Floats
    prompt_values: Floats
    limit_knots: Floats
    limit_values: Floats
    weights: Floats
    window: int

    def predict(self, prompt_token_ids: Sequence[int], max_tokens: int) -> float:
        """Tokens that an answer to this prompt will have, 1 <= guess <= max_tokens (>= 1)."""
        score = self.lengths_score(len(prompt_token_ids), max_tokens)
        if prompt_token_ids:
            found = self.weights[token_buckets(prompt_token_ids, self.window, self.weights.size)]
            score += float(found.sum()) / math.sqrt(found.size)
        return min(math.exp(min(max(score, 0.0), math.log(max_tokens))), float(max_tokens))

    def lengths_score(self, prompt_tokens: int, max_tokens: int) -> float:
        """log(tokens) as far as the two lengths tell: all that is known of the requests of a trace."""
        prompt = np.interp(math.log(max(prompt_tokens, 1)), self.prompt_knots, self.prompt_values)
        return self.intercept + float(prompt + np.interp(math.log(max_tokens), self.limit_knots, self.limit_values))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """What from_arrays takes: arrays by name, as numpy.savez stores them."""
        arrays: dict[str, NDArray[Any]] = {name: np.asarray(getattr(self, name)) for name in self.__slots__}
        return {"format": np.asarray(FORMAT), **arrays}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> LearnedPredictor:
        """The ranker that to_arrays gave; PolicyError names the array that is missing or cannot be right."""
        missing = [name for name in ("format", *cls.__slots__) if name not in arrays]
        if missing:
            raise _bad(f"the ranker has no array {', '.join(missing)}")
        if arrays["format"].shape != () or arrays["format"] != FORMAT:
            raise _bad(f"the ranker has format {arrays['format']}, this version reads {FORMAT}")
        window = arrays["window"]
        if window.shape != () or window.dtype.kind not in "iu" or window < 1:
            raise _bad(f"window must be one whole number >= 1, got {window}")
        weights = _finite("weights", arrays["weights"], 1)
        if weights.size < 2 or weights.size & (weights.size - 1):
            raise _bad(f"weights must be a power of two in number, >= 2, got {weights.size}")
        curves: dict[str, Floats] = {}
        for name in ("prompt", "limit"):
            knots, values = (_finite(f"{name}_{part}", arrays[f"{name}_{part}"], 1) for part in ("knots", "values"))
            if knots.size < 1 or knots.size != values.size or np.any(np.diff(knots) <= 0):
                raise _bad(f"{name}_knots must be ascending, and {name}_values as many, at least one")
            curves |= {f"{name}_knots": knots, f"{name}_values": values}
        intercept = float(_finite("intercept", arrays["intercept"], 0))
        return cls(intercept=intercept, weights=weights, window=int(window), **curves)


def _finite(name: str, array: NDArray[Any], dimensions: int) -> Floats:
    """A copy as float64 if it has so many dimensions and only finite numbers; else PolicyError."""
    if array.dtype.kind not in "fiu" or array.ndim != dimensions or not np.all(np.isfinite(array)):
        raise _bad(f"{name} must hold finite numbers in {dimensions} dimensions")
    return array.astype(np.float64)


def _bad(problem: str) -> PolicyError:
    return PolicyError(f"{problem}. {_TRAIN}", "predictor_path")
