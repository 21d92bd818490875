"""Calls a running fleet through its Python handles, from a process of its own.

A test process that joined the fleet's Ray cluster could join no other; so a child does it: one JSON line per question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from .servers import ROOT, Server, ray_environment

APPLICATION = "tidegate"
#: Questions that no deployment answers, in the place of its name.
PROCESS, DASHBOARD = "process of", "dashboard"


class CallFailed(Exception):
    """A handle call raised; `kind` is the class name of what it raised."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Probe:
    """A Python handle of the application in a child process."""

    def __init__(self, server: Server) -> None:
        assert server.ray_dir is not None
        self._log = server.log.with_suffix(".probe.log")
        with self._log.open("a") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.probe"],
                cwd=ROOT,
                env={**os.environ, **ray_environment(server.ray_dir), "RAY_ADDRESS": gcs_address(server)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def call(self, method: str, *arguments: Any, deployment: str | None = None, **named: Any) -> Any:
        """Call a method of the application's handle, or of one deployment's.

        Returns a list of pieces if the method's name ends in _stream.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([deployment, method, arguments, named]) + "\n")
        self._child.stdin.flush()
        while line := self._child.stdout.readline():
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
            if line.startswith("failed "):
                raise CallFailed(*json.loads(line.removeprefix("failed ")))
        raise RuntimeError(f"the probe ended:\n{self._log.read_text()[-3000:]}")

    def pid(self, replica: str) -> int:
        """Process id of an engine replica."""
        return self.call(replica, deployment=PROCESS)

    def dashboard(self) -> str:
        """URL of the cluster's dashboard, which `serve deploy` talks to."""
        return self.call("", deployment=DASHBOARD)

    def state(self) -> dict[str, dict[str, Any]]:
        """The last load report of each replica: replica id -> running, waiting, free_blocks, state, ..."""
        return self.call("fleet_state")

    def total(self, figure: str) -> int:
        """Sum of one figure over the replicas that serve."""
        return sum(replica[figure] for replica in self.state().values() if replica["state"] == "serving")

    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self.total("running") == self.total("waiting") == self.total("queued_tokens") == 0

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=30)


def gcs_address(server: Server) -> str:
    """Where this server's cluster is: "auto" would take any cluster of the machine."""
    (raylet,) = server.named("raylet/raylet")
    (argument,) = (a for a in raylet.cmdline() if a.startswith("--gcs-address="))
    return argument.partition("=")[2]


def main() -> None:
    """Answer questions from standard input until it closes."""
    import ray

    context = ray.init(log_to_driver=False, logging_level="ERROR", namespace="serve")  # RAY_ADDRESS says where
    for line in sys.stdin:
        deployment, method, arguments, named = json.loads(line)
        answer: Any
        try:
            if deployment == DASHBOARD:
                answer = f"http://{context.dashboard_url}"
            elif deployment == PROCESS:
                answer = _process(method)
            else:
                answer = _called(deployment, method, arguments, named)
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            print("failed " + json.dumps([type(cause).__name__, str(cause)]), flush=True)
        else:
            print("answer " + json.dumps(answer), flush=True)


def _called(deployment: str | None, method: str, arguments: list[Any], named: dict[str, Any]) -> Any:
    from ray import serve

    handle = serve.get_deployment_handle(deployment, APPLICATION) if deployment else serve.get_app_handle(APPLICATION)
    if method.endswith("_stream"):
        return list(getattr(handle.options(stream=True), method).remote(*arguments, **named))
    return getattr(handle, method).remote(*arguments, **named).result(timeout_s=60)


def _process(replica: str) -> int:
    import ray

    actor = ray.get_actor(f"SERVE_REPLICA::{APPLICATION}#EngineReplica#{replica}")
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30))


if __name__ == "__main__":
    main()
