"""Row 18: a recorder with a faulty connection to a real tracking server.

Each kind of fault meets each kind of request. `test_tracking_outages.py` has whole sweeps.
"""

from __future__ import annotations

import math
import random
import uuid
from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from mlflow import MlflowClient

from tests.chaos.kill_cases import SEED
from tests.chaos.scripted_proxy import (
    Exchange,
    Fault,
    Proxy,
    Reply,
    answer,
    commit_and_drop,
    done_late,
    late,
    pass_on,
    reset,
)
from tests.chaos.tracking_service import Service, read_store
from tests.integration.commandline import wait_until
from tests.time_limits import scaled
from tracking import delivery_loop
from tracking.recorder import Recorder, sync
from tracking.tracker import TrackedSweep

pytestmark = pytest.mark.integration

TRIALS, STEPS, ATTEMPTS = 2, 300, 2
PATIENCE = 120.0
WRITES = (
    "experiments/create",
    "experiments/set-experiment-tag",
    "runs/create",
    "runs/log-batch",
    "runs/log-batch#metrics",
    "runs/update",
    "mlflow-artifacts/artifacts",
)
"""Every kind of request by which a sweep changes a server that nobody else changes. The first
log-batches hold parameters: their faults would be used up before the first metrics are sent.
"""
FAULTS: dict[str, Fault] = {
    "500": answer(500),
    "429": answer(429, Retry_After="1"),
    "reset": reset,
    "commit, then reset": commit_and_drop,
    "late": late(0.3),
}


class Line(NamedTuple):
    step: int
    timestamp_ms: int
    metrics: dict[str, float]


def lines(trial: int, first: int, last: int) -> list[Line]:
    """The rows of the steps first..last, one of them without a loss."""
    return [
        Line(
            s,
            10**12 + s,
            {"train/loss": math.nan if s == 7 else trial + 1 / s, "train/lr": s * 0.1},
        )
        for s in range(first, last + 1)
    ]


@pytest.fixture(autouse=True)
def _brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_loop, "_FIRST_DELAY_SECONDS", 0.05)


def record(url: str, sweep_id: str, directory: Path) -> Recorder:
    """Record trials that are interrupted once and repeat the steps since their checkpoint."""
    figure = directory / "loss.svg"
    figure.write_text("<svg/>")
    sweep = TrackedSweep(
        experiment=sweep_id,
        sweep_id=sweep_id,
        outbox=directory / "outbox",
        tags={"who": "test"},
        params={"n": 2},
        experiment_tags={"columns": "n"},
    )
    recorder = Recorder(url, None, sweep)
    for trial in range(TRIALS):
        for attempt in range(ATTEMPTS):
            recorder.start(trial, {"lr": 0.1, "trial": trial}, {"attempt": str(attempt)})
            recorder.log(trial, lines(trial, 1 + 100 * attempt, 200 + 100 * attempt))
            recorder.finish(trial, "KILLED", {})
        recorder.artifact(trial, figure, "figures/loss.svg")
        recorder.finish(trial, "FINISHED", {})
    recorder.finish(None, "FINISHED", {})
    return recorder


def assert_exactly_once(service: Service, sweep_id: str) -> None:
    """U2 and U3: one run each; every point, parameter, status and file once and right."""
    runs = {
        run.tags["mlflow.runName"]: run
        for run in read_store(service.store, sweep_id)
        if run.status != "deleted"
    }
    assert sorted(runs) == [sweep_id, "trial-0000", "trial-0001"]
    assert {run.status for run in runs.values()} == {"FINISHED"}
    assert runs.pop(sweep_id).params == {"n": "2"}
    experiment = MlflowClient(service.url).get_experiment_by_name(sweep_id)
    assert experiment is not None
    assert experiment.tags["columns"] == "n"
    for trial in range(TRIALS):
        run = runs[f"trial-{trial:04d}"]
        assert run.params == {"lr": "0.1", "trial": str(trial)}
        assert run.tags["attempt"] == "1"
        wanted = Counter(
            (key, row.step, repr(value))
            for row in lines(trial, 1, STEPS)
            for key, value in row.metrics.items()
        )
        there = Counter((key, step, repr(value)) for key, step, value in run.points.elements())
        assert there == wanted
        assert [path.name for path in service.files(run.run_id)] == ["loss.svg"]


