"""Priority tiers: how many, how much KV cache is kept free for the higher ones, how long a lower one waits at most.

Source of the headroom: Llumnix (Sun et al., OSDI 2024), section 4.3, with K classes and exponential decay as in the
multi-tier paper; the cap is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.registry import PolicyError, number

MAX_TIERS = 16
SHORTEST_S = 0.001  # of a wait that lifts by a tier: steps of an engine take longer
AUTO_LAMBDA = 2.5  # of the multi-tier paper's code: lambda = 2.5 / (K - 1)


@dataclass(frozen=True, slots=True)
class Tiers:
    """K tiers, 0 the highest: `headroom[p]` is the share of the KV cache kept free for tier p, `aging_s[p]` the wait
    in seconds that lifts a request of tier p by one tier (inf: never).
    """

    headroom: tuple[float, ...]
    aging_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(seconds >= SHORTEST_S for seconds in self.aging_s):
            raise PolicyError(f"aging_s must be >= {SHORTEST_S:g} s, got {list(self.aging_s)}. 30 is usual.", "aging_s")
        if not 1 <= len(self.headroom) <= MAX_TIERS or len(self.aging_s) != len(self.headroom):
            raise PolicyError(f"there must be 1 to {MAX_TIERS} tiers, got {len(self.headroom)}. Merge some.", "tiers")

    def __len__(self) -> int:
        return len(self.headroom)

    def clamp(self, tier: int) -> int:
        """The tier that `tier` means: below 0 is 0, beyond the last is the last."""
        return min(max(tier, 0), len(self.headroom) - 1)

    def effective(self, tier: int, waited_s: float) -> int:
        """Tier of a request that has waited so long: one higher for each `aging_s`, at most 0."""
        return max(0, tier - math.floor(max(waited_s, 0.0) / self.aging_s[tier]))


def decaying_headroom(
    count: int, h_max: float = 0.20, decay: float | str = 1.0, cap: float = 0.35
) -> tuple[float, ...]:
    """Shares h_max * exp(-lambda * p) for p = 0 .. count - 1, scaled down together where their sum exceeds `cap`.

    h_max, cap: shares of the KV cache, 0 <= h <= 1; decay: lambda >= 0, or `auto` for 2.5 / (count - 1).
    """
    h_max = number("h_max", h_max, "It is the top tier's share of the KV cache; 0.2 is the default.", low=0, high=1)
    cap = number("cap", cap, "It bounds all headroom together; 0.35 is the default.", low=0, high=1)
    if decay == "auto":
        decay = AUTO_LAMBDA / max(count - 1, 1)
    rate = number("lambda", decay, "1 is the default; `auto` spreads it over the tiers.", low=0)
    shares = [h_max * math.exp(-rate * p) for p in range(count)]
    scale = min(1.0, cap / total) if (total := sum(shares)) > 0 else 1.0
    return tuple(share * scale for share in shares)


#: One tier: everything is equal, nothing is kept free.
SINGLE = Tiers(headroom=(0.0,), aging_s=(math.inf,))
