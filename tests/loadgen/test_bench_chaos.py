"""`bench chaos` without a fleet: what counts as cut, wrong and hit, and what its checks find."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from loadgen.bench import chaos, chaos_figures
from loadgen.bench.chaos_figures import KINDS, Kill
from loadgen.bench.fleet_control import CallFailed
from loadgen.report import Steps
from loadgen.token_stream import TokenPrompt, TokenStream

PROMPT = TokenPrompt((1, 2), 3)


def answer(*ids: int, sent: float = 0.0, times: tuple[float, ...] = (), error: str = "", status: int = 200) -> Any:
    """An answer to PROMPT with these tokens, one a second if no times are given."""
    stream = TokenStream(PROMPT, sent, list(ids), list(times) or [sent + 1.0 + i for i in range(len(ids))], status)
    stream.finish, stream.error, stream.whole = "" if error else "length", error, not error
    stream.ended_at = max(stream.times, default=sent) + 0.1
    return stream


GOOD = answer(7, 8, 9)
KILLS = [Kill(kind, 1.5, hit=0 if kind == "coordinator" else 1, out_s=0.2, whole_s=30.0) for kind in KINDS]


def result(streams: list[Any], kills: list[Kill] = KILLS, again: list[Any] | None = None, serving: int = 2) -> Any:
    """Figures of a run with these streams."""
    return chaos_figures.figures({PROMPT.ids: GOOD}, again or [GOOD], streams, kills, Counter(), serving, 2)


def missed(found: dict[str, Any]) -> set[int]:
    """Numbers of the checks that are not met."""
    return {i for i, check in enumerate(found["checks"]) if not check["met"]}


@pytest.mark.parametrize(
    ("bad", "figure", "checks"),
    [
        pytest.param(answer(7, 8, error="cut"), "cut", {0}, id="cut"),
        pytest.param(answer(7, 8, 5), "wrong", {1}, id="wrong"),
        pytest.param(answer(7, 8), "wrong", {1}, id="short"),
        pytest.param(answer(error="status 503", status=503), "refused", {2}, id="refused"),
    ],
)
def test_bad_answers_are_told_apart(bad: Any, figure: str, checks: set[int]) -> None:
    """A cut answer with the right tokens is cut, not wrong; a whole one with others is wrong; a 503 is a refusal."""
    found = result([GOOD, bad])
    assert {name: found[name] for name in ("cut", "wrong", "refused")} == {
        **dict.fromkeys(("cut", "wrong", "refused"), 0), figure: 1}  # fmt: skip
    assert missed(found) == checks


def test_a_cut_answer_with_a_wrong_token_is_both() -> None:
    """Tokens are compared as far as they came."""
    assert missed(result([GOOD, answer(7, 5, error="cut")])) == {0, 1}


def test_an_undisturbed_run_meets_every_check() -> None:
    """All is met when every answer is the reference's."""
    assert missed(result([GOOD])) == set()


def test_what_makes_a_run_worthless_is_found() -> None:
    """No stream, a kind that was never killed, nobody hit, tokens that differ by themselves, a replica that is gone."""
    assert {0, 1} <= missed(result([]))
    assert missed(result([GOOD], kills=KILLS[:2])) == {3}
    assert missed(result([GOOD], kills=[Kill(kind, 0.5) for kind in KINDS])) == {3}
    assert missed(result([GOOD], again=[answer(7, 8, 5)])) == {4}
    assert missed(result([GOOD], serving=1)) == {5}


def test_recovery_is_the_time_to_the_next_token() -> None:
    """Streams under way at the kill are silent until their next token; those before, after or through are left out."""
    under_way = answer(7, 8, 9, times=(1.0, 5.0, 6.0))
    waiting = answer(7, times=(4.0,))
    lost = answer(7, times=(1.0,), error="cut")
    lost.ended_at = 9.0
    last_one = answer(7, 8, times=(1.0, 1.9))
    last_one.ended_at = 2.1
    early, late = answer(7, times=(1.0,)), answer(7, sent=3.0)
    found = chaos_figures.silences([under_way, waiting, lost, last_one, early, late], 2.0)
    assert found == [float("inf"), pytest.approx(3.0), pytest.approx(2.0)]


def test_hit_streams_are_the_most_silent() -> None:
    """Of the streams under way as many are taken as hit as the report counted; the others are told beside them."""
    slow, quick = answer(7, 8, 9, times=(1.0, 6.5, 7.0)), answer(7, 8, 9, times=(1.0, 1.7, 7.0))
    row = result([slow, quick], kills=[Kill("engine", 1.5, hit=1, out_s=0.2, whole_s=30.0)])["kills"]["engine"]
    assert (row["kills"], row["hit"]) == (1, 1)
    assert row["p50_next_token_s"] == pytest.approx(5.0)
    assert row["max_others_next_token_s"] == pytest.approx(0.2)


