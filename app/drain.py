"""Take a replica out of service and put it back: `python -m app.drain REPLICA`, with `--undo` to take it in again.

Its requests go on elsewhere, none is cut. Without REPLICA it lists the replicas.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

LOOK_S = 0.5
REFUSED, NOT_EMPTY = 1, 3  # exit codes; 2 is argparse's


def main(arguments: list[str] | None = None, prog: str = "python -m app.drain") -> int:
    """Drain, or list the replicas of, the application that runs in the cluster of RAY_ADDRESS or of this machine."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"{main.__doc__} Exit code {REFUSED}: refused, {NOT_EMPTY}: not empty in time.",
    )
    parser.add_argument("replica", nargs="?", metavar="REPLICA", help="id of the replica; none: list them")
    parser.add_argument("--undo", action="store_true", help="let it take requests again")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest wait (default: %(default)s)")
    parser.add_argument(
        "--app", default="tidegate", metavar="NAME", help="the Serve application (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    if given.undo and given.replica is None:
        parser.error("--undo needs the REPLICA that is to take requests again")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="ERROR")
        coordinator = serve.get_deployment_handle("Coordinator", given.app)
        return run(coordinator, given.replica, undo=given.undo, timeout_s=given.timeout)
    except (ConnectionError, RayServeException) as error:
        print(f"No application {given.app!r} runs here (RAY_ADDRESS names another cluster): {error}", file=sys.stderr)
        return REFUSED


def run(coordinator: DeploymentHandle, replica: str | None, *, undo: bool, timeout_s: float) -> int:
    """Do what the command line asks of the coordinator; returns the exit code."""
    if replica is None:
        for name, row in state(coordinator).items():
            print(f"{name}  {told(row)}")
        return 0
    order = coordinator.undrain if undo else coordinator.drain
    try:
        order.remote(replica).result(timeout_s=timeout_s)
    except RayTaskError as error:
        print(error.cause, file=sys.stderr)
        return REFUSED
    if undo:
        print(f"{replica} takes requests")
        return 0
    return wait_until_empty(coordinator, replica, timeout_s)


def wait_until_empty(coordinator: DeploymentHandle, replica: str, timeout_s: float) -> int:
    """Print what is left whenever it changes."""
    deadline, shown = time.monotonic() + timeout_s, ""
    while True:
        row = state(coordinator).get(replica)
        if row is None:
            print(f"{replica} is gone")
            return 0
        if told(row) != shown:
            shown = told(row)
            print(f"{replica}  {shown}", flush=True)
        if row["state"] == "draining" and not row["running"] + row["waiting"]:
            print(f"{replica} is empty")
            return 0
        if time.monotonic() >= deadline:
            return NOT_EMPTY
        time.sleep(LOOK_S)


def state(coordinator: DeploymentHandle) -> dict[str, dict[str, Any]]:
    """The coordinator's row of each replica."""
    return coordinator.state.remote().result(timeout_s=60)["replicas"]


def told(row: dict[str, Any]) -> str:
    """A replica in words."""
    return f"{row['state']}: {row['running']} running, {row['waiting']} waiting"


if __name__ == "__main__":
    sys.exit(main())
