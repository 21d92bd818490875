"""Load reports over real sockets: what is published when, and what a router hears."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import zmq

from deployments.load_page import Figures, LoadPage
from deployments.reports import ReportPublisher, ReportSubscriber
from deployments.wire import ReplicaReport

IDLE = Figures(1.0, 64, 64, 16, 0, 0, 0, 0, 256, 8, 0, 0)


def load(of: Figures | ReplicaReport) -> tuple[int, ...]:
    """The part of figures or of a report that changes with the load."""
    return of.free_blocks, of.running, of.waiting, of.queued_tokens


class Fleet:
    """Publishers with their pages, and one subscriber that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[ReplicaReport] = []
        self.subscriber = ReportSubscriber(self.heard.append, asyncio.get_running_loop())
        self.pages: dict[str, LoadPage] = {}
        self.publishers: dict[str, ReportPublisher] = {}

    def add(self, replica: str, **timing: float) -> None:
        page = self.pages[replica] = LoadPage.create(f"tidegate-test-{uuid.uuid4().hex}")
        self.publishers[replica] = ReportPublisher(page, replica, "127.0.0.1", **timing)

    def follow(self, *replicas: str) -> None:
        self.subscriber.set_endpoints({self.publishers[replica].endpoint for replica in replicas})

    def of(self, replica: str) -> list[ReplicaReport]:
        return [report for report in self.heard if report.replica == replica]

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.subscriber.close()
        for publisher in self.publishers.values():
            publisher.close()
        for page in self.pages.values():
            page.close()


@asynccontextmanager
async def fleet(*replicas: str, **timing: float) -> AsyncIterator[Fleet]:
    fleet = Fleet()
    try:
        for replica in replicas:
            fleet.add(replica, **timing)
            fleet.pages[replica].write(IDLE)
        fleet.follow(*replicas)
        while {report.replica for report in fleet.heard} != set(replicas):  # PUB drops until the connection stands
            for replica in replicas:
                fleet.pages[replica].write(IDLE)
                fleet.publishers[replica].check()
            await asyncio.sleep(0.03)
        yield fleet
    finally:
        fleet.close()


def test_report_carries_the_figures() -> None:
    """A report says what the page says, field by field."""

    async def main() -> None:
        async with fleet("a") as f:
            f.pages["a"].write(Figures(7.5, 1, 2, 16, 4, 5, 6, 7, 8, 9, 10, 11, 0, 0.0, (0, 4, 0), (2, 0, 3)), [3])
            await f.until(lambda: f.heard[-1].t == 7.5)
            got = f.heard[-1]
            assert (got.free_blocks, got.total_blocks, got.block_size, got.running, got.waiting) == (1, 2, 16, 4, 5)
            assert (got.queued_tokens, got.head_blocks, got.batch_tokens, got.max_num_seqs) == (6, 7, 8, 9)
            assert (got.preemptions, got.admitted, got.state) == (10, [3], "serving")
            assert (got.running_by_tier, got.waiting_by_tier) == ([0, 4], [2, 0, 3])

    asyncio.run(main())


def test_nothing_is_published_before_the_first_figures() -> None:
    """A replica whose engine has not started is not reported as idle."""

    async def main() -> None:
        async with fleet() as f:
            f.add("a", heartbeat_s=0.01)
            f.follow("a")
            await asyncio.sleep(0.3)
            assert f.heard == []
            f.pages["a"].write(IDLE)
            await f.until(lambda: len(f.heard) > 0)

    asyncio.run(main())


def test_idle_replica_reports_ten_times_a_second() -> None:
    """The heartbeat goes on without any change on the page, with growing sequence numbers."""

    async def main() -> None:
        async with fleet("a") as f:
            start, before = time.monotonic(), len(f.heard)
            await f.until(lambda: len(f.heard) >= before + 10)
            assert 0.5 < time.monotonic() - start < 5
            seqs = [report.seq for report in f.heard]
            assert seqs == sorted(set(seqs))

    asyncio.run(main())


def test_a_change_does_not_wait_for_the_heartbeat() -> None:
    """With a heartbeat of a minute, each kind of change is still heard at once."""

    async def main() -> None:
        async with fleet("a", heartbeat_s=60.0) as f:
            page, figures = f.pages["a"], IDLE
            changes = [
                (figures := figures._replace(running=1)),
                (figures := figures._replace(waiting=2)),
                (figures := figures._replace(free_blocks=3)),
                (figures := figures._replace(queued_tokens=4)),
            ]
            for figures in changes:
                page.write(figures)
                await f.until(partial(lambda new: load(f.heard[-1]) == load(new), figures))
            page.write(figures, [5])
            await f.until(lambda: f.heard[-1].admitted == [5])

    asyncio.run(main())


