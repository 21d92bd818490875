"""An EngineCore must not outlive the replica that started it."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the one that spawned it dies; a main process is left alone.

    vLLM's EngineCore looks for its parent only when it is idle: a busy one would go on for minutes, and its open
    descriptors would keep Ray from noticing that the replica is dead.
    """
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
