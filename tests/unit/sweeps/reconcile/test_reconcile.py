"""Reconciliation: which facts give which repairs, and that none is needed afterwards."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import RandomSampler

from sweeps.errors import LedgerError
from sweeps.ledger.attributes import EXEMPT, PbtPerturbation
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.reconcile import (
    Correction,
    MissingParams,
    MissingReport,
    MissingRun,
    MissingTrials,
    OrphanedRun,
    SavedReport,
    StaleRunStatus,
    StaleWriter,
    SweepState,
    TrialState,
    UncountedAttempt,
    UnknownDirectory,
    UnrecordedEnd,
    reconcile,
)
from sweeps.reconcile.repairs import (
    UnknownDirectoryInTheWay,
    apply,
    follow_logs,
    send_to_tracker,
)
from sweeps.run.sync import queue_interruptions
from sweeps.spec.spec import SweepSpec, trial_yaml
from sweeps.stopping.schedulers import make_verdict_fn
from tests.curves import append_rows
from tests.fake_checkpoints import commit
from tests.make_trials import ask
from tests.memory_recorder import MemoryRecorder
from tests.specs import make_spec, with_overrides
from tracking.outbox import SWEEP, Outbox
from tracking.outbox_status import read_outbox
from trainable.errors import NonFiniteMetric
from trainable.store.local import LocalFiles
from trainable.store.manifest import STATE
from trainable.store.metrics_file import Row, read_rows

PARAMS = {"train.optimizer.lr": 0.01}
OPEN = TrialRecord(number=0, state="running", params=PARAMS, reports={1: 0.5}, value=0.5)
ROWS = (Row(10, 5, {"val/loss": 0.5}), Row(12, 7, {}))
CURVE = (SavedReport(1, 10, 0.5), SavedReport(2, 20, 0.4))


@pytest.fixture
def spec() -> SweepSpec:
    return make_spec(
        name="quad",
        trials=4,
        budget="{epochs: 4}",
        space="{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}",
        early_stopping="{scheduler: asha, grace_epochs: 1, reduction: 2}",
    )


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    found = SweepPaths(tmp_path, "quad")
    found.directory.mkdir()
    return found


@pytest.fixture
def ledger(paths: SweepPaths) -> Ledger:
    return Ledger.create(paths.ledger, mode="min", sweep_id="s")


def _facts(*trials: TrialState, **more: Any) -> SweepState:
    return SweepState(trials, parameters=frozenset(PARAMS), num_awaited=4, **more)


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        pytest.param(TrialState(OPEN), [], id="nothing is known elsewhere"),
        pytest.param(
            TrialState(OPEN, tracked_status="INTERRUPTED"), [], id="interrupted and known to be"
        ),
        pytest.param(
            TrialState(OPEN, CURVE), [MissingReport(0, CURVE[1])], id="the ledger lacks a report"
        ),
        pytest.param(
            TrialState(OPEN, CURVE, tracked_status="RUNNING", rows=ROWS),
            [MissingReport(0, CURVE[1]), OrphanedRun(0, 7)],
            id="killed between store and ledger",
        ),
        pytest.param(
            TrialState(OPEN, CURVE, trained=True, tracked_status="RUNNING"),
            [MissingReport(0, CURVE[1]), UnrecordedEnd(0, "complete")],
            id="killed between the last commit and its report",
        ),
        pytest.param(
            TrialState(OPEN, CURVE[:1], trained=True, stale_writer=True, tracked_status="RUNNING"),
            [StaleWriter(0), UnrecordedEnd(0, "complete")],
            id="killed before it closed its checkpoints, and trained to its end",
        ),
        pytest.param(
            TrialState(OPEN, CURVE[:1], stale_writer=True, tracked_status="INTERRUPTED"),
            [],
            id="killed before it closed its checkpoints, which somebody will",
        ),
        pytest.param(
            TrialState(
                replace(OPEN, state="pruned"), tracked_status="FINISHED", stale_writer=True
            ),
            [StaleWriter(0)],
            id="killed before it closed its checkpoints, and stopped for good",
        ),
        pytest.param(
            TrialState(OPEN, CURVE[:1], trained=True, rows=ROWS),
            [MissingRun(0, 5), UnrecordedEnd(0, "complete")],
            id="trained to its end, and the outbox is lost",
        ),
        pytest.param(
            TrialState(OPEN, CURVE[:1], stop_reason="asha: x", tracked_status="RUNNING"),
            [UnrecordedEnd(0, "pruned", "asha: x")],
            id="killed between a report and the verdict on it",
        ),
        pytest.param(
            TrialState(OPEN, CURVE[:1], rows=ROWS),
            [MissingRun(0, 5), OrphanedRun(0, 7)],
            id="the outbox is lost in the middle of a trial",
        ),
        pytest.param(
            TrialState(
                OPEN,
                CURVE[:1],
                stop_reason="asha: x",
                trained_past_report=True,
                tracked_status="RUNNING",
            ),
            [OrphanedRun(0)],
            id="killed after the verdict, which was to go on",
        ),
        pytest.param(
            TrialState(replace(OPEN, params={}, reports={})),
            [MissingParams(0)],
            id="killed while parameters were stored",
        ),
        pytest.param(
            TrialState(replace(OPEN, params={}, reports={}), started=True),
            [UncountedAttempt(0)],
            id="killed before its attempt was counted; the space was edited since",
        ),
        pytest.param(
            TrialState(replace(OPEN, state="complete"), tracked_status="FINISHED"),
            [],
            id="all is well",
        ),
        pytest.param(
            TrialState(replace(OPEN, state="complete"), tracked_status="RUNNING"),
            [StaleRunStatus(0, "FINISHED")],
            id="complete and not told",
        ),
        pytest.param(
            TrialState(replace(OPEN, state="pruned"), rows=ROWS),
            [MissingRun(0, 5), StaleRunStatus(0, "FINISHED", 7)],
            id="the outbox is lost",
        ),
        pytest.param(
            TrialState(replace(OPEN, state="failed", ended_at=datetime.fromtimestamp(9))),
            [MissingRun(0, 9000), StaleRunStatus(0, "FAILED")],
            id="failed before it trained, and the outbox is lost",
        ),
        pytest.param(
            TrialState(replace(OPEN, state="pruned"), rows=ROWS, tracked_status="INTERRUPTED"),
            [StaleRunStatus(0, "FINISHED", 7)],
            id="interrupted, gone on and pruned, and all since the interruption is lost",
        ),
        pytest.param(
            TrialState(replace(OPEN, state="failed"), tracked_status="RUNNING"),
            [StaleRunStatus(0, "FAILED")],
            id="failed and not told",
        ),
    ],
)
def test_facts_of_a_trial_give_repairs(trial: TrialState, expected: list[Correction]) -> None:
    assert reconcile(_facts(trial)) == expected
    assert reconcile(_facts(trial, live=True)) == [], "a live driver puts its own trials right"


def test_unknown_directories_are_named_and_may_block_resume() -> None:
    facts = _facts(TrialState(OPEN, tracked_status="KILLED"), strangers=["0002", "0009", "notes"])
    assert reconcile(facts) == [
        UnknownDirectory("0002", in_the_way=True),
        UnknownDirectory("0009", in_the_way=False),
        UnknownDirectory("notes", in_the_way=False),
    ]


def test_gaps_in_the_ledger_are_reported_first() -> None:
    third = TrialState(replace(OPEN, number=3))
    assert reconcile(_facts(TrialState(OPEN), third)) == [MissingTrials((1, 2))]


class Sweep:
    """A sweep's real files, and the steps by which a driver and its trials write them."""

    def __init__(self, paths: SweepPaths, spec: SweepSpec, ledger: Ledger) -> None:
        self.paths, self.spec, self.ledger = paths, spec, ledger
        self.recorder = MemoryRecorder(outbox=paths.outbox)
        self.warnings: list[str] = []

    def ask(self) -> int:
        space = {"train.optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True)}
        return ask(self.ledger, space, RandomSampler(seed=1)).number

    def ask_after_better_ones(self) -> int:
        for value in (0.1, 0.2):
            number = self.ask()
            for epoch in (1, 2, 3, 4):
                self.ledger.report(number, epoch=epoch, step=2 * epoch, value=value)
            self.ledger.finish(number, "complete")
        return self.ask()

    def train(self, number: int, values: list[float]) -> Path:
        """Append an epoch of two steps for each value, and commit the state of the last one."""
        for epoch, value in enumerate(values, 1):
            append_rows(
                self.paths.trial(number),
                [
                    Row(2 * epoch - 1, 0, {"train/loss": value}),
                    Row(2 * epoch, 0, {"train/loss": value, "val/loss": value, "epoch": epoch}),
                ],
            )
        return self.commit(number, len(values))

    def commit(self, number: int, epoch: int) -> Path:
        return commit(self.paths.trial(number), epoch, step=2 * epoch)

    def state(self, stop: str | None = None) -> SweepState:
        judge, trials = make_verdict_fn(self.spec), self.ledger.trials()
        return read_sweep_state(self.paths, self.spec, trials, live=False, judge=judge, stop=stop)

    def corrections(self, stop: str | None = None) -> list[Correction]:
        return reconcile(self.state(stop))

    def apply(self, stop: str | None = None) -> None:
        state = self.state(stop)
        apply(
            reconcile(state), self.paths, self.spec, self.ledger, self.recorder,
            warn=self.warnings.append,
        )  # fmt: skip
        follow_logs(state, self.spec, self.recorder)


def _delivered(paths: SweepPaths, number: int) -> list[tuple[str, int]]:
    """Deliver all that waits of a trial; returns the key and step of each point."""
    found = []
    outbox = Outbox(paths.outbox)
    while batch := outbox.next_batch(number):
        found += [(point.key, point.step) for point in batch.points]
        outbox.delivered(batch)
    outbox.close()
    return found


@pytest.fixture
def sweep(paths: SweepPaths, spec: SweepSpec, ledger: Ledger) -> Sweep:
    return Sweep(paths, spec, ledger)


def test_resent_run_has_the_times_of_its_trial(sweep: Sweep) -> None:
    """Another store is told of all trials, months later, too."""
    ended, going_on = sweep.ask(), sweep.ask()
    for number, value in ((ended, 0.5), (going_on, 0.4)):
        append_rows(
            sweep.paths.trial(number),
            [Row(1, 1000, {"train/loss": 0.5}), Row(2, 3000, {"val/loss": value, "epoch": 1})],
        )
        sweep.commit(number, 1)
        sweep.ledger.report(number, epoch=1, step=2, value=value)
    record = sweep.ledger.finish(ended, "failed", reason="oom")
    sweep.apply()
    runs = sweep.recorder.runs
    assert (runs[ended].began_ms, runs[ended].ended_ms) == (1000, record.ended_ms)
    assert (runs[going_on].began_ms, runs[going_on].ended_ms) == (1000, 3000)
    assert record.ended_ms is not None
    assert abs(record.ended_ms / 1000 - time.time()) < 600


def test_resent_run_omits_untrained_changes(
    sweep: Sweep,
) -> None:
    """A member was to go on from another one, and a stop ended the sweep."""
    number = sweep.ask()
    record, changed = sweep.ledger.trial(number), {"train.optimizer.lr": 0.09}
    record = replace(
        record, reports={1: 0.5}, epoch=1, step=2, suggested=record.params,
        params=changed, lineage=(PbtPerturbation(1, 3, changed),),
    )  # fmt: skip
    send_to_tracker(MissingRun(number), sweep.paths, sweep.spec, record, sweep.recorder)
    run = sweep.recorder.runs[number]
    assert "gradsweep.lineage" not in run.tags
    assert float(run.params["train.optimizer.lr"]) == record.suggested["train.optimizer.lr"]


def test_missing_run_gets_the_trained_parameters(sweep: Sweep) -> None:
    """Not what the spec has become since."""
    number = sweep.ask()
    sweep.train(number, [0.4, 0.3, 0.2, 0.1])
    config = sweep.spec.trial_config(number, sweep.ledger.trial(number).params)
    (sweep.paths.trial(number) / TRIAL_CONFIG).write_text(trial_yaml(config))
    trained = config.train.batch_size
    sweep.spec = with_overrides(sweep.spec, [f"train.batch_size={2 * trained}"])
    sweep.apply()
    run = sweep.recorder.runs[number]
    assert (run.status, run.params["train.batch_size"]) == ("FINISHED", str(trained))
    assert run.tags["gradsweep.attempts"] == "1"


@pytest.mark.parametrize("told", [True, False])
def test_fully_trained_trial_without_a_value_failed(sweep: Sweep, told: bool) -> None:
    sweep.spec = with_overrides(
        sweep.spec, ["budget.epochs=1", "early_stopping.scheduler=none"]
    )  # in the middle of a longer training this was allowed
    number = sweep.ask()
    sweep.train(number, [math.nan])
    if told:
        sweep.ledger.report(number, epoch=1, step=2, value=math.nan)
    sweep.apply()
    record, run = sweep.ledger.trial(number), sweep.recorder.runs[number]
    live = NonFiniteMetric("val/loss", 1, math.nan)
    assert (record.state, record.reason) == ("failed", f"non_finite: {live}")
    assert (run.status, run.tags["failure.kind"]) == ("FAILED", "non_finite")


PATIENT = ["early_stopping.patience=2", "early_stopping.scheduler=none"]


def test_trial_out_of_patience_is_complete(sweep: Sweep) -> None:
    sweep.spec = with_overrides(sweep.spec, PATIENT)
    number = sweep.ask()
    sweep.train(number, [0.3, 0.4, 0.5])
    sweep.apply()
    record, run = sweep.ledger.trial(number), sweep.recorder.runs[number]
    reason = "patience at epoch 3: val/loss not better than 0.3 of epoch 1 in 2 epochs"
    assert (record.state, record.value, record.reason) == ("complete", 0.3, reason)
    assert (run.status, run.tags["outcome"], run.tags["reason"]) == (
        "FINISHED",
        "complete",
        reason,
    )
    assert run.tags["stopped_by"] == "patience"


def test_last_epoch_without_sound_checkpoint_is_retrained(sweep: Sweep) -> None:
    number = sweep.ask()
    sweep.train(number, [0.4, 0.3, 0.2, 0.1])
    (sweep.paths.trial(number) / "checkpoints/step-00000008" / STATE).write_bytes(
        b"state of epoch 5"
    )
    sweep.commit(number, 3)
    sweep.apply()
    assert sweep.ledger.trial(number).state == "running"


def test_trial_the_scheduler_would_stop_is_not_resumed(
    sweep: Sweep,
) -> None:
    number = sweep.ask_after_better_ones()
    sweep.train(number, [0.9])
    sweep.apply()
    assert sweep.ledger.trial(number).state == "pruned"
    run = sweep.recorder.runs[number]
    assert (run.status, run.tags["outcome"], run.tags["stopped_by"]) == (
        "FINISHED", "pruned", "asha",
    )  # fmt: skip
    reason = "asha at epoch 1: val/loss 0.9, needed at most "
    assert run.tags["reason"] == sweep.ledger.trial(number).reason
    assert run.tags["reason"].startswith(reason)


@pytest.mark.parametrize("decided", ["", "in the ledger", "trained on"])
def test_recovered_report_shows_where_an_exempt_trial_would_stop(
    sweep: Sweep, decided: str
) -> None:
    """A report was decided on, when fewer trials had made one, if the ledger has it, or the trial
    trained on: the driver may have been killed before it wrote."""
    number = sweep.ask_after_better_ones()
    sweep.ledger.set_attr(number, EXEMPT, True)
    sweep.train(number, [0.9])
    if decided == "in the ledger":
        sweep.ledger.report(number, epoch=1, step=2, value=0.9)
    elif decided == "trained on":
        append_rows(sweep.paths.trial(number), [Row(3, 0, {"train/loss": 0.9})])
    sweep.apply()
    record = sweep.ledger.trial(number)
    assert (record.state, record.reports) == ("running", {1: 0.9})
    assert record.would_stop_at == (None if decided else 1)
    assert (record.would_stop_reason or "asha at epoch 1").startswith("asha at epoch 1")
    sweep.apply()
    assert sweep.ledger.trial(number) == record


def test_trial_ended_by_a_stop_has_its_whole_curve(sweep: Sweep) -> None:
    sweep.spec = with_overrides(sweep.spec, ["tracking.every=2"])
    number = sweep.ask()
    sweep.train(number, [0.4])
    later = [Row(step, 0, {"train/loss": 0.3}) for step in (3, 4, 5)]
    append_rows(sweep.paths.trial(number), later)
    sweep.apply()
    points = sweep.recorder.runs[number].points
    assert {step for _, step in points} == {1, 2}, "who goes on tells the rest"
    sweep.apply(stop="stopped by the sweep: 1 h are over")
    assert sweep.ledger.trial(number).state == "pruned"
    assert {step for _, step in points} == {1, 2, 4, 5}


def test_verdict_waits_for_the_checkpoint_of_its_report(sweep: Sweep) -> None:
    number = sweep.ask_after_better_ones()
    checkpoint = sweep.train(number, [0.9])
    shutil.rmtree(checkpoint)
    sweep.apply()
    record = sweep.ledger.trial(number)
    assert (record.state, record.reports) == ("running", {}), "untold, and not saved"
    sweep.ledger.report(number, epoch=1, step=2, value=0.9)
    sweep.apply()
    assert sweep.ledger.trial(number).state == "running", "told, and not saved"
    sweep.commit(number, 1)
    sweep.apply()
    assert sweep.ledger.trial(number).state == "pruned"


def test_finished_trials_are_resent_if_the_outbox_is_lost(sweep: Sweep) -> None:
    done, failed = sweep.ask(), sweep.ask()
    sweep.train(done, [0.4, 0.3, 0.2, 0.1])
    for epoch in (1, 2, 3, 4):
        sweep.ledger.report(done, epoch=epoch, step=2 * epoch, value=0.5 - epoch / 10)
    sweep.ledger.finish(done, "complete")
    sweep.ledger.finish(failed, "failed", reason="non_finite: the loss is nan")
    sweep.apply()
    runs = sweep.recorder.runs
    assert (runs[done].status, runs[failed].status) == ("FINISHED", "FAILED")
    assert runs[failed].tags["reason"] == "non_finite: the loss is nan"
    assert runs[done].params["train.optimizer.lr"]
    assert len(runs[done].points) == 8 + 4 + 4  # losses, validation losses, epochs


def test_trial_with_a_lost_run_is_resent_once(sweep: Sweep) -> None:
    number = sweep.ask()
    sweep.train(number, [0.4, 0.3, 0.2, 0.1])
    rows = read_rows(sweep.paths.trial(number))
    outbox = Outbox(sweep.paths.outbox)
    outbox.append(number, "start", {"params": {}, "tags": {}, "time": 0})
    outbox.append_rows(number, rows[:4])
    outbox.reset_run(number)
    outbox.append_rows(number, rows[4:])
    outbox.append(number, "finish", {"status": "FINISHED", "time": 0, "tags": {}})
    outbox.close()
    for epoch in (1, 2, 3, 4):
        sweep.ledger.report(number, epoch=epoch, step=2 * epoch, value=0.5 - epoch / 10)
    sweep.ledger.finish(number, "complete")
    assert sweep.corrections() == [
        MissingRun(number, 0),
        StaleRunStatus(number, "FINISHED", rows[-1].timestamp_ms),
    ]
    queue_interruptions(sweep.paths, sweep.spec)
    assert sweep.corrections() == []
    assert _delivered(sweep.paths, number) == [
        (key, row.step) for row in rows for key in row.metrics
    ]


def test_sync_repairs_tracking_only_and_once(sweep: Sweep) -> None:
    failed, trained, going_on = sweep.ask(), sweep.ask(), sweep.ask()
    outbox = Outbox(sweep.paths.outbox)
    for run in (SWEEP, failed, trained, going_on):
        outbox.append(run, "start", {"params": {}, "tags": {}, "time": 0})
    outbox.close()
    sweep.ledger.finish(failed, "failed", reason="oom: the memory does not suffice")
    sweep.train(trained, [0.4, 0.3, 0.2, 0.1])  # and its driver died before it noted the end
    queue_interruptions(sweep.paths, sweep.spec)
    known = read_outbox(sweep.paths.outbox)
    assert known.tracked_statuses == {
        failed: "FAILED",
        trained: "INTERRUPTED",
        going_on: "INTERRUPTED",
    }
    assert known.tracked_sweep_status == "INTERRUPTED"
    queue_interruptions(sweep.paths, sweep.spec)
    assert read_outbox(sweep.paths.outbox).pending == known.pending
    assert ("val/loss", 8) in _delivered(sweep.paths, trained)
    assert sweep.ledger.trial(trained).state == "running"
    sweep.apply()  # as a resume does, which finds the end
    assert sweep.ledger.trial(trained).state == "complete"


def test_writer_files_of_a_killed_worker_are_removed(
    sweep: Sweep,
) -> None:
    done, going_on = sweep.ask(), sweep.ask()
    sweep.train(done, [0.4, 0.3, 0.2, 0.1])
    sweep.train(going_on, [0.3])
    for number in (done, going_on):
        LocalFiles.of(sweep.paths.trial(number)).open()
    sweep.apply()
    assert not LocalFiles.of(sweep.paths.trial(done)).has_writer()
    assert LocalFiles.of(sweep.paths.trial(going_on)).has_writer()
    assert not [c for c in sweep.corrections() if isinstance(c, StaleWriter)]
    LocalFiles.of(sweep.paths.trial(done)).open()  # killed only after the driver noted its end
    assert [c for c in sweep.corrections() if isinstance(c, StaleWriter)] == [StaleWriter(done)]


def test_incomplete_parameters_are_completed(sweep: Sweep) -> None:
    import optuna

    optuna.load_study(storage=f"sqlite:///{sweep.paths.ledger}", study_name="sweep").ask()
    sweep.ledger = Ledger.open(sweep.paths.ledger)
    assert sweep.corrections() == [MissingParams(0)]
    sweep.apply()
    assert sweep.ledger.trial(0).params.keys() == PARAMS.keys()
    assert sweep.corrections() == []


def test_uncounted_attempt_keeps_its_parameters(
    sweep: Sweep,
) -> None:
    import optuna

    optuna.load_study(storage=f"sqlite:///{sweep.paths.ledger}", study_name="sweep").ask()
    sweep.ledger = Ledger.open(sweep.paths.ledger)
    sweep.paths.trial(0).mkdir(parents=True)
    (sweep.paths.trial(0) / TRIAL_CONFIG).touch()
    assert sweep.ledger.trial(0).attempts == 0
    corrections = sweep.corrections()
    assert corrections == [UncountedAttempt(0)]
    for _ in range(2):
        apply(corrections, sweep.paths, sweep.spec, sweep.ledger, sweep.recorder)
        assert sweep.ledger.trial(0).attempts == 1
    assert sweep.corrections() == []


def test_unknown_directory_is_kept_and_blocks_its_number(
    sweep: Sweep,
) -> None:
    sweep.ask()
    sweep.train(7, [0.1])
    sweep.apply()
    assert sweep.warnings == ["trials/0007 belongs to no trial of the ledger; it is left alone"]
    sweep.train(1, [0.1])
    with pytest.raises(
        UnknownDirectoryInTheWay, match=r"trials/0001 belongs to no trial .* move it away"
    ):
        sweep.apply()
    assert (sweep.paths.trial(1) / "metrics.jsonl").exists()


def test_gap_stops_everything_before_any_write(sweep: Sweep) -> None:
    facts = _facts(TrialState(replace(OPEN, number=1), tracked_status="RUNNING"))
    with pytest.raises(LedgerError, match=r"ledger\.db is not whole: the ledger has no trial 0"):
        apply(
            [*reconcile(facts), OrphanedRun(1)], sweep.paths, sweep.spec, sweep.ledger,
            sweep.recorder,
        )  # fmt: skip
    assert list(sweep.recorder.runs) == [None]
