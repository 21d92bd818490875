"""Empties a replica that is to go away: its sequences move to others, and what cannot is handed back in time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

from deployments.migration.departures import Departures
from deployments.migration.messages import Moved
from deployments.migration.sequences import Sequences
from deployments.settings import MigrationSettings
from policies.migration.handshake import State
from policies.migration.standing import Standing

logger = logging.getLogger(f"ray.serve.{__name__}")

BY_HAND_S = 60.0  # without progress
_AGAIN_S = 0.25


class Drain:
    """Moves everything away while it is on.

    `here()` is this replica's standing, None before its engine has figures; `fleet()` those of the replicas known to
    serve, itself left out. Sequences are handed back to their ingress (which sends them again elsewhere) `within_s`
    seconds after the start, or, by hand, when none has left for `BY_HAND_S`; only while another replica serves.
    """

    def __init__(
        self,
        departures: Departures,
        sequences: Sequences,
        here: Callable[[], Standing | None],
        fleet: Callable[[], Many[Standing]],
        settings: MigrationSettings,
    ) -> None:
        self._departures = departures
        self._sequences = sequences
        self._here = here
        self._fleet = fleet
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._moves: dict[asyncio.Task[Moved], str] = {}  # to where
        self._left = asyncio.Event()  # one has just moved
        self._give_up: float | None = None

    @property
    def on(self) -> bool:
        """Whether this replica is being emptied."""
        return self._task is not None

    def start(self, within_s: float | None = None) -> None:
        """Begin, or go on with another deadline; None: by hand."""
        self._give_up = None if within_s is None else self._loop.time() + within_s
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    def stop(self) -> None:
        """Keep what is still here; moves under way go on."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        here, since = len(self._sequences.running), self._loop.time()
        while True:
            self._left.clear()
            others = self._fleet() if self._sequences.running else []
            await self._round(others)
            now = self._loop.time()
            if (running := len(self._sequences.running)) < here or not running:
                since = now
            here = running
            give_up = since + BY_HAND_S if self._give_up is None else self._give_up
            if others and now >= give_up:
                self._hand_back()
            try:
                async with asyncio.timeout(_AGAIN_S):
                    await self._left.wait()
            except TimeoutError:
                pass

    async def _round(self, others: Many[Standing]) -> None:
        """Start the moves that the pairing allows now."""
        mine = self._here()
        if mine is None or not others or not self._sequences.running:
            return
        to = Counter(self._moves.values())
        mine = replace(mine, state="draining", outgoing=len(self._departures.under_way))
        fleet = [mine, *(replace(other, incoming=other.incoming + to[other.replica]) for other in others)]
        moves = [m for m in self._settings.pairing.moves(fleet) if m.source == mine.replica and m.reason == "drain"]
        if not moves:
            return
        try:
            candidates = await self._departures.candidates()
        except Exception:
            logger.exception("the engine does not tell its requests: none moves now")
            return
        for move in moves:
            victim = self._settings.victims.choose(move, candidates, self._departures.busy())
            if victim is None or (sequence := self._sequences.by_request(victim.request_id)) is None:
                continue
            task = self._departures.depart(victim, sequence, move.destination, "drain")
            self._moves[task] = move.destination
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Moved]) -> None:
        del self._moves[task]
        if not task.cancelled() and task.exception() is None and task.result().outcome == State.DONE.value:
            self._left.set()

    def _hand_back(self) -> None:
        for sequence in self._sequences.running:
            if not sequence.busy:
                logger.warning("drain: request %s could not move and is handed back", sequence.submit.rid)
                self._sequences.hand_back(sequence, "draining")
