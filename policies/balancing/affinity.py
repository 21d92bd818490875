"""Session affinity: a session stays where its prefix is cached, as long as that costs no more than a bound.

The replica of a session is its highest random weight over the replicas' ids (rendezvous hashing: Thaler and
Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on Networking 1998). No table is
kept, any number of routers agree, and a replica that comes or goes moves only the sessions that it gains or loses.
"""

from __future__ import annotations

import numpy as np

from policies.balancing.ties import Loads
from policies.fleet import FleetTable

_WORD = 2**64 - 1


def home(session: int, fleet: FleetTable) -> int:
    """The session's column: the largest of hash(session, replica), mixed by the finaliser of splitmix64."""
    mixed = fleet.id_hash.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64(session * 0xD1342543DE82EF95 & _WORD)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return int(mixed.argmax())


def stay(loads: Loads, best: int, fleet: FleetTable, session: int, bound_tokens: float) -> int:
    """The session's column if its load is at most `bound_tokens` of prefill above that of `best`, else `best`.

    Loads are iterations: a bound of so many tokens is bound_tokens / batch_tokens of them.
    """
    column = home(session, fleet)
    return column if loads[column] <= loads[best] + bound_tokens * fleet.per_batch[column] else best
