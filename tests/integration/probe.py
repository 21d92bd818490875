"""Asks a running fleet for its state through its Python handle, from a process of its own.

A test process that joined the fleet's Ray cluster could join no other; so a child does it: one JSON line per question.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from .servers import ROOT, Server, ray_environment


class Probe:
    """`state()` is what `fleet_state` of the application says: replica id -> running, waiting, blocks, state."""

    def __init__(self, server: Server) -> None:
        assert server.ray_dir is not None
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.probe"],
            cwd=ROOT,
            env={**os.environ, **ray_environment(server.ray_dir)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, method: str = "fleet_state", *arguments: Any) -> Any:
        """Call a method of the application's handle and return its JSON-able answer."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([method, arguments]) + "\n")
        self._child.stdin.flush()
        while line := self._child.stdout.readline():
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError("the probe ended")

    def state(self) -> dict[str, dict[str, Any]]:
        """The last load report of each replica."""
        return self.ask()

    def total(self, figure: str) -> int:
        """Sum of one figure over the replicas that serve."""
        return sum(replica[figure] for replica in self.state().values() if replica["state"] == "serving")

    def close(self) -> None:
        """End the child."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=30)


def main() -> None:
    """Answer questions from standard input until it closes."""
    import ray
    from ray import serve

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    handle = serve.get_app_handle("tidegate")
    for line in sys.stdin:
        method, arguments = json.loads(line)
        answer = getattr(handle, method).remote(*arguments).result(timeout_s=60)
        print("answer " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
