"""A Ray head and `serve run` as children, with everything that they start: started, watched and ended together.

Ray and vLLM start processes that outlive their parents; this process declares itself their subreaper (prctl(2)), so
that whatever they leave behind stays among its descendants and can be ended by process id.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
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

from app.config.admin import TOKEN_VARIABLE, AdminConfig

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
    admin: AdminConfig

    @property
    def url(self) -> str:
        """Base URL as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}{self.prefix}"


def _before_exec() -> None:
    """In a child: end with this process, and heed ctrl-C even if this process was started where it is ignored (`&`)."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Fleet:
    """Ray head and `serve run`, children of this process, with everything that they start."""

    def __init__(self, target: Target) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.target = target
        self.started = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="tidegate-", dir="/tmp"))  # short: Ray puts unix sockets in it
        self.log = self.folder / "serve.log"
        self.address = f"127.0.0.1:{prefer(6379)}"
        self.dashboard = f"127.0.0.1:{prefer(8265)}"
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        # Ray listens on every interface, even when told 127.0.0.1, and runs whatever a client sends. A token of the
        # cluster's own keeps others out, and a token that another Ray program left in the home folder out of the way.
        self.token = secrets.token_hex(32)
        token_file = self.folder / "token"  # readable by this user only, as is the folder (mkdtemp)
        token_file.write_text(self.token)
        self.admin_token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        self.client_env = {
            "RAY_ADDRESS": self.address,
            "RAY_DASHBOARD_ADDRESS": f"http://{self.dashboard}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file),
        }
        self.env = {
            **os.environ,
            **self.client_env,
            TOKEN_VARIABLE: self.admin_token,
            "RAY_worker_niceness": "0",  # Ray's default, 15, lets any other program of the machine starve the engines
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def start(self) -> None:
        """Start the Ray head and, once it answers, `serve run`; return when the application is ready."""
        options = {
            "port": self.address.rpartition(":")[2],
            "temp-dir": self.folder,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": self.dashboard.rpartition(":")[2],
            "dashboard-agent-listen-port": prefer(52365),
            "log-style": "record",
        }
        self._spawn("ray", "start", "--head", "--block", *(f"--{name}={value}" for name, value in options.items()))
        self._wait(self._ray_answers, lambda: "starting Ray")
        self._spawn("serve", "run", "--address", self.address, str(self.target.config))
        self._wait(self._ready, self.replicas)

    def watch(self) -> None:
        """Raise `ServeError` when a child has ended by itself; else stay."""
        while True:
            self._check_children()
            self._reap()
            time.sleep(1.0)

    def replicas(self) -> str:
        """One line on the deployments, such as "EngineReplica 1 running 1 starting | Ingress 1 running"."""
        applications = (self._ask_ray("/api/serve/applications/") or {}).get("applications", {})
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
                start_new_session=True, preexec_fn=_before_exec,
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

    def _wait(self, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Poll `done` once a second; show `describe()` when it changes, and every 10 s."""
        shown, shown_at = "", 0.0
        while not done():
            self._check_children()
            line, now = describe(), time.monotonic()
            if line != shown or now - shown_at >= 10:
                self.say(line)
                shown, shown_at = line, now
            time.sleep(1.0)

    def _ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.target.url}/health/ready", timeout=5.0, trust_env=False).status_code == 200
        return False

    def _ray_answers(self) -> bool:
        version = self._ask_ray("/api/version")
        session = self.folder / "session_latest"
        if version is not None and (not session.exists() or version["session_name"] != session.resolve().name):
            raise ServeError(f"another Ray took {self.dashboard} at the same moment: start again")
        return version is not None

    def _ask_ray(self, path: str) -> dict[str, Any] | None:
        """JSON of a GET request to the dashboard, None while it does not answer."""
        try:
            response = httpx.get(
                f"http://{self.dashboard}{path}",
                headers={"Authorization": f"Bearer {self.token}"},
                timeout=5.0,
                trust_env=False,
            )
        except httpx.TransportError:
            return None
        if response.status_code in (401, 403):
            raise ServeError(f"another Ray took {self.dashboard} at the same moment: start again")
        return response.json() if response.is_success else None


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


def prctl(option: int, value: int) -> None:
    """Call prctl(2); raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
