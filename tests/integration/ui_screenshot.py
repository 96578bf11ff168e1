"""Take the pictures of the documents: the page that `sweep ui` opens for the example sweep.

    make demo picture

What must not live here: checks of the page; see `test_live_page.py`.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from sweeps.paths import artifact_root, tracking_uri
from tests.integration.browser import open_page
from tracking.ui import start_server
from tracking.ui_app import PAGE

PICTURES = Path("docs/pictures")
FIGURES = ("survival-from-rung-to-rung", "importance")
"""Sections of the page that a guide shows."""
_COLOURS = 64  # a third of the bytes


def main() -> None:
    """Open the page that `sweep ui digits` opens, and save what is seen of it."""
    root = Path("runs").absolute()
    program = ["sweeps.report.live", str(root), "digits"]
    with start_server(tracking_uri(root), artifact_root(root), program=program) as server:
        link = server.link(f"{server.url}{PAGE}")
        with open_page(link, width=1280, height=1480) as page:
            page.locator("#learning-curves .main-svg").first.wait_for()
            page.wait_for_timeout(2000)  # the figures draw themselves in
            _save(page.screenshot(), "digits-page")
            for figure in FIGURES:
                section = page.locator(f"#{figure}")
                section.scroll_into_view_if_needed()
                section.locator(".main-svg").first.wait_for()
                page.wait_for_timeout(2000)
                _save(section.screenshot(), figure)


def _save(shot: bytes, name: str) -> None:
    picture = PICTURES / f"{name}.png"
    with Image.open(io.BytesIO(shot)) as image:
        image.convert("RGB").quantize(_COLOURS).save(picture, optimize=True)
    print(f"{picture}: {picture.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
