"""Processes under measurement: pinning, CPU time, roles, stopping."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loadgen.bench import ingress, pinning, servers

SPIN = "import time; end = time.time() + 60\nwhile time.time() < end: pass"


@pytest.fixture
def parent_and_child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a child which computes."""
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while len(pinning.family(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    yield process
    pinning.stop(process.pid, grace_s=1)
    process.wait(10)


def test_every_thread_is_pinned(parent_and_child: subprocess.Popen[bytes]) -> None:
    """Pinning a family leaves each of its threads exactly the asked core."""
    core = min(psutil.Process().cpu_affinity())
    members = pinning.family(parent_and_child.pid)
    assert len(members) == 2
    for member in members:
        pinning.pin(member, core)
    assert [member.cpu_affinity() for member in members] == [[core], [core]]


def test_cpu_time_of_a_computing_child_grows(parent_and_child: subprocess.Popen[bytes]) -> None:
    """CPU seconds of the computing child grow, and a process that has ended is left out."""
    members = pinning.family(parent_and_child.pid)
    before = pinning.cpu_seconds(members)
    time.sleep(1.0)
    after = pinning.cpu_seconds(members)
    assert after[members[1].pid] > before[members[1].pid]
    pinning.stop(parent_and_child.pid, grace_s=1)
    assert pinning.cpu_seconds(members) == {}


def test_stop_ends_the_whole_family(parent_and_child: subprocess.Popen[bytes]) -> None:
    """After stop() neither the process nor its child runs, and a second stop() does no harm."""
    members = pinning.family(parent_and_child.pid)
    pinning.stop(parent_and_child.pid, grace_s=1)
    assert not any(m.is_running() and m.status() != psutil.STATUS_ZOMBIE for m in members)
    pinning.stop(parent_and_child.pid, grace_s=1)


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("VLLM::EngineCore", "engine core"),
        ("ray::ServeReplica:tidegate:Ingress.handle_request", "ingress"),
        ("ray::ServeReplica:tidegate:EngineReplica", "replica front"),
        ("ray::ProxyActor", "proxy"),
        ("ray::ServeController.listen_for_change", "Serve controller"),
        ("/x/ray/core/src/ray/raylet/raylet --node", "raylet and gcs"),
        ("/x/bin/python -m vllm.entrypoints.openai.api_server --model m", "API server"),
        ("/x/bin/python /x/bin/serve run c.yaml", "driver"),
        ("ray-dashboard-whatever", ingress.REST),
    ],
)
def test_roles_by_process_title(title: str, expected: str) -> None:
    """Every process of both systems falls into the role that its title says."""
    assert ingress.role(title) == expected


def test_a_server_that_dies_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    """Waiting for a server that ended raises at once, with its exit code and the end of its log."""
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    server = servers._start("demo", servers.free_port(), command, {}, tmp_path)
    server.process.wait(20)
    with pytest.raises(RuntimeError, match=r"code 3(.|\n)*no such model"):
        server.wait_until_ready("/health", 20)


def test_marked_processes_belong_to_their_server(tmp_path: Path) -> None:
    """A child that made itself a session of its own and outlived its parent is still found, and stopped."""
    code = (
        "import subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {SPIN!r}], start_new_session=True); print('started')"
    )
    server = servers._start(f"demo-{time.time_ns()}", servers.free_port(), [sys.executable, "-c", code], {}, tmp_path)
    server.process.wait(20)
    orphans = server.processes()
    assert len(orphans) == 1
    server.stop(grace_s=1)
    assert server.processes() == []


def test_ray_of_a_fleet_is_found_by_its_raylet(tmp_path: Path) -> None:
    """Processes are found by a part of their title, and where to join Ray is what the server's own raylet was told."""
    arguments = ["raylet/raylet", "--gcs-address=10.1.2.3:456"]
    command = [sys.executable, "-c", SPIN, *arguments]
    server = servers._start(f"demo-{time.time_ns()}", servers.free_port(), command, {"RAY_X": "1"}, tmp_path)
    try:
        assert [p.pid for p in server.named("raylet/raylet")] == [server.process.pid]
        assert server.named("VLLM::EngineCore") == []
        assert server.gcs_address() == "10.1.2.3:456"
        assert server.env["RAY_X"] == "1"
    finally:
        server.stop(grace_s=1)
    with pytest.raises(RuntimeError, match="no raylet"):
        server.gcs_address()
