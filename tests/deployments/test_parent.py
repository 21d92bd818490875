"""A child process ends with the process that spawned it, however that one ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection

import psutil

from deployments.parent import end_on_sigterm, end_with_parent


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
    signal.signal(signal.SIGTERM, lambda *_: None)  # as a process of Ray's: its handler does not end it
    thread = threading.Thread(target=end_on_sigterm)
    thread.start()
    thread.join()
    pipe.send("ready")
    time.sleep(60)


def test_sigterm_ends_a_process_whatever_handler_it_has() -> None:
    """Also when it is asked for in another thread than the main one."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_deaf, args=(there,))
    child.start()
    assert here.poll(60)
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM
