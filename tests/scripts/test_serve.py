"""`make serve`: one fleet per port, a ready line that is true, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from scripts import serve

ROOT = Path(__file__).resolve().parents[2]

TOY = """
import subprocess
import time
from fastapi import FastAPI
from ray import serve

api = FastAPI()

@serve.deployment
class Engine:
    def __init__(self):
        self.child = subprocess.Popen(["sleep", "86399"], start_new_session=True)  # an orphan to be
        time.sleep(5)  # long enough to be seen starting
    def pid(self):
        return self.child.pid

@serve.deployment
@serve.ingress(api)
class Ingress:
    def __init__(self, engine):
        self.engine = engine
    @api.get("/health/ready")
    async def ready(self):
        return {"pid": await self.engine.pid.remote()}

def build(args):
    if "fail" in args:
        raise ValueError(args["fail"])
    return Ingress.bind(Engine.bind())
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_config(folder: Path, args: str = "{}") -> Path:
    (folder / "toy_app.py").write_text(TOY)
    config = folder / "toy.yaml"
    config.write_text(
        f"http_options: {{host: 127.0.0.1, port: {free_port()}}}\n"
        f"applications: [{{name: toy, route_prefix: /, import_path: toy_app:build, args: {args}}}]\n"
    )
    return config


def launch(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.serve", str(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(config.parent)},
    )


def serve_once(config: Path) -> subprocess.CompletedProcess[str]:
    """A start that is expected to end by itself."""
    command = [sys.executable, "-m", "scripts.serve", str(config)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Everything printed up to the first line that matches."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if re.search(pattern, line):
            return seen
    pytest.fail(f"ended without {pattern!r}:\n{seen}")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A running toy fleet."""
    config = write_config(tmp_path)
    process = launch(config)
    try:
        yield process, config
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


@pytest.mark.integration
def test_a_fleet_starts_refuses_a_second_and_ends_clean(fleet: tuple[subprocess.Popen[str], Path]) -> None:
    """The ready line comes when the fleet answers; a second start fails at once and harms nothing; ctrl-C ends all."""
    process, config = fleet
    target = serve.read_target(config)
    output = read_until(process, "ready on")
    assert "Engine 1 starting" in output
    orphan = psutil.Process(httpx.get(f"{target.url}/health/ready").json()["pid"])
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert orphan in descendants

    second = serve_once(config)
    assert second.returncode == 1
    assert f"already has port {target.port}" in second.stderr
    assert httpx.get(f"{target.url}/health/ready").status_code == 200

    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 0, rest
    assert "no process is left" in rest
    assert [one for one in [*descendants, orphan] if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert serve.is_free(target.host, target.port)


@pytest.mark.integration
def test_a_signal_while_loading_ends_clean(fleet: tuple[subprocess.Popen[str], Path]) -> None:
    """A signal during the start ends what has started so far."""
    process, _ = fleet
    read_until(process, "starting Ray")
    time.sleep(4.0)
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert descendants
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 0, rest
    assert [one for one in descendants if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.integration
def test_a_bad_application_is_reported(tmp_path: Path) -> None:
    """When the application cannot be built, its own message is shown, all ends and the status is 1."""
    process = launch(write_config(tmp_path, '{fail: "alpha must be >= 0"}'))
    output = process.communicate(timeout=180)[0]
    assert process.returncode == 1
    assert "alpha must be >= 0" in output
    assert "all logs are in" in output


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    """A port that another program listens on is named before anything is started."""
    config = write_config(tmp_path)
    target = serve.read_target(config)
    with socket.create_server((target.host, target.port)):
        result = serve_once(config)
    assert result.returncode == 1
    assert f"{target.host}:{target.port} is in use" in result.stderr


def test_a_claim_lasts_as_long_as_its_socket(tmp_path: Path) -> None:
    """While one start holds the claim, the next is refused even before the port is bound; afterwards it is not."""
    target = serve.read_target(write_config(tmp_path))
    with serve.claim(target), pytest.raises(serve.ServeError, match="another `make serve`"):
        serve.claim(target)
    serve.claim(target).close()


@pytest.mark.parametrize(
    "text", ["", "applications: []", "http_options: {port: eighty}\napplications: [{}]", "a: [", "[]"]
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    """Whatever is wrong with the file, the message names it."""
    config = tmp_path / "bad.yaml"
    config.write_text(text)
    with pytest.raises(serve.ServeError, match=r"bad\.yaml"):
        serve.read_target(config)


def test_the_shipped_config_gives_a_command_to_try() -> None:
    """The curl line for serve_config.yaml goes to its port and names its model."""
    target = serve.read_target(ROOT / "serve_config.yaml")
    line = serve.try_line(target)
    assert f":{target.port}/v1/chat/completions" in line
    assert f'"model": "{target.model}"' in line


def test_an_open_host_without_keys_is_refused(tmp_path: Path) -> None:
    """A file that serves other machines must give keys, or say that none are meant."""
    config = tmp_path / "open.yaml"
    text = (ROOT / "serve_config.yaml").read_text().replace("host: 127.0.0.1", "host: 0.0.0.0")
    config.write_text(text)
    with pytest.raises(serve.ServeError, match=r"open\.yaml: api_keys: .*open to other machines"):
        serve.read_target(config)
    for section in ("{file: /etc/keys.yaml}", "{allow_public_without_keys: true}"):
        config.write_text(text.replace("    args:\n", f"    args:\n      api_keys: {section}\n"))
        assert serve.read_target(config).host == "0.0.0.0"


def page_config(folder: Path, port: int, admin: int) -> Path:
    """A Serve file of our application with these ports."""
    config = folder / "ours.yaml"
    config.write_text(
        f"http_options: {{port: {port}}}\n"
        f"applications: [{{name: a, import_path: app.main:build, args: {{admin: {{port: {admin}}}}}}}]\n"
    )
    return config


def test_the_status_page_needs_its_port(tmp_path: Path) -> None:
    """A port of the page that is in use, or the API's, is refused before anything starts."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        target = serve.read_target(page_config(tmp_path, free_port(), other.getsockname()[1]))
        with pytest.raises(serve.ServeError, match=r"admin\.port"):
            serve.claim(target)
    serve.claim(target).close()
    with pytest.raises(serve.ServeError, match="the API has this port"):
        serve.read_target(page_config(tmp_path, 8000, 8000))
