"""What the ranker is trained on: a fleet's request log (JSONL), or a public trace that has lengths only (CSV)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import sparse

from policies.predictors import LoggedRequest, token_buckets

WINDOW = 96  # tokens looked at from each end of a prompt
BUCKETS = 8192  # hash buckets of tokens and pairs: 64 KiB of weights
SHOWN = 10  # bad lines named one by one

IntArray = npt.NDArray[np.int64]


class BadInput(ValueError):
    """The file cannot be learned from; the message says why and what would do."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Requests as arrays, one entry or row each: lengths in tokens, and which hash buckets its prompt falls into.

    `buckets` holds 1 / sqrt(number of buckets) in each of them. `kinds`: labels, empty where a line has none.
    """

    prompt_tokens: IntArray
    max_tokens: IntArray
    output_tokens: IntArray
    buckets: Any  # scipy.sparse.csr_array
    kinds: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.output_tokens)

    def take(self, rows: npt.NDArray[Any]) -> Samples:
        """Those rows only."""
        return Samples(
            self.prompt_tokens[rows],
            self.max_tokens[rows],
            self.output_tokens[rows],
            self.buckets[rows],
            self.kinds[rows],
        )


def read_log(path: Path, window: int = WINDOW, buckets: int = BUCKETS) -> tuple[Samples, list[str]]:
    """(samples, complaints) of a request log, one policies.predictors.LoggedRequest a line; empty lines are no lines.

    A complaint names a line that was left out, and why; the last one counts those that are not named.
    """
    problems: list[str] = []
    with path.open("rb") as lines:
        samples = from_requests(_parsed(lines, problems), window, buckets)
    if len(problems) > SHOWN:
        problems[SHOWN:] = [f"and {len(problems) - SHOWN} more lines like these"]
    return samples, problems


def read_trace(path: Path) -> tuple[Samples, list[str]]:
    """(samples, complaints) of a trace in the Azure format: columns ContextTokens and GeneratedTokens, in tokens."""
    lengths: list[tuple[int, int]] = []
    problems: list[str] = []
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if missing := {"ContextTokens", "GeneratedTokens"} - set(rows.fieldnames or ()):
            raise BadInput(f"{path} has no column {', '.join(sorted(missing))}: give an Azure trace, or use --log")
        for row in rows:
            try:
                prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if prompt < 1 or output < 1:
                    raise ValueError(f"{prompt} and {output} tokens are no request")
            except (TypeError, ValueError) as error:
                problems.append(f"line {rows.line_num}: {error}")
            else:
                lengths.append((prompt, output))
    if len(problems) > SHOWN:
        problems[SHOWN:] = [f"and {len(problems) - SHOWN} more lines like these"]
    prompts, outputs = np.array(lengths, np.int64).reshape(-1, 2).T
    limit = np.full_like(outputs, outputs.max(initial=1))  # a trace knows no max_tokens
    nothing = sparse.csr_array((len(lengths), 2), dtype=np.float64)
    return Samples(prompts, limit, outputs, nothing, np.full(len(lengths), "")), problems


def from_requests(requests: Iterable[LoggedRequest], window: int = WINDOW, buckets: int = BUCKETS) -> Samples:
    """Samples of logged requests; prompts are hashed one by one, so that a long log fits into memory."""
    lengths: list[tuple[int, int, int]] = []
    kinds, columns, sizes = [], [np.empty(0, np.int32)], [0]
    for request in requests:
        lengths.append((len(request.prompt_token_ids), request.max_tokens, request.output_tokens))
        kinds.append(request.kind or "")
        found = token_buckets(request.prompt_token_ids, window, buckets).astype(np.int32)
        columns.append(found)
        sizes.append(found.size)
    ends = np.cumsum(sizes)
    values = np.repeat(1 / np.sqrt(np.maximum(sizes, 1)), sizes)
    rows = sparse.csr_array((values, np.concatenate(columns), ends), shape=(len(lengths), buckets))
    prompts, limits, outputs = np.array(lengths, np.int64).reshape(-1, 3).T
    return Samples(prompts, limits, outputs, rows, np.array(kinds, np.str_))


def _parsed(lines: Iterable[bytes], problems: list[str]) -> Iterator[LoggedRequest]:
    decoder = msgspec.json.Decoder(LoggedRequest)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(f"line {number}: {error}")
            continue
        if not 1 <= request.output_tokens <= request.max_tokens:
            problems.append(f"line {number}: {request.output_tokens} output tokens of at most {request.max_tokens}")
        elif any(not 0 <= token < 1 << 32 for token in request.prompt_token_ids):
            problems.append(f"line {number}: a prompt token id is negative or beyond 32 bits")
        else:
            yield request
