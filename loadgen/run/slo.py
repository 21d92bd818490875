"""What counts as good: bounds on the waits of a request, one for all tiers or for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from loadgen.metrics import RequestRecord

NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in ms, as `vllm bench serve --goodput` has them; inf: none."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2el: float = math.inf

    def met(self, record: RequestRecord) -> bool:
        """Whether a request ended well and within all bounds; answers of one token have no time per token."""
        if record.outcome != "ok":
            return False
        tpot = record.tgt / (record.output_len - 1) if record.output_len > 1 else 0.0
        return record.ttft * 1e3 <= self.ttft and tpot * 1e3 <= self.tpot and record.latency * 1e3 <= self.e2el


Slos = Mapping[int | None, Slo]


def slos(texts: Iterable[str]) -> dict[int | None, Slo]:
    """`ttft=500,tpot=50` for all tiers, `0:ttft=200` for tier 0; None is the key of those without one of their own.

    Bounds of one tier may come in several texts. ValueError says what is wrong.
    """
    found: dict[int | None, Slo] = {}
    for text in texts:
        tier, colon, bounds = text.rpartition(":")
        if colon and not tier.isdecimal():
            raise ValueError(f"slo: {tier!r} is no tier; write [TIER:]ttft=MS,tpot=MS,e2el=MS")
        values: dict[str, float] = {}
        for part in bounds.split(","):
            name, equals, value = part.partition("=")
            if name not in NAMES or not equals:
                raise ValueError(f"slo: {part!r} is none of {', '.join(f'{name}=MS' for name in NAMES)}")
            try:
                values[name] = float(value)
            except ValueError:
                raise ValueError(f"slo: {name} is {value!r}; give milliseconds") from None
            if not values[name] > 0:
                raise ValueError(f"slo: {name} is {value} ms; give a number > 0")
        key = int(tier) if colon else None
        found[key] = replace(found.get(key, Slo()), **values)
    return found


def slo_of(known: Slos, tier: int | None) -> Slo | None:
    """The bounds of a tier; None if there are none."""
    return known.get(tier, known.get(None))
