"""Keeps a test server running while tests are written: `python -m tests.integration.keep plain|fleet`, ctrl-C ends it.

Prints the environment variable that makes the tests use it.
"""

from __future__ import annotations

import sys
import time

from .servers import Server, start_fleet, start_plain, wait_ready


def main() -> None:
    """Start the named server and wait."""
    name = sys.argv[1]
    server: Server = start_plain() if name == "plain" else start_fleet(replicas=1, dtype="float32")
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
