"""Trace formats by name, and which of them a file is in."""

from __future__ import annotations

import dataclasses
from codecs import BOM_UTF8
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from loadgen.workloads import csv_traces, json_traces
from loadgen.workloads.json_traces import Count, estimated
from loadgen.workloads.rows import MOST_SECONDS, BadTrace, Reader, collect
from loadgen.workloads.workload import Workload, by_due

ALLOWED = 0.01  # share of bad rows that is reported and left out; more is an error


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format: its reader, the window of the models it was recorded from, tokens of one prompt block."""

    read: Reader
    context: int
    block_tokens: int = 0


FORMATS = {
    "azure": Format(csv_traces.azure, 8192),
    "burstgpt": Format(csv_traces.burstgpt, 8192),
    "mooncake": Format(json_traces.mooncake, 131072, json_traces.MOONCAKE_BLOCK),
    "sharegpt": Format(json_traces.sharegpt, 0),
    "evalscope": Format(json_traces.evalscope, 0),
}
OURS = "workload"


def read(path: Path, kind: str | None = None, *, allowed: float = ALLOWED, count: Count = estimated) -> Workload:
    """The workload in a trace or workload file; `kind` is a name of FORMATS, by default found from the content.

    BadTrace (a ValueError) says which rows are no good if they are more than the share `allowed`. `count` tells the
    tokens of a text where a trace has texts only.
    """
    kind = kind or kind_of(path)
    if kind == OURS:
        return json_traces.ours(path)
    if kind not in FORMATS:
        raise ValueError(f"format: no reader {kind!r}; choose one of {', '.join((*FORMATS, OURS))}")
    form = FORMATS[kind]
    rows = json_traces.sharegpt(path, count) if kind == "sharegpt" else form.read(path)
    return collect(path, rows, kind=kind, allowed=allowed, block_tokens=form.block_tokens, context=form.context)


def kind_of(path: Path) -> str:
    """Name of the format, from the first line of the file; BadTrace if it looks like none of them."""
    with path.open("rb") as file:
        start = next((line for line in iter(lambda: file.readline(1 << 20), b"") if line.strip()), b"")
    if not start:
        raise BadTrace(f"{path}: there is nothing in it")
    start = start.removeprefix(BOM_UTF8)
    text = start.decode(errors="replace").strip()
    if text.startswith("["):
        return "sharegpt"
    if text.startswith("{"):
        try:
            row = json_traces.decoded(start)
        except ValueError:
            row = {}
        for kind, field in ((OURS, "workload"), ("mooncake", "input_length"), ("evalscope", "body")):
            if field in row:
                return kind
    columns = {name.strip() for name in text.split(",")}
    for kind, names in (("azure", csv_traces.AZURE), ("burstgpt", csv_traces.BURSTGPT)):
        if columns.issuperset(names):
            return kind
    raise BadTrace(f"{path}: looks like no trace format; name it: {', '.join((*FORMATS, OURS))}")


def faster(workload: Workload, speed: float) -> Workload:
    """Time compressed by `speed`: the gaps keep their coefficient of variation. ValueError if it stretches too far."""
    with np.errstate(over="ignore"):
        times = np.asarray([r.due for r in workload.requests]) / speed
    if len(times) and times[-1] > MOST_SECONDS:
        raise ValueError(
            f"speed, rate: the last request would be due at {times[-1]:g} s; at most {MOST_SECONDS:g} is possible"
        )
    return workload.retimed(times, {"time_compressed": speed})


def at_rate(workload: Workload, rate: float) -> Workload:
    """Time compressed (or stretched) so that the mean rate is `rate` requests/s."""
    last = workload.requests[-1].due if workload.requests else 0.0
    if last <= 0:
        raise ValueError("rate: all requests are due at one time; give --arrivals instead")
    return faster(workload, rate * last / (len(workload.requests) - 1))


def jittered(workload: Workload, seconds: float, rng: np.random.Generator) -> Workload:
    """A uniform delay of up to `seconds` for each request: for traces whose stamps are that coarse."""
    late = rng.uniform(0.0, seconds, len(workload.requests))
    moved = by_due(
        msgspec.structs.replace(r, due=r.due + float(s)) for r, s in zip(workload.requests, late, strict=True)
    )
    return dataclasses.replace(workload, requests=moved, about={**workload.about, "jitter": seconds})


def token_counter(tokenizer: Path) -> Callable[[str], int]:
    """Tokens of a text by a `tokenizer.json`, without special ones; ValueError if the file is none."""
    from tokenizers import Tokenizer

    try:
        encoder = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # it raises nothing more special, for missing files too
        raise ValueError(f"tokenizer: {tokenizer}: {error}") from None
    return lambda text: len(encoder.encode(text, add_special_tokens=False).ids)
