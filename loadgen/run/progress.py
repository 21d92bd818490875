"""Progress of a run on the terminal: requests sent, open, ended by outcome, and how late the client is."""

from __future__ import annotations

import asyncio
import itertools
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from loadgen.run.drive import Watch

EVERY = 0.5  # s between updates; a plain log gets a line every LINES updates
LINES = 20


class Progress:
    """Shows a Watch while the run goes on; plain lines where there is no terminal."""

    def __init__(self, console: Console, watch: Watch) -> None:
        self._console = console
        self._watch = watch
        self._bar = Bar(
            BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), console=console
        )
        self._task = self._bar.add_task("", total=watch.planned)
        self._updates: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        self._updates = asyncio.get_running_loop().create_task(self._update())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._updates is not None
        self._updates.cancel()
        await asyncio.gather(self._updates, return_exceptions=True)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._watch.ended.total(), description=self.line())
            self._bar.stop()

    def line(self) -> str:
        """What is going on, in a line."""
        watch = self._watch
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(watch.ended.items()))
        return f"{watch.sent} sent, {watch.open} open, {ended or 'none ended'}; late at most {watch.lag * 1e3:.0f} ms"

    async def _update(self) -> None:
        for count in itertools.count(1):
            await asyncio.sleep(EVERY)
            if self._console.is_terminal:
                self._bar.update(self._task, completed=self._watch.ended.total(), description=self.line())
            elif count % LINES == 0:
                self._console.print(f"{time.strftime('%H:%M:%S')} {self.line()}")
