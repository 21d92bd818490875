"""Start and stop the servers under measurement: plain vLLM, and the fleet in a Ray of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console

from loadgen.bench import pinning
from loadgen.report import ROOT

MODEL_NAME = "bench"
# Ray starts its daemons as sessions of their own; they are found by this mark in their environment.
MARK = "TIDEGATE_BENCH"


def default_model() -> str:
    """Folder of the default model; SystemExit saying how to get it if it is not there."""
    folder = Path.home() / ".cache" / "tidegate" / "models" / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        raise SystemExit(f"no model at {folder}: run `make setup` once, or give --model FOLDER")
    return str(folder)


@dataclass(slots=True)
class Server:
    """A server under measurement: where it answers, where it logs, and the processes it consists of.

    `env`: what its environment has beyond ours.
    """

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    env: dict[str, str] = field(default_factory=dict)
    _known: dict[int, psutil.Process] = field(default_factory=dict)

    def processes(self) -> list[psutil.Process]:
        """All living processes of this server."""
        for process in pinning.family(self.process.pid):
            self._known.setdefault(process.pid, process)
        for process in psutil.process_iter():
            if process.pid not in self._known and _mark(process) == self.name:
                for member in pinning.family(process.pid):
                    self._known.setdefault(member.pid, member)
        self._known = {pid: p for pid, p in self._known.items() if p.is_running()}
        return list(self._known.values())

    def named(self, part: str) -> list[psutil.Process]:
        """Its living processes whose title contains `part`, oldest first."""
        return sorted((p for p in self.processes() if part in pinning.title(p)), key=lambda p: p.create_time())

    def gcs_address(self) -> str:
        """Where a driver joins the Ray of this fleet: "auto" would take any Ray of the machine."""
        marker = "--gcs-address="
        arguments = (a for p in self.named("raylet/raylet") for a in pinning.title(p).split() if a.startswith(marker))
        if (address := next(arguments, None)) is None:
            raise RuntimeError(f"{self.name} has no raylet:\n{self.log_end()}")
        return address.removeprefix(marker)

    def wait_until_ready(self, path: str, timeout_s: float) -> None:
        """Return when `path` answers 200; RuntimeError with the end of the log if that does not come."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with code {self.process.returncode}:\n{self.log_end()}")
            try:
                with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} was not ready after {timeout_s:.0f} s:\n{self.log_end()}")

    def log_end(self, lines: int = 40) -> str:
        """Last lines of the log, with its path."""
        return "\n".join([str(self.log), *self.log.read_text(errors="replace").splitlines()[-lines:]])

    def stop(self, grace_s: float = 30.0) -> None:
        """Interrupt it as ctrl-C does, and kill what is left after `grace_s` seconds."""
        everything = self.processes()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(everything, timeout=grace_s)
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(alive, timeout=10)
        self.process.wait(timeout=10)


def _mark(process: psutil.Process) -> str | None:
    try:
        mark: str | None = process.environ().get(MARK)
        return mark
    except (psutil.Error, OSError):
        return None


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def start_plain(model: str, engine_args: dict[str, Any], core: int, folder: Path) -> Server:
    """vLLM's own OpenAI server; `engine_args` by vLLM's Python names; the engine computes on `core`."""
    port = free_port()
    flags = []
    for name, value in engine_args.items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    # As a module: the `vllm` command asks for a distribution named vllm, which the CPU wheel is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", *flags]
    env = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}
    return _start("vllm", port, command, env, folder)


def start_fleet(
    model: str, engine_args: dict[str, Any], folder: Path, replicas: int = 1, **sections: dict[str, Any]
) -> Server:
    """`serve run` with replicas behind one ingress, as a user would write it, in a Ray session below `folder`.

    `sections` are further ones of the application's `args`.
    """
    port = free_port()
    application = {
        "name": "tidegate",
        "route_prefix": "/",
        "import_path": "app.main:build",
        "args": {
            "model_loading_config": {"model_id": MODEL_NAME, "model_source": model},
            "engine_kwargs": engine_args,
            "deployment_config": {"num_replicas": replicas},
            "cpu": {"threads_per_replica": 1},  # as plain vLLM gets: one core is an engine's
            "admin": {"port": free_port()},  # of its own: other fleets may run here
            **sections,
        },
    }
    config = folder / "serve_config.yaml"
    config.write_text(
        yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]})
    )
    command = [str(Path(sys.executable).with_name("serve")), "run", "--address", "local", str(config)]
    env = {
        "RAY_TMPDIR": str(folder),
        "RAY_ADDRESS": "",
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's default of 15 yields to every other process; plain vLLM runs at 0
    }
    return _start("tidegate", port, command, env, folder)


def _start(name: str, port: int, command: list[str], env: dict[str, str], folder: Path) -> Server:
    log = folder / f"{name}.log"
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", **env}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            # SPT_NOENV: process titles leave the environment block alone
            env={**os.environ, **ours, MARK: name, "SPT_NOENV": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,  # not a session: the kernel shares the CPU by session, a client in another starved
        )
    return Server(name, f"http://127.0.0.1:{port}", log, process, ours)


@contextmanager
def session_folder(console: Console) -> Iterator[Path]:
    """A new folder for logs and Ray sessions, removed at the end, but kept and named if something goes wrong.

    Its path is short: socket paths below it may have 107 characters at most.
    """
    folder = Path(tempfile.mkdtemp(prefix="tgb", dir="/tmp" if Path("/tmp").is_dir() else None))
    try:
        yield folder
    except BaseException:
        console.print(f"logs are kept in {folder}")
        raise
    shutil.rmtree(folder, ignore_errors=True)
