"""Engine replicas that follow a script, the ingress over them, and the check that nothing is left behind."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from fastapi import FastAPI

from app.config import load_config
from app.config.keys import KeyEntry
from app.fleet_client import FleetEngineClient
from app.gate import Gate
from app.python_api import PythonApi
from app.reception import Reception
from app.request_log import RequestLog
from app.streams import Failover
from app.vllm_compat import RequestOutputKind, SamplingParams, build_openai_app, tokens_input
from deployments.delta_link import DeltaSender
from deployments.routing import NoReplicaError
from deployments.token_codec import decode_params
from deployments.wire import Delta, Outcome, Submit, ticket

from .asgi_client import Answer, ask

END = 2  # SmolLM2's <|im_end|>
PROMPT = [504, 3575, 282]


@dataclass
class Submission:
    """One run of a sequence on a replica as a script sees it: a call of `EngineReplica.generate`, or an adopted one."""

    submit: Submit
    params: SamplingParams
    fleet: ScriptedReplicas
    sent: int = 0
    state: str = "running"
    hop: int = 0
    replica: str | None = None
    parent: int = 0
    task: asyncio.Task[Outcome] | None = None
    attached: int = 0  # calls of `attach`

    def send(self, *ids: int, finish: str | None = None, **more: Any) -> None:
        """Send the next tokens of this run."""
        self.send_late(self.sent, *ids, finish=finish, **more)
        self.sent += len(ids)

    def send_late(
        self, start: int, *ids: int, epoch: int | None = None, finish: str | None = None, **more: Any
    ) -> None:
        """Send a delta that need not be the next one; the first of a hop says where it comes from."""
        s, sender = self.submit, self.replica
        if sender is not None:
            more |= {"sender": sender, "parent": self.parent}
            self.replica, self.parent = None, self.hop
        epoch = s.epoch if epoch is None else epoch
        self.fleet.link(s.reply_to, Delta(s.rid, epoch, start, list(ids), finish, hop=self.hop, **more))

    def move(self, replica: str, script: Script, hop: int | None = None) -> Outcome:
        """Let `replica` go on by `script`; what this run's call is to return."""
        hop = self.hop + 1 if hop is None else hop
        parent = self.parent if self.replica is not None else self.hop
        run = Submission(self.submit, self.params, self.fleet, self.sent, hop=hop, replica=replica, parent=parent)
        self.fleet.adopt(replica, script, run)
        return Outcome(self.sent, moved_to=replica, hop=hop)


Script = Callable[[Submission], Awaitable[Outcome]]


def says(ids: list[int], *, per_delta: int = 1) -> Script:
    """A script that sends these ids and the end token, so many per delta, within the request's max_tokens.

    Begun elsewhere, it sends the rest.
    """

    async def script(call: Submission) -> Outcome:
        wanted = [*ids, END][: call.params.max_tokens]
        finish = "stop" if wanted[-1] == END else "length"
        for start in range(call.sent, len(wanted), per_delta):
            call.send(*wanted[start : start + per_delta], finish=finish if start + per_delta >= len(wanted) else None)
            await asyncio.sleep(0)
        return Outcome(call.sent, finish)

    return script


def moves(replica: str, script: Script, *ids: int) -> Script:
    """A script that sends these tokens and then gives the sequence to `replica`, where `script` goes on."""

    async def moving(call: Submission) -> Outcome:
        if ids:
            call.send(*ids)
        return call.move(replica, script)

    return moving


async def silent(call: Submission) -> Outcome:
    """A script that never says anything."""
    await asyncio.Event().wait()
    raise AssertionError


def lost_with(error: Exception | Outcome, *first: int) -> Script:
    """A script that sends these tokens and then ends without the sequence's end."""

    async def script(call: Submission) -> Outcome:
        if first:
            call.send(*first)
            await asyncio.sleep(0.02)
        if isinstance(error, Outcome):
            return error
        raise error

    return script


