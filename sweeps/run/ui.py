"""Start MLflow's server unless one runs, and open the page of a sweep's runs.

What must not live here: starting MLflow's server, and its addresses (`tracking.ui`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from sweeps.artifacts.trial_figures import trials_without_figures
from sweeps.path_checks import check_writable
from sweeps.paths import artifact_root, tracking_uri
from sweeps.recording.tags import leaders_view
from sweeps.stores import reach_tracking, tracker_at
from sweeps.view.sweep_view import SweepView
from tracking.address import is_server
from tracking.mlflow_chart_view import of_sweep
from tracking.processes import start_idle
from tracking.trusted_stores import secured
from tracking.ui import charts_page, runs_page, start_server


def serve(
    say: Callable[[str], None],
    root: Path,
    view: SweepView | None,
    *,
    port: int,
    open_browser: bool,
    doing: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Serve the MLflow UI until Ctrl-C, and open the page of a sweep or of all runs."""
    uri = tracking_uri(root) if view is None else reach_tracking(view.paths, view.spec)[0]
    if is_server(uri):
        page = page_of(uri, view)
        _open(say, page, page if open_browser else None)
        if view is not None and (missing := _num_without_figures(view)):
            command = view.paths.command("sync")
            say(f"draw the figures of {missing} trials with: {command}")
        return
    check_writable(root, "--root")
    tracker = tracker_at(uri, root)
    tracker.correct_addresses()  # of a root that was moved or copied
    tracker.probe(known=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # otherwise the server would outlive this one
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    with doing("starting the MLflow UI (20 to 60 seconds)"):
        server = start_server(secured(uri), artifact_root(root), port=port)
    try:
        say("Ctrl-C ends it")
        page = page_of(server.url, view)
        redirect = None
        if open_browser:
            with contextlib.suppress(OSError):  # on a full disk, the user has the printed link
                redirect = server.redirect_file(root, page).as_uri()
        _open(say, server.link(page), redirect)
        with _drawing(say, view):
            server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()


@contextlib.contextmanager
def _drawing(say: Callable[[str], None], view: SweepView | None) -> Iterator[None]:
    """Run `sweep sync` in the background while the page is open, to draw missing figures."""
    missing = _num_without_figures(view)
    if view is None or not missing:
        yield
        return
    say(f"drawing the figures of {missing} trials; reload the page to see them")
    command = ["sync", view.paths.name, "--root", str(view.paths.root)]
    process = start_idle(
        [sys.executable, "-P", "-m", "sweeps.entry", *command],
        os.environ,
        silent=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGTERM)  # with its child processes that draw
        process.communicate()


def _num_without_figures(view: SweepView | None) -> int:
    """Return for how many trials `sweep sync` would draw figures."""
    # The driver of a running sweep holds the lock.
    if view is None or view.state == "running":
        return 0
    return len(trials_without_figures(view.paths, view.records))


def page_of(base: str, view: SweepView | None) -> str:
    """Return the address of the charts of a sweep's trials; without a sweep, of the server."""
    if view is None or view.delivered.experiment_id is None:
        return base
    known = view.delivered.experiment_tags
    views = [leaders_view(view.spec, view.ledger.sweep_id), leaders_view(view.spec)]
    experiment = view.delivered.experiment_id
    if (key := next((one.key for one in views if one.tag in known), None)) is not None:
        return charts_page(base, [experiment], key)
    # The view of the charts is not delivered yet: the table.
    return runs_page(
        base,
        experiment,
        order_by_metric=f"best/{view.spec.metrics[0]}",
        ascending=view.spec.modes[0] == "min",
        search=of_sweep(view.ledger.sweep_id),
    )


def _open(say: Callable[[str], None], link: str, redirect: str | None) -> None:
    """Say a link, and open `redirect` in a browser."""
    say(link)
    if redirect is not None:
        webbrowser.open(redirect)
