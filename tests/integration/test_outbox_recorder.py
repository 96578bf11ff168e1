"""The recorder on a real SQLite store, read back by MLflow's own client."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.integration.commandline import wait_until
from tests.integration.sweep_runs import runs_of_sweep
from tests.time_limits import scaled
from tracking.address import sqlite_uri
from tracking.delivery_loop import DeliveryThread
from tracking.mlflow_server import connect
from tracking.outbox import Outbox
from tracking.outbox_status import read_outbox
from tracking.recorder import Deliver, Recorder, sync
from tracking.tracker import TrackedSweep
from tracking.ui import start_server

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
LONG = 60


class Line(NamedTuple):
    step: int
    timestamp_ms: int
    metrics: dict[str, float]


class Store:
    """One store for the module: making its tables takes seconds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = f"sqlite:///{root / 'mlflow.db'}"
        self.artifacts = root / "mlartifacts"

    def recorder(
        self, sweep_id: str, experiment: str = "digits", deliver: Deliver = DeliveryThread
    ) -> Recorder:
        outbox = self.root / sweep_id / "outbox"
        sweep = TrackedSweep(
            experiment=experiment,
            sweep_id=sweep_id,
            outbox=outbox,
            tags={"who": "test"},
            params={"trials": 4},
        )
        return Recorder(self.uri, self.artifacts, sweep, deliver=deliver)

    @property
    def client(self) -> MlflowClient:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri)

    def runs(self, sweep_id: str, experiment: str = "digits") -> dict[int | None, Run]:
        return runs_of_sweep(self.uri, experiment, sweep_id)

    def history(self, run: Run, key: str) -> list[tuple[int, int, float]]:
        history = self.client.get_metric_history(run.info.run_id, key)
        return sorted((m.step, m.timestamp, m.value) for m in history)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    built = Store(tmp_path_factory.mktemp("root"))
    yield built
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore._engine_map[built.uri].dispose()  # its pool would warn of open connections


def lines(first: int, last: int) -> list[Line]:
    return [
        Line(s, 10**12 + s, {"train/loss": 1 / (1 + s), "train/lr": s * 0.1})
        for s in range(first, last + 1)
    ]


def test_sweep_is_a_run_with_one_child_per_trial(store: Store, tmp_path: Path) -> None:
    figure = tmp_path / "loss.svg"
    figure.write_text("<svg/>")
    recorder = store.recorder("whole")
    for trial in (0, 12):
        recorder.start(trial, {"train.lr": 0.1, "task.note": "x" * 7000}, {"node": "here"})
        recorder.log(trial, lines(1, 700))
    recorder.log(12, [Line(701, 10**12 + 701, {"train/loss": math.nan, "train/lr": math.inf})])
    recorder.artifact(0, figure, "figures/loss.svg")
    recorder.finish(0, "FINISHED", {"reason": "done"})
    recorder.finish(12, "KILLED", {"reason": "pruned"})
    recorder.tag(None, {"best": "0"})
    recorder.finish(None, "FINISHED", {})
    assert recorder.close(LONG) == 0

    runs = store.runs("whole")
    assert runs.keys() == {None, 0, 12}
    parent = runs[None]
    assert (parent.info.run_name, parent.info.status) == ("digits", "FINISHED")
    known = read_outbox(store.root / "whole" / "outbox")
    assert parent.info.run_id == known.sweep_run_id
    assert parent.info.experiment_id == known.experiment_id
    assert known.run_ids == {trial: runs[trial].info.run_id for trial in (0, 12)}
    assert parent.data.params == {"trials": "4"}
    assert {
        "who": "test",
        "best": "0",
        "gradsweep.role": "sweep",
    }.items() <= parent.data.tags.items()
    for trial, status in ((0, "FINISHED"), (12, "KILLED")):
        run = runs[trial]
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert (run.info.run_name, run.info.status) == (f"trial-{trial:04d}", status)
        assert run.info.end_time >= run.info.start_time
        assert run.data.params["train.lr"] == "0.1"
        assert len(run.data.params["task.note"]) == 6000
        expected = [
            (row.step, row.timestamp_ms, row.metrics["train/loss"]) for row in lines(1, 700)
        ]
        assert store.history(run, "train/loss")[:700] == expected
    assert math.isnan(store.history(runs[12], "train/loss")[700][2])
    assert store.history(runs[12], "num_infinite/train/lr") == [(701, 10**12 + 701, 1.0)]
    assert len(store.history(runs[12], "train/lr")) == 700
    stored = store.root / "mlartifacts" / "digits" / runs[0].info.run_id / "artifacts" / "figures"
    assert [path.read_text() for path in stored.iterdir()] == ["<svg/>"]