class Response:
    """What a Serve handle's call returns: awaitable, cancellable."""

    def __init__(self, task: asyncio.Task[Outcome]) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, Outcome]:
        return asyncio.shield(self._task).__await__()

    def cancel(self) -> None:
        self._task.cancel()


class ScriptedReplicas:
    """Stands for the Serve handle: each submission runs the next script, the last one again and again.

    `adopted` are the runs of moved sequences; `gone` are replicas that the router no longer knows.
    """

    def __init__(self, link: Callable[[str, Delta], None], *scripts: Script) -> None:
        self.link = link
        self.scripts = list(scripts)
        self.calls: list[Submission] = []
        self.sessions: list[int | None] = []
        self.adopted: list[Submission] = []
        self.gone: set[str] = set()
        self.generate = _Method(self._generate)
        self.attach = _Method(self._attach)

    def _generate(
        self,
        frame: bytes,
        *,
        ticket: int,
        prompt_tokens: int,
        tier: int,
        session: int | None,
        trace: dict[str, str] | None,
    ) -> Response:
        submit = msgspec.msgpack.decode(frame, type=Submit)
        assert trace == submit.trace
        assert ticket == _ticket(submit)
        assert prompt_tokens == len(submit.prompt) + len(submit.output)
        assert tier == submit.priority
        call = Submission(submit, decode_params(submit.params), self, len(submit.output))
        script = self.scripts[min(len(self.calls), len(self.scripts) - 1)]
        self.calls.append(call)
        self.sessions.append(session)
        return Response(asyncio.get_running_loop().create_task(self._run(script, call)))

    def adopt(self, replica: str, script: Script, run: Submission) -> None:
        """Begin the run of a moved sequence on `replica`."""
        self.adopted.append(run)
        run.task = asyncio.get_running_loop().create_task(self._run(script, run))

    def _attach(self, rid: str, epoch: int, hop: int, *, target_replica: str) -> Response:
        return Response(asyncio.get_running_loop().create_task(self._outcome(rid, epoch, hop, target_replica)))

    async def _outcome(self, rid: str, epoch: int, hop: int, replica: str) -> Outcome:
        if replica in self.gone:
            raise NoReplicaError(f"replica {replica} is gone")
        for run in self.adopted:
            if (run.submit.rid, run.submit.epoch, run.hop) == (rid, epoch, hop) and run.task is not None:
                run.attached += 1
                return await run.task  # cancelling the call aborts the run
        return Outcome(0, fault="engine", message="unknown")

    async def _run(self, script: Script, call: Submission) -> Outcome:
        try:
            outcome = await script(call)
            call.state = "ended"
            return outcome
        except asyncio.CancelledError:
            call.state = "aborted"
            raise
        except Exception:
            call.state = "failed"
            raise

    @property
    def running(self) -> int:
        """Runs that neither ended nor were aborted."""
        return sum(call.state == "running" for call in self.calls + self.adopted)


class _Method:
    """A method of a Serve handle."""

    def __init__(self, remote: Callable[..., Response]) -> None:
        self.remote = remote


def _ticket(submit: Submit) -> int:
    return ticket(submit.rid, submit.epoch)