def test_tickets_are_named_in_three_reports() -> None:
    """Each ticket is in exactly three consecutive reports, so a router may lose two."""

    async def main() -> None:
        decode = msgspec.msgpack.Decoder(ReplicaReport).decode
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:  # not our subscriber: that merges reports
            socket.subscribe(b"")
            async with fleet("a", heartbeat_s=0.02) as f:
                socket.connect(f.publishers["a"].endpoint)
                while not socket.poll(0):
                    await asyncio.sleep(0.01)
                for ticket in range(20):
                    f.pages["a"].write(IDLE, [ticket, 100 + ticket])
                    await asyncio.sleep(0.015)
                last = f.heard[-1].seq
                await f.until(lambda: f.heard[-1].seq > last + 6)
                named: dict[int, list[int]] = {}
                while socket.poll(0):
                    report = decode(socket.recv())
                    for ticket in report.admitted:
                        named.setdefault(ticket, []).append(report.seq)
        assert set(named) == {*range(20), *range(100, 120)}
        assert all(seqs == list(range(seqs[0], seqs[0] + 3)) for seqs in named.values())

    asyncio.run(main())


def test_state_and_settings_go_out_at_once() -> None:
    """Draining, dead and new settings are published without waiting for a poll or the heartbeat."""

    async def main() -> None:
        async with fleet("a", heartbeat_s=60.0, idle_poll_s=60.0) as f:
            f.publishers["a"].set_settings({"policy": "p2c"})
            await f.until(lambda: f.heard[-1].settings == {"policy": "p2c"})
            assert abs(f.heard[-1].settings_t - time.time()) < 20
            f.publishers["a"].set_state("draining")
            await f.until(lambda: f.heard[-1].state == "draining")
            f.publishers["a"].set_state("dead")
            await f.until(lambda: f.heard[-1].state == "dead")
            assert f.heard[-1].settings == {"policy": "p2c"}

    asyncio.run(main())


def test_death_before_the_first_figures_is_reported() -> None:
    """An engine that dies while starting is reported dead although the page is empty."""

    async def main() -> None:
        async with fleet() as f:
            f.add("a")
            f.follow("a")
            await asyncio.sleep(0.3)
            f.publishers["a"].set_state("dead")
            await f.until(lambda: [report.state for report in f.heard] == ["dead"])

    asyncio.run(main())


def test_the_set_of_replicas_may_change() -> None:
    """A replica that is added is heard, one that is taken out falls silent, the others go on."""

    async def main() -> None:
        async with fleet("a", "b") as f:
            f.add("c")
            f.pages["c"].write(IDLE)
            f.follow("b", "c")
            await f.until(lambda: len(f.of("c")) > 0)
            await asyncio.sleep(0.1)
            a, b = len(f.of("a")), len(f.of("b"))
            await f.until(lambda: len(f.of("b")) >= b + 3)
            assert len(f.of("a")) == a

    asyncio.run(main())


def test_a_blocked_router_gets_the_newest_report_with_all_tickets() -> None:
    """After the loop was busy for many reports, each replica's newest is handed on once, and no ticket is missing."""

    async def main() -> None:
        async with fleet("a", "b", heartbeat_s=60.0) as f:
            before = len(f.heard)
            for ticket in range(50):  # nothing is awaited: the subscriber cannot run in between
                f.pages["a"].write(IDLE._replace(running=ticket), [ticket])
                f.publishers["a"].check()
            time.sleep(0.5)
            await f.until(lambda: f.heard[-1].running == 49)
            assert set().union(*(report.admitted for report in f.heard[before:])) == set(range(50))
            assert len(f.heard) - before < 25

    asyncio.run(main())


def test_a_foreign_frame_is_ignored() -> None:
    """Bytes that are no report neither stop the subscriber nor reach the router."""

    async def main() -> None:
        async with fleet("a") as f:
            with zmq.Context() as context, context.socket(zmq.PUB) as stranger:
                stranger.bind("tcp://127.0.0.1:*")
                endpoint = stranger.get_string(zmq.LAST_ENDPOINT)
                f.subscriber.set_endpoints({f.publishers["a"].endpoint, endpoint})
                for _ in range(20):
                    stranger.send(b"\xc1 nonsense")
                    stranger.send(msgspec.msgpack.encode(["a", "b"]))
                    await asyncio.sleep(0.02)
                seen = len(f.heard)
                await f.until(lambda: len(f.heard) > seen)
                assert {report.replica for report in f.heard} == {"a"}

    asyncio.run(main())


def test_reports_are_fresh_when_they_arrive() -> None:
    """Half of all figures are on the router within 50 ms even on a busy machine (a few ms on a quiet one)."""

    async def main() -> None:
        async with fleet("a", "b", "c", "d") as f:
            ages: list[float] = []
            f.subscriber._on_report = lambda report: ages.append(time.time() - report.t)
            for step in range(50):
                for page in f.pages.values():
                    page.write(IDLE._replace(t=time.time(), running=1 + step % 3))
                await asyncio.sleep(0.01)
            assert len(ages) > 50
            assert sorted(ages)[len(ages) // 2] < 0.05

    asyncio.run(main())


def test_closing_twice_is_harmless() -> None:
    """Publisher and subscriber can be closed at any time, also before anything was followed."""

    async def main() -> None:
        async with fleet() as f:
            f.subscriber.close()
            f.follow()
            await asyncio.sleep(0.05)

    asyncio.run(main())