def test_resumed_trial_keeps_its_run(store: Store) -> None:
    recorder = store.recorder("resumed")
    recorder.start(0, {"lr": 1}, {})
    recorder.log(0, lines(1, 50))
    recorder.finish(0, "KILLED", {})
    assert recorder.close(LONG) == 0
    recorder = store.recorder("resumed")
    recorder.start(0, {"lr": 2, "new": True}, {})
    recorder.log(0, lines(31, 80))
    assert recorder.close(LONG) == 0
    run = store.runs("resumed")[0]
    assert run.info.status == "RUNNING"
    assert run.data.params == {"lr": "1", "new": "True"}
    assert run.data.tags["param_changed.lr"] == "2"
    assert [step for step, _, _ in store.history(run, "train/loss")] == list(range(1, 81))


def test_driver_killed_while_delivering_duplicates_nothing(store: Store) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from tracking import mlflow_server
from tracking.recorder import Recorder
from tracking.tracker import TrackedSweep
from tracking.metric_points import PointRow
sent = 0
real = mlflow_server.MlflowServer.log
def log(self, run_id, request):
    global sent
    real(self, run_id, request)
    sent += 1
    if sent == 2:
        os.kill(os.getpid(), signal.SIGKILL)
mlflow_server.MlflowServer.log = log
uri, root = sys.argv[1:]
sweep = TrackedSweep(experiment="digits", sweep_id="killed", outbox=Path(root))
recorder = Recorder(uri, None, sweep)
for trial in range(3):
    recorder.start(trial, {"lr": trial}, {})
    steps = range(1, 41)
    recorder.log(trial, [PointRow(s, 10**12 + s, {"train/loss": 1 / (1 + s)}) for s in steps])
recorder.close(60)
"""
    outbox = store.root / "killed" / "outbox"
    command = [sys.executable, "-c", program, store.uri, str(outbox)]
    assert subprocess.run(command, cwd=ROOT, timeout=scaled(120), check=False).returncode == -9
    recorder = store.recorder("killed")
    for trial in range(3):
        recorder.start(trial, {"lr": trial}, {})
        recorder.log(trial, lines(1, 60))
    assert recorder.close(LONG) == 0
    runs = store.runs("killed")
    assert runs.keys() == {None, 0, 1, 2}
    for trial in range(3):
        assert [step for step, _, _ in store.history(runs[trial], "train/loss")] == list(
            range(1, 61)
        )


@pytest.mark.chaos
def test_deleted_outbox_experiment_or_run_duplicates_nothing(store: Store) -> None:
    recorder = store.recorder("lost", "short-lived")
    recorder.start(0, {"lr": 1}, {})
    recorder.log(0, lines(1, 50))
    assert recorder.close(LONG) == 0
    known = read_outbox(store.root / "lost" / "outbox")
    run_id = known.run_ids[0]
    for path in (store.root / "lost" / "outbox").iterdir():
        path.unlink()
    store.client.delete_run(run_id)
    store.client.delete_experiment(known.experiment_id)
    recorder = store.recorder("lost", "short-lived")
    recorder.log(0, lines(1, 70))
    assert recorder.close(LONG) == 0
    run = store.runs("lost", "short-lived")[0]
    assert run.info.run_id == run_id
    assert [step for step, _, _ in store.history(run, "train/loss")] == list(range(1, 71))


@pytest.mark.chaos
@pytest.mark.parametrize("deleted", [False, True], ids=["renamed", "and deleted"])
def test_renamed_experiment_keeps_its_runs(store: Store, deleted: bool) -> None:
    sweep_id = f"renamed-{deleted}"
    recorder = store.recorder(sweep_id, "before")
    recorder.start(0, {"lr": 1}, {})
    recorder.log(0, lines(1, 50))
    assert recorder.close(LONG) == 0
    before = store.runs(sweep_id, "before")
    experiment_id = before[0].info.experiment_id
    store.client.rename_experiment(experiment_id, f"after {deleted}")
    if deleted:
        store.client.delete_experiment(experiment_id)
    recorder = store.recorder(sweep_id, "before")
    recorder.log(0, lines(1, 70))
    assert recorder.close(LONG) == 0
    assert runs_of_sweep(store.uri, "before", sweep_id) == {}
    after = store.runs(sweep_id, f"after {deleted}")
    assert {n: r.info.run_id for n, r in after.items()} == {
        n: r.info.run_id for n, r in before.items()
    }
    assert [step for step, _, _ in store.history(after[0], "train/loss")] == list(range(1, 71))


@pytest.mark.chaos
def test_unrelated_experiment_with_our_id_is_left_alone(store: Store) -> None:
    stranger = store.client.create_experiment("of somebody else")
    for known in (stranger, "987654321"):
        outbox = Outbox(store.root / f"known-{known}" / "outbox")
        outbox.found(known)
        outbox.close()
        recorder = store.recorder(f"known-{known}")
        recorder.start(0, {"lr": 1}, {})
        assert recorder.close(LONG) == 0
        assert store.runs(f"known-{known}").keys() == {None, 0}
    assert store.client.search_runs([stranger]) == []


def test_second_sync_adds_nothing(store: Store) -> None:
    recorder = store.recorder(
        "offline", deliver=lambda destination: DeliveryThread(destination, _refuse)
    )
    recorder.start(0, {"lr": 1}, {})
    recorder.log(0, lines(1, 50))
    recorder.finish(0, "FINISHED", {})
    recorder.finish(None, "FINISHED", {})
    assert recorder.close(0.1) == 5
    outbox = store.root / "offline" / "outbox"
    for _ in range(2):
        assert sync(store.uri, store.artifacts, "digits", "offline", outbox, patience=LONG) == 0
        runs = store.runs("offline")
        assert {trial: run.info.status for trial, run in runs.items()} == {
            None: "FINISHED",
            0: "FINISHED",
        }
        assert [step for step, _, _ in store.history(runs[0], "train/loss")] == list(range(1, 51))


def _refusal(url: str, body: object = None, **headers: str) -> int:
    """The status with which a server refuses a request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, headers={"Content-Type": "application/json", **headers}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    with refused.value:
        return refused.value.code


