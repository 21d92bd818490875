"""Starts the fleet on this machine and keeps it until ctrl-C: `python scripts/serve.py [serve_config.yaml]`.

    ray start --head --block ─► serve run CONFIG ─► GET /health/ready is 200 ─► ready line ─► signal ─► end everything
     (own temp folder, loopback)

Ray and vLLM start processes that outlive their parents; this process declares itself their subreaper (prctl(2)), so
that whatever they leave behind stays among its descendants and can be ended by process id.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
GRACE_S = 20.0  # for each step on the way out
BIN = Path(sys.executable).parent


class ServeError(RuntimeError):
    """The fleet cannot be started or has ended by itself; the message says why."""


class Stop(BaseException):
    """SIGINT or SIGTERM: end the fleet. Not an Exception, so that no retry loop swallows it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the fleet of a config file answers."""

    config: Path
    host: str
    port: int
    prefix: str
    model: str

    @property
    def url(self) -> str:
        """Base URL as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}{self.prefix}"


def read_target(config: Path) -> Target:
    """Take host, port, route prefix and model name from a Serve config; the application validates the rest."""
    try:
        content: dict[str, Any] = yaml.safe_load(config.read_text())
        http = content.get("http_options") or {}
        application = content["applications"][0]
        model = ((application.get("args") or {}).get("model_loading_config") or {}).get("model_id", "MODEL")
        prefix = (application.get("route_prefix") or "/").rstrip("/")
        return Target(config.resolve(), http.get("host", "127.0.0.1"), int(http.get("port", 8000)), prefix, model)
    except OSError as error:
        raise ServeError(f"cannot read {config}: {error.strerror}") from error
    except (yaml.YAMLError, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ServeError(f"{config} is not a Serve config (http_options, applications): {error!r}") from error


def claim(target: Target) -> socket.socket:
    """Refuse to start where something listens, or is about to; keep the result open for as long as the fleet runs."""
    guard = socket.socket(socket.AF_UNIX)
    try:
        guard.bind(f"\0tidegate-{target.port}")  # abstract: visible to others at once, gone with this process
    except OSError:
        raise ServeError(
            f"another `make serve` on this machine already has port {target.port}: end it with ctrl-C, "
            f"or set another http_options.port in {target.config.name}"
        ) from None
    if not is_free(target.host, target.port):
        raise ServeError(
            f"{target.host}:{target.port} is in use by another program: end it, "
            f"or set another http_options.port in {target.config.name}"
        )
    return guard


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections in TIME_WAIT do not count
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError:
            return False
        return True


def prefer(port: int) -> int:
    """`port`, which users know by heart, or a free one when another Ray has it."""
    if is_free("127.0.0.1", port):
        return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Fleet:
    """Ray head and `serve run`, children of this process, with everything that they start."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.started = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-", dir="/tmp"))  # short: Ray puts unix sockets in it
        self.log = self.folder / "serve.log"
        self.address = f"127.0.0.1:{prefer(6379)}"
        self.dashboard = f"127.0.0.1:{prefer(8265)}"
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        # On loopback and behind this user's permissions; Ray would otherwise switch token mode on when it finds a
        # token that some other Ray program left in the home folder, and then refuse our own drivers.
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_ADDRESS": self.address,
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def start(self) -> None:
        """Start the Ray head and, once it answers, `serve run`; return when the application is ready."""
        options = {
            "node-ip-address": "127.0.0.1",
            "port": self.address.rpartition(":")[2],
            "temp-dir": self.folder,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": self.dashboard.rpartition(":")[2],
            "dashboard-agent-listen-port": prefer(52365),
            "log-style": "record",
        }
        self._spawn("ray", "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items()))
        self._wait(f"http://{self.dashboard}/api/version", lambda: "starting Ray")
        self._spawn("serve", "run", "--address", self.address, str(self.target.config))
        self._wait(f"{self.target.url}/health/ready", self.replicas)

    def watch(self) -> None:
        """Raise `ServeError` when a child has ended by itself; else stay."""
        while True:
            self._check_children()
            self._reap()
            time.sleep(1.0)

    def replicas(self) -> str:
        """One line on the deployments, such as "EngineReplica 1 running 1 starting | Ingress 1 running"."""
        response = self._get(f"http://{self.dashboard}/api/serve/applications/")
        applications = response.json().get("applications", {}) if response else {}
        for application in applications.values():
            if application["status"] == "DEPLOY_FAILED":
                raise ServeError(f"the application could not be deployed: {application['message']}")
        states = [
            f"{name} " + " ".join(f"{count} {state.lower()}" for state, count in sorted(found.items()))
            for application in applications.values()
            for name, deployment in application["deployments"].items()
            if (found := Counter(replica["state"] for replica in deployment["replicas"]))
        ]
        return " | ".join(states) or "loading the application"

    def stop(self) -> None:
        """End every descendant: `serve run` takes Serve down, then Ray ends, then whatever is left.

        A signal meanwhile skips to the last step.
        """
        try:
            self._end("serve", signal.SIGINT)
            self._end("ray", signal.SIGTERM)
        except Stop:
            self.say("killing the fleet")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for send in (psutil.Process.terminate, psutil.Process.kill):
            left = psutil.Process().children(recursive=True)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    send(process)
            psutil.wait_procs(left, timeout=5.0)
        if left := psutil.Process().children(recursive=True):
            raise ServeError(f"could not end {', '.join(map(str, left))}")

    def log_tail(self, lines: int = 25) -> str:
        """The last lines that Ray and Serve printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"serve: [{time.monotonic() - self.started:4.0f} s] {text}", flush=True)

    def _spawn(self, program: str, *args: str) -> None:
        """Start one of the venv's programs in a session of its own: ctrl-C in the terminal reaches only us."""
        with self.log.open("ab") as log:
            self.children[program] = subprocess.Popen(
                [str(BIN / program), *args], env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )  # fmt: skip

    def _end(self, program: str, sign: signal.Signals) -> None:
        child = self.children.get(program)
        if child is None or child.poll() is not None:
            return
        child.send_signal(sign)
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.say(f"{program} did not end within {GRACE_S:.0f} s, killing it")
            child.kill()
            child.wait()

    def _reap(self) -> None:
        """Collect orphans that have ended, such as a dead replica's engine: a subreaper does that in init's place."""
        own = {child.pid for child in self.children.values()}
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid not in own:
            os.waitpid(dead.si_pid, 0)

    def _check_children(self) -> None:
        for program, child in self.children.items():
            if child.poll() is not None:
                raise ServeError(f"`{program}` ended by itself with status {child.returncode}")

    def _wait(self, url: str, describe: Callable[[], str]) -> None:
        """Poll `url` once a second until it answers 200; show `describe()` when it changes, and every 10 s."""
        shown, shown_at = "", 0.0
        while self._get(url) is None:
            self._check_children()
            line, now = describe(), time.monotonic()
            if line != shown or now - shown_at >= 10:
                self.say(line)
                shown, shown_at = line, now
            time.sleep(1.0)

    @staticmethod
    def _get(url: str) -> httpx.Response | None:
        with contextlib.suppress(httpx.HTTPError):
            response = httpx.get(url, timeout=5.0, trust_env=False)
            return response if response.status_code == 200 else None
        return None


