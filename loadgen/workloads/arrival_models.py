"""Arrival processes by name. Rates are mean requests per second, so one rate can be asked of every process.

`chat` and `code` have the burstiness of the Azure LLM inference traces of 2023 (conversation: a Poisson process whose
rate drifts; code: bursts of about 9 s and silence of about 27 s), at any rate. `functions` is the rate curve of papers
that replay Azure Functions at 20-80 requests/s; that trace is not shipped, the curve is a model of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from loadgen import arrivals
from loadgen.arrivals import Times
from loadgen.workloads import readers
from loadgen.workloads.specs import build, within


class Arrivals(Protocol):
    """Something that draws arrival times."""

    def times(self, n: int, rng: np.random.Generator, /) -> Times:
        """n sorted times, seconds from the start of the run."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals."""

    rate: float

    def __post_init__(self) -> None:
        within("rate", self.rate, 0, above=True)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """n arrivals."""
        return arrivals.poisson(n, self.rate, rng)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps with coefficient of variation `cv`: 0 is a metronome, 1 Poisson, 4 strong clumps."""

    rate: float
    cv: float = 2.0

    def __post_init__(self) -> None:
        within("rate", self.rate, 0, above=True)
        within("cv", self.cv, 0)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """n arrivals."""
        return arrivals.gamma(n, self.rate, self.cv, rng)


@dataclass(frozen=True, slots=True)
class Chat:
    """Azure conversation 2023: locally Poisson; the rate drifts from minute to minute, CV .22 inside an hour.

    The process has CV .28: minutes are correlated by .9, so an hour shows only part of it.
    """

    rate: float
    cv: float = 1.03

    def __post_init__(self) -> None:
        within("rate", self.rate, 0, above=True)
        within("cv", self.cv, 0)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """n arrivals."""
        low, high = self.rate / 3, self.rate * 3
        curve = arrivals.drifting(n, self.rate, 0.28, 60.0, 0.9, low, high, rng, self.cv)
        return arrivals.under_rate(n, curve, rng, self.cv)


@dataclass(frozen=True, slots=True)
class Code:
    """Azure code 2023: bursts of `on` s with CV 1.5, silence of `off` s with CV 1.5; four times the rate while on."""

    rate: float
    on: float = 9.0
    off: float = 27.0

    def __post_init__(self) -> None:
        for name in ("rate", "on", "off"):
            within(name, getattr(self, name), 0, above=True)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """n arrivals; gaps inside a burst have CV 2, which with the bursts gives the trace's counts per second."""
        peak = self.rate * (self.on + self.off) / self.on
        curve = arrivals.on_off(n, peak, self.on, 1.5, self.off, 1.5, rng)
        return arrivals.under_rate(n, curve, rng, cv=2.0)


@dataclass(frozen=True, slots=True)
class Functions:
    """A rate that wanders between 20/45 and 80/45 of `rate` in half a minute (CV .45), and clumps of gap CV `cv`."""

    rate: float = 45.0
    cv: float = 2.0

    def __post_init__(self) -> None:
        within("rate", self.rate, 0, above=True)
        within("cv", self.cv, 0)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """n arrivals."""
        low, high = self.rate * 20 / 45, self.rate * 80 / 45
        curve = arrivals.drifting(n, self.rate, 0.45, 30.0, 0.8, low, high, rng, self.cv)
        return arrivals.under_rate(n, curve, rng, self.cv)


@dataclass(frozen=True, slots=True)
class Step:
    """`rate` until second `at`, then `to`."""

    rate: float
    to: float
    at: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        within("rate", self.rate, 0)
        within("to", self.to, 0, above=True)
        within("at", self.at, 0)
        within("cv", self.cv, 0)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """n arrivals."""
        return arrivals.under_rate(n, [(self.at, self.rate), (math.inf, self.to)], rng, self.cv)


@dataclass(frozen=True, slots=True)
class Ramp:
    """From `rate` to `to` in `seconds`, then `to`."""

    rate: float
    to: float
    seconds: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        within("rate", self.rate, 0)
        within("to", self.to, 0, above=True)
        within("seconds", self.seconds, 0, above=True)
        within("cv", self.cv, 0)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """n arrivals."""
        return arrivals.under_rate(n, arrivals.ramp(self.rate, self.to, self.seconds), rng, self.cv)


@dataclass(frozen=True, slots=True)
class Square:
    """`high` for the share `duty` of each `period` (s), `low` for the rest."""

    low: float
    high: float
    period: float = 30.0
    duty: float = 0.5
    cv: float = 1.0

    def __post_init__(self) -> None:
        within("low", self.low, 0)
        within("high", self.high, 0, above=True)
        within("period", self.period, 0, above=True)
        within("duty", self.duty, 0, 1, above=True)
        within("cv", self.cv, 0)

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """n arrivals."""
        curve = arrivals.square(n, self.low, self.high, self.period, self.duty, self.cv)
        return arrivals.under_rate(n, curve, rng, self.cv)


ARRIVALS: dict[str, type[Any]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "chat": Chat,
    "code": Code,
    "functions": Functions,
    "step": Step,
    "ramp": Ramp,
    "square": Square,
}
TRACE = "trace:"


@dataclass(frozen=True, slots=True)
class Trace:
    """The times of a trace file, the first n of them; compressed to a mean of `rate` requests/s if that is given."""

    path: Path
    rate: float | None = None

    def times(self, n: int, rng: np.random.Generator) -> Times:
        """The first n times; ValueError if the trace has fewer."""
        workload = readers.read(self.path)
        if n > len(workload.requests):
            raise ValueError(f"arrivals: {self.path} has {len(workload.requests)} requests, {n} are wanted")
        workload = workload.first(n)
        workload = workload if self.rate is None else readers.at_rate(workload, self.rate)
        return np.asarray([r.due for r in workload.requests])


def arrival_model(text: str) -> Arrivals:
    """The process that `text` names, `gamma:rate=5,cv=2` say; ValueError says what is wrong.

    `trace:FILE` and `trace:FILE,rate=R` are the times of a trace.
    """
    if text.startswith(TRACE):
        path, comma, rate = text.removeprefix(TRACE).partition(",rate=")
        try:
            asked = float(rate) if comma else None
            if asked is not None:
                within("rate", asked, 0, above=True)
        except ValueError as error:
            raise ValueError(f"arrivals: trace: {error}; write {TRACE}FILE,rate=N") from None
        return Trace(Path(path), asked)
    model: Arrivals = build("arrivals", text, ARRIVALS)
    return model