def assert_none_was_sent_twice(proxy: Proxy) -> None:
    """The server was asked to take each point once; it would have dropped the second one."""
    assert len(proxy.points) == TRIALS * STEPS * 2
    assert not [point for point, count in proxy.points.items() if count > 1]


@pytest.mark.fault(18, "each kind of request meets each kind of fault")
@pytest.mark.parametrize(
    "service",
    [
        pytest.param("service_on_sqlite", id="sqlite"),
        pytest.param("service_on_postgres", id="postgresql", marks=pytest.mark.chaos),
    ],
    indirect=True,
)
@pytest.mark.parametrize("name", FAULTS)
def test_row_18_each_request_meets_each_fault(
    service: Service, proxy: Proxy, tmp_path: Path, name: str
) -> None:
    sweep_id = uuid.uuid4().hex
    for path in WRITES:
        proxy.script(path, FAULTS[name], pass_on, FAULTS[name])
    recorder = record(proxy.url, sweep_id, tmp_path)
    assert recorder.close(scaled(PATIENCE)) == 0
    for path in WRITES:
        assert proxy.unused.count(path) < 3, f"no {path} was met"
    assert_exactly_once(service, sweep_id)
    assert_none_was_sent_twice(proxy)
    before = proxy.count("log-batch")
    left = sync(
        proxy.url, None, sweep_id, sweep_id, tmp_path / "outbox", patience=scaled(PATIENCE)
    )
    assert (left, proxy.count("log-batch")) == (0, before)


@pytest.mark.chaos
@pytest.mark.fault(18, "every second request meets some fault")
def test_row_18_no_request_is_safe(service: Service, proxy: Proxy, tmp_path: Path) -> None:
    sweep_id = uuid.uuid4().hex
    chance = random.Random(SEED)
    faults = [*FAULTS.values(), *[pass_on] * len(FAULTS)]
    proxy.otherwise(lambda exchange: chance.choice(faults)(exchange))
    assert record(proxy.url, sweep_id, tmp_path).close(scaled(PATIENCE)) == 0
    assert_exactly_once(service, sweep_id)
    assert_none_was_sent_twice(proxy)


@pytest.mark.chaos
@pytest.mark.fault(18, "the server does what a client asked that has lost patience")
def test_row_18_answer_after_the_client_gave_up(
    service: Service, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    sweep_id = uuid.uuid4().hex
    proxy.script("runs/log-batch", late(5.0), pass_on, done_late(2.5))
    assert record(proxy.url, sweep_id, tmp_path).close(scaled(PATIENCE)) == 0
    assert_exactly_once(service, sweep_id)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("wanted", "credentials"),
    [
        pytest.param(
            f"Basic {b64encode(b'ada:right').decode()}",
            {"MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": "right"},
            id="basic",
        ),
        pytest.param("Bearer right", {"MLFLOW_TRACKING_TOKEN": "right"}, id="token"),
    ],
)
def test_server_with_login_receives_everything(
    service: Service,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    credentials: dict[str, str],
) -> None:
    refused: list[str] = []

    def guard(exchange: Exchange) -> None:
        if exchange.authorization == wanted:
            pass_on(exchange)
        else:
            refused.append(exchange.path)
            exchange.reply(Reply(401))

    proxy.otherwise(guard)
    sweep_id = uuid.uuid4().hex
    recorder = record(proxy.url, sweep_id, tmp_path)
    queued = recorder.pending()
    wait_until(lambda: refused)
    assert recorder.close(0.0) == queued
    assert read_store(service.store, sweep_id) == []

    tried = len(refused)
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)
    assert (
        sync(proxy.url, None, sweep_id, sweep_id, tmp_path / "outbox", patience=scaled(PATIENCE))
        == 0
    )
    assert len(refused) == tried
    assert_exactly_once(service, sweep_id)
