"""When a process ends: an EngineCore with the replica that started it, a replica at once when it is told to."""

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


def end_on_sigterm() -> None:
    """Let SIGTERM end this process at once, as SIGKILL does; may be called from any thread.

    Ray's own handler takes an actor off its calls and leaves its threads running, for 50 s as seen: a replica would
    report that it serves and answer nothing. (`signal.signal` works in the main thread only, which is Ray's.)
    """
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # None: SIG_DFL
