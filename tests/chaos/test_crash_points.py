"""Rows 2 and 33: SIGKILL and power loss at each persisting call of single operations.

What a save, a logged row, a ledger's transaction, an append to the outbox and a sweep's creation
persist is listed; the process is killed before every one of these calls, and in the middle of
every write. Then the reader's side is looked at: what was acknowledged is there, once, and
whatever was under way is whole or not there.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from optuna.samplers import RandomSampler

from sweeps.ledger.ledger import Ledger
from sweeps.paths import SweepPaths
from sweeps.spec.spec import parse_spec
from tests.chaos import fsync_model
from tests.chaos.crash_runs import CrashRuns, Remains, Stage
from tests.chaos.faults import Faults, Kind
from tests.chaos.fsync_model import SPEC, creation, open_store, save
from tests.chaos.power_loss import FATES, Fate
from tests.chaos.spaces import SPACE
from tests.make_trials import ask
from tracking.outbox import Outbox, payload_rows
from tracking.outbox_file import read_marks
from trainable.checkpoint import CheckpointStore
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import History, Row, read_rows

Check = Callable[[Remains], None]


# What is there before a program starts


def _nothing(directory: Path) -> None:
    del directory


def _three_saved(directory: Path) -> None:
    """The first one is the best."""
    store = open_store(directory)
    for step, value in ((1, 0.5), (2, 9.0), (3, 9.0)):
        save(store, step, value)
    store.close()


def _newest_damaged(directory: Path) -> None:
    _three_saved(directory)
    _flip(directory / "checkpoints" / "step-00000002" / "manifest.json")
    _flip(directory / "checkpoints" / "step-00000003" / "state.pt")


def _four_rows(directory: Path) -> None:
    files = LocalFiles.of(directory)
    files.open()
    history = History(directory, files, step=0)
    history.append(Row(step, 0, {"train/loss": -1.0}) for step in (1, 2, 3, 4))
    history.close()
    files.close()


def _empty_ledger(directory: Path) -> None:
    Ledger.create(directory / "ledger.db", mode="min", sweep_id="s")


# What must hold afterwards


def _saves(remains: Remains) -> None:
    _newest_is_whole(remains, before=3)
    best = CheckpointStore(remains.directory).best()
    assert best is not None
    assert best.step == 1
    assert not (remains.directory / "checkpoints" / "quarantine").exists()


def _first_saves(remains: Remains) -> None:
    _newest_is_whole(remains, before=0)


def _damaged(remains: Remains) -> None:
    _newest_is_whole(remains, before=1)
    # What was damaged is kept for whoever wants to know why: once, except that a power loss
    # between the syncs of two directories may have left it in both.
    quarantine = remains.directory / "checkpoints" / "quarantine"
    kept: dict[str, list[bytes]] = {}
    for path in quarantine.iterdir():
        kept.setdefault(path.name[: len("step-00000002")], []).append(
            (path / "manifest.json").read_bytes() + (path / "state.pt").read_bytes()
        )
    assert sorted(kept) == ["step-00000002", "step-00000003"]
    for copies in kept.values():
        assert len(set(copies)) == 1
        assert len(copies) == 1 or "power" in remains.where


def _newest_is_whole(remains: Remains, before: int) -> None:
    acknowledged = [before, *(step for (step,) in remains.said("saved"))]
    newest = CheckpointStore(remains.directory).newest()
    step = newest.step if newest else 0
    assert step in (acknowledged[-1], acknowledged[-1] + 1)
    _goes_on(remains.directory, step)


def _goes_on(directory: Path, step: int) -> None:
    """The next process continues from there, and leaves nothing that it found unfinished."""
    store = open_store(directory)
    state = store.resume()
    assert (state["step"] if state else 0) == step
    store.close()
    assert not list((directory / "checkpoints").glob(".*"))


def _curve(remains: Remains) -> None:
    # A row survives its process once it is appended, and the machine once it is synced.
    verb = "synced" if "power" in remains.where else "appended"
    rows = read_rows(remains.directory)
    steps = [row.step for row in rows]
    assert steps[:2] == [1, 2]  # a checkpoint covers these
    assert steps == sorted(set(steps))
    written = {row.step for row in rows if row.metrics["train/loss"] > 0}
    assert {step for (step,) in remains.said(verb)} <= written
    files = LocalFiles.of(remains.directory)
    files.open()
    History(remains.directory, files, step=2).close()
    files.close()
    assert [row.step for row in read_rows(remains.directory)] == [1, 2]
    assert not list((remains.directory / "checkpoints").glob(".*"))


def _ledger(remains: Remains) -> None:
    ledger = Ledger.open(remains.directory / "ledger.db")
    trials = ledger.trials()
    assert [trial.number for trial in trials] == list(range(len(trials)))
    for number, params in remains.said("asked"):
        assert trials[number].params == params
    for (number,) in remains.said("started"):
        assert trials[number].attempts == 1
    for number, epoch in remains.said("reported"):
        assert trials[number].reports[epoch] == 0.5
    for (number,) in remains.said("finished"):
        assert trials[number].state == "complete"
    for trial in trials:
        if not trial.finished:
            assert trial.params.keys() == SPACE.keys(), "a trial is there whole, or not at all"
            ledger.finish(trial.number, "failed")
    assert ask(ledger, SPACE, RandomSampler(seed=9)).number == len(trials)


def _outbox(remains: Remains) -> None:
    outbox = Outbox(remains.directory)
    assert outbox.moved_aside is None
    queued = {step for steps in remains.said("queued") for step in steps}
    claimed = {step for steps in remains.said("claimed") for step in steps}
    delivered = {step for steps in remains.said("delivered") for step in steps}
    waiting = _waiting(outbox)
    if "power" not in remains.where:  # appends wait for no disk
        assert not delivered & set(waiting)
        assert queued - claimed <= set(waiting)
        assert claimed - set(waiting) in (set(), claimed)
    for (payload,) in outbox._db.execute("SELECT payload FROM records WHERE kind = 'artifact'"):
        copy = remains.directory / json.loads(payload)["staged"]
        assert copy.read_bytes() == Path(fsync_model.__file__).read_bytes()
    # Every row is handed in again, as after a crash: those that are known are dropped.
    gone = claimed - set(waiting)
    outbox.append_rows(0, [Row(step, 0, {"loss": 1 / step}) for step in range(1, 8)])
    again = _waiting(outbox)
    assert sorted(again) == sorted({1, 2, 3, 4, 5, 6, 7} - gone)
    # What may be at the server already is compared with it first; so nothing doubles there.
    assert all(in_doubt for step, in_doubt in again.items() if step in claimed)
    outbox.close()


def _creation(remains: Remains) -> None:

    said: list[str] = []
    paths = SweepPaths(remains.directory, "small")
    existed = paths.exists()
    if existed:
        assert parse_spec(paths.spec.read_text(), "sweep.yaml") == parse_spec(SPEC, "small.yaml")
        assert Ledger.open(paths.ledger).trials() == []
    else:
        assert not remains.acknowledged
    creation(remains.directory, said.append)
    assert said == ["opened" if existed else "created"]
    assert sorted(p.name for p in paths.directory.iterdir()) == ["ledger.db", "lock", "sweep.yaml"]


CASES = {
    "save": ("saves", _three_saved, _saves),
    "first save": ("saves", _nothing, _first_saves),
    "save after damage": ("saves", _newest_damaged, _damaged),
    "curve": ("curve", _four_rows, _curve),
    "ledger": ("ledger", _empty_ledger, _ledger),
    "outbox": ("outbox", _nothing, _outbox),
    "creation": ("creation", _nothing, _creation),
}


@pytest.fixture(scope="module")
def stage(shim: Path) -> Iterator[Stage]:
    # In memory where there is such a file system: what a kill leaves is the same there, and
    # thousands of syncs wait for no disk.
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        directory = Path(name)
        opened = Stage(Faults(shim, directory, directory / "runs"), directory / "runs")
        yield opened
        opened.close()


@pytest.fixture(params=CASES)
def crash_runs(
    request: pytest.FixtureRequest, stage: Stage, tmp_path: Path
) -> tuple[CrashRuns, Check]:
    name, prepare, check = CASES[request.param]
    return CrashRuns(stage, name, _prepared(prepare, tmp_path)), check


# CI takes a few of those that open a ledger: that alone takes a tenth of a second each time.
_LONG = ("ledger", "creation")
_SLICE = pytest.param(5, id="slice")
_ALL = pytest.param(1, id="all", marks=pytest.mark.chaos)


@pytest.mark.fault(2, "SIGKILL before and within each persisting call")
@pytest.mark.parametrize("every", [_SLICE, _ALL])
def test_row_02_sigkill_at_each_persisting_call(
    crash_runs: tuple[CrashRuns, Check], every: int
) -> None:
    opened, check = crash_runs
    num_kills = 0
    for remains in opened.killed(every=every if opened.name in _LONG else 1):
        _explained(check, remains)
        num_kills += 1
    print(f"{opened.name}: killed {num_kills} times")
    assert num_kills >= 15


@pytest.mark.fault(
    33, "the power goes off at each persisting call, with four fates of what was not synced"
)
@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("every", [_SLICE, _ALL])
def test_row_33_power_loss_at_each_persisting_call(
    crash_runs: tuple[CrashRuns, Check], every: int, fate: Fate
) -> None:
    opened, check = crash_runs
    num_cuts = 0
    for remains in opened.power_lost(fate, every=every if opened.name in _LONG else min(every, 6)):
        _explained(check, remains)
        num_cuts += 1
    print(f"{opened.name}: the power went off {num_cuts} times")
    assert num_cuts >= (15 if every == 1 else 2)


def test_save_order_survives_power_loss(stage: Stage, tmp_path: Path) -> None:
    operations = CrashRuns(stage, "saves", _prepared(_three_saved, tmp_path)).whole()
    new = next(i for i, o in enumerate(operations) if "new-step" in o.path)
    commit = next(i for i, o in enumerate(operations) if o.other.endswith("step-00000004"))
    kinds = [(o.kind, Path(o.path).name) for o in operations[new : commit + 2]]
    without_repeats = [k for k, before in zip(kinds, [None, *kinds], strict=False) if k != before]
    aside = "new-step-00000004"
    assert without_repeats == [
        (Kind.MKDIR, aside),
        (Kind.CREATE, "state.pt"),
        (Kind.WRITE, "state.pt"),
        (Kind.SYNC, "state.pt"),
        (Kind.CREATE, "manifest.json"),
        (Kind.WRITE, "manifest.json"),
        (Kind.SYNC, "manifest.json"),
        (Kind.SYNC, aside),
        (Kind.RENAME, aside),
        (Kind.SYNC, "checkpoints"),
    ]


def _prepared(prepare: Callable[[Path], None], directory: Path) -> Path:
    template = directory / "template"
    template.mkdir()
    prepare(template)
    return template


def _explained(check: Check, remains: Remains) -> None:
    try:
        check(remains)
    except Exception as problem:  # whatever goes wrong, the place is what one wants to know
        kept = remains.directory.with_name("failed")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(remains.directory, kept)
        raise AssertionError(
            f"{remains.where}, said {remains.acknowledged}: {problem}"
        ) from problem


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _waiting(outbox: Outbox) -> dict[int, bool]:
    """The steps of all rows to be sent; true for those that may be at the server already."""
    query = "SELECT payload FROM records WHERE kind = 'metrics'"
    with closing(sqlite3.connect(outbox.directory / "outbox.db")) as db:
        delivered, in_flight = read_marks(db, 0)
        rows = [row for (text,) in db.execute(query) for row in payload_rows(json.loads(text))]
    sent = in_flight.steps["loss"] if in_flight else 0
    return {
        row.step: row.step <= sent for row in rows if row.step > delivered.steps.get("loss", 0)
    }
