"""Start the server of `sweep ui`, and open its first page.

What must not live here: starting the server's process (`tracking.ui`), and its pages (`report`).
"""

from __future__ import annotations

import contextlib
import signal
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from subprocess import DEVNULL

from sweeps.artifacts.trial_figures import trials_without_figures
from sweeps.formatting import counted
from sweeps.path_checks import check_writable
from sweeps.paths import artifact_root, tracking_uri
from sweeps.stores import reach_tracking, tracker_at
from sweeps.view.sweep_view import SweepView
from tracking.address import is_server
from tracking.child_process import end_group, lower_priority, start_python
from tracking.trusted_stores import secured
from tracking.ui import ServerError, start_server
from tracking.ui_app import PAGE


def serve(
    say: Callable[[str], None],
    root: Path,
    view: SweepView | None,
    *,
    port: int,
    open_browser: bool,
    doing: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Serve the page of a sweep and MLflow's pages until Ctrl-C, and open the first of them.

    Of a tracking server, only the page of a sweep is served here.
    """
    uri = tracking_uri(root) if view is None else reach_tracking(view.paths, view.spec)[0]
    what, page, program = "MLflow (20 to 60 seconds)", "/", ["tracking.ui_app"]
    if view is not None:
        what, page = f"the page of {view.paths.name}", PAGE
        program = ["sweeps.report.live", str(root), view.paths.name]
    if not is_server(uri):
        check_writable(root, "--root")
        tracker = tracker_at(uri, root)
        tracker.correct_addresses()  # of a root that was moved or copied
        tracker.probe(known=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # otherwise the server would outlive this one
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    with doing(f"starting {what}"):
        server = start_server(secured(uri), artifact_root(root), port=port, program=program)
    try:
        say("Ctrl-C ends it")
        link = server.link(f"{server.url}{page}")
        redirect = None
        if open_browser:
            with contextlib.suppress(OSError):  # on a full disk, the user has the printed link
                redirect = server.redirect_file(root, f"{server.url}{page}").as_uri()
        say(link)
        if redirect is not None:
            webbrowser.open(redirect)
        with _drawing(say, view, is_server(uri)):
            status = server.wait()
        raise ServerError(f"the server ended with status {status}:\n{server.output()}")
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()


@contextlib.contextmanager
def _drawing(say: Callable[[str], None], view: SweepView | None, remote: bool) -> Iterator[None]:
    """Run `sweep sync` in the background while the page is open, to draw missing figures.

    What a tracking server receives, the user decides.
    """
    missing = _num_without_figures(view)
    if view is None or not missing:
        yield
        return
    count = counted(missing, "trial")
    if remote:
        say(f"draw the figures of {count} with: {view.paths.command('sync')}")
        yield
        return
    say(f"drawing the figures of {count} for MLflow; reload its page to see them")
    command = ["-m", "sweeps.entry", "sync", view.paths.name, "--root", str(view.paths.root)]
    process = start_python(*command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
    lower_priority(process)
    try:
        yield
    finally:
        end_group(process, patience=30.0)  # with its child processes that draw


def _num_without_figures(view: SweepView | None) -> int:
    """Return for how many trials `sweep sync` would draw figures."""
    # The driver of a running sweep holds the lock.
    if view is None or view.state == "running":
        return 0
    return len(trials_without_figures(view.paths, view.records))
