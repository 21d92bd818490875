"""A bench's hand on its fleet, with a child process that only pretends to have joined it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from deployments.settings import make_policy
from loadgen.bench.fleet_control import BY_SESSION, CallFailed, FleetControl, sessions, settle
from loadgen.bench.servers import Server
from policies.balancing import BALANCING
from policies.fleet import FleetTable
from policies.types import Call

#: Answers: `state` by the replicas' states, which change with each question; `move` after the question behind it.
CHILD = """
import json, sys
kept, looks = None, 0
def say(number, failed, value):
    print("answer " + json.dumps([number, failed, value]), flush=True)
print("joined", flush=True)
for line in sys.stdin:
    number, whom, method, named = json.loads(line)
    if method == "fleet_state":
        looks += 1
        say(number, False, {"a": {"state": "serving"}, "b": {"state": "serving" if looks > 2 else "draining"}})
    elif method == "move":
        kept = number, named
    elif method == "end":
        sys.exit(3)
    elif method == "drain":
        say(number, True, "ValueError: no such replica")
    else:
        say(number, False, whom)
        if kept:
            say(kept[0], False, [kept[1]] if kept[1]["source"] == "a" else [])
"""


class Fleet(Server):
    """A server that is not there."""

    def gcs_address(self) -> str:
        return "nowhere:1"


@asynccontextmanager
async def joined(folder: Path) -> AsyncIterator[FleetControl]:
    """A control whose child is CHILD."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    fleet = Fleet("fleet", "http://nowhere", folder / "fleet.log", process)
    async with FleetControl(fleet, child=(sys.executable, "-c", CHILD)) as control:
        yield control


def test_answers_find_their_questions(tmp_path: Path) -> None:
    """A question may be answered after a later one; `move` gives the first entry, or says that there was none."""

    async def ask() -> None:
        async with joined(tmp_path) as control:
            for source in ("a", "b"):
                move = asyncio.create_task(control.move(source, "c", "stop_and_copy"))
                await asyncio.sleep(0)
                assert await control.coordinator("state") == "coordinator"
                if source == "a":
                    wanted = {"source": "a", "destination": "c", "count": 1, "how": "stop_and_copy"}
                    assert await move == wanted
                else:
                    with pytest.raises(CallFailed, match="no request of b"):
                        await move

    asyncio.run(ask())


def test_what_was_raised_is_told(tmp_path: Path) -> None:
    """A call that raised raises here, with its message; a child that ends fails every question, open or later."""

    async def ask() -> None:
        async with joined(tmp_path) as control:
            with pytest.raises(CallFailed, match="no such replica"):
                await control.coordinator("drain", replica="x")
            for method in ("end", "state"):
                with pytest.raises(CallFailed, match="the process that joined the fleet ended"):
                    await control.coordinator(method)

    asyncio.run(ask())


def test_waiting_for_replicas(tmp_path: Path) -> None:
    """`settle` returns the ids once enough serve, and gives the states when that does not come."""

    async def ask() -> None:
        async with joined(tmp_path) as control:
            assert await settle(control, 2, 30, every_s=0.01) == ["a", "b"]
            with pytest.raises(RuntimeError, match=r"not 3 serving.*'a': 'serving'"):
                await settle(control, 3, 0.05, every_s=0.01)

    asyncio.run(ask())


def test_a_session_stays_where_it_was_sent() -> None:
    """Every replica gets a session, and the router's own policy sends it there however loaded that replica is."""
    replicas = ["a1", "b2", "c3"]
    table, policy, rng = FleetTable(), make_policy(BALANCING, BY_SESSION), np.random.default_rng(0)
    for name in replicas:
        table.join(name)
    found = sessions(replicas)
    assert sorted(found) == replicas
    for name, session in found.items():
        for ticket in range(50):
            call = Call(900, session=zlib.crc32(session.encode()))
            assert table.ids[policy.choose(table, call, rng)] == name
            table.dispatch(zlib.crc32(f"{name}{ticket}".encode()), name, 900)
