"""Messages of a move between replicas, and the order to give requests away (msgspec, msgpack arrays). No vLLM, no Ray.

What A asks of B is an event of B's machine, what B answers is one of A's (policies/migration/events.py); both travel by
class name and fields. KV blocks do not travel in here: they are arguments of the call beside the frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any, Literal

import msgspec

from deployments.wire import Submit
from policies.migration import destination as d
from policies.migration import events as e

How = Literal["live", "stop_and_copy", "recompute"]
Answer = e.Reserved | e.Refused | d.Stored | e.Committed | e.CommitRefused

_ASKS: dict[str, Callable[..., e.ToDestination]] = {
    kind.__name__: kind for kind in (e.Reserve, e.Write, e.Commit, e.Query, e.ReleaseOnDestination)
}
_ANSWERS: dict[str, Callable[..., Answer]] = {
    kind.__name__: kind for kind in (e.Reserved, e.Refused, d.Stored, e.Committed, e.CommitRefused)
}


class Message(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """One message of A to B: `ask` and `figures` are the event's class and fields.

    `fingerprint`: of A's engine, with Reserve. `blocks`: KV blocks in the parts beside this frame, from block `first`
    on. With Commit: `submit` is the sequence as B submits it, `computed` its tokens whose KV has been copied, `parent`
    the hop of the token before (`wire.Delta`).
    """

    move: str
    ask: str
    figures: list[Any] = []
    fingerprint: str = ""
    first: int = 0
    blocks: int = 0
    computed: int = 0
    submit: Submit | None = None
    parent: int = 0

    @property
    def event(self) -> e.ToDestination:
        """What B's machine is to hear."""
        return _ASKS[self.ask](*self.figures)


class Give(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Order to a replica: give up to `count` requests to `destination` (`policies.migration.pairing.Move.requests`).

    `reason` is one of the pairing's, or "hand": cool-down and least remaining length do not hold then. `room[p]`: least
    and most KV blocks of a request of tier p, empty: any. `rid`: this sequence (or the OpenAI id that it belongs to),
    whatever its size. `how`: `live` in stages, `stop_and_copy` all KV within the pause, `recompute` without KV, by
    handing it back to the ingress (`destination` means nothing then).
    """

    reason: str
    destination: str
    room: list[tuple[int, int]] = []
    waiting_tier: int | None = None
    rid: str | None = None
    count: int = 1
    how: How = "live"


class Moved(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """How one move ended; `outcome` is the source's last state (policies/migration/handshake.py), `reason` why.

    `hop`: the hop that it became, `tokens`: those that it had generated when it was parked; -1: it came not so far.
    `blocks`, `bytes`: of KV that were sent.
    """

    rid: str
    outcome: str
    reason: str
    hop: int = -1
    tokens: int = -1
    destination: str = ""
    blocks: int = 0
    bytes: int = 0


class Given(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What became of a `Give`: moves that went well, and all of them."""

    moved: int
    outcomes: list[Moved] = []


_answer_encoder = msgspec.msgpack.Encoder()
_answer_decoder = msgspec.msgpack.Decoder(tuple[str, list[Any]] | None)
_message_decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


def message(move: str, event: e.ToDestination, **more: Any) -> Message:
    """The message that asks B for `event`."""
    return Message(move, type(event).__name__, list(astuple(event)), **more)


def decode_message(frame: bytes) -> Message:
    """Decode what A sent."""
    return _message_decoder.decode(frame)


def encode_answer(answer: Answer | None) -> bytes:
    """Encode B's answer; None: it has nothing to say."""
    return _answer_encoder.encode(None if answer is None else (type(answer).__name__, list(astuple(answer))))


def decode_answer(frame: bytes) -> Answer | None:
    """Decode what `encode_answer` wrote."""
    answer = _answer_decoder.decode(frame)
    return None if answer is None else _ANSWERS[answer[0]](*answer[1])
