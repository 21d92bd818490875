"""Models named on the command line: `gamma:rate=5,cv=2` becomes `Gamma(rate=5.0, cv=2.0)`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

LEAST, MOST = 1e-6, 1e9  # what no rate, length or time exceeds, and floats can bear


def build(what: str, text: str, models: Mapping[str, type[Any]]) -> Any:
    """The model that `text` names, a dataclass of `models` with the parameters given; ValueError says what is wrong.

    `what` names the option in errors. Parameters are numbers, 0 or LEAST to MOST in size; those of a dataclass without
    default must be given.
    """
    name, _, rest = text.partition(":")
    if name not in models:
        raise ValueError(f"{what}: no model {name!r}; choose one of {', '.join(models)}")
    fields = {f.name: f for f in dataclasses.fields(models[name])}
    values: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in fields:
            raise ValueError(f"{what}: {name} has no parameter {part!r}; write {usage(name, models[name])}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{what}: {name}:{key} is {value!r}; give a number") from None
        if math.isfinite(number) and number and not LEAST <= abs(number) <= MOST:
            raise ValueError(f"{what}: {name}:{key} is {value}; give 0, or a number of {LEAST:g} to {MOST:g}")
        if fields[key].type == "int":
            if not number.is_integer():
                raise ValueError(f"{what}: {name}:{key} is {value!r}; give a whole number")
            number = int(number)
        values[key] = number
    missing = [key for key, f in fields.items() if f.default is dataclasses.MISSING and key not in values]
    if missing:
        raise ValueError(f"{what}: {name} needs {', '.join(missing)}; write {usage(name, models[name])}")
    try:
        return models[name](**values)
    except ValueError as error:
        raise ValueError(f"{what}: {name}: {error}") from None


def usage(name: str, model: type[Any]) -> str:
    """How to write the model: `gamma:rate=R,cv=1`."""
    parts = [
        f"{f.name}={'N' if f.default is dataclasses.MISSING else format(f.default, 'g')}"
        for f in dataclasses.fields(model)
    ]
    return ":".join(filter(None, (name, ",".join(parts))))


def within(name: str, value: float, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """ValueError naming the parameter unless low <= value <= high (low < value where `above`) and it is finite."""
    if not math.isfinite(value) or value > high or value < low or (above and value == low):
        least = f"> {low:g}" if above else f">= {low:g}"
        most = "" if math.isinf(high) else f" and <= {high:g}"
        raise ValueError(f"{name} is {value:g}; give a finite number {least}{most}")
