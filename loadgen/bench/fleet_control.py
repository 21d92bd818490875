"""A bench's hand on the fleet that it measures: the Python handles of its application and of its coordinator.

The caller is a child process, one JSON line per question and per answer: who has joined one Ray cluster can join no
other, and Ray's threads have no place in a load client. Questions are answered as they get ready, not in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from loadgen.bench import servers
from loadgen.report import ROOT
from policies.balancing.affinity import home
from policies.fleet import FleetTable

How = Literal["live", "stop_and_copy", "recompute"]

#: Settings of the fleet under which a session stays on its replica, whatever the load: `sessions` names them.
BY_SESSION = {"policy": "sal", "affinity_tokens": 1e9}
SESSION_HEADER = "X-Session-ID"
_JOIN_TIMEOUT_S = 120.0
_CHILD = (sys.executable, "-m", "loadgen.bench.fleet_control")


class CallFailed(RuntimeError):
    """A handle call raised; the text is the class and the message of what it raised."""


class FleetControl:
    """Calls the handles of one fleet while the block lasts; times out with CallFailed. `child` is what joins it."""

    def __init__(self, fleet: servers.Server, timeout_s: float = 60.0, child: Sequence[str] = _CHILD) -> None:
        self._fleet = fleet
        self._command = child
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}

    async def __aenter__(self) -> FleetControl:
        self._log = self._fleet.log.with_suffix(".control.log").open("wb")
        self._child = await asyncio.create_subprocess_exec(
            *self._command,
            str(self._timeout_s),
            cwd=ROOT,
            env={**os.environ, **self._fleet.env, "RAY_ADDRESS": self._fleet.gcs_address()},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
        )
        self._reader = asyncio.get_running_loop().create_task(self._read())
        try:
            await asyncio.wait_for(self.state(), _JOIN_TIMEOUT_S)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._reader.cancel()
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            await asyncio.wait_for(self._child.wait(), 15)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        self._log.close()

    async def state(self) -> dict[str, dict[str, Any]]:
        """The last load report of each replica as the ingress has it: replica id -> `running`, `state`, ..."""
        state: dict[str, dict[str, Any]] = await self._call("fleet", "fleet_state")
        return state

    async def serving(self) -> list[str]:
        """Ids of the replicas that serve."""
        return sorted(name for name, report in (await self.state()).items() if report["state"] == "serving")

    async def coordinator(self, method: str, **named: Any) -> Any:
        """Call a method of the coordinator."""
        return await self._call("coordinator", method, **named)

    async def move(self, source: str, destination: str, how: How = "live") -> dict[str, Any]:
        """Move one request of `source`; returns its `outcome` and `reason`. CallFailed if there was none to move."""
        moves = await self.coordinator("move", source=source, destination=destination, count=1, how=how)
        if not moves:
            raise CallFailed(f"no request of {source} could be moved")
        first: dict[str, Any] = moves[0]
        return first

    async def _call(self, whom: str, method: str, **named: Any) -> Any:
        if self._reader.done():
            raise self._lost()
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps([number, whom, method, named]).encode() + b"\n")
        try:
            return await answer
        finally:
            del self._asked[number]

    async def _read(self) -> None:
        assert self._child.stdout is not None
        async for line in self._child.stdout:
            if not line.startswith(b"answer "):
                continue  # whatever else prints there
            number, failed, value = json.loads(line.removeprefix(b"answer "))
            if (answer := self._asked.get(number)) is not None and not answer.done():
                if failed:
                    answer.set_exception(CallFailed(value))
                else:
                    answer.set_result(value)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self._lost())

    def _lost(self) -> CallFailed:
        return CallFailed(f"the process that joined the fleet ended; its log: {self._log.name}")


async def settle(control: FleetControl, replicas: int, timeout_s: float, every_s: float = 0.5) -> list[str]:
    """Ids of the replicas once so many serve; RuntimeError with the states after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while len(serving := await control.serving()) != replicas:
        if time.monotonic() > deadline:
            states = {name: report["state"] for name, report in (await control.state()).items()}
            raise RuntimeError(f"after {timeout_s:.0f} s there are not {replicas} serving replicas: {states}")
        await asyncio.sleep(every_s)
    return serving


def sessions(replicas: Iterable[str]) -> dict[str, str]:
    """For each replica a session that a fleet with BY_SESSION balancing sends there, found as its router finds it."""
    table = FleetTable()
    for name in replicas:
        table.join(name)
    found: dict[str, str] = {}
    for i in itertools.count():
        session = f"bench-{i}"
        found.setdefault(table.ids[home(zlib.crc32(session.encode()), table)], session)
        if len(found) == len(table.ids):
            return found
    raise AssertionError("unreachable")


def main() -> None:
    """Answer questions from standard input until it closes."""
    from concurrent.futures import ThreadPoolExecutor

    import ray
    from ray import serve

    timeout_s = float(sys.argv[1])
    ray.init(log_to_driver=False, logging_level="ERROR")  # RAY_ADDRESS says where
    handles = {
        "fleet": serve.get_app_handle("tidegate"),
        "coordinator": serve.get_deployment_handle("Coordinator", "tidegate"),
    }

    def answer(line: str) -> None:
        number, whom, method, named = json.loads(line)
        failed = False
        try:
            value = getattr(handles[whom], method).remote(**named).result(timeout_s=timeout_s)
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            failed, value = True, f"{type(cause).__name__}: {cause}"
        print("answer " + json.dumps([number, failed, value]), flush=True)

    with ThreadPoolExecutor(8) as pool:
        for line in sys.stdin:
            pool.submit(answer, line)


if __name__ == "__main__":
    main()
