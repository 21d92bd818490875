"""A request that moves between replicas is answered as one that stays, and leaves nothing where it was."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from .answers import ask
from .moves import Load, Mover, Reading, Request, Unmoved, reading
from .probe import CallFailed
from .servers import MAX_NUM_SEQS, TIER_GRACE_S, Server, until
from .shapes import CHAT, COMPLETIONS, COUNTING, MESSAGES, RESPONSES, STREAM, chat, complete, message, respond
from .traces import check_moved_once, collecting, logged

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SOAK_S = 30.0
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
SAMPLED = {"temperature": 0.9, "seed": 5}
DETAILS = {"logprobs": True, "top_logprobs": 2}
NAMES: Any = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 12}},
    "required": ["names"],
    "additionalProperties": False,
}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "names", "schema": NAMES, "strict": True}}
TOOLS: Any = [{"type": "function", "function": {"name": "greet", "strict": True, "parameters": NAMES}}]
STORY: Any = [{"role": "user", "content": "Write a long story about a lighthouse."}]
#: The model goes on with the same two characters, each of several tokens.
EMOJI: Any = {
    "messages": [
        {"role": "user", "content": "Repeat: 🍕🦄🍕🦄🍕🦄🍕🦄"},
        {"role": "assistant", "content": "🍕🦄🍕🦄🍕🦄🍕🦄🍕🦄🍕🦄"},
    ],
    "add_generation_prompt": False,
    "continue_final_message": True,
}
#: Long enough for several moves. FIRST and SECOND have eight sequences each: what runs at once fits one replica.
KINDS = {
    "greedy": (CHAT, chat(max_tokens=90, ignore_eos=True, **DETAILS, **STREAM)),
    "seeded": (CHAT, {**chat(max_tokens=90, ignore_eos=True, **DETAILS, **STREAM), **SAMPLED}),
    "penalties": (
        CHAT,
        {
            **chat(max_tokens=90, ignore_eos=True, **STREAM),
            **SAMPLED,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
        },
    ),
    "min-tokens": (CHAT, chat(max_tokens=90, min_tokens=70, stop=[".", "\n"], **STREAM)),
    "stop": (COMPLETIONS, complete(prompt=COUNTING, max_tokens=120, stop=["27, 28"], logprobs=1, **STREAM)),
    "n2": (CHAT, {**chat(max_tokens=70, ignore_eos=True, n=2, **STREAM), **SAMPLED}),
    "whole": (CHAT, chat(max_tokens=90, ignore_eos=True, logit_bias={"504": -100, "30": 5}, **DETAILS)),
    "json-schema": (CHAT, chat(max_tokens=90, response_format=SCHEMA, **STREAM)),
    "json-seeded": (CHAT, {**chat(max_tokens=90, response_format=SCHEMA, **STREAM), **SAMPLED}),
    "tools": (CHAT, chat(max_tokens=90, tools=TOOLS, tool_choice="required", **STREAM)),
    "characters": (CHAT, chat(**EMOJI, max_tokens=70, ignore_eos=True, **DETAILS, **STREAM)),
    "responses": (RESPONSES, respond(max_output_tokens=90, ignore_eos=True, stream=True)),
    "messages": (MESSAGES, message(messages=STORY, max_tokens=90, stream=True)),
    "whole-completion": (COMPLETIONS, complete(prompt=["One", "Two"], max_tokens=90, ignore_eos=True, logprobs=1)),
}
REQUESTS = {name: Request(name, *kind) for name, kind in KINDS.items()}
FIRST, SECOND = list(REQUESTS.values())[:7], list(REQUESTS.values())[7:]


def of_length(tokens: int, **more: Any) -> Request:
    """A completion of a prompt of so many tokens."""
    prompt = [(7 * i + 13 * tokens) % 40_000 + 100 for i in range(tokens)]
    body = complete(prompt=prompt, max_tokens=100, ignore_eos=True, logprobs=1, **STREAM, **more)
    return Request(f"of-{tokens}-tokens", COMPLETIONS, body)


@pytest.fixture(scope="module")
def mover(pair: Server) -> Iterator[Mover]:
    """The coordinator of the two-replica fleet, moving nothing of its own accord."""
    made = Mover(pair)
    made.pair()
    made.coordinator("pause", True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unmoved(pair: Server) -> Unmoved:
    """Answers of the undisturbed fleet."""
    return Unmoved(pair)


@pytest.fixture(autouse=True)
def nothing_is_left(mover: Mover) -> Iterator[None]:
    """After each test nothing runs or waits on either replica and all KV blocks are free again."""
    until(mover.probe.idle, 60, "an idle fleet")
    free = mover.free()
    yield
    mover.settled(free)


def hop(mover: Mover, source: str, destination: str, count: int) -> list[str]:
    """Move up to so many requests; returns the ids of those that moved."""
    moves = mover.move(source=source, destination=destination, count=count)
    return [move["rid"] for move in moves if move["outcome"] == "done"]


def unended(answers: Sequence[Reading]) -> int:
    """Answers that are still under way."""
    return sum(not answer.ended.is_set() for answer in answers)


def to_and_fro(mover: Mover, places: tuple[str, str], answers: Sequence[Reading], pause_s: float = 0.1) -> Counter[str]:
    """Move everything to the other replica and back until all answers have ended; returns moves by request id."""
    source, destination = places
    moved: Counter[str] = Counter()
    while unended(answers):
        moved.update(hop(mover, source, destination, MAX_NUM_SEQS))
        source, destination = destination, source
        time.sleep(pause_s)
    return moved


@pytest.mark.parametrize("hops", [1, 5])
def test_moved_streams_are_the_unmoved_ones(mover: Mover, unmoved: Unmoved, hops: int) -> None:
    """Prompts of 50, 500 and 2,000 tokens, moved at once: text, log-probabilities, finish and usage are equal."""
    follow(mover, unmoved, [of_length(tokens) for tokens in (50, 500, 2000)], hops)


@pytest.mark.parametrize("hops", [2, pytest.param(5, marks=pytest.mark.soak)])
def test_a_long_stream_is_the_unmoved_one(mover: Mover, unmoved: Unmoved, hops: int) -> None:
    """The same for a prompt of 4,000 tokens."""
    follow(mover, unmoved, [of_length(4000)], hops)


def follow(mover: Mover, unmoved: Unmoved, requests: list[Request], hops: int) -> None:
    """Move requests so many times, each time after some more tokens, and compare."""
    unmoved.learn(requests)
    source, destination = mover.pair()
    with mover.streams_on(source, requests) as answers:
        for _ in range(hops):
            goals = [answer.pieces + 3 for answer in answers]
            until(lambda: all(a.pieces >= g for a, g in zip(answers, goals, strict=True)), 60, "tokens", every=0.01)  # noqa: B023
            left = len(requests)
            while left:  # a busy machine may let a move run out of time; the request stays and moves later
                left -= len(hop(mover, source, destination, left))
            source, destination = destination, source
        assert unended(answers)
    unmoved.check(requests, answers)


@pytest.mark.parametrize("requests", [FIRST, SECOND], ids=["sampling", "apis"])
def test_every_kind_of_request_moves(mover: Mover, unmoved: Unmoved, requests: list[Request]) -> None:
    """Whatever is asked of sampling, structure, stop strings and API survives being moved again and again.

    Streams and whole answers run together and move together, every sequence of them at least twice.
    """
    unmoved.learn(requests)
    places = mover.pair()
    with mover.streams_on(places[0], requests) as answers:
        moved = to_and_fro(mover, places, answers)
    unmoved.check(requests, answers)
    for request in requests:
        of_request = {rid: count for rid, count in moved.items() if request.owns(rid)}
        assert len(of_request) >= request.sequences, (request.name, moved)
        assert min(of_request.values()) >= 2, of_request


def test_cuts_inside_characters(pair: Server, mover: Mover, unmoved: Unmoved) -> None:
    """Text is equal wherever a move cuts the bytes of a character, and many cuts did fall inside one."""
    body = chat(**EMOJI, max_tokens=60, ignore_eos=True, return_token_ids=True, **STREAM)
    requests = [Request(f"cut{i}", CHAT, body) for i in range(4)]
    unmoved.learn(requests)
    (choice,) = unmoved.form(requests[0])["stream"]["choices"].values()
    inside = {i for i in range(1, 60) if decoded(pair, choice["token_ids"][:i]).endswith("\ufffd")}
    assert len(inside) >= 20, choice
    places = mover.pair()
    cuts: set[int] = set()
    while len(inside & cuts) < 8:
        with mover.streams_on(places[0], requests) as answers:
            source, destination = places
            while unended(answers):
                moves = mover.move(source=source, destination=destination, count=len(requests))
                cuts |= {move["tokens"] for move in moves if move["outcome"] == "done"}
                source, destination = destination, source
        unmoved.check(requests, answers)


def decoded(server: Server, tokens: list[int]) -> str:
    """Text of these tokens."""
    return ask(server.url, "/detokenize", {"tokens": tokens}).body["prompt"]


def test_a_waiting_request_moves(mover: Mover, unmoved: Unmoved) -> None:
    """A request that waits for a place on a full replica moves to one with room and is answered while others run on."""
    full = Request("full", CHAT, {**chat(**{**ENDLESS, "max_tokens": 400}), "temperature": 1, "n": MAX_NUM_SEQS})
    waits = Request("waits", CHAT, chat(max_tokens=20, ignore_eos=True, **STREAM))
    unmoved.learn([waits])
    source, destination = mover.pair()
    with ExitStack() as clients:
        with mover.only(source):
            (filler,) = clients.enter_context(reading(mover.server, [full]))
            until(lambda: mover.load(source) == MAX_NUM_SEQS, 60, "a full replica")
            (answer,) = clients.enter_context(reading(mover.server, [waits]))
            until(lambda: mover.load(source, "waiting") == 1, 60, "a waiting request")
        (rid,) = hop(mover, source, destination, 1)
        assert waits.name in rid
        until(answer.ended.is_set, 60, "the answer")
        assert mover.load(source) == MAX_NUM_SEQS
        assert not filler.ended.is_set()
        filler.leave.set()
    unmoved.check([waits], [answer])


def test_clients_that_leave_during_a_move(mover: Mover) -> None:
    """A client that hangs up at any moment of a move leaves nothing on either replica, and the move ends."""
    chance = random.Random(4)
    requests = [Request(f"leaves{i}", CHAT, chat(**ENDLESS)) for i in range(3)]
    source, destination = mover.pair()
    free = mover.free()
    for _ in range(5):
        with ThreadPoolExecutor(1) as moving, mover.streams_on(source, requests) as answers:
            moves = moving.submit(mover.move, source=source, destination=destination, count=len(requests))
            for answer in answers:
                time.sleep(chance.uniform(0, 0.08))
                answer.leave.set()
            outcomes = [move["outcome"] for move in moves.result(timeout=60)]
        assert set(outcomes) <= {"done", "cancelled", "aborted", "rolled_back"}
        mover.settled(free)


def test_a_drain_by_hand_cuts_nobody(pair: Server, mover: Mover, unmoved: Unmoved) -> None:
    """A drained replica gives all its streams away and gets no new one until the drain is taken back."""
    requests = [
        Request(f"drained{i}", CHAT, {**chat(max_tokens=100, ignore_eos=True, **STREAM), **SAMPLED, "seed": i})
        for i in range(MAX_NUM_SEQS)
    ]
    unmoved.learn(requests)
    drained, other = mover.pair()
    with reading(pair, requests) as answers:
        until(lambda: all(answer.pieces >= 3 for answer in answers), 60, "tokens of each stream")
        assert mover.load(drained)
        assert mover.load(other)
        mover.coordinator("drain", drained)
        until(lambda: mover.held(drained) == 0, 60, "an empty replica")
        assert unended(answers) == len(answers)
        assert ask(pair.url, CHAT, chat(max_tokens=2)).status == 200
        assert mover.probe.state()[drained]["state"] == "draining"
        assert mover.held(drained) == 0
    unmoved.check(requests, answers)
    mover.coordinator("undrain", drained)
    until(lambda: drained in mover.serving(), 30, "the replica serves again")
    with reading(pair, requests[:4]) as answers:
        until(lambda: mover.load(drained), 60, "requests on it")
        for answer in answers:
            answer.leave.set()


def test_a_loaded_replica_gives_to_an_idle_one(mover: Mover, unmoved: Unmoved) -> None:
    """Left to itself the coordinator spreads requests that stand on one replica, and their answers are right."""
    requests = [Request(f"skewed{i}", CHAT, chat(max_tokens=150 + i, ignore_eos=True, **STREAM)) for i in range(6)]
    unmoved.learn(requests)
    source, destination = mover.pair()
    with mover.streams_on(source, requests) as answers:
        mover.coordinator("pause", False)
        try:
            until(lambda: mover.load(destination) >= 2, 60, "two requests on the other replica")
        finally:
            mover.coordinator("pause", True)
        assert unended(answers) == len(answers)
    unmoved.check(requests, answers)
    assert mover.coordinator("state")["moves"]["balance"]["done"] >= 2


def test_a_higher_tier_gets_its_place_by_a_move(mover: Mover, unmoved: Unmoved) -> None:
    """A critical request that finds its replica full of background work is served there, as one of that work moves to
    the other replica: nothing is preempted, and all answers are the unmoved ones.
    """
    background = [
        Request(f"behind{i}", CHAT, chat(max_tokens=180 + i, ignore_eos=True, priority=3, **STREAM))
        for i in range(MAX_NUM_SEQS)
    ]
    critical = Request("critical", CHAT, chat(max_tokens=20, ignore_eos=True, priority=0, **STREAM))
    unmoved.learn([*background, critical])
    source, destination = mover.pair()
    preempted, moved = mover.load(source, "preemptions"), mover.coordinator("state")["moves"].get("tier", {})
    # The coordinator says so itself to a crowded replica; here it is on its way while the other one seems to drain.
    mover.probe.call("expect_help", TIER_GRACE_S, 60.0, deployment="EngineReplica", target_replica=source)
    with ExitStack() as clients:
        with mover.only(source):
            answers = clients.enter_context(reading(mover.server, background))
            until(lambda: mover.load(source) == MAX_NUM_SEQS, 60, "a full replica", every=0.02)
            answers += clients.enter_context(reading(mover.server, [critical]))
            until(lambda: mover.load(source, "waiting") == 1, 60, "a waiting request", every=0.02)
        assert answers[-1].pieces == 0
        mover.coordinator("pause", False)
        try:
            until(lambda: answers[-1].pieces > 1, 60, "the critical request's tokens", every=0.02)
        finally:
            mover.coordinator("pause", True)
        assert mover.load(source, "preemptions") == preempted
        assert mover.load(destination) >= 1
        assert unended(answers[:-1]) == MAX_NUM_SEQS
    unmoved.check([*background, critical], answers)
    assert mover.coordinator("state")["moves"]["tier"]["done"] > moved.get("done", 0)


def test_a_named_request_moves_and_is_traced(pair: Server, mover: Mover, unmoved: Unmoved) -> None:
    """The client's request id is enough to move a request, and source and ingress log the move with its trace id."""
    request = Request("traced", CHAT, chat(max_tokens=60, ignore_eos=True, **STREAM))
    unmoved.learn([request])
    source, destination = mover.pair()
    with mover.streams_on(source, [request]) as answers:
        (move,) = mover.move(rid=f"chatcmpl-{request.name}")
    unmoved.check([request], answers)
    assert (move["outcome"], move["source"], move["destination"]) == ("done", source, destination), move
    until(lambda: len(logged(pair, request.trace)) >= 2, 30, "a line of the source and one of the ingress", every=0.2)
    of_source, of_ingress = sorted(logged(pair, request.trace))
    assert f"migration request={move['rid']} " in of_source
    assert " outcome=done why=moved" in of_source
    assert f"moved request={move['rid']} " in of_ingress


