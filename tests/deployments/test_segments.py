"""The shared memory through which KV blocks pass."""

from __future__ import annotations

import errno
import os
import uuid

import numpy as np
import pytest

from deployments.load_page import page_path
from deployments.migration import segments
from deployments.migration.segments import Segment, Segments, SegmentsFull


@pytest.fixture
def name() -> str:
    return f"tidegate-test-{uuid.uuid4().hex}"


def parts(blocks: int, seed: int = 0) -> list[np.ndarray]:
    """One part for each of two ranks, with 30 and 40 bytes per block."""
    return [np.random.default_rng(seed).integers(0, 256, blocks * each, np.uint8) for each in (30, 40)]


def test_both_sides_see_the_same_bytes(name: str) -> None:
    """What one rank's worker finds at its region is what the replica wrote there, and the other way round."""
    ours = Segments(name, [30, 40], 100)
    theirs = [Segment.open(own) for own in ours.names]
    first = ours.take(5)
    ours.write(first, 5, (sent := parts(5)))
    for segment, each, part in zip(theirs, (30, 40), sent, strict=True):
        assert segment.memory[first * each : (first + 5) * each] == part.tobytes()
        segment.claim(0, each)
        segment.memory[:each] = bytes(range(each))
    assert [part.tolist() for part in ours.read(0, 1)] == [list(range(30)), list(range(40))]
    ours.unlink()


def test_what_was_read_is_a_copy(name: str) -> None:
    """The next export may overwrite the segment while the caller still sends the last one."""
    ours = Segments(name, [30, 40], 100)
    ours.unlink()
    ours.write(ours.take(5), 5, (sent := parts(5)))
    read = ours.read(0, 5)
    ours.write(0, 5, parts(5, seed=1))
    assert all(np.array_equal(mine, part) for mine, part in zip(read, sent, strict=True))


def test_regions_in_use_do_not_overlap(name: str) -> None:
    """Each region is its holder's alone until it is given back; then its place is used again, lowest first."""
    ours = Segments(name, [30, 40], 20)
    ours.unlink()
    a, b, c = ours.take(5), ours.take(8), ours.take(7)
    assert (a, b, c) == (0, 5, 13)
    with pytest.raises(SegmentsFull, match="20 blocks"):
        ours.take(1)
    ours.give_back(b)
    assert (ours.take(3), ours.take(5)) == (5, 8)
    with pytest.raises(SegmentsFull):
        ours.take(1)
    ours.give_back(a)
    assert ours.take(5) == 0


def test_no_file_is_left(name: str) -> None:
    """The files are gone once both sides have them open, or when a segment could not be made; memory stays usable."""
    ours = Segments(name, [30, 40], 20)
    theirs = Segment.open(ours.names[0])
    ours.unlink()
    assert not any(page_path(own).exists() for own in ours.names)
    ours.write(ours.take(1), 1, parts(1))
    assert theirs.memory[:30] == parts(1)[0].tobytes()
    page_path(f"{name}-1").touch()
    with pytest.raises(FileExistsError):
        Segments(name, [30, 40], 20)
    assert not page_path(f"{name}-0").exists()


def test_a_segment_is_sparse(name: str) -> None:
    """It is as large as the KV cache, and has memory only where blocks passed through."""
    ours = Segments(name, [1 << 20], 4096)
    file = page_path(ours.names[0])
    try:
        assert file.stat().st_size == 4 << 30
        ours.take(1000)
        ours.write(ours.take(2), 2, [np.zeros(2 << 20, np.uint8)])
        assert file.stat().st_blocks * 512 <= 4 << 20
    finally:
        ours.unlink()


def test_a_full_device_is_an_error_of_the_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is claimed before it is written: a full /dev/shm raises instead of killing the process by SIGBUS."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ours = Segments(name, [1 << 20], 20)
    ours.unlink()
    block = np.ones(1 << 20, np.uint8)
    ours.write(0, 1, [block])
    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    ours.write(0, 1, [block])  # has its memory already
    with pytest.raises(SegmentsFull, match="No space left"):
        ours.write(1, 1, [block])


def test_parts_of_another_size_are_refused(name: str) -> None:
    """Blocks of another engine are not taken for this one's."""
    ours = Segments(name, [30, 40], 20)
    ours.unlink()
    with pytest.raises(ValueError, match="3 blocks here have"):
        ours.write(ours.take(3), 3, parts(2))
