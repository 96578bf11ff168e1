"""Take the README's picture: the example sweep, compared in MLflow's own charts.

    make demo picture

What must not live here: checks of the page; see `test_sweep.py`.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from sweeps.paths import SweepPaths, artifact_root, tracking_uri
from sweeps.results.sweep_status import SweepStatus
from tests.integration.browser import open_page
from tracking.ui import runs_page, start_server

PICTURE = Path("sweeps/examples/digits-compared.png")
_COLOURS = 256  # keeps the curves apart, and a third of the bytes


def main() -> None:
    """Open the charts of `runs/digits` and save what is seen."""
    root = Path("runs").absolute()
    view = SweepStatus(SweepPaths(root, "digits"))
    assert view.delivered.experiment_id is not None
    with start_server(tracking_uri(root), artifact_root(root)) as server:
        url = runs_page(
            server.url,
            view.delivered.experiment_id,
            order_by_metric=f"best/{view.spec.metric}",
            ascending=view.spec.mode == "min",
        )
        with open_page(
            server.link(f"{url}&compareRunsMode=CHART"), width=1440, height=1130
        ) as page:
            page.get_by_role("button", name="Close").first.click()  # a chat beside the charts
            page.get_by_text("train/grad_norm").first.wait_for()
            page.wait_for_timeout(5000)  # the charts draw themselves in
            shot = page.screenshot()
    with Image.open(io.BytesIO(shot)) as image:
        image.convert("RGB").quantize(_COLOURS).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
