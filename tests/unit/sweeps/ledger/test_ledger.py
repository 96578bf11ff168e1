"""The ledger: numbers, parameters and states of trials are stored once and kept."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler

from sweeps.errors import LedgerBusy, LedgerError
from sweeps.ledger.attributes import PbtPerturbation, is_of_search
from sweeps.ledger.ledger import Ledger, LedgerReport
from sweeps.ledger.ranking import ranking
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.sqlite import LedgerFile
from sweeps.ledger.storage import StudyStorage
from sweeps.ledger.trials import TrialRecord, TrialSummary, of_search
from tests.make_trials import ask, proposal

SPACE = {
    "train.optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True),
    "train.schedule.warmup": FloatDistribution(0.0, 0.3),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger.create(path, mode="min", sweep_id="s1")


def _ask(ledger: Ledger, seed: int = 0) -> int:
    return ask(ledger, SPACE, RandomSampler(seed=seed)).number


def test_trials_are_numbered_and_keep_their_parameters(ledger: Ledger, path: Path) -> None:
    first = ask(ledger, SPACE, RandomSampler(seed=1))
    second = ask(ledger, SPACE, RandomSampler(seed=2))
    assert (first.number, second.number) == (0, 1)
    assert first.params != second.params
    again = Ledger.open(path)
    assert again.sweep_id == "s1"
    assert [t.params for t in again.trials()] == [first.params, second.params]
    assert {t.state for t in again.trials()} == {"running"}


def test_value_is_the_best_report_and_the_first_of_equal_ones(ledger: Ledger) -> None:
    number = _ask(ledger)
    assert ledger.trial(number).best_step is None
    for epoch, value in [(1, 0.9), (2, 0.4), (2, 0.1), (3, 0.6), (4, 0.4)]:  # 2 is repeated
        ledger.report(number, epoch=epoch, step=epoch * 10, value=value)
    record = ledger.trial(number)
    assert record.reports == {1: 0.9, 2: 0.4, 3: 0.6, 4: 0.4}
    assert (record.value, record.epoch, record.step) == (0.4, 4, 40)
    assert (record.best_epoch, record.best_step) == (2, 20)
    ledger.finish(number, "complete")
    assert ledger.trial(number).state == "complete"
    assert ledger.best() == ledger.trial(number)


def test_population_decision_is_kept_with_initial_values(ledger: Ledger, path: Path) -> None:
    first, second = (_ask(ledger, seed) for seed in (0, 1))
    began = ledger.trial(first).params
    for epoch in (1, 2):
        assert Ledger.open(path).generation == epoch - 1
        for number in (first, second):
            ledger.report(number, epoch=epoch, step=epoch, value=1.0 / epoch)
        changed = {**began, "train.optimizer.lr": 0.01 * epoch}
        ledger.mutate(epoch, {first: PbtPerturbation(epoch, second, changed)})
    assert Ledger.open(path).generation == 2
    for record in (Ledger.open(path).trial(first), LedgerReader(path).trials[first]):
        assert (record.suggested, record.params) == (began, changed)
        assert [(one.epoch, one.donor) for one in record.lineage] == [(1, second), (2, second)]
        assert record.best_params == record.lineage[0].params
    assert not ledger.trial(second).lineage


def test_the_first_end_stays(ledger: Ledger) -> None:
    number = _ask(ledger)
    ledger.report(number, epoch=1, step=10, value=0.5)
    ledger.finish(number, "pruned")
    ledger.finish(number, "complete")
    ledger.report(number, epoch=2, step=20, value=0.1)
    record = ledger.trial(number)
    assert (record.state, record.reports) == ("pruned", {1: 0.5})


@pytest.mark.parametrize(("mode", "infinite"), [("max", math.inf), ("min", -math.inf)])
@pytest.mark.parametrize("ending", [None, "complete", "pruned"])
def test_infinity_is_a_report_and_never_the_best(
    path: Path, mode: Any, infinite: float, ending: Any
) -> None:
    ledger = Ledger.create(path, mode=mode, sweep_id="s1")
    nothing_else, number = _ask(ledger), _ask(ledger)
    ledger.report(nothing_else, epoch=1, step=10, value=infinite)
    for epoch, value in enumerate([0.5, infinite, 0.5], start=1):
        ledger.report(number, epoch=epoch, step=10 * epoch, value=value)
    if ending is not None:
        ledger.finish(number, ending)
        ledger.finish(nothing_else, "pruned")
    for record in (ledger.trial(number), LedgerReader(path).trials[number]):
        assert (record.value, record.best_epoch, record.best_step) == (0.5, 1, 10)
    for record in (ledger.trial(nothing_else), LedgerReader(path).trials[nothing_else]):
        assert (record.value, record.best_step) == (None, None)
    assert ledger.trial(number).reports == {1: 0.5, 2: infinite, 3: 0.5}


def test_attempts_are_counted_over_reopening(ledger: Ledger, path: Path) -> None:
    number = _ask(ledger)
    assert ledger.start(number) == 1
    again = Ledger.open(path)
    assert again.start(number) == 2
    assert again.trial(number).attempts == 2


def test_missing_parameters_are_added_to_existing_ones(ledger: Ledger, path: Path) -> None:
    del ledger
    study = optuna.load_study(storage=f"sqlite:///{path}", study_name="sweep")
    rate = study.ask().suggest_float("train.optimizer.lr", 1e-4, 1e-1, log=True)
    reopened = Ledger.open(path)
    wanted = proposal(SPACE, RandomSampler(seed=3))
    record = reopened.complete(0, wanted)
    assert record.params == {**wanted.params, "train.optimizer.lr": rate}
    assert Ledger.open(path).trials() == [record]


def test_parameter_may_change_its_type_between_trials(ledger: Ledger, path: Path) -> None:
    spaces = [
        {"task.x": CategoricalDistribution(("a", "b"))},
        {"task.x": CategoricalDistribution(("b", None, 3))},
        {"task.x": IntDistribution(1, 9)},
        {"task.x": FloatDistribution(0.5, 9, log=True)},
    ]
    asked = [ask(ledger, space, RandomSampler(seed=1)).params for space in spaces]
    assert [trial.params for trial in Ledger.open(path).trials()] == asked
    assert [trial.params for trial in LedgerReader(path).trials] == asked
    stored = [trial.distributions for trial in ledger.frozen_trials()]
    assert stored == spaces


class Died(BaseException):
    """Stands for the process' death: nothing on the way takes it for an error."""


