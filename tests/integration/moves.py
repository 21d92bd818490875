"""Moves requests of a running fleet by hand while clients read, and compares what they read with unmoved answers."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from .answers import Answer, canonical, differences, parse_events
from .probe import Probe
from .servers import Server, until
from .shapes import RESPONSES

#: A hop that nobody attaches to is aborted after 10 s; a busy machine takes some more.
FREED_WITHIN_S = 30.0
#: Longest answer of these tests on a busy machine.
ANSWERED_WITHIN_S = 240.0


class Request(NamedTuple):
    """One request; its name is part of the request id that the fleet gives it."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def trace(self) -> str:
        """The trace id that its client sends along."""
        return hashlib.md5(self.name.encode()).hexdigest()

    def owns(self, rid: str) -> bool:
        """Whether a sequence is one of this request's; vLLM's Responses API does not take ids from outside."""
        return f"-{self.name}-" in f"-{rid}" or (self.path == RESPONSES and rid.startswith("resp_"))

    @property
    def sequences(self) -> int:
        """Sequences that it runs; a prompt of token ids is one prompt."""
        prompt = self.body.get("prompt", "")
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return int(self.body.get("n", 1)) * (len(prompt) if several else 1)


@dataclass
class Reading:
    """An answer as it comes: status, headers, raw text so far; `leave` makes the client hang up at the next piece."""

    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    text: str = ""
    leave: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def read(self, url: str, request: Request) -> Reading:
        """Send the request and read to the end, or until told to leave."""
        headers = {"X-Request-Id": request.name, "traceparent": f"00-{request.trace}-00f067aa0ba902b7-01"}
        try:
            with httpx.stream(
                "POST", url + request.path, json=request.body, headers=headers, timeout=ANSWERED_WITHIN_S, verify=False
            ) as reply:
                self.status, self.headers = reply.status_code, reply.headers
                for chunk in reply.iter_text():
                    self.text += chunk
                    if self.leave.is_set():
                        break
        finally:
            self.ended.set()
        return self

    @property
    def pieces(self) -> int:
        """Events that have come."""
        return self.text.count("data: ")

    @property
    def form(self) -> dict[str, Any]:
        """All that must be equal to an unmoved answer."""
        answer = Answer(self.status, self.headers)
        if answer.kind == "text/event-stream":
            answer.events = parse_events(self.text)
        else:
            answer.body = json.loads(self.text)
        return canonical(answer)


