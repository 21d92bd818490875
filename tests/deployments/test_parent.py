"""A child process ends with the process that spawned it, however that one ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import psutil

from deployments.parent import TERMINATION_S, Termination, end_with_parent


def _grandchild(pipe: Connection) -> None:
    end_with_parent()
    pipe.send(os.getpid())
    time.sleep(60)


def _child(pipe: Connection) -> None:
    multiprocessing.get_context("spawn").Process(target=_grandchild, args=(pipe,)).start()
    time.sleep(60)


def test_kill_9_of_the_parent_ends_a_busy_child() -> None:
    """The grandchild is gone within seconds of a SIGKILL to its parent, although it never looks."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(there,))
    child.start()
    assert here.poll(60)
    grandchild = psutil.Process(here.recv())
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    grandchild.wait(timeout=10)


def test_a_main_process_is_left_alone() -> None:
    """Tests and simulations that run a scheduler in their own process keep their fate."""
    end_with_parent()
    assert multiprocessing.parent_process() is None


def _deaf(pipe: Connection) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # as a process of Ray's has one of its own
    with ThreadPoolExecutor(1) as other:
        termination = other.submit(Termination).result()
    pipe.send(termination.ordered)
    while not termination.ordered:
        time.sleep(0.01)
    pipe.send(signal.getitimer(signal.ITIMER_REAL)[0])
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # the rest of the time in short
    time.sleep(60)


def test_sigterm_gives_a_process_a_last_moment_whatever_handler_it_had() -> None:
    """It is noticed, the process lives on and is ended by the alarm; asked for in another thread than the main one."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_deaf, args=(there,))
    child.start()
    assert here.poll(60)
    assert here.recv() is False
    child.terminate()
    assert here.poll(60)
    assert TERMINATION_S - 5 < here.recv() <= TERMINATION_S
    child.join(10)
    assert child.exitcode == -signal.SIGALRM
