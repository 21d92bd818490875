"""Take a replica out of service and put it back: `python -m app.drain REPLICA`, with `--undo` to take it in again.

Its requests go on elsewhere, none is cut. Without REPLICA it lists the replicas.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import AuthenticationError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

LOOK_S, CONNECT_S = 0.5, 5.0
REFUSED, NOT_EMPTY = 1, 3  # exit codes; 2 is argparse's


def main(arguments: list[str] | None = None, prog: str = "python -m app.drain") -> int:
    """Drain a replica, let it serve again (`undrain`) or list them, in the cluster of RAY_ADDRESS or of this host."""
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
        parser.error("name the REPLICA that is to take requests again")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        connect(os.environ.get("RAY_ADDRESS", ""))
    except (OSError, ValueError, AuthenticationError) as error:  # ConnectionError is an OSError
        print(
            f"No way into a Ray cluster: {error}\nRAY_ADDRESS, RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH say which cluster "
            "and with which token; `make serve` prints those of its own, which end with it",
            file=sys.stderr,
        )
        return REFUSED
    try:
        coordinator = serve.get_deployment_handle("Coordinator", given.app)
        return run(coordinator, given.replica, undo=given.undo, timeout_s=given.timeout)
    except (RayServeException, KeyError) as error:  # KeyError: an application without this deployment
        print(
            f"No application {given.app!r} runs in this cluster: {error}\n--app names another application, RAY_ADDRESS "
            "another cluster",
            file=sys.stderr,
        )
    except RayError as error:
        print(f"The coordinator does not answer, try again in a few seconds: {error}", file=sys.stderr)
    return REFUSED


def connect(address: str) -> None:
    """Enter the Ray cluster at `address` (empty: this machine's); OSError or AuthenticationError if that fails.

    Ray by itself asks twenty times, for most of a minute each where nobody listens.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            raise ConnectionError(f"nobody answers at {address}: {error}") from error
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "2")  # so many attempts, a second apart
    ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="ERROR")


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
    try:
        if wait_until_empty(coordinator, replica, timeout_s):
            return 0
        print(f"{replica} is not empty after {timeout_s:g} s", end="", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"no longer waiting for {replica}", end="", file=sys.stderr)
    print("; it goes on draining, until `undrain` takes that back", file=sys.stderr)
    return NOT_EMPTY


def wait_until_empty(coordinator: DeploymentHandle, replica: str, timeout_s: float) -> bool:
    """Print what is left whenever it changes; whether nothing is in time."""
    deadline, shown = time.monotonic() + timeout_s, ""
    while True:
        row = state(coordinator).get(replica)
        if row is None:
            print(f"{replica} is gone")
            return True
        if told(row) != shown:
            shown = told(row)
            print(f"{replica}  {shown}", flush=True)
        if row["state"] == "draining" and not row["running"] + row["waiting"]:
            print(f"{replica} is empty")
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)


def state(coordinator: DeploymentHandle) -> dict[str, dict[str, Any]]:
    """The coordinator's row of each replica."""
    return coordinator.state.remote().result(timeout_s=60)["replicas"]


def told(row: dict[str, Any]) -> str:
    """A replica in words."""
    return f"{row['state']}: {row['running']} running, {row['waiting']} waiting"


if __name__ == "__main__":
    sys.exit(main())