def test_ui_is_local_read_only_and_leaves_no_process(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    off = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    for name, value in off.items():  # whatever the user's own programs are given
        monkeypatch.setenv(name, {"true": "false", "false": "true"}[value])
    connect(store.uri).create_experiment("shown")
    with start_server(store.uri, store.artifacts) as server:
        search = f"{server.url}/ajax-api/2.0/mlflow/experiments/search"
        cookie = server.health().get_header("Cookie")
        assert cookie is not None
        asked = urllib.request.Request(f"{search}?max_results=10", headers={"Cookie": cookie})
        with urllib.request.urlopen(asked) as answer:
            names = {experiment["name"] for experiment in json.load(answer)["experiments"]}
        assert "shown" in names
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert {
            c.laddr.ip for p in family for c in p.net_connections() if c.status == "LISTEN"
        } == {"127.0.0.1"}
        assert not any(store.uri in " ".join(process.cmdline()) for process in family)
        environments = [process.environ() for process in family]
        assert all(off.items() <= environment.items() for environment in environments)
        assert not any("mlflow.server.jobs" in " ".join(p.cmdline()) for p in family)
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example"):
            refusal = _refusal(f"{search}?max_results=1", Host=host, Cookie=cookie)
            assert refusal == 403, host
        away = {"Origin": "http://evil.example", "Cookie": cookie}
        assert _refusal(search, {"max_results": 1}, **away) == 403
    assert not any(process.is_running() and process.status() != "zombie" for process in family)


def _refuse() -> object:
    raise ConnectionRefusedError


@pytest.mark.chaos
def test_interrupted_store_creation_is_completed(tmp_path: Path) -> None:
    store = tmp_path / "mlflow.db"
    program = f"from tracking.mlflow_server import connect; connect('sqlite:///{store}')"
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    aside = tmp_path / ".mlflow.db.new"
    wait_until(lambda: aside.exists() and aside.stat().st_size, every=0.002)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert not store.exists()
    assert connect(f"sqlite:///{store}").create_experiment("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.parametrize("name", ["50%?"])
def test_store_path_needs_no_url_escaping(tmp_path: Path, name: str) -> None:
    connect(sqlite_uri(tmp_path / name / "mlflow.db")).search_experiments(max_results=1)
    assert [found.name for found in tmp_path.rglob("*")] == [name, "mlflow.db"]
