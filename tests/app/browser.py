"""A real headless browser for the status page, and what it did that it should not."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, sync_playwright

_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
DESKTOP, PHONE = (1280, 900), (390, 844)
PATIENCE_MS = 120_000  # beside a fleet that has all cores


@dataclass
class Watched:
    """A page, with every message of its console, every error in it and every request to another host."""

    page: Page
    said: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def act(self, token: str | None) -> None:
        """Type the token in, as a user does."""
        self.page.fill("#token", token or "")
        self.page.click("#token-form button")


@contextlib.contextmanager
def opened(
    url: str, size: tuple[int, int] = DESKTOP, scheme: Literal["light", "dark"] = "light", **more: Any
) -> Iterator[Watched]:
    """The status page in a fresh browser with a fresh profile."""
    program = shutil.which("chromium")
    if program is None:
        pytest.fail("chromium is missing: `make debian` as root installs it")
    with tempfile.TemporaryDirectory() as profile, sync_playwright() as driver:
        context: BrowserContext = driver.chromium.launch_persistent_context(
            profile,
            executable_path=program,
            headless=True,
            args=_FLAGS,
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            **more,
        )
        context.set_default_timeout(PATIENCE_MS)
        page = context.pages[0]
        watched, host = Watched(page), urlsplit(url).netloc
        page.on("console", lambda message: watched.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: watched.said.append(f"error: {error}"))
        page.on("request", lambda request: _note(watched.foreign, request.url, host))
        page.goto(f"{url}/status")
        page.wait_for_selector("#live.good, #live.bad")
        try:
            yield watched
        finally:
            context.close()


def _note(foreign: list[str], url: str, host: str) -> None:
    where = urlsplit(url)
    if where.scheme not in ("data", "chrome", "about") and where.netloc != host:
        foreign.append(url)


def shoot(watched: Watched, path: Path) -> None:
    """Take a picture of the whole page, once its levels have settled."""
    watched.page.wait_for_timeout(1000)
    watched.page.screenshot(path=path, full_page=True)
