"""Types of command line arguments that say what they want when they are given something else."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import yaml

from policies.registry import PolicyError, Registry


def seed(text: str) -> int:
    """A whole number >= 0."""
    return _at_least(int(text), 0, "is no seed; give whole numbers >= 0")


def count(text: str) -> int:
    """A whole number >= 1."""
    return _at_least(int(text), 1, "is too few; give a whole number >= 1")


def whole(text: str) -> int:
    """A whole number >= 0."""
    return _at_least(int(text), 0, "is too few; give a whole number >= 0")


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


def out_file(text: str) -> Path:
    """A file that can be written, or made with its folders: said before the work, not after it."""
    path = Path(text)
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; name a file")
    _writable(path.parent)
    return path


def out_folder(text: str) -> Path:
    """A folder that can be written to, or made."""
    path = Path(text)
    _writable(path)
    return path


def model_folder(text: str) -> str:
    """A local folder with a model, as vLLM loads it."""
    if not os.path.isfile(os.path.join(text, "config.json")):
        raise argparse.ArgumentTypeError(f"{text!r} has no config.json; name the folder of a model")
    return text


def settings(text: str) -> dict[str, Any]:
    """The values of `key=value,...` as YAML reads them, 3e9 as a number too; ValueError if it is written otherwise."""
    return {key: _value(value) for key, value in (part.split("=") for part in text.split(",") if part)}


def policy(registry: Registry[Any], text: str) -> dict[str, Any]:
    """The spec of a policy written as `name` or `name:parameter=value,...`.

    A policy that wants the lengths of answers is told the true ones if its predictor is not given.
    """
    name, _, rest = text.partition(":")
    try:
        parameters = settings(rest)
        if "predictor" in registry.parameters(name):
            parameters.setdefault("predictor", "oracle")
        registry.make(name, **parameters)
    except PolicyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write a policy as name or name:parameter=value,...") from None
    return {"name": name, **parameters}


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{text!r} is no value") from None
    if not isinstance(value, str):
        return value
    try:
        number = float(value)  # YAML takes 3e9 for a text, and wants 3.0e+9
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def _writable(folder: Path) -> None:
    place = folder
    while not os.path.exists(place) and place != place.parent:  # as Path.exists, without its PermissionError
        place = place.parent
    if not os.path.isdir(place):
        raise argparse.ArgumentTypeError(f"{place} is no folder; name another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{place} cannot be written to; name another place")


def _at_least(value: int, least: int, complaint: str) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} {complaint}")
    return value
