"""When a process ends: an EngineCore with the replica that started it, a replica soon after it is told to."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal

TERMINATION_S = int(signal.SIGTERM)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the one that spawned it dies; a main process is left alone.

    vLLM's EngineCore looks for its parent only when it is idle: a busy one would go on for minutes, and its open
    descriptors would keep Ray from noticing that the replica is dead.
    """
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Termination:
    """From its making on, SIGTERM ends this process after `TERMINATION_S` and no sooner; may be made in any thread.

    Ray's own handler takes an actor off its calls at once and leaves its threads running, for 50 s as seen: a replica
    would report that it serves and answer nothing. The main thread, which alone may use `signal.signal`, is Ray's and
    waits in C++. So the handler is a function of libc that needs no Python and is safe there: alarm(2). It is called
    with the signal's number, 15, as its seconds, and SIGALRM ends the process unless it has ended before.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGTERM, ctypes.cast(libc.alarm, ctypes.c_void_p))

    @property
    def ordered(self) -> bool:
        """Whether SIGTERM has come."""
        return signal.getitimer(signal.ITIMER_REAL)[0] > 0