@contextmanager
def reading(server: Server, requests: Sequence[Request]) -> Iterator[list[Reading]]:
    """Answers to these requests, all read at once; leaving the block waits for their ends, an error hangs up."""
    made = [Reading() for _ in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = [pool.submit(r.read, server.url, request) for r, request in zip(made, requests, strict=True)]
        try:
            yield made
        except BaseException:
            for one in made:
                one.leave.set()
            raise
        for future in futures:
            future.result(timeout=ANSWERED_WITHIN_S)


class Unmoved:
    """The answers of an undisturbed fleet, asked for once per request."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._forms: dict[str, dict[str, Any]] = {}

    def learn(self, requests: Sequence[Request]) -> None:
        """Ask those that are not known yet, all at once."""
        new = [request for request in requests if request.name not in self._forms]
        if not new:
            return
        with reading(self._server, new) as answers:
            pass
        for request, answer in zip(new, answers, strict=True):
            assert answer.status == 200, (request.name, answer.text)
            self._forms[request.name] = answer.form

    def form(self, request: Request) -> dict[str, Any]:
        """A known answer."""
        return self._forms[request.name]

    def differences(self, request: Request, answer: Reading) -> list[str]:
        """Where an answer is not the unmoved one."""
        if answer.status != 200:
            return [f"{request.name}: {answer.status} {answer.text[:300]}"]
        return [f"{request.name}{line}" for line in differences(self._forms[request.name], answer.form)][:10]

    def check(self, requests: Sequence[Request], answers: Sequence[Reading]) -> None:
        """Fail if an answer differs in anything."""
        found = [self.differences(request, answer) for request, answer in zip(requests, answers, strict=True)]
        assert not any(found), "\n".join(line for lines in found for line in lines)


class Mover:
    """The fleet's coordinator by its handle, and where the requests are."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.probe = Probe(server)

    def coordinator(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the coordinator."""
        return self.probe.call(method, *arguments, deployment="Coordinator", **named)

    def move(self, **named: Any) -> list[dict[str, Any]]:
        """Move requests by hand; one entry per move: rid, outcome, reason."""
        return self.coordinator("move", **named)

    def serving(self) -> list[str]:
        """Ids of the replicas that serve."""
        return sorted(name for name, report in self.probe.state().items() if report["state"] == "serving")

    def pair(self) -> tuple[str, str]:
        """The two replicas that serve."""
        until(lambda: len(self.serving()) == 2, ANSWERED_WITHIN_S, "two serving replicas", every=0.3)
        first, second = self.serving()
        return first, second

    def load(self, replica: str, figure: str = "running") -> int:
        """One figure of a replica's last report; 0 if it is gone."""
        return int(self.probe.state().get(replica, {}).get(figure, 0))

    def held(self, replica: str) -> int:
        """Requests that run or wait on a replica."""
        report = self.probe.state().get(replica, {"running": 0, "waiting": 0})
        return int(report["running"] + report["waiting"])

    def free(self) -> dict[str, int]:
        """Free KV blocks of each replica that serves."""
        return {name: r["free_blocks"] for name, r in self.probe.state().items() if r["state"] == "serving"}

    def settled(self, free: Mapping[str, int]) -> None:
        """Wait until nothing runs or waits anywhere and each replica has its blocks back."""
        until(lambda: self.probe.idle() and self.free() == free, FREED_WITHIN_S, f"idle, with {free} blocks free")

    @contextmanager
    def only(self, replica: str) -> Iterator[None]:
        """Inside the block new requests go to this replica, as all others drain."""
        others = [name for name in self.serving() if name != replica]
        for other in others:
            self.coordinator("drain", other)
        try:
            until(lambda: self.serving() == [replica], 30, "the others drain", every=0.02)
            yield
        finally:
            for other in others:
                self.coordinator("undrain", other)
            until(lambda: set(others) <= set(self.serving()), 30, "the others serve again", every=0.02)

    @contextmanager
    def streams_on(self, replica: str, requests: Sequence[Request]) -> Iterator[list[Reading]]:
        """Read these answers, all of whose sequences are on one replica when the block begins."""
        wanted = sum(request.sequences for request in requests)
        with ExitStack() as clients:
            with self.only(replica):
                answers = clients.enter_context(reading(self.server, requests))
                until(lambda: self.held(replica) == wanted, 60, f"{wanted} sequences on {replica}", every=0.02)
                until(lambda: all(a.pieces for a, r in zip(answers, requests, strict=True) if r.body.get("stream")),
                      60, "a token of each stream", every=0.01)  # fmt: skip
            yield answers

    def close(self) -> None:
        """End the probe."""
        self.probe.close()


class Load:
    """Clients that ask one known request after another until the block ends; each answer is compared.

    A share `leaving` of them hang up after a few pieces. `wrong` lists what was not answered as expected.
    """

    def __init__(
        self, unmoved: Unmoved, server: Server, requests: Sequence[Request], clients: int, leaving: float = 0
    ) -> None:
        self._unmoved, self._server, self._requests = unmoved, server, requests
        self._clients, self._leaving = clients, leaving
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._lock = threading.Lock()
        self.answered = self.left = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Load:
        self._futures = [self._pool.submit(self._client, number) for number in range(self._clients)]
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for future in self._futures:
            future.result(timeout=2 * ANSWERED_WITHIN_S)
        self._pool.shutdown()

    def check(self) -> None:
        """Fail if a stream was cut, refused or wrong."""
        assert not self.wrong, f"{len(self.wrong)} of {self.answered}:\n" + "\n".join(self.wrong[:20])
        assert self.answered > 0

    def more(self, answers: int) -> Callable[[], bool]:
        """Whether so many more answers have come since this call."""
        goal = self.answered + answers
        return lambda: self.answered >= goal

    def _client(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            request, answer = chance.choice(self._requests), Reading()
            leaves = chance.random() < self._leaving
            if leaves:
                threading.Timer(chance.uniform(0.05, 2), answer.leave.set).start()
            try:
                answer.read(self._server.url, request)
                found = [] if leaves else self._unmoved.differences(request, answer)
            except Exception as error:  # whatever it is, it is what a client would have seen
                found = [f"{request.name}: {error!r} after {answer.pieces} pieces"]
            with self._lock:
                self.answered += not leaves
                self.left += leaves
                self.wrong += found
