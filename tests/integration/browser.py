"""The system's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def require_chromium() -> None:
    """Skip where there is no Chromium; in continuous integration that is a failure."""
    if CHROMIUM is None:
        message = "Chromium is not installed; on Debian and Ubuntu: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)


@contextmanager
def open_page(url: str, *, width: int = 1400, height: int = 900) -> Iterator[Page]:
    """A page of a headless browser, loaded."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(url)
        yield page
        browser.close()
