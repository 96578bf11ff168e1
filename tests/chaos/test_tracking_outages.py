"""Rows 17 to 20: whole sweeps with an unreliable tracking server.

What is compared is a sweep that nothing happened to. `test_delivery_faults.py` has single
requests.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sweeps.ledger.ledger import Ledger
from tests.chaos.invariants import SERIAL, References, Sandbox, assert_all, assert_ended
from tests.chaos.outcome import read_runs
from tests.chaos.postgres import Cluster
from tests.chaos.scripted_proxy import (
    Exchange,
    Proxy,
    answer,
    commit_and_drop,
    late,
    pass_on,
    reset,
)
from tests.chaos.tracking_service import Run, Service, read_store
from tests.time_limits import scaled
from tracking.recorder import Recorder, sync
from tracking.tracker import TrackedSweep

pytestmark = pytest.mark.integration
PATIENCE = 120.0
on_both_stores = pytest.mark.parametrize(
    "service",
    ["service_on_sqlite", "service_on_postgres"],
    indirect=True,
    ids=["sqlite", "postgresql"],
)


@pytest.fixture
def sandbox(service: Service, tmp_path: Path) -> Iterator[Sandbox]:
    """A directory for the serial sweep, recorded by the tracking server."""
    made = Sandbox(tmp_path / "sweep", SERIAL, store=service.store)
    yield made
    made.close()


@pytest.fixture
def foreign(service: Service) -> Iterator[Callable[[], bool]]:
    """A run of somebody else's in the same experiment; tells whether it is as it was."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=service.url)
    found = client.get_experiment_by_name("chaos")
    experiment = found.experiment_id if found else client.create_experiment("chaos")
    # What a careless query could take for ours: a trial's number, and a run that still goes on.
    run_id = client.create_run(
        experiment, tags={"gradsweep.trial": "0", "gradsweep.sweep_id": uuid.uuid4().hex}
    ).info.run_id
    client.log_metric(run_id, "val/loss", 0.5, step=5)
    client.log_param(run_id, "seed", "theirs")

    def look() -> Run:
        return next(run for run in read_store(service.store) if run.run_id == run_id)

    before = look()
    yield lambda: look() == before
    client.delete_run(run_id)


@pytest.mark.chaos
@pytest.mark.fault(17, "the server is down in the middle of the sweep")
@pytest.mark.parametrize("seconds", [2, 60])
def test_row_17_down_in_the_middle(
    references: References,
    sandbox: Sandbox,
    proxy: Proxy,
    foreign: Callable[[], bool],
    seconds: int,
) -> None:
    driver, _ = sandbox.run_to("forward", 10, "--tracking-uri", proxy.url)
    driver.until(lambda: sandbox.cli.json("status", "chaos")["outbox_pending"] == 0)
    assert _ends(sandbox) == {None: ("RUNNING", None), 0: ("RUNNING", None)}
    proxy.down()
    down_at = time.monotonic()
    sandbox.probe.pace(seconds / 50)  # so that training has not ended when the server is back
    sandbox.probe.release("forward-10")
    # The training goes on: two trials begin and end, and what they say waits in the outbox.
    driver.until(lambda: sandbox.probe.count() > 70 and time.monotonic() - down_at > seconds)
    status = sandbox.cli.json("status", "chaos")
    assert status["trials"]["complete"] + status["trials"]["pruned"] >= 2
    assert status["outbox_pending"] > 5
    proxy.up()
    sandbox.probe.pace(0)
    ended = driver.wait()
    assert_all(sandbox, references.of(SERIAL), ended)
    assert foreign()


@pytest.mark.chaos
@pytest.mark.fault(6, "the power goes off under thinned curves, beside somebody else's runs")
def test_row_06_downsampled_curves_survive_resume(
    references: References,
    service: Service,
    foreign: Callable[[], bool],
    tmp_path: Path,
) -> None:
    thinned = SERIAL + "tracking: {every: 4}\n"
    sandbox = Sandbox(tmp_path / "sweep", thinned, store=service.store)
    try:
        driver, _ = sandbox.run_to("backward", 48, "--tracking-uri", service.url)
        driver.power_off()
        found = assert_all(sandbox, references.of(thinned), sandbox.resume_to_end())
        steps = {step for key, step in found.history(0) if key == "train/loss"}
        assert steps == {1, 4, 5, 8, 10, 12, 15}
        assert foreign()
    finally:
        sandbox.close()


