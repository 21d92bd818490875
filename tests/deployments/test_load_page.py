"""The shared-memory load page: whole records across processes, crashes and overruns."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Iterator

import pytest

from deployments.load_page import RING, Figures, LoadPage, LoadPageError, page_path


def figures(n: int) -> Figures:
    """Figures that all say `n`, so that a torn record shows."""
    return Figures._make([float(n), *[n] * 12, n / 4, *[(n,) * (n % 17)] * 3, 0, 0])


@pytest.fixture
def name() -> str:
    return f"tidegate-test-{uuid.uuid4().hex}"


@pytest.fixture
def page(name: str) -> Iterator[LoadPage]:
    page = LoadPage.create(name)
    yield page
    page.close()


def test_figures_arrive_as_written(page: LoadPage, name: str) -> None:
    """A reader gets every field of the newest figures, and none before the first write."""
    other = LoadPage.open(name)
    assert other.read() is None
    wide = Figures(1.5, 2**40, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0.25, tuple(range(16)), (2**32 - 1,) * 16, (7,) * 16)
    assert page.write(figures(1)) == 1
    assert page.write(wide, [5, 6]) == 2
    assert other.read() == wide._replace(admitted=2, version=2)
    assert other.version == 2
    other.close()


def test_admitted_since_gives_each_ticket_once(page: LoadPage) -> None:
    """Asking with the count of the last answer gives exactly the tickets logged since, none twice."""
    page.write(figures(1), [1, 2, 3])
    tickets, count = page.admitted_since(0)
    page.write(figures(2), [4, 2**32 - 1])
    assert tickets == [1, 2, 3]
    assert page.admitted_since(count) == ([4, 2**32 - 1], 5)
    assert page.admitted_since(count, until=4) == ([4], 4)
    assert page.admitted_since(5) == ([], 5)


@pytest.mark.parametrize("total", [RING - 1, RING, RING + 1, 3 * RING + 7])
def test_ring_keeps_the_last_tickets(page: LoadPage, total: int) -> None:
    """A reader that fell behind gets the newest 4096 tickets, in order, and never a wrong one."""
    for start in range(0, total, 100):
        page.write(figures(1), range(start, min(start + 100, total)))
    tickets, count = page.admitted_since(0)
    assert count == total
    assert tickets == list(range(max(0, total - RING), total))


def test_policy_is_seen_once(page: LoadPage, name: str) -> None:
    """A setting is handed out until its version is known, then the page says that nothing changed."""
    other = LoadPage.open(name)
    assert other.policy_if_changed(0) is None
    page.set_policy({"name": "fcfs"})
    version = page.set_policy({"name": "larry", "alpha": 500.0})
    assert other.policy_if_changed(0) == (version, {"name": "larry", "alpha": 500.0})
    assert other.policy_if_changed(version) is None
    with pytest.raises(ValueError, match="longer"):
        page.set_policy({"name": "x" * 5000})
    assert other.policy_if_changed(version) is None
    other.close()


def test_grace_holds_until_its_end(page: LoadPage, name: str) -> None:
    """The other side sees the seconds until the time that was set, none before any was, and the newest setting only."""
    other = LoadPage.open(name)
    assert other.grace_s(100.0) == 0.0
    page.set_grace(0.5, until=110.0)
    assert [other.grace_s(now) for now in (100.0, 109.9, 110.0, 200.0)] == [0.5, 0.5, 0.0, 0.0]
    page.set_grace(2.0, until=105.0)
    assert [other.grace_s(now) for now in (100.0, 106.0)] == [2.0, 0.0]
    page.write(figures(3), [1, 2])
    page.set_policy({"name": "fcfs"})
    assert other.grace_s(100.0) == 2.0
    other.close()


def test_open_refuses_what_is_no_page(name: str) -> None:
    """A missing file and a file that is something else each give an error that says what to do."""
    with pytest.raises(LoadPageError, match="create it"):
        LoadPage.open(name)
    page_path(name).write_bytes(b"x" * 100)
    with pytest.raises(LoadPageError, match="not a load page"):
        LoadPage.open(name)
    page_path(name).write_bytes(bytes(os.path.getsize(page_path(name))))
    LoadPage.create(name).close()  # a left-over is replaced
    assert not page_path(name).exists()


def test_unlinked_page_stays_usable(page: LoadPage, name: str) -> None:
    """Once both sides have the page open its file can go, so that no crash leaves one behind."""
    other = LoadPage.open(name)
    page.unlink()
    assert not page_path(name).exists()
    other.write(figures(3))
    assert page.read() == figures(3)._replace(admitted=0, version=1)
    other.close()


def test_only_the_creator_removes_the_file(page: LoadPage, name: str) -> None:
    """Closing the engine's side leaves the file; closing the replica's side, even twice, removes it."""
    LoadPage.open(name).close()
    assert page_path(name).exists()
    page.close()
    page.close()
    assert not page_path(name).exists()


def _write_for_ever(name: str) -> None:
    page, n = LoadPage.open(name), 0
    while True:
        n += 1
        page.write(figures(n), [n % 2**32] * (n % 3))


def test_no_torn_record_and_no_loss_when_the_writer_is_killed(page: LoadPage, name: str) -> None:
    """Against a writer at full speed every read is whole and newer; after SIGKILL the last record is still there."""
    writer = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(name,))
    writer.start()
    try:
        last, reads, count, deadline = 0, 0, 0, time.monotonic() + 60
        while reads < 20_000 and time.monotonic() < deadline:
            seen = page.read()
            if seen is None:
                time.sleep(0.001)
                continue
            reads += 1
            n = seen.steps
            assert seen == figures(n)._replace(admitted=seen.admitted, version=n)
            assert n >= last
            if reads % 50 == 0:
                tickets, count = page.admitted_since(count, until=seen.admitted)
                assert tickets == sorted(tickets)
                assert all(ticket <= n for ticket in tickets)
            last = n
        assert reads == 20_000
    finally:
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
    seen = page.read()
    assert seen is not None
    assert seen == figures(seen.steps)._replace(admitted=seen.admitted, version=seen.steps)


def test_a_write_cut_short_leaves_the_record_before_it(page: LoadPage, name: str) -> None:
    """A writer that dies half-way through its slot does not hide the figures or the policy before."""
    page.write(figures(1))
    page.set_policy({"name": "fcfs"})
    file = page_path(name)
    whole = file.read_bytes()
    page.write(figures(2))
    page.set_policy({"name": "larry"})
    changed = file.read_bytes()
    # Take the new slots, half of each changed byte run, under the old versions: what a cut in mid-write leaves.
    torn = bytearray(changed)
    torn[:64] = whole[:64]
    for i in range(64, len(torn)):
        if whole[i] != changed[i] and i % 2:
            torn[i] = whole[i]
    file.write_bytes(torn)
    other = LoadPage.open(name)
    assert other.read() == figures(1)._replace(admitted=0, version=1)
    assert other.policy_if_changed(0) == (1, {"name": "fcfs"})
    other.close()


@pytest.mark.parametrize(
    ("at", "value"),
    [(64 + 384 + 20, 0xFF), (8, 1)],
    ids=["a figure changed", "the slot already holds later figures"],
)
def test_figures_that_are_not_whole_are_never_returned(page: LoadPage, name: str, at: int, value: int) -> None:
    """A slot whose checksum or version does not fit what was asked for gives an error, not figures."""
    for n in (1, 2, 3):
        page.write(figures(n))
    raw = bytearray(page_path(name).read_bytes())
    assert raw[at] != value
    raw[at] = value
    page_path(name).write_bytes(raw)
    other = LoadPage.open(name)
    with pytest.raises(LoadPageError, match="damaged"):
        other.read()
    other.close()


def test_a_page_without_a_file_is_shared_by_its_name() -> None:
    """Another mapping by `name` sees what is written and outlives the name, which is a descriptor's and no file's."""
    ours = LoadPage.anonymous()
    assert "memfd" in os.readlink(ours.name)
    theirs = LoadPage.open(ours.name)
    ours.unlink()
    with pytest.raises(LoadPageError):
        LoadPage.open(ours.name)
    theirs.set_policy({"name": "fcfs"})
    assert ours.policy_if_changed(0) == (1, {"name": "fcfs"})
    theirs.close()
    ours.close()
