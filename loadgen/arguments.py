"""Types of command line arguments that say what they want when they are given something else."""

from __future__ import annotations

import argparse
import math
from typing import Any

import yaml

from policies.registry import PolicyError, Registry


def seed(text: str) -> int:
    """A whole number >= 0."""
    return _at_least(int(text), 0, "is no seed; give whole numbers >= 0")


def count(text: str) -> int:
    """A whole number >= 1."""
    return _at_least(int(text), 1, "is too few; give a whole number >= 1")


def positive(text: str) -> float:
    """A finite number > 0."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not possible; give a number > 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; give a number from 0 to 1")
    return value


def policy(registry: Registry[Any], text: str) -> dict[str, Any]:
    """The spec of a policy written as `name` or `name:parameter=value,...`.

    A policy that wants the lengths of answers is told the true ones if its predictor is not given.
    """
    name, _, rest = text.partition(":")
    try:
        parameters = {
            key: yaml.safe_load(value) for key, value in (part.split("=") for part in rest.split(",") if rest)
        }
        if "predictor" in registry.parameters(name):
            parameters.setdefault("predictor", "oracle")
        registry.make(name, **parameters)
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write a policy as name or name:parameter=value,...") from None
    return {"name": name, **parameters}


def _at_least(value: int, least: int, complaint: str) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} {complaint}")
    return value
