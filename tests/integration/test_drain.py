"""Replicas come, go and die under load, also in the middle of moves: no client's stream is cut or wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from .moves import ANSWERED_WITHIN_S, Load, Mover, Request, Unmoved, reading
from .probe import CallFailed
from .servers import MAX_NUM_SEQS, ROOT, Server, ray_environment, title, until
from .shapes import CHAT, STREAM, chat

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ENGINE, COORDINATOR = "VLLM::EngineCore", "ray::ServeReplica:tidegate:Coordinator"
#: A replica starts in half a minute; three at once on two cores take longer.
STARTED_WITHIN_S = 400.0
LIST: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array", "minItems": 25,
                                                                            "items": {"type": "integer"}}}}  # fmt: skip


def question(number: int, **more: Any) -> Request:
    """One long streamed answer of many."""
    content = f"Tell me about the number {number}."
    body = chat(messages=[{"role": "user", "content": content}], max_tokens=100, **STREAM)
    return Request(f"question{number}", CHAT, {**body, "ignore_eos": True, **more})


#: As many as one replica has places: greedy, seeded, with penalties, with a grammar.
QUESTIONS = [
    *(question(i) for i in range(3)),
    *(question(i, temperature=0.9, seed=i) for i in range(3, 6)),
    question(6, temperature=0.8, seed=6, presence_penalty=1.0, repetition_penalty=1.1),
    question(7, response_format=LIST, ignore_eos=False),
]


@pytest.fixture(scope="module")
def mover(elastic: Server) -> Iterator[Mover]:
    """The fleet's coordinator."""
    made = Mover(elastic)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unmoved(elastic: Server, mover: Mover) -> Unmoved:
    """Answers of the undisturbed fleet."""
    serve(mover, 2)
    made = Unmoved(elastic)
    made.learn(QUESTIONS)
    return made


def serve(mover: Mover, replicas: int, besides: Sequence[str] = ()) -> list[str]:
    """Wait until exactly so many replicas serve, and none of `besides`; returns their ids."""
    serving: list[str] = []

    def there() -> bool:
        try:
            serving[:] = mover.serving()
        except CallFailed:  # Serve gives no handle of an application while it changes its version
            return False
        return len(serving) == replicas and not set(serving) & set(besides)

    until(there, STARTED_WITHIN_S, f"{replicas} serving replicas", every=0.5)
    return serving


def deploy(elastic: Server, mover: Mover, change: Callable[[dict[str, Any]], None]) -> None:
    """`serve deploy` of the fleet's Serve file with a change to its application."""
    assert elastic.ray_dir is not None
    file = elastic.ray_dir / "serve_config.yaml"
    content = yaml.safe_load(file.read_text())
    change(content["applications"][0])
    file.write_text(yaml.safe_dump(content))
    serve_command = str(Path(sys.executable).with_name("serve"))
    command = [serve_command, "deploy", "--address", mover.probe.dashboard(), str(file)]
    env = {**os.environ, **ray_environment(elastic.ray_dir)}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=STARTED_WITHIN_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def engine_of(pid: int) -> psutil.Process:
    """The EngineCore of an engine replica's process."""
    (engine,) = (p for p in psutil.Process(pid).children(recursive=True) if ENGINE in title(p))  # others come and go
    return engine


def process(elastic: Server, mover: Mover, role: str, source: str, destination: str) -> psutil.Process:
    """The process that plays this part in a move from `source` to `destination`."""
    if role == "coordinator":
        return elastic.named(COORDINATOR)[0]
    side, _, engine = role.partition(" ")
    pid = mover.probe.pid(source if side == "source" else destination)
    return engine_of(pid) if engine else psutil.Process(pid)


