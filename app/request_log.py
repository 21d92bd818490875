"""Log of finished requests as JSON lines, to train the length predictor on. It holds prompts: keep it private.

One line: {"prompt_token_ids": [...], "max_tokens": n or null, "output_tokens": n, "tier": 0, "t": wall-clock seconds}.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(f"ray.serve.{__name__}")

_BACKLOG = 10_000  # lines that may wait for the disk; more are dropped


class RequestLog:
    """Appends to `path` from a thread of its own until the file has `max_bytes`, then stops with a warning.

    All ingress processes of a machine may share the path: each line is one write in append mode.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self._fd = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._path, self._max_bytes = path, max_bytes
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_BACKLOG)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def note(self, prompt: list[int], max_tokens: int | None, output_tokens: int, tier: int) -> None:
        """Take note of a finished sequence; never waits."""
        line = {
            "prompt_token_ids": prompt,
            "max_tokens": max_tokens,
            "output_tokens": output_tokens,
            "tier": tier,
            "t": round(time.time(), 3),
        }
        if self._thread.is_alive() and not self._lines.full():
            self._lines.put_nowait(line)

    def close(self) -> None:
        """Write what waits and close the file."""
        if self._thread.is_alive():
            self._lines.put(None)
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
                if os.fstat(self._fd).st_size + len(data) > self._max_bytes:
                    logger.warning("%s is full (ingress.request_log_mib): no more requests are logged", self._path)
                    return
                os.write(self._fd, data)
        except OSError:
            logger.exception("%s cannot be written: no more requests are logged", self._path)
        finally:
            os.close(self._fd)