def _die_after(monkeypatch: pytest.MonkeyPatch, write: str, count: int) -> None:
    """Let the process die right after one of the writes of a transaction."""
    real, done = getattr(StudyStorage, write), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        stored = real(*args, **kwargs)
        done += 1
        if done == count:
            raise Died
        return stored

    monkeypatch.setattr(StudyStorage, write, dying)


def _report(ledger: Ledger) -> object:
    return ledger.report(0, epoch=2, step=20, value=0.1)


def _fail(ledger: Ledger) -> object:
    return ledger.finish(0, "failed", reason="lost", traceback="Traceback ...")


def _complete(ledger: Ledger) -> object:
    return ledger.finish(0, "complete")


@pytest.mark.parametrize(
    ("do", "write", "count"),
    [
        (_report, "set_attribute", 1),
        (_fail, "set_attribute", 1),
        (_fail, "set_attribute", 2),
        (_complete, "end_trial", 1),
        (_ask, "set_param", 1),
        (_ask, "add_trial", 1),
    ],
)
def test_kill_within_one_event_leaves_none_of_its_writes(
    ledger: Ledger, path: Path, do: Callable[[Ledger], object], write: str, count: int
) -> None:
    _ask(ledger)
    ledger.report(0, epoch=1, step=10, value=0.5)
    before = ledger.trials()
    with pytest.MonkeyPatch.context() as patched:
        _die_after(patched, write, count)
        with pytest.raises(Died):
            do(ledger)
    again = Ledger.open(path)
    assert again.trials() == before == [ledger.trial(0)]
    do(again)
    assert Ledger.open(path).trials() != before


@pytest.mark.parametrize("do", [_ask, _report, _fail])
def test_the_disk_is_waited_for_once(ledger: Ledger, do: Callable[[Ledger], object]) -> None:
    _ask(ledger)
    said: list[str] = []
    ledger._storage._db.set_trace_callback(said.append)
    do(ledger)
    assert said.count("COMMIT") == 1
    assert sum(statement.startswith(("INSERT", "UPDATE")) for statement in said) >= 2
    assert not [statement for statement in said if statement.startswith("SELECT")]


def test_a_commit_waits_for_its_directory(path: Path) -> None:
    """As SQLite's EXTRA, 3, does: FULL does not sync the directory once the journal is gone."""
    with contextlib.closing(LedgerFile(path).connect()) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)


def test_creating_twice_is_refused(ledger: Ledger, path: Path) -> None:
    del ledger
    with pytest.raises(LedgerError, match="already holds a ledger"):
        Ledger.create(path, mode="min", sweep_id="s2")


