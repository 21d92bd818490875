"""Rows of a trace file that are no good: reported with their line and counted, never dropped in silence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadgen.workloads.workload import Request, Workload, by_due

SHOWN = 10
MOST_TOKENS = 10_000_000  # of one prompt or answer; more is a broken row
MOST_SECONDS = 4e11  # wall-clock seconds of year 14000, in microseconds by mistake


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: where it is, counted in `unit`s, and why."""

    line: int
    problem: str
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.unit} {self.line}: {self.problem}"


class BadTrace(ValueError):
    """A trace with more bad rows than allowed, or with none that is good; the message names the first of them."""


Rows = Iterable[Request | BadRow]
Reader = Callable[[Path], Rows]


def collect(path: Path, rows: Rows, *, kind: str, allowed: float, block_tokens: int, context: int) -> Workload:
    """The workload of the good rows, first one at second 0, sorted by time; at most a share `allowed` may be bad.

    `about` says what the trace was: file, format, bad rows with their lines (the first 10), rows out of order.
    """
    good: list[Request] = []
    bad: list[BadRow] = []
    for row in rows:
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            good.append(row)
    total = len(good) + len(bad)
    shown = [str(row) for row in bad[:SHOWN]]
    if bad and (len(bad) > allowed * total or not good):
        more = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise BadTrace(
            f"{path}: {len(bad)} of {total} rows cannot be used, more than the {allowed:.1%} allowed "
            f"(--skip-bad SHARE):\n  " + "\n  ".join(shown) + more
        )
    if not good:
        raise BadTrace(f"{path}: no request in it")
    late = sum(a.due > b.due for a, b in itertools.pairwise(good))
    about: dict[str, Any] = {
        "read": {
            "file": path.name,
            "format": kind,
            "rows": total,
            "bad_rows": len(bad),
            "bad": shown,
            "out_of_order": late,
        }
    }
    return Workload(from_zero(good), about, block_tokens, context)


def from_zero(requests: list[Request]) -> tuple[Request, ...]:
    """Sorted by time, the first at 0."""
    first = min(r.due for r in requests)
    return by_due(msgspec.structs.replace(r, due=r.due - first) for r in requests)


def whole(name: str, value: object, least: int = 0) -> int:
    """A whole number of tokens, from a number or its digits; ValueError names the field."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{name} is {_short(value)}, not a whole number")
    try:
        number = int(_plain(value))
    except ValueError:
        raise ValueError(f"{name} is {_short(value)}, not a whole number") from None
    if not least <= number <= MOST_TOKENS:
        raise ValueError(f"{name} is {number}; at least {least} and at most {MOST_TOKENS} is possible")
    return number


def seconds(name: str, value: object) -> float:
    """A finite time >= 0 in s, from a number or its digits; ValueError names the field."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{name} is {_short(value)}, not a number of seconds")
    try:
        number = float(_plain(value))
    except (ValueError, OverflowError):
        raise ValueError(f"{name} is {_short(value)}, not a number of seconds") from None
    if not 0 <= number <= MOST_SECONDS:
        raise ValueError(f"{name} is {number:g} s; at least 0 and at most {MOST_SECONDS:g} is possible")
    return number


def _plain(value: int | float | str) -> int | float | str:
    if isinstance(value, str) and "_" in value:
        raise ValueError("Python reads 1_000 as a number, no trace means it")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def checked(
    numbered: Iterable[tuple[int, Any]], parse: Callable[[Any], Request], unit: str = "line"
) -> Iterator[Request | BadRow]:
    """Each row parsed, or the ValueError that `parse` raised as a bad row; `unit`: what the numbers count."""
    for line, row in numbered:
        if isinstance(row, BadRow):
            yield row
            continue
        try:
            yield parse(row)
        except ValueError as error:
            yield BadRow(line, str(error), unit)
