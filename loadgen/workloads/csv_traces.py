"""Readers of CSV traces: Azure LLM inference (2023 and 2024) and BurstGPT."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from loadgen.workloads.rows import BadRow, checked, seconds, whole
from loadgen.workloads.workload import Request

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")

Row = dict[str, str]


def azure(path: Path) -> Iterator[Request | BadRow]:
    """Columns TIMESTAMP (date and time, UTC if it says nothing else), ContextTokens, GeneratedTokens."""

    def parse(row: Row) -> Request:
        return Request(
            due=_moment(row["TIMESTAMP"]),
            prompt_tokens=whole("ContextTokens", row["ContextTokens"], 1),
            output_tokens=whole("GeneratedTokens", row["GeneratedTokens"], 1),
        )

    return checked(_table(path, AZURE), parse)


def burstgpt(path: Path) -> Iterator[Request | BadRow]:
    """Columns Timestamp (s), Request tokens, Response tokens; newer files have a Session ID too.

    Requests that failed when the trace was recorded have 0 response tokens: those rows cannot be replayed.
    """

    def parse(row: Row) -> Request:
        if row["Response tokens"].strip() == "0":
            raise ValueError("Response tokens is 0: the request failed when it was recorded")
        session = row.get("Session ID") or row.get("SessionID")
        return Request(
            due=seconds("Timestamp", row["Timestamp"]),
            prompt_tokens=whole("Request tokens", row["Request tokens"], 1),
            output_tokens=whole("Response tokens", row["Response tokens"], 1),
            session=session or None,
        )

    return checked(_table(path, BURSTGPT), parse)


def _moment(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text[:60]!r}, not a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _table(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, Row | BadRow]]:
    """(line, row by column name); rows with another number of columns are bad. ValueError without the columns."""
    # Bytes that are no UTF-8 become a mark that no number contains, so they show up as a bad row.
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        head = [name.strip() for name in next(reader, [])]
        if missing := [name for name in columns if name not in head]:
            raise ValueError(f"{path}: no column {', '.join(missing)} in its first line {','.join(head)[:100]!r}")
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield reader.line_num, BadRow(reader.line_num, str(error))
                continue
            if not values:
                continue
            if len(values) != len(head):
                yield reader.line_num, BadRow(reader.line_num, f"{len(values)} columns instead of {len(head)}")
            else:
                yield reader.line_num, dict(zip(head, values, strict=True))