@pytest.mark.parametrize("name", ["what?", "50%25", "a{b}", "#1", os.fsdecode(b"M\xfcller")])
def test_ledger_path_needs_no_url_escaping(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "ledger.db"
    path.parent.mkdir()
    _ask(Ledger.create(path, mode="min", sweep_id="s1"))
    assert LedgerFile(path).num_trials() == 1
    assert [found.name for found in tmp_path.rglob("*")] == [name, "ledger.db"]


def test_opening_missing_or_invalid_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger at"):
        Ledger.open(tmp_path / "missing.db")
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database" * 100)
    with pytest.raises(LedgerError, match="not a readable ledger"):
        Ledger.open(garbage)


@pytest.mark.parametrize(
    "planted",
    [
        "ALTER TABLE trials RENAME TO t; CREATE VIEW trials AS SELECT * FROM t",
        "CREATE TRIGGER more AFTER INSERT ON trials BEGIN DELETE FROM studies; END",
    ],
)
def test_a_ledger_that_computes_is_refused(ledger: Ledger, path: Path, planted: str) -> None:
    """A view may never come to an end, and a trigger writes what nobody asked for."""
    del ledger
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(planted)
    for found in (_read(path), _look(path)):
        assert isinstance(found, LedgerError)
        assert "it holds a view or a trigger" in str(found)


def _damaged(whole: bytes) -> Iterator[bytes]:
    yield b""
    for cut in range(1, 10):
        yield whole[: len(whole) * cut // 10]
    for page in range(len(whole) // 4096):
        yield whole[: page * 4096] + bytes(4096) + whole[(page + 1) * 4096 :]


def _read(path: Path) -> list[TrialRecord] | LedgerError:
    try:
        return Ledger.open(path).trials()
    except LedgerError as error:
        return error


def _look(path: Path) -> list[TrialSummary] | LedgerError:
    try:
        return LedgerReader(path).trials
    except LedgerError as error:
        return error


def test_damaged_ledger_is_an_error_or_read_whole(ledger: Ledger, path: Path) -> None:
    for number in range(5):
        _ask(ledger, seed=number)
        ledger.report(number, epoch=1, step=10, value=number / 10)
        ledger.finish(number, "complete")
    trials, whole = ledger.trials(), path.read_bytes()
    refused = 0
    for content in _damaged(whole):
        path.write_bytes(content)
        found = _read(path)
        seen = _look(path)
        assert type(seen) is type(found), "looking finds what the ledger finds"
        if isinstance(found, LedgerError):
            refused += 1
            assert str(path) in str(found)
            assert path.read_bytes() == content
        else:
            assert [trial.params for trial in seen] == [trial.params for trial in trials]
            assert found == trials, "what is read is what was written"
    assert refused >= 20


def test_a_locked_ledger_is_waited_for_within_a_bound(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = _ask(ledger)
    monkeypatch.setattr("sweeps.ledger.sqlite.WAIT_SECONDS", 0.1)
    patient = Ledger.open(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for use in (
            lambda: patient.report(number, epoch=1, step=1, value=0.5),
            lambda: patient.finish(number, "complete"),
            lambda: Ledger.open(path),
            lambda: LedgerReader(path),
        ):
            with pytest.raises(
                LedgerBusy, match=r"another process has locked the ledger .*ledger\.db for"
            ):
                use()
        other.execute("ROLLBACK")
    patient.report(number, epoch=1, step=1, value=0.5)
    assert patient.trial(number).reports == {1: 0.5}


def test_trials_are_counted_without_creating_a_study(tmp_path: Path) -> None:
    empty = tmp_path / "empty.db"
    empty.touch()
    assert LedgerFile(empty).num_trials() is None
    assert empty.read_bytes() == b""


def test_transaction_is_stored_whole_or_not_at_all(ledger: Ledger) -> None:
    numbers = [_ask(ledger), _ask(ledger)]

    def store() -> None:
        for number in numbers:
            ledger.report(number, epoch=1, step=1, value=0.5)
        ledger.finish(numbers[0], "complete")

    def fail() -> None:
        store()
        _ask(ledger)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.transaction(fail)
    for _ in range(2):  # as remembered, and as read
        assert [trial.reports for trial in ledger.trials()] == [{}, {}]
        assert [ledger.trial(number).state for number in numbers] == ["running"] * 2
        ledger = Ledger.open(ledger.location.path)
    ledger.transaction(store)
    for _ in range(2):
        assert [trial.reports for trial in ledger.trials()] == [{1: 0.5}] * 2
        assert [ledger.trial(number).state for number in numbers] == ["complete", "running"]
        ledger = Ledger.open(ledger.location.path)


def test_a_trial_that_has_not_changed_is_the_same_object(ledger: Ledger) -> None:
    for _ in range(4):
        _ask(ledger)
    before = ledger.frozen_trials()
    ledger.report(1, epoch=1, step=1, value=0.5)
    ledger.finish(3, "pruned")
    after = ledger.frozen_trials()
    assert [one is two for one, two in zip(before, after, strict=True)] == [True, False] * 2
    assert after[1].intermediate_values == {1: 0.5}
    assert after[3].state.name == "PRUNED"
    assert ledger.frozen_trials() == after
    _ask(ledger)
    assert [one.number for one in ledger.frozen_trials()] == [0, 1, 2, 3, 4]


def test_what_another_connection_wrote_is_seen_in_the_next_transaction(
    ledger: Ledger, path: Path
) -> None:
    other = Ledger.open(path)
    assert [_ask(one, seed) for seed, one in enumerate((ledger, other, other, ledger))] == [
        *range(4)
    ]
    assert ledger.trials() == Ledger.open(path).trials()


def test_threads_take_turns(ledger: Ledger) -> None:
    numbers = [_ask(ledger, seed) for seed in range(4)]

    def report(number: int) -> None:
        for epoch in range(1, 6):
            ledger.report(number, epoch=epoch, step=epoch, value=1 / epoch)
            assert max(ledger.trial(number).reports) == epoch
            assert len(ledger.trials()) == 4
        ledger.finish(number, "complete")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(report, numbers))
    for trial in Ledger.open(ledger.location.path).trials():
        assert (trial.state, len(trial.reports)) == ("complete", 5)


def test_times_of_a_trial_are_stored(ledger: Ledger) -> None:
    number = _ask(ledger)
    assert (ledger.trial(number).started_at, ledger.trial(number).seconds) == (None, None)
    before = datetime.now()
    ledger.start(number)
    started = ledger.trial(number).started_at
    assert started is not None
    assert abs(started - before) < timedelta(minutes=10)
    ledger.report_all(number, [LedgerReport(1, 10, 0.5, (), 2.5)])
    ledger.store_trial_seconds(number, 3.25)
    ledger.start(number)  # a second attempt
    ledger.report(number, epoch=2, step=20, value=0.4)
    ledger.finish(number, "complete", seconds=4.5)
    ledger.store_trial_seconds(number, 9.0)  # too late
    for found in (ledger.trial(number), LedgerReader(ledger.location.path).trials[number]):
        assert (found.started_at, found.seconds, found.attempts) == (started, 4.5, 2)
        assert found.ended_at is not None
        assert found.ended_at >= started
        assert (found.epoch, found.best_epoch) == (2, 2)


def test_devices_count_by_the_resources_of_each_attempt(ledger: Ledger) -> None:
    number = _ask(ledger)
    for resources, seconds in (((1, 0.5), (2.0, 4.0)), ((4, 0), (5.0,)), ((1, 2), (5.0, 7.0))):
        ledger = Ledger.open(ledger.location.path)  # each attempt may be another driver's
        ledger.trial_resources = lambda _params, found=resources: found
        for total in seconds:
            ledger.store_trial_seconds(number, total)
    ledger.finish(number, "pruned", seconds=8.0)
    for found in (ledger.trial(number), LedgerReader(ledger.location.path).trials[number]):
        assert (found.seconds, found.cpu_seconds, found.gpu_seconds) == (8, 4 + 4 + 3, 2 + 6)


def test_plan_stays_until_what_was_planned_changes(ledger: Ledger) -> None:
    assert LedgerReader(ledger.location.path).plan is None
    plan = {"trials": 4, "epochs": 10, "rule": "asha", "seconds": 3.0}
    ledger.store_plan(plan)
    ledger.store_plan(plan | {"seconds": 9.0})
    assert LedgerReader(ledger.location.path).plan == plan
    ledger.store_plan(plan | {"trials": 8})
    assert LedgerReader(ledger.location.path).plan == plan | {"trials": 8}


def test_roles_and_common_seeds_are_kept(path: Path) -> None:
    ledger = Ledger.create(path, mode="min", sweep_id="s")
    first, second = (ask(ledger, SPACE, RandomSampler(seed=n)).number for n in range(2))
    for number, value in ((first, 2.0), (second, 3.0)):
        ledger.report(number, epoch=1, step=1, value=value)
    ledger.finish(first, "complete")
    ledger.finish(second, "pruned")
    ledger.add_extra("finish", second)
    for origin in (first, second):
        number = ledger.add_extra("confirm", origin, 1).number
        ledger.report(number, epoch=1, step=1, value=1.0)
        ledger.finish(number, "complete")
    for trials in (ledger.trials(), LedgerReader(path).trials):
        assert [(t.role, t.origin) for t in trials] == [
            ("search", None),
            ("search", None),
            ("finish", 1),
            ("confirm", 0),
            ("confirm", 1),
        ]
        assert [t.seed[:2] for t in trials] == [
            ("trial", 0),
            ("trial", 1),
            ("trial", 1),
            ("confirm", 1),
            ("confirm", 1),
        ]
        assert [t.params for t in trials[3:]] == [t.params for t in trials[:2]]
        assert [t.number for t in of_search(trials)] == [0, 1]
        assert [t.number for t in ranking(trials, minimize=True)] == [0, 1]  # none that confirms
    attributes = [trial.user_attrs for trial in ledger.frozen_trials()]
    assert [is_of_search(one) for one in attributes] == [True, True, False, False, False]