def test_a_moved_stream_is_one_trace(pair: Server, mover: Mover) -> None:
    """Its spans are one tree under its client's, with the engines' times; that nobody took any before did no harm."""
    request = Request("spans", CHAT, chat(max_tokens=60, ignore_eos=True, **STREAM))
    source, destination = mover.pair()
    with collecting(pair) as collector:
        with mover.streams_on(source, [request]):
            (move,) = mover.move(rid=f"chatcmpl-{request.name}")
        until(lambda: len(collector.spans(request.trace)) >= 8, 60, "eight spans", every=0.2)
        check_moved_once(collector.spans(request.trace), source, destination, 60, move["tokens"])


def test_moves_of_nonsense_are_refused(mover: Mover) -> None:
    """A call that cannot mean anything says what is wrong with which value, and moves nothing."""
    first, second = mover.pair()
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("move", {"source": "nobody", "destination": first}, "nobody"),
        ("move", {"source": first, "destination": "nobody"}, "nobody"),
        ("move", {"source": first, "destination": first}, first),
        ("move", {"source": first, "destination": second, "count": 0}, "count"),
        ("move", {"rid": "no-such-request"}, "no-such-request"),
        ("drain", {"replica": "nobody"}, "nobody"),
        ("undrain", {"replica": "nobody"}, "nobody"),
    ]
    for method, named, said in calls:
        with pytest.raises(CallFailed, match=said) as caught:
            mover.coordinator(method, **named)
        assert caught.value.kind == "ValueError", (method, named)


