"""Keeps a test server running while tests are written, until ctrl-C: `python -m tests.integration.keep NAME`.

NAME is one of STARTS.
Prints the environment variable that makes the tests use it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from .servers import Server, start_elastic, start_fleet, start_pair, start_plain, wait_ready

STARTS: dict[str, Callable[[], Server]] = {
    "plain": start_plain,
    "fleet": partial(start_fleet, replicas=1, dtype="float32"),
    "pair": start_pair,
    "elastic": start_elastic,
}


def main() -> None:
    """Start the named server and wait."""
    name = sys.argv[1]
    server = STARTS[name]()
    print(f'export TIDEGATE_TEST_{name.upper()}="{server.url} {server.log} {server.mark} {server.ray_dir}"', flush=True)
    try:
        wait_ready(server, "/health" if name == "plain" else "/health/ready")
        print("ready", flush=True)
        while True:
            time.sleep(60)
    except KeyboardInterrupt:
        print("left behind:", server.stop())


if __name__ == "__main__":
    main()
