"""Who computes where and when on the machine under measurement, and how much CPU time each has used (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterable

import psutil


def family(pid: int) -> list[psutil.Process]:
    """The process and all its descendants that are still alive."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def pin(process: psutil.Process, core: int) -> None:
    """Move every thread of the process to one core; threads it starts later inherit that."""
    try:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass  # it ended meanwhile


def go_first() -> bool:
    """Let this process's main thread have the CPU whenever it wants it, as a load client on a machine of its own has.

    On the cores of the servers a client in a session of its own was seen to wait 4 s for the CPU (autogroup), which is
    then counted as the servers' latency. Returns whether the system permits it (root, CAP_SYS_NICE).
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    return True


def title(process: psutil.Process) -> str:
    """What the process calls itself (vLLM and Ray set titles such as `VLLM::EngineCore`, `ray::ProxyActor`)."""
    try:
        return " ".join(process.cmdline()).strip() or process.name()
    except psutil.Error:
        return ""


def cpu_seconds(processes: Iterable[psutil.Process]) -> dict[int, float]:
    """User + system CPU seconds by process id, without the processes that have ended."""
    used = {}
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used[process.pid] = times.user + times.system
    return used


def stop(pid: int, grace_s: float = 20.0) -> None:
    """End a process and its descendants: TERM to the root, then KILL to whatever is left after `grace_s`."""
    members = family(pid)
    if not members:
        return
    try:
        members[0].terminate()
    except psutil.NoSuchProcess:
        pass
    _, alive = psutil.wait_procs(members, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(alive, timeout=5)
