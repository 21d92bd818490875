"""What a request's hints are made of: its extra arguments, the promises of its tier, a policy's length predictor."""

from __future__ import annotations

import math
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np

from policies.predictors import LearnedPredictor, LengthPredictor
from policies.registry import PolicyError
from policies.tiers import SINGLE, Tiers
from policies.types import Hints

_PROMISES = ("ttft_slo_s", "tpot_slo_s")


class Hinted(Protocol):
    """The part of vLLM's Request that hints are made from; `priority` is the tier, clamped."""

    priority: int
    max_tokens: int
    sampling_params: Any
    prompt_token_ids: list[int] | None


def tiers_of(spec: dict[str, Any] | None) -> Tiers:
    """The tiers of a spec `{"headroom": [...], "aging_s": [... or null], ...}`; one tier if there is none."""
    if spec is None:
        return SINGLE
    aging = (math.inf if seconds is None else float(seconds) for seconds in spec["aging_s"])
    return Tiers(headroom=tuple(spec["headroom"]), aging_s=tuple(aging))


def extra_argument(request: Hinted, key: str) -> Any:
    """The value that `extra_args["tidegate"]` has for `key`; None where it has none, or is something else."""
    extra = request.sampling_params.extra_args if request.sampling_params else None
    ours = extra.get("tidegate") if extra else None
    return ours.get(key) if isinstance(ours, dict) else None


def hints_of(request: Hinted, spec: dict[str, Any] | None, predictor: LengthPredictor | None) -> Hints:
    """Hints of one request; `spec` is the tiers' as in `tiers_of`, with `ttft_slo_s` and `tpot_slo_s` if they promise.

    What a client sends is not trusted: a length that is no positive whole number is no hint.
    """
    tokens = extra_argument(request, "output_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        tokens = None
    ttft = tpot = None
    if spec is not None:
        ttft, tpot = (promises[request.priority] if (promises := spec.get(key)) else None for key in _PROMISES)
    predicted = predictor.predict(request.prompt_token_ids or (), request.max_tokens) if predictor else None
    return Hints(output_tokens=tokens, predicted_tokens=predicted, ttft_slo_s=ttft, tpot_slo_s=tpot)


def load_predictor(path: str) -> LearnedPredictor:
    """The trained ranker in an .npz file; PolicyError if it cannot be read or is none."""
    remedy = "Train one: `python -m loadgen train-predictor`, and put its file where every replica can read it."
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return LearnedPredictor.from_arrays(dict(arrays))
    except PolicyError as error:
        raise PolicyError(f"predictor_path {path}: {error}", "predictor_path") from None
    except (OSError, ValueError, TypeError, AttributeError, EOFError, BadZipFile) as error:
        raise PolicyError(f"predictor_path {path} cannot be read: {error}. {remedy}", "predictor_path") from None
