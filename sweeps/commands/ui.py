"""`sweep ui`: the page of a sweep's runs, served where nobody serves it, and opened.

What must not live here: how MLflow's server is started, and its addresses (`tracking.ui`).
"""

from __future__ import annotations

import contextlib
import signal
import webbrowser
from pathlib import Path

from rich.console import Console

from sweeps.path_checks import check_place
from sweeps.paths import artifact_root, tracking_uri
from sweeps.publishing.figure_worker import undrawn
from sweeps.recording.tags import leaders_view
from sweeps.results.sweep_status import SweepStatus
from sweeps.store_access import reach_tracking
from sweeps.tracker import tracker_at
from tracking.address import is_server
from tracking.mlflow_chart_view import of_sweep
from tracking.trusted_stores import secured
from tracking.ui import runs_page, start_server


def serve(
    console: Console, root: Path, view: SweepStatus | None, *, port: int, open_browser: bool
) -> None:
    """Run the MLflow UI until Ctrl-C, on the runs page of a sweep when one is named.

    A tracking server has its pages already: the sweep's is opened there, and nothing is started.
    """
    uri = tracking_uri(root) if view is None else reach_tracking(view.paths, view.spec)[0]
    if is_server(uri):
        page = _page(uri, view)
        _open(console, page, page if open_browser else None)
        return
    check_place(root, "--root")
    tracker_at(uri, root).probe(known=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # or the server would outlive this one
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    with console.status("starting the MLflow UI (20 to 60 seconds)"):
        server = start_server(secured(uri), artifact_root(root), port=port)
    try:
        console.print("Ctrl-C ends it")
        page = _page(server.url, view)
        opening = None
        if open_browser:
            with contextlib.suppress(OSError):  # where nothing can be written, the link remains
                opening = server.opening(root, page).as_uri()
        _open(console, server.link(page), opening)
        if view is not None:
            _name_the_undrawn(console, view)
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()


def _name_the_undrawn(console: Console, view: SweepStatus) -> None:
    """Say which pictures the sweep's end did not wait for; a running sweep's driver makes them."""
    missing = len(undrawn(view.paths, view.records))
    if missing and view.state != "running":
        command = view.paths.command("sync")
        text = f"make the pictures of {missing} more trials: {command}"
        console.print(text, soft_wrap=True)


def _page(base: str, view: SweepStatus | None) -> str:
    """The page of a sweep's runs below a server's address; all of them without a sweep."""
    if view is None or view.delivered.experiment_id is None:
        return base
    known = view.delivered.experiment_tags
    views = [leaders_view(view.spec, view.ledger.sweep_id), leaders_view(view.spec)]
    key = next((one.key for one in views if one.tag in known), None)
    return runs_page(
        base,
        view.delivered.experiment_id,
        order_by_metric=f"best/{view.spec.metrics[0]}",
        ascending=view.spec.modes[0] == "min",
        view_key=key,
        search=of_sweep(view.ledger.sweep_id),
    )


def _open(console: Console, link: str, opening: str | None) -> None:
    """Print a link, and open a browser on what leads to it."""
    console.print(link, soft_wrap=True)
    if opening is not None:
        webbrowser.open(opening)
