"""Are the answers those of another run, token by token? Broken ones must be the beginning of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.metrics import RequestRecord

SHOWN = 10


@dataclass(frozen=True, slots=True)
class Reference:
    """Answer of an earlier run: its text, its token ids if they were asked for, and whether it came to its end."""

    text: str
    token_ids: tuple[int, ...]
    whole: bool


def compare(records: Sequence[tuple[int, RequestRecord]], reference: dict[int, Reference]) -> dict[str, Any]:
    """Compare (number, record) of each request with the reference of that number.

    `equal`: the same answer. `prefix`: one of the two broke off, and what there is agrees. `different`: the others,
    of which the first are shown with the place where they part. `unknown`: no answer in one of the two runs. By
    token ids where both have them, else by text.
    """
    found: dict[str, Any] = {"compared": 0, "equal": 0, "prefix": 0, "different": 0, "unknown": 0, "first": []}
    for number, record in records:
        other = reference.get(number)
        if other is None or not record.times or not (other.text or other.token_ids):
            found["unknown"] += 1
            continue
        by_ids = bool(record.token_ids and other.token_ids)
        ours: Sequence[Any] = record.token_ids if by_ids else record.text
        theirs: Sequence[Any] = other.token_ids if by_ids else other.text
        common = min(len(ours), len(theirs))
        found["compared"] += 1
        whole = record.outcome == "ok" and other.whole
        if ours[:common] != theirs[:common] or (whole and len(ours) != len(theirs)):
            found["different"] += 1
            if len(found["first"]) < SHOWN:
                place = next((i for i in range(common) if ours[i] != theirs[i]), common)
                found["first"].append({"request": number, "unit": "token" if by_ids else "character", "at": place})
        else:
            found["equal" if len(ours) == len(theirs) else "prefix"] += 1
    return found
