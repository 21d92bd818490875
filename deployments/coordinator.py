"""Coordinator: looks at all replicas' reports a few times a second and asks the crowded ones to give requests away.

One Serve deployment with one replica. It is never on the way of a token: when it dies, moves under way end without it,
and Serve starts another that begins with nothing but the reports.

Private name of Serve (contract-tested): `DeploymentHandle._init`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
from ray.serve.handle import DeploymentHandle

from deployments.coordination import HELP_S, Coordination, freest, inverted
from deployments.fleet_events import FleetEvents
from deployments.gauges import FleetGauges
from deployments.hints import tiers_of
from deployments.migration.messages import Give, Given, How, Moved
from deployments.router import FleetRouter
from deployments.routing import Heard, find_router
from deployments.settings import MigrationSettings
from deployments.wire import ReplicaReport
from policies.migration.pairing import Move

logger = logging.getLogger(f"ray.serve.{__name__}")

LEAST_S = 0.025  # between two looks at the fleet
WATCH_S = 0.25  # between two looks at who is there

_encode = msgspec.msgpack.Encoder().encode
_decode_given = msgspec.msgpack.Decoder(Given).decode


class Coordinator:
    """Moves by policy (`balance`, `defragment`, `tier`), moves and drains by hand, and the fleet's state.

    A replica that drains sees to its own requests. Refused questions raise ValueError, which names what there is.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engines: DeploymentHandle, settings: MigrationSettings, tiers: dict[str, Any]
    ) -> None:
        self._engines = engines
        engines._init()  # builds the handle's router, whose reports are wanted before the first call
        self._settings = settings
        self._plan = Coordination(settings, tiers_of(tiers))
        self._paused = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._events = FleetEvents()
        self._gauges = FleetGauges()
        self._watching = asyncio.create_task(self._watch_for_ever())
        self._ticking = asyncio.create_task(self._tick_for_ever()) if settings.enabled else None

    async def check_health(self) -> None:
        """Raise what ended its looking, so that Serve replaces this coordinator."""
        for task in (self._watching, self._ticking):
            if task is not None and task.done():
                task.result()

    async def move(
        self,
        rid: str | None = None,
        source: str | None = None,
        destination: str | None = None,
        count: int = 1,
        how: How = "live",
    ) -> list[dict[str, Any]]:
        """Move the request `rid`, or `count` requests of `source`, whatever cool-downs say; returns what became of it.

        Without `destination` they go to the freest other replica. An entry for each request that was tried: `rid`,
        `source`, `destination`, `outcome` (`done` if it moved), `reason`, and what the source says of it.
        """
        fleet = self._fleet()
        self._check_known(fleet, source, destination)
        if rid is None and source is None:
            raise ValueError(f"name the request (rid) or the replica that gives (source): {', '.join(sorted(fleet))}")
        if source is not None and source == destination:
            raise ValueError(f"source and destination are both {source!r}: name two of {', '.join(sorted(fleet))}")
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        sources = [source] if source is not None else [name for name in sorted(fleet) if name != destination]
        asked = [self._by_hand(fleet, name, destination, rid, count, how) for name in sources]
        outcomes = [outcome for answer in await asyncio.gather(*asked) for outcome in answer]
        if rid is None:
            return outcomes
        known = [outcome for outcome in outcomes if outcome["reason"] != "unknown"]
        if not known:
            raise ValueError(f"no replica has a request {rid!r}. Asked were: {', '.join(sources)}")
        return known

    async def drain(self, replica: str) -> None:
        """Let a replica take no more requests and give away those that it has, until `undrain`; it goes on running."""
        fleet = self._fleet()
        self._check_known(fleet, replica)
        others = [name for name, heard in fleet.items() if heard.report.state == "serving" and name != replica]
        if not others:
            raise ValueError(f"{replica!r} is the only replica that serves: add another one before you drain it")
        self._events.note("order", time.time(), f"{replica} was told to drain", replica)  # before what comes of it
        await self._engines.drain.remote(True, target_replica=replica)

    async def undrain(self, replica: str) -> None:
        """Let a replica that was drained by hand take requests again."""
        self._check_known(self._fleet(), replica)
        self._events.note("order", time.time(), f"{replica} was told to serve again", replica)
        await self._engines.drain.remote(False, target_replica=replica)

    async def pause(self, on: bool) -> None:
        """Make no moves by policy while on; those by hand and drains go on. Forgotten when the coordinator restarts."""
        self._paused = on
        self._events.note("order", time.time(), "moves by policy are paused" if on else "moves by policy go on")

    async def note(self, kind: str, text: str) -> None:
        """Put what somebody else did into the list of recent events."""
        self._events.note(kind, time.time(), text)

    async def state(self) -> dict[str, Any]:
        """Freeness table, moves under way, counts by reason and outcome, recent events, balancing settings in force."""
        fleet = self._fleet()
        state = self._plan.state(fleet.values(), time.monotonic())
        newest = max((heard.report for heard in fleet.values()), key=lambda r: r.settings_t, default=None)
        return {
            **state,
            "enabled": self._settings.enabled,
            "paused": self._paused,
            "events": self._events.recent(),
            "balancing": newest.settings if newest else None,
        }

    async def _watch_for_ever(self) -> None:
        while True:
            if (router := self._router()) is not None:
                router.listener = self._hear
                self._gauges.look(router.heard(), len(self._plan.under_way), time.monotonic())
                self._events.look({heard.report.replica: heard.report for heard in router.heard()}, time.time())
            await asyncio.sleep(WATCH_S)

    async def _tick_for_ever(self) -> None:
        least_s = min(self._settings.tick_s, LEAST_S)
        while True:
            router = self._router()
            if router is not None and not self._paused:
                self._tick(router, time.monotonic())
            await asyncio.sleep(least_s)
            try:
                async with asyncio.timeout(self._settings.tick_s - least_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    def _hear(self, report: ReplicaReport) -> None:
        """A higher tier that waits behind lower ones waits for no tick: its grace is short."""
        if inverted(report):
            self._loop.call_soon_threadsafe(self._wake.set)
        if self._events.is_news(report):
            self._loop.call_soon_threadsafe(self._events.hear, report, time.time())

    def _tick(self, router: FleetRouter, now: float) -> None:
        fleet = router.fresh(now)
        for number, move in self._plan.next_moves(fleet, now):
            logger.debug("asking %s to give a request to %s (%s)", move.source, move.destination, move.reason)
            room, count = list(move.room), move.requests
            give = Give(move.reason, move.destination, room=room, waiting_tier=move.waiting_tier, count=count)
            self._begin(self._give(number, move, give))
        for replica in self._plan.helped(fleet, now):
            self._begin(self._help(replica))

    def _begin(self, call: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _help(self, replica: str) -> None:
        try:
            await self._engines.expect_help.remote(self._settings.tier_grace_s, HELP_S, target_replica=replica)
        except Exception as error:  # it goes without: lower tiers make way at once
            logger.warning("%s cannot be told of room elsewhere: %s", replica, error)

    async def _give(self, number: int, move: Move, give: Give) -> Given | None:
        """Ask the source; None if it could not be asked. Not timed out, as the source carries on either way."""
        try:
            given = _decode_given(await self._engines.give.remote(_encode(give), target_replica=move.source))
        except Exception as error:  # whatever a replica raises, or its death: the next tick decides anew
            logger.warning("%s gave nothing to %s (%s): %s", move.source, move.destination, move.reason, error)
            self._plan.failed(number, move, time.monotonic())
            return None
        self._plan.ended(number, move, given, time.monotonic())
        self._events.moved(move, given, time.time())
        return given

    async def _by_hand(
        self, fleet: dict[str, Heard], source: str, destination: str | None, rid: str | None, count: int, how: How
    ) -> list[dict[str, Any]]:
        now = time.monotonic()
        standings = {name: self._plan.standing(heard.report, now) for name, heard in fleet.items()}
        destination = destination or freest(standings, source)
        if destination is None:
            raise ValueError(f"there is no other replica that serves: {source!r} can give to nobody")
        move = Move(source, destination, "hand", room=())
        give = Give("hand", destination, rid=rid, count=count, how=how)
        given = await self._give(self._plan.begin(move, now), move, give)
        if given is None:
            given = Given(0, [Moved(rid or "", "failed", "no_answer")])
        pair = {"source": source, "destination": destination}
        return [{**msgspec.structs.asdict(moved), **pair} for moved in given.outcomes]

    def _router(self) -> FleetRouter | None:
        return find_router(self._engines.deployment_name)

    def _fleet(self) -> dict[str, Heard]:
        router = self._router()
        return {heard.report.replica: heard for heard in router.heard()} if router is not None else {}

    def _check_known(self, fleet: dict[str, Heard], *replicas: str | None) -> None:
        for replica in replicas:
            if replica is not None and replica not in fleet:
                raise ValueError(f"no such replica: {replica!r}. There are: {', '.join(sorted(fleet)) or 'none'}")