def prctl(option: int, value: int) -> None:
    """Call prctl(2); raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def try_line(target: Target) -> str:
    """A curl command for the fleet."""
    body = f'{{"model": "{target.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"curl {target.url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def on_signal(number: int, frame: object) -> None:
    """Leave `watch` or a start in progress."""
    raise Stop


def main() -> int:
    """Run the fleet of one config file; exit status 0 after ctrl-C or SIGTERM, 1 after a failure."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=Path("serve_config.yaml"))
    try:
        target = read_target(parser.parse_args().config)
        guard = claim(target)
    except ServeError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with guard:
        return run(Fleet(target))


def run(fleet: Fleet) -> int:
    """Start `fleet`, say when it is ready, wait for a signal, end it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    failure: ServeError | None = None
    try:
        fleet.start()
        fleet.say(
            f"ready on {fleet.target.url}, logs in {fleet.folder}, ctrl-C ends it. Try:\n\n{try_line(fleet.target)}\n"
        )
        print(
            f"Python handles and `serve status`: export RAY_AUTH_MODE=disabled RAY_ADDRESS={fleet.address}\n",
            flush=True,
        )
        fleet.watch()
    except Stop:
        fleet.say("ending the fleet; ctrl-C again kills it")
    except ServeError as error:
        failure = error
        print(fleet.log_tail(), file=sys.stderr)
    try:
        fleet.stop()
    except ServeError as error:
        failure = failure or error
    if failure:
        print(f"serve: {failure}\nserve: all logs are in {fleet.folder}", file=sys.stderr)
        return 1
    shutil.rmtree(fleet.folder, ignore_errors=True)
    fleet.say("ended, no process is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
