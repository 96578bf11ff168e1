"""Take the README's picture: the page that `sweep ui` opens for the example sweep.

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

PICTURE = Path("sweeps/examples/digits-page.png")
_COLOURS = 64  # a third of the bytes


def main() -> None:
    """Open the page that `sweep ui digits` opens, and save what is seen."""
    root = Path("runs").absolute()
    program = ["sweeps.report.live", str(root), "digits"]
    with start_server(tracking_uri(root), artifact_root(root), program=program) as server:
        link = server.link(f"{server.url}{PAGE}")
        with open_page(link, width=1280, height=1480) as page:
            page.locator("#learning-curves .main-svg").first.wait_for()
            page.wait_for_timeout(2000)  # the figures draw themselves in
            shot = page.screenshot()
    with Image.open(io.BytesIO(shot)) as image:
        image.convert("RGB").quantize(_COLOURS).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