@pytest.mark.parametrize(
    ("role", "after_s"),
    [
        pytest.param("source", 0.05, marks=pytest.mark.soak),
        ("source engine", 0.3),
        ("destination", 0.3),
        pytest.param("destination engine", 0.05, marks=pytest.mark.soak),
        ("coordinator", 0.1),
    ],
)
def test_kill_9_during_moves(elastic: Server, mover: Mover, unmoved: Unmoved, role: str, after_s: float) -> None:
    """Whoever of a move is killed whenever, all streams end as if nothing had been, and the fleet comes back."""
    source, destination = serve(mover, 2)
    victim = process(elastic, mover, role, source, destination)
    with ThreadPoolExecutor(1) as moving, mover.streams_on(source, QUESTIONS) as answers:
        moves = moving.submit(mover.move, source=source, destination=destination, count=MAX_NUM_SEQS)
        time.sleep(after_s)
        victim.kill()
        print(f"killed the {role} with {sum(not a.ended.is_set() for a in answers)} streams under way")
        assert not all(answer.ended.is_set() for answer in answers)
        moves.exception(timeout=120)  # the coordinator's call may fail with it; the streams may not
    unmoved.check(QUESTIONS, answers)
    serve(mover, 2)
    until(lambda: coordinates(mover), STARTED_WITHIN_S, "a coordinator that answers", every=0.5)
    until(mover.probe.idle, 60, "an idle fleet")
    assert len(set(mover.free().values())) == 1


def coordinates(mover: Mover) -> bool:
    """Whether the coordinator knows both replicas."""
    try:
        return len(mover.coordinator("state")["replicas"]) >= 2
    except CallFailed:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_sigterm_of_a_replica(elastic: Server, mover: Mover, unmoved: Unmoved, number: signal.Signals) -> None:
    """A replica that is told to end (as when its node drains) gives its streams away first; Serve starts another."""
    first, _ = serve(mover, 2)
    with mover.streams_on(first, QUESTIONS) as answers:
        os.kill(mover.probe.pid(first), number)
        until(lambda: first not in mover.serving(), 30, "the replica out of routing", every=0.02)
    unmoved.check(QUESTIONS, answers)
    until(lambda: first not in mover.serving() and len(mover.serving()) == 2, STARTED_WITHIN_S, "another", every=0.5)


def test_from_one_replica_to_three_and_back(elastic: Server, mover: Mover, unmoved: Unmoved) -> None:
    """`serve deploy` of another number of replicas under load: nothing is cut, all is right, and all replicas work."""

    def to(replicas: int) -> None:
        def change(application: dict[str, Any]) -> None:
            application["deployments"] = [{"name": "EngineReplica", "num_replicas": replicas}]

        deploy(elastic, mover, change)
        serve(mover, replicas)

    to(1)
    with Load(unmoved, elastic, QUESTIONS, clients=8) as load:
        until(load.more(4), ANSWERED_WITHIN_S, "answers of one replica")
        to(3)
        until(lambda: all(mover.load(name) for name in mover.serving()), 60, "all three work")
        until(load.more(8), ANSWERED_WITHIN_S, "answers of three replicas")
        to(1)
        until(load.more(4), ANSWERED_WITHIN_S, "answers of one replica")
    load.check()
    to(2)


def test_a_new_version_under_load(elastic: Server, mover: Mover, unmoved: Unmoved) -> None:
    """`serve deploy` of a new version replaces replicas and ingress under load: nothing is cut, all is right."""
    old = serve(mover, 2)

    def change(application: dict[str, Any]) -> None:
        application["args"]["ingress"]["max_queued_requests"] += 1

    with Load(unmoved, elastic, QUESTIONS, clients=6) as load:
        until(load.more(4), ANSWERED_WITHIN_S, "answers of the old version")
        deploy(elastic, mover, change)
        serve(mover, 2, besides=old)
        until(load.more(8), ANSWERED_WITHIN_S, "answers of the new version")
    load.check()


@pytest.mark.soak
def test_drains_and_moves_at_random(elastic: Server, mover: Mover, unmoved: Unmoved) -> None:
    """Half a minute of drains taken back at any moment, while streams move: all answers are right."""
    chance = random.Random(5)
    end = time.monotonic() + 30
    with Load(unmoved, elastic, QUESTIONS, clients=6) as load:
        while time.monotonic() < end:
            source, destination = chance.sample(serve(mover, 2), 2)
            mover.coordinator("drain", source)
            time.sleep(chance.uniform(0, 1.5))
            mover.coordinator("undrain", source)
            mover.move(source=source, destination=destination, count=chance.randint(1, 4))
    load.check()
    with reading(elastic, QUESTIONS[:1]) as answers:
        pass
    unmoved.check(QUESTIONS[:1], answers)
