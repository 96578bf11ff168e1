"""Take the README's picture: the page that `sweep ui` opens for the example sweep.

    make demo picture

What must not live here: checks of the page; see `test_sweep.py`.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from sweeps.paths import SweepPaths, artifact_root, tracking_uri
from sweeps.run.ui import page_of
from sweeps.view.sweep_view import SweepView
from tests.integration.browser import open_page
from tracking.ui import start_server

PICTURE = Path("sweeps/examples/digits-compared.png")
_COLOURS = 256  # keeps the curves apart, and a third of the bytes


def main() -> None:
    """Open the page that `sweep ui digits` opens, and save what is seen."""
    root = Path("runs").absolute()
    view = SweepView(SweepPaths(root, "digits"))
    with start_server(tracking_uri(root), artifact_root(root)) as server:
        link = server.link(page_of(server.url, view))
        with open_page(link, width=1440, height=1130) as page:
            for axis in (*view.spec.space, f"best/{view.spec.metrics[0]}"):
                page.locator("svg").get_by_text(axis).first.wait_for(state="attached")
            page.wait_for_timeout(5000)  # the charts draw themselves in
            shot = page.screenshot()
    with Image.open(io.BytesIO(shot)) as image:
        image.convert("RGB").quantize(_COLOURS).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
