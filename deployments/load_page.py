"""One replica's load figures and its policy setting, in a page of memory shared by replica and EngineCore.

The EngineCore writes figures and admitted tickets once per scheduler step, the replica actor writes the policy and the
grace that requests of higher tiers have.
Each record has two slots and a version: the writer fills the slot that nobody reads and then raises the version, so
a reader never waits, and a process that dies in the middle of a write leaves the record before it intact. A checksum
in each slot rejects what a reader saw while its slot was used again (and stores that a weakly ordered CPU reordered).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from policies.tiers import MAX_TIERS

RING = 4096  # admitted tickets kept
POLICY_BYTES = 4080  # longest policy spec, as JSON

_MAGIC = 0x5449444547415433
# Offsets into the array of 64-bit words at the head of the page.
_MAGIC_WORD, _FIGURES, _RESERVED, _ADMITTED, _POLICY = 0, 1, 2, 3, 4
_GRACE_AT = 40  # two doubles: seconds, and until when in wall-clock seconds
_HEAD = struct.Struct(
    "=d12qd3q"
)  # the figures, then the number of tiers; what is counted by tier and a checksum follow
_BY_TIER = [struct.Struct(f"={3 * count}I") for count in range(MAX_TIERS + 1)]
_CHECK = struct.Struct("=I")
_POLICY_HEAD = struct.Struct("=QI")  # version, length of the JSON text
_SLOT = 384
_FIGURES_AT = 64
_RING_AT = _FIGURES_AT + 2 * _SLOT
_POLICY_AT = _RING_AT + 4 * RING
_POLICY_SLOT = 4 + 12 + POLICY_BYTES
_SIZE = _POLICY_AT + 2 * _POLICY_SLOT
_ATTEMPTS = 1000


class Figures(NamedTuple):
    """Load of one engine at the end of a scheduler step: requests, KV blocks, tokens; `t` in wall-clock seconds.

    `queued_tokens` still have to be prefilled (waiting and partly prefilled requests; after a preemption the
    generated tokens too), `head_blocks` are wanted by the head of the queue, `batch_tokens` is the token budget of
    a step. `preemptions`, `steps` and `admitted` only grow. `policy_version` is the policy setting in force
    (0: the one from start-up). `full_rate` is the prompt tokens/s of full steps (full_steps.py; 0: unknown).
    `running_by_tier` and `waiting_by_tier` count the requests of each tier, 0 first, `blocks_by_tier` the KV blocks
    of the running ones, half a second old at most and shared blocks once for each.
    The page itself fills in `admitted` (tickets logged so far) and `version`.
    """

    t: float
    free_blocks: int
    total_blocks: int
    block_size: int
    running: int
    waiting: int
    queued_tokens: int
    head_blocks: int
    batch_tokens: int
    max_num_seqs: int
    preemptions: int
    steps: int
    policy_version: int = 0
    full_rate: float = 0.0
    running_by_tier: tuple[int, ...] = ()
    waiting_by_tier: tuple[int, ...] = ()
    blocks_by_tier: tuple[int, ...] = ()
    admitted: int = 0
    version: int = 0


class LoadPageError(RuntimeError):
    """The page does not exist, is not a load page, or holds no whole record."""


def page_path(name: str) -> Path:
    """File behind the page `name`: in shared memory where the system has it."""
    shm = Path("/dev/shm")
    return (shm if shm.is_dir() else Path(tempfile.gettempdir())) / name


class LoadPage:
    """Shared-memory page; made by `create` (the replica, which also removes it) or `open` (the EngineCore)."""

    def __init__(self, path: Path, memory: mmap.mmap, *, owner: bool) -> None:
        self.name = path.name
        self._path: Path | None = path if owner else None
        self._descriptor: int | None = None  # of a page that is no file
        self._memory = memory
        self._view = memoryview(memory)
        self._words = self._view[:_FIGURES_AT].cast("Q")
        self._grace = self._view[_GRACE_AT:_FIGURES_AT].cast("d")
        self._ring = self._view[_RING_AT:_POLICY_AT].cast("I")

    @classmethod
    def create(cls, name: str) -> LoadPage:
        """Make an empty page; a file of that name, left by a process that crashed, is replaced."""
        path = page_path(name)
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, _SIZE)
            page = cls(path, mmap.mmap(fd, _SIZE), owner=True)
        finally:
            os.close(fd)
        page._words[_MAGIC_WORD] = _MAGIC
        return page

    @classmethod
    def anonymous(cls) -> LoadPage:
        """Make an empty page that is no file, so that none is left however this process ends.

        Other processes of this user open it by its `name`, a path in /proc, until `unlink`.
        """
        fd = os.memfd_create("tidegate")
        os.ftruncate(fd, _SIZE)
        page = cls(Path(f"/proc/{os.getpid()}/fd/{fd}"), mmap.mmap(fd, _SIZE), owner=True)
        page.name, page._descriptor = str(page._path), fd
        page._words[_MAGIC_WORD] = _MAGIC
        return page

    @classmethod
    def open(cls, name: str) -> LoadPage:
        """Map the page `name` of another process; LoadPageError if there is none."""
        path = page_path(name)
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            raise LoadPageError(f"load page {path} does not exist: create it before the engine starts") from None
        try:
            if os.fstat(fd).st_size != _SIZE:
                raise LoadPageError(f"{path} is not a load page of this version")
            page = cls(path, mmap.mmap(fd, _SIZE), owner=False)
        finally:
            os.close(fd)
        if page._words[_MAGIC_WORD] != _MAGIC:
            page.close()
            raise LoadPageError(f"{path} is not a load page of this version")
        return page

    @property
    def version(self) -> int:
        """Version of the newest figures; 0 until the engine wrote some."""
        return self._words[_FIGURES]

    @property
    def policy_version(self) -> int:
        """Version of the newest policy setting; 0 until one was made."""
        return self._words[_POLICY]

    def write(self, figures: Figures, tickets: Sequence[int] = ()) -> int:
        """Log the tickets that these figures count for the first time, then publish the figures; their version."""
        admitted = self._words[_ADMITTED]
        if tickets:
            # Announce the entries before they are overwritten: a reader checks this after copying them.
            self._words[_RESERVED] = admitted + len(tickets)
            for ticket in tickets:
                self._ring[admitted % RING] = ticket
                admitted += 1
            self._words[_ADMITTED] = admitted
        version = self._words[_FIGURES] + 1
        *counted, running, waiting, blocks, _, _ = figures
        blocks = blocks or (0,) * len(running)
        by_tier = _BY_TIER[len(running)].pack(*running, *waiting, *blocks)
        body = _HEAD.pack(*counted, admitted, version, len(running)) + by_tier
        at = _FIGURES_AT + _SLOT * (version & 1)
        self._memory[at : at + len(body) + 4] = body + _CHECK.pack(zlib.crc32(body))
        self._words[_FIGURES] = version
        return version

    def read(self) -> Figures | None:
        """Newest whole figures; None until the engine wrote some."""
        for _ in range(_ATTEMPTS):
            version = self._words[_FIGURES]
            if version == 0:
                return None
            at = _FIGURES_AT + _SLOT * (version & 1)
            record = self._memory[at : at + _SLOT]
            *counted, admitted, written, tiers = _HEAD.unpack_from(record)
            if written != version or not 0 <= tiers <= MAX_TIERS:
                continue
            end = _HEAD.size + _BY_TIER[tiers].size
            if zlib.crc32(record[:end]) == _CHECK.unpack_from(record, end)[0]:
                by_tier = _BY_TIER[tiers].unpack_from(record, _HEAD.size)
                three = (by_tier[:tiers], by_tier[tiers : 2 * tiers], by_tier[2 * tiers :])
                return Figures._make((*counted, *three, admitted, version))
        raise LoadPageError("no whole figures in the load page: its memory is damaged, restart the replica")

    def admitted_since(self, count: int, until: int | None = None) -> tuple[list[int], int]:
        """Tickets logged after the first `count` and up to `until` (default: all), and the count to ask with next.

        With `until=figures.admitted`: exactly the tickets that those figures count. Only the last 4096 are kept.
        """
        end = self._words[_ADMITTED] if until is None else until
        start = max(count, end - RING)
        tickets = [self._ring[i % RING] for i in range(start, end)]
        overwritten = self._words[_RESERVED] - RING - start
        return tickets[max(overwritten, 0) :], end

    def set_policy(self, spec: dict[str, Any]) -> int:
        """Hand the scheduler a new policy, in force from its next step; the version of this setting."""
        text = json.dumps(spec).encode()
        if len(text) > POLICY_BYTES:
            raise ValueError(f"policy spec of {len(text)} bytes is longer than the {POLICY_BYTES} of the load page")
        version = self._words[_POLICY] + 1
        at = _POLICY_AT + _POLICY_SLOT * (version & 1)
        body = _POLICY_HEAD.pack(version, len(text)) + text
        self._memory[at : at + 4 + len(body)] = _CHECK.pack(zlib.crc32(body)) + body
        self._words[_POLICY] = version
        return version

    def policy_if_changed(self, last_version: int) -> tuple[int, dict[str, Any]] | None:
        """(version, spec) of the newest policy setting unless it is `last_version`; None if nothing changed."""
        for _ in range(_ATTEMPTS):
            version = self._words[_POLICY]
            if version == last_version or version == 0:
                return None
            at = _POLICY_AT + _POLICY_SLOT * (version & 1)
            slot = self._memory[at : at + _POLICY_SLOT]
            (check,), (written, length) = _CHECK.unpack_from(slot), _POLICY_HEAD.unpack_from(slot, 4)
            body = slot[4 : 16 + length]
            if zlib.crc32(body) == check and written == version:
                return version, json.loads(body[12:])
        raise LoadPageError("no whole policy in the load page: its memory is damaged, restart the replica")

    def set_grace(self, seconds: float, until: float) -> None:
        """Let requests of higher tiers wait so long for help, in steps before `until` (wall-clock seconds)."""
        self._grace[0], self._grace[1] = seconds, until

    def grace_s(self, now: float) -> float:
        """The grace in force at `now` (wall-clock seconds), 0 if there is none."""
        return self._grace[0] if now < self._grace[1] else 0.0

    def unlink(self) -> None:
        """Remove the file, or the name of a page that is none; who has the page open keeps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        elif self._path is not None:
            self._path.unlink(missing_ok=True)
        self._path = self._descriptor = None

    def close(self) -> None:
        """Unmap the page and, in the process that made it, remove the file. May be called twice."""
        self.unlink()
        self._ring.release()
        self._words.release()
        self._grace.release()
        self._view.release()
        self._memory.close()
