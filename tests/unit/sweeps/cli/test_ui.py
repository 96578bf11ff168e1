"""`sweep ui` for a sweep on a tracking server."""

from __future__ import annotations

import io
import re
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from sweeps.cli import render
from sweeps.run import ui
from sweeps.view.mlflow_pages import page_of
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox import Outbox

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
    assert "refused by the tracking store, and not sent again: 1 record;" in text.getvalue()


def test_page_of_a_sweep_links_to_its_tracking_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the page itself is served here, with the address in the environment alone."""
    monkeypatch.setenv("SWEEP_TRUSTED_STORES", SERVER)
    sweep = MadeSweep(tmp_path, more=f"tracking: {{uri: '{SERVER}'}}")
    started: list[tuple[object, ...]] = []

    def start(uri: str, *_: object, program: Sequence[str], **__: object) -> Served:
        started.append((uri, *program))
        return Served()

    monkeypatch.setattr(ui, "start_server", start)
    said: list[str] = []
    ui.serve(said.append, tmp_path, sweep.view, port=0, open_browser=False)
    assert started == [(SERVER, "sweeps.report.live", str(tmp_path), "small")]
    assert said[-1] == f"{Served.url}/sweep?login=secret"

    assert page_of(SERVER, sweep.view) == f"{SERVER}/", "it has recorded nothing there yet"
    outbox = Outbox(sweep.paths.outbox)
    outbox.found("12")
    outbox.close()
    assert page_of(SERVER, sweep.view) == (
        f"{SERVER}/#/experiments/12/runs?workflowType=machine_learning"
        "&orderByKey=metrics.%60best%2Fval%2Floss%60&orderByAsc=true"
        "&searchFilter=tags.%60gradsweep.sweep_id%60%20%3D%20%27id-small%27"
    )


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
        return f"{page}?login=secret"

    def redirect_file(self, directory: Path, page: str) -> Path:
        return directory / f"{page[17:21]}.html"


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


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_pages_of_a_comparison_are_words_in_a_terminal_and_urls_in_a_pipe() -> None:
    base = "http://127.0.0.1:5000/#"
    found = {
        "mlflow_charts_page": f"{base}/charts",
        "mlflow_compare_page": None,
        "mlflow_metric_page": f"{base}/metric",
    }
    terminal, pipe = Terminal(), io.StringIO()
    render.pages(Console(file=terminal, width=80, force_terminal=True), found)
    render.pages(Console(file=pipe, width=80), found)
    (line,) = terminal.getvalue().splitlines()
    assert re.sub(r"\x1b\]8;.*?\x1b\\|\x1b\[[\d;]*m", "", line) == (
        "MLflow, while `sweep ui` runs: charts · curves"
    )
    assert [page for page in found.values() if page and page in line] == [
        f"{base}/charts",
        f"{base}/metric",
    ]
    assert pipe.getvalue().splitlines() == [
        f"charts in MLflow, while `sweep ui` runs: {base}/charts",
        f"curves in MLflow, while `sweep ui` runs: {base}/metric",
    ]
