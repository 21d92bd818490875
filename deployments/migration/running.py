"""All of live migration on one replica, put together: what comes, what goes, the drain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, Protocol

import msgspec
import numpy as np

from deployments import metrics
from deployments.migration.departures import Departures, GivingKV
from deployments.migration.destination import Destination, DestinationKV
from deployments.migration.drain import Drain
from deployments.migration.messages import Answer, Give, Message, encode
from deployments.migration.sequences import Sequences
from deployments.settings import MigrationSettings
from policies.migration.standing import Standing

logger = logging.getLogger(f"ray.serve.{__name__}")

_give_decoder = msgspec.msgpack.Decoder(Give)


class KV(GivingKV, DestinationKV, Protocol):
    """Both halves of deployments/migration/engine_kv.py."""


class Fleet(Protocol):
    """The other replicas: calls to them, and what is known of those that serve."""

    async def ready(self, replica: str) -> None: ...
    async def call(self, replica: str, message: Message, parts: Many[np.ndarray]) -> Answer | None: ...
    def serving(self) -> list[Standing]: ...


class Migration:
    """Moves to and from the replica `replica`; `here` is its standing, `errored` says whether its engine is dead."""

    def __init__(
        self,
        replica: str,
        kv: KV,
        sequences: Sequences,
        fleet: Fleet,
        settings: MigrationSettings,
        here: Callable[[], Standing | None],
        errored: Callable[[], bool],
    ) -> None:
        self._replica = replica
        self.departures = Departures(replica, kv, sequences, fleet.call, fleet.ready, settings, errored)
        self.destination = Destination(kv, sequences, settings.limits, self._refusal, _count)
        self.draining = Drain(self.departures, sequences, here, self._others_of(fleet), settings)

    def destinations(self) -> list[str]:
        """Where the moves under way go, one entry for each."""
        return [move.destination for move in self.departures.under_way.values()]

    def _others_of(self, fleet: Fleet) -> Callable[[], list[Standing]]:
        return lambda: [standing for standing in fleet.serving() if standing.replica != self._replica]

    def _refusal(self) -> str | None:
        return "draining" if self.draining.on else None

    async def give(self, frame: bytes) -> bytes:
        """Carry out an order of the coordinator (`messages.Give`); returns `messages.Given`."""
        return encode(await self.departures.give(_give_decoder.decode(frame)))

    async def hear(self, frame: bytes, parts: Many[Any]) -> bytes:
        """Answer a message of another replica that gives a request to this one."""
        return await self.destination.hear(frame, parts)

    def close(self) -> None:
        """Stop everything where it is: leases free what is left."""
        self.draining.stop()
        self.departures.close()
        self.destination.close()


def _count(outcome: str, reason: str) -> None:
    """A move that ended on its destination without a word from its source."""
    logger.warning("migration outcome=%s why=%s: the source is silent", outcome, reason)
    metrics.moved("lease", outcome, reason)
