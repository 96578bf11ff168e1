"""What people are told of a sweep that a tracking server of their own keeps."""

from __future__ import annotations

import io
import webbrowser
from pathlib import Path

import pytest
from rich.console import Console

from sweeps.commands import pages
from sweeps.lock import SweepLock
from sweeps.results import tables
from tests.unit.sweeps.made_sweep import MadeSweep
from tracking.outbox import Outbox

SERVER = "https://mlflow.example:8443/base"


def test_refused_records_are_told(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    outbox = Outbox(sweep.paths.outbox)
    outbox.append(0, "tags", {"bad": "1"})
    assert sweep.view.status()["outbox_refused"] == 0
    batch = outbox.claim(0)
    assert batch is not None
    outbox.refuse(batch, "not allowed here")
    outbox.close()
    found = sweep.view.status()
    assert (found["outbox_pending"], found["outbox_refused"]) == (0, 1)
    text = io.StringIO()
    Console(file=text, width=200).print(tables.status(found, sweep.spec, sweep.paths))
    assert "1 records were refused by the tracking store" in text.getvalue()


def test_artifacts_that_cannot_be_stored_are_told(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    outbox = Outbox(sweep.paths.outbox)
    outbox.append_artifact(0, sweep.paths.spec, "sweep.yaml")
    assert sweep.view.status()["outbox_held"] is None
    outbox.hold("sweep.yaml of trial 0 cannot be stored")
    outbox.close()
    found = sweep.view.status()
    assert (found["outbox_pending"], found["outbox_refused"]) == (1, 0)
    text = io.StringIO()
    Console(file=text, width=200).print(tables.status(found, sweep.spec, sweep.paths))
    assert "1 artifact waits: sweep.yaml of trial 0 cannot be stored" in text.getvalue()


def test_the_page_on_a_server_is_opened_and_none_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = MadeSweep(tmp_path, more=f"tracking: {{uri: '{SERVER}'}}")
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    text = io.StringIO()

    pages.serve(Console(file=text), tmp_path, sweep.view, port=0, open_browser=True)
    assert opened == [SERVER], "it has recorded nothing there yet"
    outbox = Outbox(sweep.paths.outbox)
    outbox.found("12")
    outbox.close()
    pages.serve(Console(file=text), tmp_path, sweep.view, port=0, open_browser=True)
    page = (
        f"{SERVER}/#/experiments/12/runs?workflowType=machine_learning"
        "&orderByKey=metrics.%60best%2Fval%2Floss%60&orderByAsc=true"
    )
    assert opened == [SERVER, page]
    pages.serve(Console(file=text), tmp_path, sweep.view, port=0, open_browser=False)
    assert opened == [SERVER, page]
    assert text.getvalue().split() == [SERVER, page, page]


class Served:
    """A server that somebody looks at until Ctrl-C."""

    url = "http://127.0.0.1:5000"

    def __init__(self) -> None:
        self.stopped = False

    def wait(self) -> None:
        raise KeyboardInterrupt

    def stop(self) -> None:
        self.stopped = True


class Process:
    """What draws meanwhile."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.done: list[str] = []

    def terminate(self) -> None:
        self.done.append("terminated")

    def communicate(self) -> None:
        self.done.append("awaited")


@pytest.mark.parametrize("who", ["nobody", "driver", "no sweep"])
def test_pictures_that_the_end_did_not_wait_for_are_made_while_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    sweep, server, started = MadeSweep(tmp_path), Served(), list[Process]()
    for ending in ("complete", "complete", "failed"):
        sweep.add(ending, 0.5)
    sweep.add(None)
    (sweep.paths.trial(0) / "figures").mkdir(parents=True)

    def start(command: list[str], *_: object, **__: object) -> Process:
        started.append(Process(command))
        return started[-1]

    monkeypatch.setattr(pages, "start_server", lambda *_, **__: server)
    monkeypatch.setattr(pages, "start_behind", start)
    text = io.StringIO()
    lock = SweepLock(sweep.paths.lock)
    if who == "driver":
        lock.acquire()
    view = None if who == "no sweep" else sweep.view
    pages.serve(Console(file=text, width=200), tmp_path, view, port=0, open_browser=False)
    lock.release()
    assert server.stopped
    if who != "nobody":
        assert not started
        assert "pictures" not in text.getvalue()
        return
    (process,) = started
    assert process.command[-4:] == ["sync", "small", "--root", str(tmp_path)]
    assert process.done == ["terminated", "awaited"]
    assert "making the pictures of 2 more trials" in text.getvalue()
