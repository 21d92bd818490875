"""Figures of a run with kills: which answers were cut or wrong, and how long what was killed was missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.metrics import percentile
from loadgen.token_stream import TokenStream

#: What is killed, by the title of its process.
KINDS = {
    "replica": "ray::ServeReplica:tidegate:EngineReplica",
    "engine": "VLLM::EngineCore",
    "coordinator": "ray::ServeReplica:tidegate:Coordinator",
}


@dataclass(slots=True)
class Kill:
    """One kill: `at` (`time.perf_counter()`), and the seconds from it until routing knew, and until all was back.

    `hit`: streams that ran or waited on what was killed, by its last load report. `out_s` is nan for the coordinator.
    """

    kind: str
    at: float
    hit: int = 0
    out_s: float = float("nan")
    whole_s: float = float("nan")


def silences(streams: Sequence[TokenStream], at: float) -> list[float]:
    """For each stream under way at `at`: seconds from then to its next token, longest first; inf if none came."""
    found = []
    for stream in streams:
        if stream.sent < at < stream.ended_at:
            later = next((t for t in stream.times if t > at), None)
            if later is not None:
                found.append(later - at)
            elif not stream.whole:
                found.append(float("inf"))
    return sorted(found, reverse=True)


def figures(
    reference: Mapping[tuple[int, ...], TokenStream],
    again: Sequence[TokenStream],
    streams: Sequence[TokenStream],
    kills: Sequence[Kill],
    moves: Counter[str],
    serving: int,
    replicas: int,
) -> dict[str, Any]:
    """Verdicts on the streams, recovery times by kind of kill, and the checks.

    `refused`: answered with another status than 200; `cut`: begun and not brought to its end; `wrong`: other tokens
    than the undisturbed fleet's, or other ones as far as it came.
    """
    refused = [s for s in streams if s.status != 200 and not s.ids]
    cut = [s for s in streams if s.error and s not in refused]
    wrong = [s for s in streams if _differs(s, reference[s.prompt.ids])]
    result: dict[str, Any] = {
        "streams": len(streams),
        "tokens": sum(len(s.ids) for s in streams),
        "cut": len(cut),
        "wrong": len(wrong),
        "refused": len(refused),
        "errors": dict(Counter(s.error for s in (*cut, *refused))),
        "wrong_undisturbed": sum(_differs(s, reference[s.prompt.ids]) for s in again),
        "kills": {kind: _of_kind([k for k in kills if k.kind == kind], streams) for kind in KINDS},
        "moves": dict(moves),
        "serving_at_the_end": serving,
        "replicas": replicas,
    }
    return {**result, "checks": checks(result)}


def _differs(answer: TokenStream, reference: TokenStream) -> bool:
    if answer.whole:
        return (answer.ids, answer.finish) != (reference.ids, reference.finish)
    return answer.ids != reference.ids[: len(answer.ids)]


def _of_kind(kills: Sequence[Kill], streams: Sequence[TokenStream]) -> dict[str, Any]:
    """Streams that were hit are those that were silent longest: as many as the load report counted."""
    silent = [s for kill in kills for s in silences(streams, kill.at)[: kill.hit]]
    others = [s for kill in kills for s in silences(streams, kill.at)[kill.hit :]]
    return {
        "kills": len(kills),
        "hit": len(silent),
        **{f"{name}_next_token_s": value for name, value in _p50_max(silent).items()},
        **{f"{name}_others_next_token_s": value for name, value in _p50_max(others).items()},
        **{f"{name}_out_of_routing_s": value for name, value in _p50_max([k.out_s for k in kills]).items()},
        **{f"{name}_whole_again_s": value for name, value in _p50_max([k.whole_s for k in kills]).items()},
    }


def _p50_max(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 50), "max": max(values, default=float("nan"))}


def checks(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What the fleet promises, what was found, and whether that is met."""
    killed = {kind: row["kills"] for kind, row in result["kills"].items()}
    hit = sum(row["hit"] for row in result["kills"].values())
    streams, serving = result["streams"], result["serving_at_the_end"]
    found = (
        ("no stream is cut", f"{result['cut']} of {streams}", streams > 0 and result["cut"] == 0),
        ("no token is wrong", f"{result['wrong']} of {streams} streams", streams > 0 and result["wrong"] == 0),
        ("no request is refused", f"{result['refused']} of {streams}", result["refused"] == 0),
        ("each kind was killed, streams were hit", f"{killed}, {hit} streams", all(killed.values()) and hit > 0),
        (
            "undisturbed answers are the same in a fuller batch",
            f"{result['wrong_undisturbed']} differ",
            result["wrong_undisturbed"] == 0,
        ),
        ("every replica is back", f"{serving} of {result['replicas']}", serving == result["replicas"]),
    )
    return [{"check": check, "found": text, "met": bool(met)} for check, text, met in found]
