"""What the ingress knows about the request that it is serving: it travels beside vLLM's serving classes, not through.

They know one integer `priority` and no key; the tier, the session, the limits and the fate of a request travel in a
context variable, which every task that serves the request inherits.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.rate_limits import Charge
    from app.request_span import RequestSpan


@dataclass(slots=True, eq=False)
class Incoming:
    """One request of a client, whatever number of prompts and sequences it has.

    `tier`: 0 the highest; `session`: a stable number of the client's session; `charge`: the rate limits that it is
    under. `error`: before its first output, for the gate to turn into a status; `span`: what is recorded of it, if
    anything. `admitted`: it has passed admission;
    `wanted`: the sequences it was admitted for; `begun`: a sequence of it has a token; `rids`: those that run;
    `began`: monotonic seconds of its arrival here.
    """

    tier: int
    session: int | None = None
    tenant: str | None = None
    charge: Charge | None = None
    error: Exception | None = None
    span: RequestSpan | None = None
    admitted: bool = False
    wanted: int = 0
    begun: bool = False
    rids: set[str] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)


#: The request that the current task serves; None outside of any.
incoming: ContextVar[Incoming | None] = ContextVar("incoming", default=None)


def record_early(error: Exception) -> None:
    """Remember an error of the current request so that a stream that has not started gets a real status."""
    if (request := incoming.get()) is not None:
        request.error = error