def test_a_request_that_is_gone_is_no_error(mover: Mover) -> None:
    """Asked to move more than there is, the coordinator answers with what it did: nothing."""
    first, second = mover.pair()
    assert hop(mover, first, second, 3) == []


def test_soak(pair: Server, mover: Mover, unmoved: Unmoved) -> None:
    """Half a minute of moves, drains and clients that leave: every answer is right, and nothing is left."""
    chance = random.Random(20)
    requests = [*REQUESTS.values(), *(of_length(tokens) for tokens in (50, 500, 2000))]
    unmoved.learn(requests)
    files, moves = pair.shared_memory(), Counter[str]()
    end = time.monotonic() + SOAK_S
    with Load(unmoved, pair, requests, clients=8, leaving=0.2) as load:
        while time.monotonic() < end:
            source, destination = chance.sample(mover.pair(), 2)
            if chance.random() < 0.1:
                mover.coordinator("drain", source)
                time.sleep(chance.uniform(0, 2))
                mover.coordinator("undrain", source)
            else:
                count = chance.randint(1, MAX_NUM_SEQS)
                moves.update(m["outcome"] for m in mover.move(source=source, destination=destination, count=count))
                time.sleep(chance.uniform(0, 0.3))
    print(f"answered {load.answered}, left {load.left}, moves {dict(moves)}")
    load.check()
    assert moves["done"] > SOAK_S / 18, moves
    assert pair.shared_memory() == files