@dataclass
class Fleet:
    """A FleetEngineClient over scripted replicas and, where a test wants HTTP, the gate around vLLM's app."""

    client: FleetEngineClient
    replicas: ScriptedReplicas
    observed: list[tuple[int, int]]
    arguments: Namespace
    reception: Reception
    has_replica: bool = True
    _app: FastAPI | None = None

    @property
    def tokenizer(self) -> Any:
        """The default model's tokenizer."""
        return self.client.renderer.tokenizer

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        return cast(list[int], self.tokenizer.encode(text, add_special_tokens=False))

    async def app(self) -> FastAPI:
        """vLLM's app over the client."""
        if self._app is None:
            self._app = await build_openai_app(self.arguments, self.client)
        return self._app

    async def gate(self) -> Gate:
        """The public HTTP app."""
        return Gate(await self.app(), lambda: self.has_replica, 2**20, self.reception)

    async def python(self) -> PythonApi:
        """The API of Python handles."""
        return PythonApi((await self.app()).state, self.client, self.reception)

    async def post(self, path: str, body: dict[str, Any], **more: Any) -> Answer:
        """One HTTP request through the gate."""
        return await ask(await self.gate(), "POST", path, body, **more)

    def left(self) -> dict[str, int]:
        """What the client and the replicas still hold."""
        client = self.client
        held = {
            "streams": client._streams,
            "queued": client._queue,
            "collectors": client._collectors,
            "states": client._outputs.request_states,
            "parents": client._outputs.parent_requests,
            "external ids": {k: v for k, v in client._outputs.external_req_ids.items() if v},
            "tasks": [t for t in asyncio.all_tasks() if t.get_coro().__name__ == "run_stream"],  # type: ignore[union-attr]
        }
        counts = {"calls": self.replicas.running, **{name: len(what) for name, what in held.items()}}
        return {name: count for name, count in counts.items() if count}

    async def settle(self) -> dict[str, int]:
        """What is left after everything that is on its way has had its turn."""
        for _ in range(200):
            if not self.left():
                break
            await asyncio.sleep(0.005)
        return self.left()


class FleetMaker:
    """Makes fleets and checks at the end that they are empty."""

    def __init__(self, vllm_config: Any, arguments: Namespace) -> None:
        self._vllm_config = vllm_config
        self._arguments = arguments
        self._made: list[tuple[Fleet, DeltaSender | None]] = []

    async def __call__(
        self,
        *scripts: Script,
        over_zmq: bool = True,
        max_queued: int = 1000,
        tiers: dict[str, Any] | None = None,
        keys: list[KeyEntry] | None = None,
        ingress: dict[str, Any] | None = None,
        log: RequestLog | None = None,
        timeout_s: float | None = None,
        failover: Failover = Failover(max_attempts=3, timeout_s=5.0),  # noqa: B008  # frozen
    ) -> Fleet:
        """A fleet; without `over_zmq` deltas reach the client in the same loop turn.

        `tiers` and `ingress` are sections of the configuration.
        """
        config = load_config(
            {"ingress": {"max_queued_requests": max_queued, **(ingress or {})}, **({"tiers": tiers} if tiers else {})}
        )
        reception = Reception(config, keys or [])
        sender = DeltaSender(lambda endpoint: None) if over_zmq else None
        fleet: Fleet
        link = sender.send if sender is not None else lambda _, delta: fleet.client._on_deltas([delta])
        replicas, observed = ScriptedReplicas(link, *scripts), cast(list[tuple[int, int]], [])
        client = FleetEngineClient(
            self._vllm_config,
            cast(Any, replicas),
            "127.0.0.1",
            has_replica=lambda: fleet.has_replica,
            observe=lambda prompt, output: observed.append((prompt, output)),
            failover=failover,
            queue=reception.queue,
            default_tier=config.tiers.default_tier,
            timeout_s=timeout_s,
            log=log,
        )
        fleet = Fleet(client, replicas, observed, self._arguments, reception)
        self._made.append((fleet, sender))
        return fleet

    async def close(self) -> None:
        """Nothing may be left of any request."""
        for fleet, sender in self._made:
            left = await fleet.settle()
            fleet.client.close()
            if sender is not None:
                sender.close()
            assert not left


def params(**more: Any) -> SamplingParams:
    """Parameters of a stream."""
    return SamplingParams(**{"max_tokens": 500, "output_kind": RequestOutputKind.DELTA, **more})


async def collect(fleet: Fleet, sampling: SamplingParams | None = None, rid: str = "r") -> dict[int, Any]:
    """Text, token ids and reasons of each sequence of one request."""
    result: dict[int, Any] = {}
    async for output in fleet.client.generate(tokens_input(PROMPT), sampling or params(), rid):
        for sequence in output.outputs:
            text, ids, _ = result.get(sequence.index, ("", [], None))
            reasons = (sequence.finish_reason, sequence.stop_reason)
            result[sequence.index] = (text + sequence.text, ids + list(sequence.token_ids), reasons)
    return result