@pytest.mark.chaos
@pytest.mark.fault(6, "kill -9 of the driver, and a sync that tells what it could not")
def test_row_06_sync_reports_killed_sweep_as_not_running(
    references: References, sandbox: Sandbox, service: Service
) -> None:
    driver, _ = sandbox.run_to("forward", 48, "--tracking-uri", service.url)
    driver.until(lambda: sandbox.cli.json("status", "chaos")["outbox_pending"] == 0)
    before = _ends(sandbox)
    assert (before[None], before[2]) == (("RUNNING", None), ("RUNNING", None))
    driver.kill()
    assert _ends(sandbox) == before
    sandbox.cli.ok("sync", "chaos")
    interrupted = ("KILLED", "interrupt")
    assert _ends(sandbox) == {**before, None: interrupted, 2: interrupted}
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.chaos
@on_both_stores
@pytest.mark.fault(17, "the server itself is killed and started again")
def test_row_17_server_killed_and_started_again(
    references: References, sandbox: Sandbox, service: Service
) -> None:
    driver, _ = sandbox.run_to("forward", 40, "--tracking-uri", service.url)
    service.kill()
    sandbox.probe.release("forward-40")
    driver.until(lambda: sandbox.cli.json("status", "chaos")["outbox_pending"] > 5)
    service.start()
    assert_ended(driver.wait(), 0)
    # A server takes long to come up: the sweep may have ended before, and left records waiting.
    assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())


@pytest.mark.chaos
@pytest.mark.fault(17, "the server accepts and never answers")
def test_row_17_no_recorder_call_waits_for_the_server(
    service: Service, proxy: Proxy, tmp_path: Path
) -> None:
    hung = threading.Event()

    def hang(exchange: Exchange) -> None:
        hung.wait()
        exchange.reset()

    proxy.otherwise(hang)
    sweep_id = uuid.uuid4().hex
    recorder = _recorder(proxy, sweep_id, tmp_path)
    for trial in range(3):
        recorder.start(trial, {"lr": trial}, {})
        for step in range(1, 101):
            recorder.log(trial, [_Line(step, step, {"train/loss": 1 / step})])
        recorder.finish(trial, "FINISHED", {})
    recorder.finish(None, "FINISHED", {})
    # All verbs have returned, and no request has: the event is not set.
    assert recorder.pending() == 1 + 3 * 102 + 1
    proxy.otherwise(answer(500))
    hung.set()
    assert recorder.close(0.0) == 308
    assert read_store(service.store, sweep_id) == []


@pytest.mark.chaos
@pytest.mark.fault(18, "a whole sweep, and every kind of fault")
def test_row_18_sweep_meets_every_fault(
    references: References, sandbox: Sandbox, proxy: Proxy
) -> None:
    proxy.script("experiments/create", commit_and_drop)
    proxy.script("runs/create", commit_and_drop, answer(500), reset, late(5.0))
    each = [commit_and_drop, answer(500), answer(429, Retry_After="1"), reset, late(5.0)]
    proxy.script("runs/log-batch", *each, *each)
    proxy.script("runs/update", *each)
    proxy.script("mlflow-artifacts", *each)
    ended = sandbox.run("--tracking-uri", proxy.url).wait()
    assert "runs/log-batch" not in proxy.unused
    assert_all(sandbox, references.of(SERIAL), ended)


@on_both_stores
@pytest.mark.fault(19, "down all run, then delivered")
def test_row_19_second_sync_adds_nothing(service: Service, proxy: Proxy, tmp_path: Path) -> None:
    proxy.down()
    sweep_id = uuid.uuid4().hex
    recorder = _recorder(proxy, sweep_id, tmp_path)
    for trial in range(3):
        recorder.start(trial, {"lr": trial}, {})
        recorder.log(trial, [_Line(s, s, {"train/loss": 1 / s}) for s in range(1, 1501)])
        recorder.finish(trial, "FINISHED", {})
    recorder.finish(None, "FINISHED", {})
    assert recorder.close(0.0) > 0
    assert _sync(proxy, sweep_id, tmp_path, patience=1.0) > 0
    proxy.up()
    assert _sync(proxy, sweep_id, tmp_path) == 0
    once, asked = read_store(service.store, sweep_id), len(proxy.seen)
    assert len(once) == 4
    for run in once:
        assert run.status == "FINISHED"
        if "gradsweep.trial" in run.tags:
            assert dict(run.points) == {("train/loss", s, 1 / s): 1 for s in range(1, 1501)}
    assert _sync(proxy, sweep_id, tmp_path) == 0
    assert (read_store(service.store, sweep_id), len(proxy.seen)) == (once, asked)


