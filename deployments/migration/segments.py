"""Shared memory through which KV blocks pass between a replica and the workers of its engine: one segment per worker
and direction, sparse and larger than what can be under way, so that nothing has to be sized.

Source: measured on CPU: the bytes inside vLLM's own RPC make 0.2 to 0.8 GB/s, through a mapping that is kept 13 GB/s
and more (the first touch of /dev/shm 1.2 GB/s). Both sides map a segment once and then its file is unlinked, so that no
file is left however the processes end. Pages are claimed before they are written: a full /dev/shm is an error of one
move, not the end of the process by SIGBUS.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from deployments.load_page import page_path

_CHUNK = 1 << 20  # bytes of a segment that get memory together


class SegmentsFull(RuntimeError):
    """/dev/shm, or the segment, has no room for so many blocks now."""


class Segment:
    """One mapping; made by `create` in the replica or by `open` in the worker."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(descriptor, size)
        self._descriptor = descriptor
        self._claimed: set[int] = set()

    @classmethod
    def create(cls, name: str, size: int) -> Segment:
        """A new sparse segment of `size` bytes under a name that no file has."""
        descriptor = os.open(page_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, size)
        return cls(descriptor, size)

    @classmethod
    def open(cls, name: str) -> Segment:
        """The segment that another process of this host has made."""
        descriptor = os.open(page_path(name), os.O_RDWR)
        return cls(descriptor, os.fstat(descriptor).st_size)

    def claim(self, start: int, end: int) -> None:
        """See to it that the bytes from `start` to `end` have memory, for good; SegmentsFull if there is none."""
        for chunk in range(start // _CHUNK, -(-end // _CHUNK)):
            if chunk not in self._claimed:
                try:
                    os.posix_fallocate(self._descriptor, chunk * _CHUNK, min(_CHUNK, self.size - chunk * _CHUNK))
                except OSError as error:
                    raise SegmentsFull(f"{page_path('').parent} has no room for KV blocks: {error}") from None
                self._claimed.add(chunk)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class Segments:
    """The replica's side of one direction: a segment for each rank, used in regions of whole blocks.

    `block_bytes` has the bytes of one block over all layers for each rank. In a region of n blocks the bytes lie as
    [layer, block, byte].
    """

    def __init__(self, name: str, block_bytes: Sequence[int], blocks: int) -> None:
        self.names = [f"{name}-{rank}" for rank in range(len(block_bytes))]
        self._block_bytes = tuple(block_bytes)
        self._blocks = blocks
        self._segments: list[Segment] = []
        self._taken: dict[int, int] = {}  # first block of a region -> its blocks
        try:
            for own, each in zip(self.names, block_bytes, strict=True):
                self._segments.append(Segment.create(own, each * blocks))
        except OSError:
            self.unlink()
            raise
        self._bytes = [np.frombuffer(segment.memory, np.uint8) for segment in self._segments]

    def unlink(self) -> None:
        """Remove the files; who has the segments mapped keeps them."""
        for name in self.names:
            page_path(name).unlink(missing_ok=True)

    def take(self, blocks: int) -> int:
        """First block of a free region of `blocks` blocks, to be given back; SegmentsFull if there is none."""
        first, blocks = 0, max(blocks, 1)
        for start in sorted(self._taken):
            if start - first >= blocks:
                break
            first = start + self._taken[start]
        if first + blocks > self._blocks:
            raise SegmentsFull(f"moves under way use up the segment of {self._blocks} blocks")
        self._taken[first] = blocks
        return first

    def give_back(self, first: int) -> None:
        """The region that begins there is free again."""
        del self._taken[first]

    def write(self, first: int, blocks: int, parts: Sequence[np.ndarray]) -> None:
        """Copy one part per rank into the region; ValueError if they are not what so many blocks are here.

        SegmentsFull if there is no memory for it.
        """
        if [part.nbytes for part in parts] != [each * blocks for each in self._block_bytes]:
            raise ValueError(f"{blocks} blocks here have {[each * blocks for each in self._block_bytes]} bytes")
        for segment, each in zip(self._segments, self._block_bytes, strict=True):
            segment.claim(first * each, (first + blocks) * each)
        for memory, each, part in zip(self._bytes, self._block_bytes, parts, strict=True):
            np.copyto(memory[first * each : (first + blocks) * each], part.reshape(-1).view(np.uint8))

    def read(self, first: int, blocks: int) -> list[np.ndarray]:
        """Copies of what lies in `blocks` blocks from `first` on, one part per rank."""
        return [
            memory[first * each : (first + blocks) * each].copy()
            for memory, each in zip(self._bytes, self._block_bytes, strict=True)
        ]