def test_prompts_are_of_every_kind_and_fit() -> None:
    """All samplings come, each prompt has ids of its own, and prompt and answer fit the window."""
    asked = chaos.prompts(24, np.random.default_rng(0))
    assert len({p.ids for p in asked}) == 24
    assert [p.body for p in asked[:4]] == list(chaos.SAMPLING)
    assert all(len(p.ids) + p.output_len <= chaos.ENGINE["max_model_len"] for p in asked)


class Fleet:
    """A fleet of two replicas with 3 requests each and a coordinator; each part is its own control, process and kill.

    A killed replica is out of routing at once and replaced after some looks, a killed coordinator silent for one call.
    """

    def __init__(self) -> None:
        self.replicas = ["r0", "r1"]
        self.born = 2
        self.killed: list[str] = []
        self.missing = 0
        self.silent = 0

    def named(self, title: str) -> list[Process]:
        kind = next(kind for kind, part in KINDS.items() if part == title)
        return [Process(self, kind, name) for name in (["c"] if kind == "coordinator" else self.replicas)]

    async def state(self) -> dict[str, dict[str, Any]]:
        if self.missing:
            self.missing -= 1
            if not self.missing:
                self.replicas.append(f"r{self.born}")
                self.born += 1
        return {name: {"state": "serving", "running": 2, "waiting": 1} for name in self.replicas}

    async def serving(self) -> list[str]:
        return sorted(await self.state())

    async def coordinator(self, method: str, **named: Any) -> Any:
        if self.silent:
            self.silent -= 1
            raise CallFailed("RayActorError: it died")
        if method == "state":
            return {}
        assert {named["source"], named["destination"]} <= set(self.replicas)
        return [{"outcome": "done", "reason": "moved"}] * named["count"]


class Process:
    """A process of the fleet above."""

    def __init__(self, fleet: Fleet, kind: str, name: str) -> None:
        self.fleet, self.kind, self.name = fleet, kind, name

    def kill(self) -> None:
        assert len(self.fleet.replicas) == 2
        self.fleet.killed.append(self.kind)
        if self.kind == "coordinator":
            self.fleet.silent = 1
        else:
            self.fleet.replicas.remove(self.name)
            self.fleet.missing = 3


def rampage(monkeypatch: pytest.MonkeyPatch, streams: list[Any], kills: int) -> tuple[Fleet, list[Kill], Counter[str]]:
    """Let the killer loose until it has killed so often, or for a while if that does not come."""
    for name, value in (("PAUSE_S", (0.0, 0.001)), ("MOVING_S", (0.0, 0.001)), ("POLL_S", 0.001)):
        monkeypatch.setattr(chaos, name, value)
    fleet, made, moves = Fleet(), list[Kill](), Counter[str]()

    async def play() -> None:
        ended = asyncio.Event()
        fleets: Any = fleet
        with Steps(Console(file=io.StringIO()), 1) as steps:
            rng = np.random.default_rng(0)
            killer = asyncio.create_task(chaos._kill(fleets, fleets, streams, ended, rng, made, moves, steps))
            for _ in range(2000 if kills else 50):
                if kills and len(made) >= kills:
                    break
                await asyncio.sleep(0.005)
            ended.set()
            await killer

    asyncio.run(play())
    return fleet, made, moves


def running() -> Any:
    """A stream that has begun and goes on."""
    return TokenStream(PROMPT, 0.0, [7], [1.0], 200)


def test_each_kind_is_killed_as_often_and_only_in_a_whole_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every three kills one is of each kind; moves precede each; recovery and those hit are noted."""
    fleet, kills, moves = rampage(monkeypatch, [running() for _ in range(chaos.BUSY)], kills=6)
    assert sorted(fleet.killed[:3]) == sorted(fleet.killed[3:6]) == sorted(KINDS)
    for kill in kills:
        lost = kill.kind != "coordinator"
        assert kill.hit == (3 if lost else 0)
        assert kill.whole_s > 0
        assert (kill.out_s <= kill.whole_s) == lost
    assert moves["done: moved"] >= chaos.MOVES * 2 * len(kills) - moves["RayActorError"] * chaos.MOVES
    assert moves["done: moved"] > 0


def test_nothing_is_killed_beside_too_few_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that wait for their first token or have ended do not count."""
    waiting = TokenStream(PROMPT, 0.0)
    streams = [*(running() for _ in range(chaos.BUSY - 1)), waiting, answer(7, 8, 9)]
    assert rampage(monkeypatch, streams, kills=0)[0].killed == []