@pytest.mark.chaos
@pytest.mark.fault(19, "down all run, then delivered by a sync")
def test_row_19_sweep_without_a_server(
    references: References, sandbox: Sandbox, service: Service, proxy: Proxy
) -> None:
    # Whether it is there may be asked; after that it does nothing.
    asked = ("/version", "experiments/search")
    proxy.otherwise(
        lambda exchange: (pass_on if any(p in exchange.path for p in asked) else reset)(exchange)
    )
    ended = sandbox.run("--tracking-uri", proxy.url).wait()
    assert_ended(ended, 0, "tracking does not have all of it yet")
    assert _runs(service, sandbox) == []
    proxy.otherwise(pass_on)
    assert sandbox.cli.ok("sync", "chaos").endswith("; 0 wait\n")
    once, sent = _runs(service, sandbox), proxy.points.total()
    assert len(once) == 1 + len(sandbox.cli.json("trials", "chaos"))
    assert sent == len(proxy.points) == sum(run.points.total() for run in once)
    assert sandbox.cli.ok("sync", "chaos") == "delivered 0 records; 0 wait\n"
    assert (_runs(service, sandbox), proxy.points.total()) == (once, sent)
    found = assert_all(sandbox, references.of(SERIAL), sandbox.resume_to_end())
    assert found.status["outbox_pending"] == 0
    assert proxy.points.total() == sent


@pytest.mark.fault(20, "PostgreSQL restarts in the middle of a batch")
def test_row_20_recorder_before_a_restart(
    service_on_postgres: Service, cluster: Cluster, tmp_path: Path
) -> None:
    sweep_id = uuid.uuid4().hex
    with Proxy(service_on_postgres.url) as proxy:
        recorder = _recorder(proxy, sweep_id, tmp_path)
        recorder.start(0, {"lr": 1}, {})
        assert recorder.flush(scaled(PATIENCE)) == 0
        recorder.log(0, [_Line(s, s, {"train/loss": 1 / s}) for s in range(1, 2501)])
        cluster.restart_while_writing("metrics")
        recorder.finish(0, "FINISHED", {})
        recorder.finish(None, "FINISHED", {})
        assert recorder.close(scaled(PATIENCE)) == 0
    runs = read_store(cluster.uri, sweep_id)
    assert [run.status for run in runs] == ["FINISHED"] * 2
    (run,) = [run for run in runs if "gradsweep.trial" in run.tags]
    assert dict(run.points) == {("train/loss", s, 1 / s): 1 for s in range(1, 2501)}


@pytest.mark.chaos
@pytest.mark.fault(20, "PostgreSQL restarts in the middle of a sweep's write")
def test_row_20_sweep_before_a_restart(
    references: References, service_on_postgres: Service, cluster: Cluster, tmp_path: Path
) -> None:
    sandbox = Sandbox(tmp_path / "sweep", SERIAL, store=cluster.uri)
    try:
        driver, _ = sandbox.run_to("forward", 10, "--tracking-uri", service_on_postgres.url)
        sandbox.probe.release("forward-10")
        cluster.restart_while_writing("metrics")
        assert_all(sandbox, references.of(SERIAL), driver.wait())
    finally:
        sandbox.close()


class _Line:
    def __init__(self, step: int, timestamp_ms: int, metrics: dict[str, float]) -> None:
        self.step, self.timestamp_ms, self.metrics = step, timestamp_ms, metrics


def _recorder(proxy: Proxy, sweep_id: str, directory: Path) -> Recorder:
    sweep = TrackedSweep(
        experiment=sweep_id, sweep_id=sweep_id, outbox=directory / "outbox", params={"trials": 3}
    )
    return Recorder(proxy.url, None, sweep)


def _sync(proxy: Proxy, sweep_id: str, directory: Path, patience: float = PATIENCE) -> int:
    return sync(proxy.url, None, sweep_id, sweep_id, directory / "outbox", patience=patience)


def _ends(sandbox: Sandbox) -> dict[int | None, tuple[str, str | None]]:
    """The status of each trial's one run, and of the sweep's (None), and who stopped it."""
    found = {}
    for number, runs in read_runs(sandbox).items():
        (run,) = runs
        found[number] = run.status, run.tags.get("stopped_by")
    return found


def _runs(service: Service, sandbox: Sandbox) -> list[Run]:
    return read_store(service.store, Ledger.open(sandbox.paths.ledger).sweep_id)
