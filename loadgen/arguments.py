"""Types of command line arguments that say what they want when they are given something else."""

from __future__ import annotations

import argparse
import math


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


def _at_least(value: int, least: int, complaint: str) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} {complaint}")
    return value
