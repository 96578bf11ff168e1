"""`sweep ui` for a sweep on a tracking server."""

from __future__ import annotations

import io
import signal
import webbrowser
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console

from sweeps.cli import render
from sweeps.recording.tags import leaders_view
from sweeps.run import ui
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.mlflow_chart_view import SharedView
from tracking.outbox import SWEEP, Outbox

SERVER = "https://mlflow.example:8443/base"


def test_rejected_records_are_reported(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    outbox = Outbox(sweep.paths.outbox)
    outbox.append(0, "tags", {"bad": "1"})
    assert sweep.view.status()["outbox_refused"] == 0
    batch = outbox.next_batch(0)
    assert batch is not None
    outbox.refuse(batch, "not allowed here")
    outbox.close()
    found = sweep.view.status()
    assert (found["outbox_pending"], found["outbox_refused"]) == (0, 1)
    text = io.StringIO()
    Console(file=text, width=200).print(render.status(found, sweep.view))
    assert "1 records were refused by the tracking store" in text.getvalue()


def test_artifacts_that_cannot_be_stored_are_reported(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    outbox = Outbox(sweep.paths.outbox)
    outbox.append_artifact(0, sweep.paths.spec, "sweep.yaml")
    assert sweep.view.status()["outbox_held"] is None
    outbox.mark_blocked("sweep.yaml of trial 0 cannot be stored")
    outbox.close()
    found = sweep.view.status()
    assert (found["outbox_pending"], found["outbox_refused"]) == (1, 0)
    text = io.StringIO()
    Console(file=text, width=200).print(render.status(found, sweep.view))
    assert "1 artifact waits: sweep.yaml of trial 0 cannot be stored" in text.getvalue()


def test_page_of_a_server_is_opened_and_none_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_TRUSTED_STORES", SERVER)
    sweep = MadeSweep(tmp_path, more=f"tracking: {{uri: '{SERVER}'}}")
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    said: list[str] = []

    ui.serve(said.append, tmp_path, sweep.view, port=0, open_browser=True)
    assert opened == [SERVER], "it has recorded nothing there yet"
    outbox = Outbox(sweep.paths.outbox)
    outbox.found("12")
    outbox.close()
    ui.serve(said.append, tmp_path, sweep.view, port=0, open_browser=True)
    page = (
        f"{SERVER}/#/experiments/12/runs?workflowType=machine_learning"
        "&orderByKey=metrics.%60best%2Fval%2Floss%60&orderByAsc=true"
        "&searchFilter=tags.%60gradsweep.sweep_id%60%20%3D%20%27id-small%27"
    )
    assert opened == [SERVER, page]
    ui.serve(said.append, tmp_path, sweep.view, port=0, open_browser=False)
    assert opened == [SERVER, page]
    assert said == [SERVER, page, page]
    _deliver(sweep, leaders_view(sweep.spec, "id-small"))
    url = ui.page_of(SERVER, sweep.view)
    query = parse_qs(urlsplit(url).fragment.split("?")[1])
    assert query["compareRunsMode"] == ["CHART"]
    assert query["viewStateShareKey"] == [leaders_view(sweep.spec, "id-small").key]


def _deliver(sweep: MadeSweep, view: SharedView) -> None:
    """Have the outbox say that the experiment has a view."""
    outbox = Outbox(sweep.paths.outbox)
    outbox.append(SWEEP, "experiment", {view.tag: view.state})
    batch = outbox.next_batch(SWEEP)
    assert batch is not None
    outbox.delivered(batch)
    outbox.close()


class Served:
    """A server that somebody looks at until Ctrl-C."""

    url = "http://127.0.0.1:5000"

    def __init__(self) -> None:
        self.stopped = False

    def wait(self) -> None:
        raise KeyboardInterrupt

    def stop(self) -> None:
        self.stopped = True

    def link(self, page: str) -> str:
        return f"{page}/?login=secret"

    def redirect_file(self, directory: Path, page: str) -> Path:
        return directory / f"{page[-4:]}.html"


def test_browser_gets_a_file_name_and_not_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Command lines are readable by every user of the machine."""
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(ui, "start_server", lambda *_, **__: Served())
    text = io.StringIO()
    ui.serve(Console(file=text, width=200).print, tmp_path, None, port=0, open_browser=True)
    assert opened == [(tmp_path / "5000.html").as_uri()]
    assert text.getvalue().splitlines()[-1] == f"{Served.url}/?login=secret"


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_ends_the_ui_unless_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: bool
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    monkeypatch.setattr(ui, "start_server", lambda *_, **__: Served())
    try:
        ui.serve(print, tmp_path, None, port=0, open_browser=False)
        assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == ignored
    finally:
        signal.signal(signal.SIGHUP, before)
