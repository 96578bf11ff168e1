"""A failed trial that is run again is one trial: same number, one end, its failure as history."""

from __future__ import annotations

import os
from pathlib import Path

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import RandomSampler

from sweeps.ledger.attributes import ACCUMULATION, SIGNALS, WOULD_STOP
from sweeps.ledger.failed_attempts import FailedAttempt, Reopened
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.reader import LedgerReader
from tests.make_trials import ask

SPACE = {"train.optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True)}
STEPS = {1: 10, 2: 20}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def _ledger(path: Path, *modes: str) -> Ledger:
    ledger = Ledger.create(path, mode=list(modes or ["min"]), sweep_id="s1")  # type: ignore[arg-type]
    for number in range(3):
        ask(ledger, SPACE, RandomSampler(seed=number))
    return ledger


def _fail(ledger: Ledger, number: int, *values: float) -> None:
    others = [1.0] * (len(ledger.minimizes) - 1)
    ledger.start(number)
    for epoch, value in enumerate(values, start=1):
        ledger.report(number, epoch=epoch, step=epoch * 10, value=value, others=others)
    ledger.set_attr(number, SIGNALS, ["grad_norm rises"])
    ledger.set_attr(number, ACCUMULATION, 4)
    ledger.store_trial_seconds(number, 7.5)
    ledger.finish(number, "failed", reason="ValueError: no", traceback="Traceback: no")


def _attempt(ledger: Ledger, number: int, at: int) -> FailedAttempt:
    failed = ledger.trial(number)
    return FailedAttempt(
        failed.attempts, failed.reason or "", failed.epoch, failed.ended_ms, at, "task.py"
    )


def _reopen(ledger: Ledger, number: int, at: int, *, fresh: bool = False) -> None:
    steps = {epoch: step for epoch, step in STEPS.items() if epoch <= at}
    reopened = Reopened(fresh, replaces_run=True)
    ledger.reopen(number, _attempt(ledger, number, at), reopened, steps=steps)


@pytest.mark.parametrize("modes", [("min",), ("min", "max")])
def test_reopened_trial_continues_at_its_checkpoint(path: Path, modes: tuple[str, ...]) -> None:
    ledger = _ledger(path, *modes)
    _fail(ledger, 1, 0.5, 0.4, 0.1)
    before = ledger.trial(1)
    _reopen(ledger, 1, 2)
    for one in (ledger.trial(1), Ledger.open(path).trial(1), LedgerReader(path).records()[1]):
        assert (one.state, one.params, one.attempts) == ("running", before.params, 1)
        assert one.reports == {1: 0.5, 2: 0.4}
        assert (one.epoch, one.step, one.best_epoch, one.best_step) == (2, 20, 2, 20)
        assert (one.value, one.seconds, one.accumulation) == (0.4, 7.5, 4)
        assert (one.reason, one.traceback, one.ended_at, one.signals) == (None, None, None, ())
        assert one.reopened == Reopened(fresh=False, replaces_run=True)
        [failed] = one.failed_attempts
        assert (failed.attempt, failed.reason, failed.epoch) == (1, "ValueError: no", 3)
        assert failed.ended_ms == before.ended_ms
    ledger.store_reopened(1)
    assert ledger.trial(1).reopened is None


def test_fresh_trial_keeps_no_report(path: Path) -> None:
    ledger = _ledger(path)
    _fail(ledger, 1, 0.5, 0.4)
    _reopen(ledger, 1, 0, fresh=True)
    one = LedgerReader(path).records()[1]
    assert (one.reports, one.value, one.epoch, one.best_epoch) == ({}, None, 0, None)
    assert (one.accumulation, one.attempts, one.seconds) == (None, 1, 7.5)


def test_reopened_trial_keeps_its_device_seconds(path: Path) -> None:
    ledger = _ledger(path)
    ledger.trial_resources = lambda _: (2, 0.5)
    _fail(ledger, 1, 0.5, 0.4)
    _reopen(ledger, 1, 1)
    ledger = Ledger.open(path)
    ledger.trial_resources = lambda _: (4, 1)
    ledger.store_trial_seconds(1, 10.0)
    one = LedgerReader(path).trials[1]
    assert (one.cpu_seconds, one.gpu_seconds) == (7.5 * 2 + 2.5 * 4, 7.5 * 0.5 + 2.5)


@pytest.mark.parametrize(("at", "kept"), [(1, None), (2, 2)])
def test_where_an_exempt_trial_would_stop_is_found_again(
    path: Path, at: int, kept: int | None
) -> None:
    ledger = _ledger(path)
    ledger.set_attr(1, WOULD_STOP, [2, "asha"])
    _fail(ledger, 1, 0.5, 0.4)
    _reopen(ledger, 1, at)
    assert ledger.trial(1).would_stop_at == kept


def test_reopened_trial_ends_once_more(path: Path) -> None:
    ledger = _ledger(path)
    for number in (0, 1, 2):
        _fail(ledger, number, 0.5, 0.4)
    _reopen(ledger, 1, 1)
    ledger = Ledger.open(path)
    assert ledger.start(1) == 2
    ledger.report(1, epoch=2, step=20, value=0.3)
    ledger.finish(1, "complete")
    one = LedgerReader(path).trials[1]
    assert (one.state, one.value, one.finish_order, len(one.failed_attempts)) == (
        ("complete", 0.3, 4, 1)
    )
    assert [trial.state for trial in ledger.trials()] == ["failed", "complete", "failed"]


def test_only_a_failed_trial_is_reopened(path: Path) -> None:
    ledger = _ledger(path)
    ledger.report(0, epoch=1, step=10, value=0.5)
    ledger.finish(0, "complete")
    ledger.finish(1, "pruned", reason="asha")
    for number in (0, 1, 2):
        before = ledger.trial(number)
        _reopen(ledger, number, 0)
        assert ledger.trial(number) == before


def test_killed_reopening_changes_nothing(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path / "ledger.db")
    _fail(ledger, 1, 0.5, 0.4)
    before = Ledger.open(tmp_path / "ledger.db").trials()
    if (child := os.fork()) == 0:
        try:
            ledger._storage.set_study_attribute = lambda *_: os._exit(9)  # type: ignore[method-assign]
            _reopen(ledger, 1, 1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert Ledger.open(tmp_path / "ledger.db").trials() == before


def test_optuna_reads_a_reopened_trial_as_running(tmp_path: Path) -> None:
    ledger = _ledger(tmp_path / "ledger.db")
    _fail(ledger, 1, 0.5, 0.4)
    _reopen(ledger, 1, 1)
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/ledger.db")
    one = study.trials[1]
    assert one.state == optuna.trial.TrialState.RUNNING
    assert (one.datetime_complete, one.intermediate_values) == (None, {1: 0.5})
