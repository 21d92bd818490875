"""Files of a run: run.json (figures), requests.jsonl (every answer), requests.csv and tiers.csv."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgen.metrics import RequestRecord
from loadgen.report import finite
from loadgen.run.exact import Reference
from loadgen.run.figures import Sent

FORMAT = 1
RUN, ANSWERS, REQUESTS, TIERS = "run.json", "requests.jsonl", "requests.csv", "tiers.csv"
TIER_COLUMNS = ("asked", "completed", "within_slo", "request_goodput", "output_throughput")
WAITS = ("ttft_ms", "normalized_ttft_ms", "tpot_ms", "itl_ms", "tgt_s", "e2el_ms")
SHARES = ("p50", "p95", "p99")


class Head(msgspec.Struct, frozen=True):
    """First line of requests.jsonl; `workload`: digest of what was asked."""

    run: int
    workload: str
    requests: int


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request: number in the workload, tier, how it ended, record. Times in seconds since the start of the run."""

    request: int
    outcome: str
    due: float
    sent: float
    status: int
    prompt_tokens: int
    output_tokens: int
    tier: int | None = None
    session: str | None = None
    reason: str = ""
    error: str = ""
    times: tuple[float, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()

    def record(self) -> RequestRecord:
        """The record that was written."""
        first, last = (self.times[0] - self.due, self.times[-1] - self.due) if self.times else (0.0, 0.0)
        left = self.outcome if self.outcome in ("cancelled", "unfinished") else ""
        return RequestRecord(
            self.due,
            self.sent,
            self.prompt_tokens,
            self.output_tokens,
            first,
            last,
            error=self.error,
            status=self.status,
            reason=self.reason,
            times=self.times,
            text=self.text,
            token_ids=self.token_ids,
            left=left,
        )


def write_answers(folder: Path, workload: str, sent: Sequence[Sent]) -> None:
    """Write requests.jsonl; times to the microsecond."""
    encode = msgspec.json.Encoder().encode
    lines: list[msgspec.Struct] = [Head(FORMAT, workload, len(sent))]
    for i, request, r in sent:
        lines.append(
            Line(
                request=i,
                outcome=r.outcome,
                due=r.due,
                sent=round(r.sent, 6),
                status=r.status,
                prompt_tokens=r.prompt_len,
                output_tokens=r.output_len,
                tier=request.tier,
                session=request.session,
                reason=r.reason,
                error=r.error,
                times=tuple(round(t, 6) for t in r.times),
                text=r.text,
                token_ids=r.token_ids,
            )
        )
    with (folder / ANSWERS).open("wb") as file:
        file.writelines(encode(line) + b"\n" for line in lines)


def read_answers(path: Path) -> tuple[Head, list[Line]]:
    """Head and lines of a run's folder, or of its requests.jsonl; ValueError names a line that is no good."""
    path = path / ANSWERS if path.is_dir() else path
    lines = path.read_bytes().splitlines()
    number = 1
    try:
        head = msgspec.json.decode(lines[0] if lines else b"", type=Head)
        decode = msgspec.json.Decoder(Line).decode
        found = []
        for number, line in enumerate(lines[1:], 2):  # noqa: B007 - the message needs it
            found.append(decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: line {number}: {error}") from None
    if head.run != FORMAT:
        raise ValueError(f"{path}: format {head.run}, this version reads {FORMAT}")
    if len(found) != head.requests:
        raise ValueError(f"{path}: {len(found)} requests, line 1 announces {head.requests}: the file was cut")
    return head, found


def read_reference(path: Path, workload: str) -> dict[int, Reference]:
    """Answers of an earlier run of the same workload, by number; ValueError if it was another workload."""
    head, lines = read_answers(path)
    if head.workload != workload:
        raise ValueError(
            f"{path}: a run of workload {head.workload}, this one is {workload}: answers cannot be compared"
        )
    return {line.request: Reference(line.text, line.token_ids, line.outcome == "ok") for line in lines}


def read_keys(path: Path) -> dict[str, str]:
    """Secrets by the names of keys; ValueError, without any of them, if the file is no JSON object of texts."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a JSON object with a secret for each name: {error}") from None


def write_tables(folder: Path, sent: Sequence[Sent], found: dict[str, Any]) -> None:
    """Write requests.csv, a row for each request, and tiers.csv, a row for each tier and one for all."""
    _table(
        folder / REQUESTS,
        (
            *("request", "tier", "session", "key", "due_s", "sent_s", "lag_s", "status", "outcome", "reason", "error"),
            *(
                "prompt_tokens",
                "asked_output_tokens",
                "output_tokens",
                "ttft_s",
                "tpot_s",
                "tgt_s",
                "e2el_s",
                "max_itl_s",
            ),
        ),
        (
            (
                *(i, request.tier, request.session, request.key, request.due, r.sent, r.sent - r.due),
                *(r.status, r.outcome, r.reason, r.error.replace("\n", " ")),
                *(r.prompt_len, request.output_tokens, r.output_len),
                *(_if(r.times, r.ttft), _if(len(r.times) > 1, r.tgt / max(1, r.output_len - 1))),
                *(_if(r.times, r.tgt), _if(r.outcome == "ok", r.latency), _if(r.itls, max(r.itls, default=0.0))),
            )
            for i, request, r in sent
        ),
    )
    outcomes = tuple(found["outcomes"])
    waits = tuple(f"{share}_{wait}" for wait in WAITS for share in SHARES)
    _table(
        folder / TIERS,
        ("tier", *TIER_COLUMNS, *outcomes, *waits),
        (
            (
                tier,
                *(group[name] for name in TIER_COLUMNS),
                *group["outcomes"].values(),
                *(group[name] for name in waits),
            )
            for tier, group in {**found["tiers"], "all": found}.items()
        ),
    )


def _if(condition: object, value: float) -> float | None:
    return value if condition else None


def _table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            writer.writerow([round(cell, 6) if isinstance(cell, float) else cell for cell in map(finite, row)])
