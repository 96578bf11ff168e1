"""A tracking store that lost records: rolled back, emptied, cleaned by hand, damaged.

The store is MLflow's own; the sweep is made by hand, so that nothing is trained.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from sweeps.cli.messages import synced
from sweeps.run import ui
from sweeps.run.doctor import check_stores
from sweeps.run.session import open_sweep
from sweeps.run.sync import deliver
from tests.slices import sliced
from tests.unit.sweeps.sweep_factory import MadeSweep, prepared
from tracking.mlflow_server import connect
from tracking.outbox_status import read_outbox
from tracking.probe import TrackingUnusable
from tracking.store_reader import _Client, open_reader, read_runs
from trainable.store.metrics_file import Row
from trainable.store.notes import RecordedTest, append_tested

pytestmark = pytest.mark.integration

NAME = "small"
STORE = "mlflow.db"
NUM_RUNS = 4
TESTED = RecordedTest(
    10, 1_700_000_000_500, {"test/loss": 0.4, "test/top 5": 0.9}, 10, 1, "ab", 15, "cpu", "fp32"
)


class Held(NamedTuple):
    """What a store holds of a sweep, whatever the ids of its runs are."""

    statuses: list[tuple[str, ...]]
    points: list[tuple[object, ...]]
    params: list[tuple[str, ...]]
    tags: list[tuple[str, ...]]


def _add(sweep: MadeSweep, ending: str | None, losses: list[float]) -> None:
    number = sweep.add(ending, *losses, reason="NaN: bad" if ending == "failed" else None)  # type: ignore[arg-type]
    rows = []
    for step in range(1, 10 * len(losses) + 1):
        metrics = {"train/loss": 1 / step, "train/lr": float("inf") if step == 3 else 0.1}
        if step % 10 == 0:
            metrics |= {"epoch": step / 10, "val/loss": losses[step // 10 - 1]}
        rows.append(Row(step, 1_700_000_000_000 + step, metrics))
    sweep.log(number, *rows)
    if ending is not None:
        figures = sweep.paths.trial(number) / "figures"
        figures.mkdir()
        (figures / "loss.png").write_bytes(b"png")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a sweep that is recorded, and an older copy of its store."""
    root = tmp_path_factory.mktemp("template") / "runs"
    sweep = MadeSweep(root, NAME)
    _add(sweep, None, [0.9])
    deliver(sweep.view)
    shutil.copy(root / STORE, root / "older.db")
    sweep.ledger.finish(0, "complete")
    _add(sweep, "failed", [0.5, float("nan")])
    _add(sweep, None, [0.7])
    figures = sweep.paths.trial(0) / "figures"
    figures.mkdir()
    (figures / "loss.png").write_bytes(b"png")
    append_tested(sweep.paths.trial(0), TESTED)
    deliver(sweep.view)
    deliver(sweep.view, verify=True)  # sends the figure, as the end of a trial would
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil, its artifacts included."""
    shutil.copytree(template, tmp_path / "runs")
    return tmp_path / "runs"


def _view(root: Path):  # type: ignore[no-untyped-def]
    from sweeps.paths import SweepPaths
    from sweeps.view.sweep_view import SweepView

    return SweepView(SweepPaths(root, NAME))


def _held(root: Path) -> Held:
    run = "SELECT r.name, {} FROM runs r {} WHERE r.lifecycle_stage = 'active' ORDER BY 1, 2, 3, 4"
    with closing(sqlite3.connect(root / STORE)) as db:

        def read(columns: str, table: str) -> list[tuple[object, ...]]:
            join = f"JOIN {table} m ON m.run_uuid = r.run_uuid"
            return db.execute(run.format(columns, join)).fetchall()

        return Held(
            db.execute(
                "SELECT r.name, r.status, e.name, e.lifecycle_stage FROM runs r "
                "JOIN experiments e USING (experiment_id) "
                "WHERE r.lifecycle_stage = 'active' ORDER BY 1"
            ).fetchall(),
            read("m.key, m.step, m.value, m.timestamp, m.is_nan", "metrics"),
            read("m.key, m.value, 0", "params"),  # type: ignore[arg-type]
            [
                # a description names the root for which it was written
                (*tag[:2], re.sub("--root [^`]+", "", str(tag[2])))  # type: ignore[misc]
                for tag in read("m.key, m.value, 0", "tags")
                if tag[1] not in ("mlflow.parentRunId", "stopped_by", "figures")
            ],
        )


def _sql(*statements: str) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        with closing(sqlite3.connect(root / STORE)) as db, db:
            for statement in statements:
                db.execute(statement)

    return spoil


def _roll_back(root: Path) -> None:
    shutil.copy(root / "older.db", root / STORE)


def _empty(root: Path) -> None:
    (root / STORE).unlink()


def _replace(root: Path) -> None:
    _empty(root)
    connect(f"sqlite:///{root / STORE}").search_experiments()


def _remove(where: str) -> tuple[str, ...]:
    """As `mlflow gc` does."""
    tables = ("metrics", "latest_metrics", "params", "tags", "runs")
    runs = f"(SELECT run_uuid FROM runs WHERE {where})"
    return tuple(f"DELETE FROM {table} WHERE run_uuid IN {runs}" for table in tables)


RUNS_LOST = {
    "rolled back": _roll_back,
    "emptied": _empty,
    "replaced": _replace,
    "garbage-collected": _sql(*_remove("name IN ('trial-0000', 'trial-0001')")),
    "own run garbage-collected": _sql(*_remove(f"name = '{NAME}'")),
    "experiment removed": _sql(
        *_remove("1"), "DELETE FROM experiment_tags", "DELETE FROM experiments WHERE name='small'"
    ),
    "left running": _sql("UPDATE runs SET status = 'RUNNING', end_time = NULL"),
}
DELETED = {
    "runs deleted": _sql(
        "UPDATE runs SET lifecycle_stage = 'deleted' WHERE name IN ('trial-0000', 'trial-0002')"
    ),
    "experiment deleted": _sql(
        "UPDATE runs SET lifecycle_stage = 'deleted'",
        "UPDATE experiments SET lifecycle_stage = 'deleted' WHERE name = 'small'",
    ),
}
PART_LOST = {
    "points deleted": _sql("DELETE FROM metrics WHERE step % 3 = 0"),
    "first and last points": _sql("DELETE FROM metrics WHERE step IN (1, 10)"),
    "a metric": _sql("DELETE FROM metrics WHERE key = 'train/loss'"),
    "a parameter": _sql("DELETE FROM params WHERE key LIKE 'train.optimizer.%'"),
    "a description": _sql("DELETE FROM tags WHERE key = 'mlflow.note.content'"),
    "a tag": _sql("DELETE FROM tags WHERE key IN ('failure.kind', 'best_step')"),
}


@pytest.mark.parametrize(
    "name",
    sliced(
        [*RUNS_LOST, *DELETED, *PART_LOST],
        ("runs deleted", "points deleted", "a parameter").__contains__,
    ),
)
def test_missing_records_are_repaired_once(root: Path, name: str) -> None:
    """Whole runs are looked for at each sync: `test_lost_runs_are_resent_automatically`."""
    whole = _held(root)
    assert len(whole.statuses) == NUM_RUNS
    (RUNS_LOST | DELETED | PART_LOST)[name](root)
    assert not (root / STORE).exists() or _held(root) != whole
    done = deliver(_view(root), verify=True)
    assert done.missing
    assert not done.still_missing
    assert done.left == 0
    assert _held(root) == whole
    again = deliver(_view(root), verify=True)
    assert not again.missing
    assert again.delivered == 0
    assert _held(root) == whole


def test_complete_store_needs_no_repair(root: Path) -> None:
    whole = _held(root)
    done = deliver(_view(root), verify=True)
    assert (done.delivered, done.left, bool(done.missing)) == (0, 0, False)
    assert _held(root) == whole


def test_values_on_test_data_are_sent(root: Path) -> None:
    names = {point[1] for point in _held(root).points if point[0] == "trial-0000"}
    assert names >= TESTED.metrics.keys()
    append_tested(root / NAME / "trials/0001", TESTED._replace(step=20))
    before = _held(root).points
    for _ in range(2):  # as after a `sweep audit --test` that was killed before it queued them
        deliver(_view(root))
    assert [point[:4] for point in _held(root).points if point not in before] == [
        ("trial-0001", "test/loss", 20, 0.4),
        ("trial-0001", "test/top 5", 20, 0.9),
    ]


def test_an_edited_description_stays(root: Path) -> None:
    _sql("UPDATE tags SET value = 'mine' WHERE key = 'mlflow.note.content'")(root)
    edited = _held(root)
    assert not deliver(_view(root), verify=True).missing
    assert _held(root) == edited


def test_counts_of_missing_records(root: Path) -> None:
    _sql(
        "DELETE FROM metrics WHERE key = 'train/loss' AND step = 7",
        "UPDATE runs SET status = 'RUNNING' WHERE name = 'trial-0000'",
    )(root)
    done = deliver(_view(root), verify=True)
    assert (done.missing.points, done.missing.statuses, done.missing.runs) == (3, 1, 0)
    said = _text(synced(done, _view(root).paths, verified=True))
    assert "missing in the tracking store, and sent again: 1 status, 3 metric values" in said
    said = _text(synced(deliver(_view(root), verify=True), _view(root).paths, verified=True))
    assert "compared 4 runs: nothing is missing" in said
    assert done.as_dict()["missing"]["points"] == 3


@pytest.mark.parametrize(
    "name", sliced(RUNS_LOST, ("rolled back", "garbage-collected").__contains__)
)
def test_lost_runs_are_resent_automatically(root: Path, name: str) -> None:
    whole = _held(root)
    RUNS_LOST[name](root)
    done = deliver(_view(root))
    assert done.missing
    assert _held(root) == whole
    assert not deliver(_view(root)).missing


def test_new_runs_are_sent_and_not_called_missing(tmp_path: Path) -> None:
    new = MadeSweep(tmp_path, NAME)
    _add(new, "complete", [0.4])
    assert not deliver(new.view).missing
    assert {status[0] for status in _held(new.paths.root).statuses} == {NAME, "trial-0000"}
    _add(new, "failed", [0.5])
    _sql(*_remove("name = 'trial-0000'"))(new.paths.root)
    done = deliver(new.view)
    assert done.missing.runs == 1
    assert len(_held(new.paths.root).statuses) == 3
    _sql(*_remove(f"name = '{NAME}'"))(new.paths.root)
    assert deliver(new.view).missing.runs == 1, "the sweep's own run is lost, and no longer new"


@pytest.mark.parametrize("name", sliced(DELETED, "runs deleted".__eq__))
def test_deleted_runs_are_named_and_left_alone(root: Path, name: str) -> None:
    DELETED[name](root)
    left = _held(root)
    done = deliver(_view(root))
    assert _held(root) == left
    assert "deleted in the tracking store" in _text(
        synced(done, _view(root).paths, verified=False)
    )


@pytest.mark.parametrize(
    "name", sliced(["rolled back", "garbage-collected", "left running"], "rolled back".__eq__)
)
def test_resume_resends_lost_runs(root: Path, name: str) -> None:
    RUNS_LOST[name](root)
    view = _view(root)
    said: list[str] = []
    ready = prepared(view.paths, view.spec, accept_changes=True)
    sweep = open_sweep(ready, lambda: None, print)
    try:
        sweep.reconcile(said.append)
    finally:
        sweep.recorder.close(0.0)
    assert any("of 4 runs" in line for line in said), said
    # A driver goes on from here; what it does not do any more is what it was told of lost runs.
    deliver(_view(root))
    statuses = {name: status for name, status, *_ in _held(root).statuses}
    assert statuses.keys() >= {"trial-0000", "trial-0001", "trial-0002", NAME}
    assert statuses["trial-0000"] == "FINISHED"
    assert statuses["trial-0001"] == "FAILED"


def test_doctor_names_lost_runs_and_damage(root: Path) -> None:
    assert check_stores(root) == []
    _roll_back(root)
    (found,) = check_stores(root)
    assert (found.level, found.what) == ("warn", NAME)
    assert "2 runs" in found.detail
    assert "sync" in found.remedy
    outbox = root / NAME / "outbox" / "outbox.db"
    outbox.write_bytes(b"x" * 5000)
    assert any("outbox.db is damaged" in one.detail for one in check_stores(root))


@pytest.mark.parametrize(
    "how", sliced(["no database", "a page", "truncated", "without tables"], "a page".__eq__)
)
def test_damaged_store_is_refused_with_the_remedy(root: Path, how: str) -> None:
    store = root / STORE
    if how == "no database":
        store.write_bytes(b"no database at all " * 1000)
    elif how == "a page":
        with store.open("r+b") as file:
            file.seek(4096 * 3)
            file.write(b"\xff" * 4096 * 30)
    elif how == "truncated":
        with store.open("r+b") as file:
            file.truncate(40_000)
    else:
        _sql("PRAGMA foreign_keys = OFF", "DROP TABLE metrics", "DROP TABLE runs")(root)
    spoiled = store.read_bytes()
    for act in (
        lambda: deliver(_view(root)),
        lambda: deliver(_view(root), verify=True),
        lambda: ui.serve(print, root, _view(root), port=0, open_browser=False),
    ):
        with pytest.raises(TrackingUnusable, match=r"is damaged .*sweep sync NAME --verify"):
            act()
    assert store.read_bytes() == spoiled
    (root / "damaged").mkdir()
    store.rename(root / "damaged" / STORE)
    assert not deliver(_view(root), verify=True).still_missing
    assert not deliver(_view(root), verify=True).missing


def test_client_reads_what_sql_reads(root: Path) -> None:
    uri, view = f"sqlite:///{root / STORE}", _view(root)
    sweep_id = view.ledger.sweep_id
    database, client = open_reader(uri, NAME, None), _Client(uri, NAME, None)
    runs = sorted(database.runs(sweep_id))
    assert runs == sorted(client.runs(sweep_id))
    ids = [run.run_id for run in runs]
    held, answered = database.data(ids), client.data(ids)
    for one in ids:
        assert held[one][:-1] == answered[one][:-1]
        assert held[one].last == pytest.approx(answered[one].last, rel=0, abs=0, nan_ok=True)
    for run in runs:
        for folder in ("", "figures"):
            assert database.files(run, folder) == client.files(run, folder)


@pytest.mark.chaos
def test_server_runs_match_the_outbox(root: Path) -> None:
    from tests.tracking_server import start_tracking_server

    view = _view(root)
    with start_tracking_server(f"sqlite:///{root / STORE}", root / "mlartifacts") as server:
        found = read_runs(server.url, NAME, None, view.ledger.sweep_id, {})
    assert {run.trial for run in found} == {-1, 0, 1, 2}
    assert read_outbox(view.paths.outbox).run_ids.items() <= {
        (run.trial, run.run_id) for run in found
    }


def _text(renderable: object) -> str:
    import io

    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=400).print(renderable)
    return text.getvalue()
