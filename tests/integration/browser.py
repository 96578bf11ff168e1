"""The system's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import ConsoleMessage, Page, sync_playwright

from tests.time_limits import scaled

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
_PATIENCE_MS = 120_000  # beside other tests on two cores


def require_chromium() -> None:
    """Skip where there is no Chromium; in continuous integration that is a failure."""
    if CHROMIUM is None:
        message = "Chromium is not installed; on Debian and Ubuntu: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


@dataclass(frozen=True)
class Seen:
    """What a page asked of others, and what it complained of, from its first moment."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

        def hear(message: ConsoleMessage) -> None:
            # Without a GPU the driver says how slow it is when a page draws by WebGL.
            is_of_driver = "GL Driver Message (OpenGL, Performance" in message.text
            if message.type in ("error", "warning") and not is_of_driver:
                self.complaints.append(message.text)

        page.on("console", hear)


@contextmanager
def open_page(
    url: str, *, width: int = 1400, height: int = 900, seen: Seen | None = None
) -> Iterator[Page]:
    """A page of a headless browser, loaded."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(scaled(_PATIENCE_MS))
        if seen is not None:
            seen.watch(page)
        page.goto(url)
        yield page
        browser.close()


def photograph(page: Page, name: str) -> None:
    """Keep a picture of a whole page in the directory that SCREENSHOTS names, to be looked at."""
    if directory := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=Path(directory, f"{name}.png"), full_page=True)
