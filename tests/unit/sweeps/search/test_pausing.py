"""Records of pausing trials: one attempt, one run, one end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.tune.search import Searcher

from sweeps.ledger.failed_attempts import FailedAttempt, Reopened
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.reasons import BY_THE_SWEEP, BY_THE_USER
from sweeps.paths import SweepPaths
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.reconcile import UnrecordedEnd, reconcile
from sweeps.reconcile.repairs import apply
from sweeps.recording.tags import lineage_tags
from sweeps.run.session import SweepSession
from sweeps.run.tune_callbacks import TuneEventHandler
from sweeps.run.worker_watch import WorkerRules
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.stopping.schedulers import make_scheduler, make_verdict_fn
from tests.curves import append_rows
from tests.fake_checkpoints import commit
from tests.memory_recorder import MemoryRecorder
from trainable.config import BudgetConfig
from trainable.store.metrics_file import Row

SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 4
budget: {epochs: 4}
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
early_stopping: {scheduler: asha_promote, grace_epochs: 1, reduction: 2}
"""
LOSSES = [0.4, 0.3, 0.2, 0.1]


class Driver:
    """What Tune does with one worker, whose trials all learn alike."""

    def __init__(self, paths: SweepPaths, spec: SweepSpec, recorder: MemoryRecorder) -> None:
        self.paths, self.recorder = paths, recorder
        self.ledger = Ledger.open(paths.ledger)
        self.searcher = LedgerSearcher(
            self.ledger,
            spec,
            paths,
            DriverCallbacks(
                fence=lambda: None,
                refuse=lambda *told: self.book.refuse(*told),
                flush=lambda: self.book.flush(),
            ),
            Capacity(1, 1),
        )
        self.seen: list[tuple[str, int]] = []
        view: Any = SimpleNamespace(
            started=lambda start, *_: self.seen.append(("started", start.number)),
            promoted=lambda number: self.seen.append(("promoted", number)),
            paused=lambda number, _: self.seen.append(("paused", number)),
            ended=lambda number, state, *_: self.seen.append((state, number)),
            reported=lambda _: None,
        )
        self.book = TuneEventHandler(
            SweepSession(paths, spec, self.ledger, recorder, lambda: None),
            view,
            make_scheduler(spec),
            WorkerRules(),
            on_step=lambda: None,
        )
        self.turn = 0
        self.end = 4  # after so many epochs a training ends

    def run_one(self) -> bool:
        """Run the next stretch of a trial; False when there is none."""
        self.turn += 1
        config: Any = self.searcher.suggest(f"t{self.turn}")
        if config == Searcher.FINISHED:
            return False
        number = config["number"]
        trial: Any = SimpleNamespace(config=config, last_result={})
        self.book.on_trial_start(0, [], trial)
        last = min(config["pause_at_epoch"] or 4, self.end)
        for epoch in range(len(self.ledger.trial(number).reports) + 1, last + 1):
            value = LOSSES[number] / epoch
            trial.last_result = {
                "objective": value, "epoch": epoch, "step": epoch, "metrics": {},
            }  # fmt: skip
            self.book.on_trial_result(0, [], trial, trial.last_result)
        commit(self.paths.trial(number), last, step=last)
        trial.last_result["ending"] = "finished" if last == self.end else "paused"
        self.searcher.on_trial_complete(f"t{self.turn}")
        self.book.on_trial_complete(0, [], trial)
        self.book.flush()
        return True

    def states(self) -> list[str]:
        return [trial.state for trial in self.ledger.trials()]

    def statuses(self) -> list[tuple[str, str]]:
        runs = [self.recorder.runs[number] for number in range(len(self.ledger.trials()))]
        return [(str(run.status), run.tags.get("stopped_by", "")) for run in runs]


@pytest.fixture
def spec() -> SweepSpec:
    return parse_spec(SPEC, "s.yaml")


@pytest.fixture
def driver(tmp_path: Path, spec: SweepSpec) -> Driver:
    paths = SweepPaths(tmp_path, "s")
    paths.directory.mkdir()
    Ledger.create(paths.ledger, mode="min", sweep_id="s")
    return Driver(paths, spec, MemoryRecorder())


def test_paused_trial_stays_running_in_tracking(driver: Driver) -> None:
    for _ in range(2):
        assert driver.run_one()
    assert driver.states() == ["running", "running"]
    assert driver.statuses() == [("RUNNING", ""), ("RUNNING", "")]
    while driver.run_one():
        pass
    for number, reason in driver.searcher.never_promoted().items():
        driver.book.stop(number, reason, live=False)
    assert driver.states() == ["pruned", "pruned", "pruned", "complete"]
    assert driver.statuses() == [("FINISHED", "asha_promote")] * 3 + [("FINISHED", "")]
    assert [trial.attempts for trial in driver.ledger.trials()] == [1] * 4
    assert [bool(trial.reason) for trial in driver.ledger.trials()] == [True] * 3 + [False]
    assert driver.seen.count(("promoted", 1)) == 1
    assert driver.seen.count(("started", 1)) == 1


def test_paused_trial_is_interrupted_and_then_promoted(driver: Driver, spec: SweepSpec) -> None:
    for _ in range(2):
        driver.run_one()
    driver.searcher.stopping = True
    assert not driver.run_one()
    assert driver.searcher.never_promoted() == {}, "they wait for the next driver"
    driver.book.interrupt_live()
    assert driver.statuses() == [("KILLED", "interrupt")] * 2
    again = Driver(driver.paths, spec, driver.recorder)
    assert again.run_one()
    assert again.seen == [("started", 1), ("paused", 1)]
    assert again.statuses() == [("KILLED", "interrupt"), ("RUNNING", "")]
    assert again.ledger.trial(1).attempts == 2


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("patience", ["", ", patience: 1"])
def test_loop_that_ends_by_itself_has_trained_to_its_end(
    driver: Driver, resumed: bool, patience: str
) -> None:
    """So the others, which wait, are not needed for a result."""
    spec = parse_spec(SPEC.replace("reduction: 2", "reduction: 2" + patience), "s.yaml")
    driver = Driver(driver.paths, spec, driver.recorder)
    driver.end = 3
    while driver.run_one():
        if resumed:
            driver = Driver(driver.paths, spec, driver.recorder)
            driver.end = 3
    trials = driver.ledger.trials()
    assert sorted(trial.epoch for trial in trials) == [1, 1, 2, 3]
    state = read_sweep_state(driver.paths, spec, trials, live=False, judge=make_verdict_fn(spec))
    apply(reconcile(state), driver.paths, spec, driver.ledger, driver.recorder)
    assert sorted(driver.states()) == ["complete", "pruned", "pruned", "pruned"]


def _promoted_beside_a_better_one(driver: Driver, *, started: bool) -> None:
    """Promote trial 1 of 0 and 1, and let the better trial 2 come to its rung meanwhile."""
    for _ in range(2):
        driver.run_one()
    driver.searcher._capacity = Capacity(2, 1)
    config: Any = driver.searcher.suggest("promoted")
    assert (config["number"], config["pause_at_epoch"]) == (1, 2)
    if started:
        driver.book.on_trial_start(0, [], SimpleNamespace(config=config, last_result={}))
    driver.run_one()
    assert driver.ledger.trial(2).reports.keys() == {1}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("interrupted", [False, True])
def test_promoted_trial_goes_on_after_a_stop_before_its_next_report(
    driver: Driver, spec: SweepSpec, started: bool, interrupted: bool
) -> None:
    _promoted_beside_a_better_one(driver, started=started)
    if interrupted:
        driver.book.interrupt_live()
    for _ in range(2):  # and again
        driver = Driver(driver.paths, spec, driver.recorder)
        trials = driver.ledger.trials()
        state = read_sweep_state(
            driver.paths, spec, trials, live=False, judge=make_verdict_fn(spec)
        )
        apply(reconcile(state), driver.paths, spec, driver.ledger, driver.recorder)
        config: Any = driver.searcher.suggest("again")
        assert (config["number"], config["pause_at_epoch"]) == (1, 2)
    driver = Driver(driver.paths, spec, driver.recorder)
    while driver.run_one():
        pass
    epochs = [trial.epoch for trial in driver.ledger.trials()]
    assert epochs == [1, 2, 1, 4], "of four, two are promoted: 1 was, and 3 is the best then"


def test_retried_trial_waits_for_another_promotion(driver: Driver, spec: SweepSpec) -> None:
    """When it failed, its promotion was another trial's."""
    _promoted_beside_a_better_one(driver, started=True)
    driver.ledger.finish(1, "failed", reason="error: x")
    attempt = FailedAttempt(1, "error: x", 1, None, 1, "")
    driver.ledger.reopen(1, attempt, Reopened(False, False), steps={1: 1})
    driver = Driver(driver.paths, spec, driver.recorder)
    config: Any = driver.searcher.suggest("again")
    assert config["number"] == 2


def test_exploiting_member_is_one_run_with_changed_parameters(
    tmp_path: Path,
) -> None:
    spec = parse_spec(SPEC.replace("asha_promote, grace_epochs: 1, reduction: 2", "pbt"), "s.yaml")
    paths = SweepPaths(tmp_path, "s")
    paths.directory.mkdir()
    Ledger.create(paths.ledger, mode="min", sweep_id="s")
    driver = Driver(paths, spec, MemoryRecorder())
    while driver.run_one():
        pass
    heir, run = driver.ledger.trial(0), driver.recorder.runs[0]
    assert [(one.epoch, one.donor) for one in heir.lineage] == [(1, 3), (2, 3), (3, 3)]
    assert driver.states() == ["complete"] * 4
    rate = "train.optimizer.lr"
    assert run.params[rate] == str(heir.suggested["train.optimizer.lr"])
    assert run.tags[f"param_changed.{rate}"] == str(heir.params["train.optimizer.lr"])
    assert run.tags["gradsweep.lineage"] == (
        "epoch 1 from trial 3; epoch 2 from trial 3; epoch 3 from trial 3"
    )
    in_steps = spec.model_copy(update={"budget": BudgetConfig(steps=8, report_every=2)})
    assert lineage_tags(heir, in_steps)["gradsweep.lineage"].startswith("report 1 from trial 3;")
    rates = {mutation.params["train.optimizer.lr"] for mutation in heir.lineage}
    assert {value for (key, _), value in run.points.items() if key == f"param/{rate}"} == rates
    assert [trial.attempts for trial in driver.ledger.trials()] == [1] * 4
    assert driver.statuses() == [("FINISHED", "")] * 4
    assert "gradsweep.lineage" not in driver.recorder.runs[3].tags
    assert driver.seen.count(("started", 0)) == 1
    assert driver.seen.count(("promoted", 0)) == 3


UNFIT = """
  train.optimizer.nesterov: {choice: [false, true]}
  train.optimizer.momentum: {quniform: [0.0, 0.9, 0.9]}
search:
  try_first:
    - {train.optimizer.nesterov: false, train.optimizer.momentum: 0.0}
    - {train.optimizer.nesterov: true, train.optimizer.momentum: 0.9}
    - {train.optimizer.nesterov: false, train.optimizer.momentum: 0.9}
    - {train.optimizer.nesterov: true, train.optimizer.momentum: 0.0}
train: {optimizer: {name: sgd}}
"""


@pytest.fixture
def unfit(tmp_path: Path, request: pytest.FixtureRequest) -> Driver:
    """A population in whose space some points are no configuration: nesterov needs momentum."""
    text = SPEC.replace("asha_promote, grace_epochs: 1, reduction: 2", request.param)
    text = text.replace("\n  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}\n", UNFIT)
    paths = SweepPaths(tmp_path, "s")
    paths.directory.mkdir()
    Ledger.create(paths.ledger, mode="min", sweep_id="s")
    return Driver(paths, parse_spec(text, "s.yaml"), MemoryRecorder())


@pytest.mark.parametrize("unfit", ["pbt"], indirect=True)
def test_population_continues_without_an_invalid_member(unfit: Driver) -> None:
    while unfit.run_one():
        pass
    assert unfit.states()[3] == "failed"
    assert "running" not in unfit.states(), "those that came to the first rung before"


@pytest.mark.parametrize("unfit", ["pbt, resample: 1", "pb2"], indirect=True)
def test_no_member_gets_an_invalid_configuration(unfit: Driver) -> None:
    while unfit.run_one():
        pass
    trials = unfit.ledger.trials()
    assert any(trial.lineage for trial in trials)
    assert [trial.state for trial in trials if trial.attempts] == ["complete"] * 3


@pytest.mark.parametrize("at_a_resume", [False, True])
@pytest.mark.parametrize("began", [False, True])
def test_change_counts_only_if_the_member_restarted(
    tmp_path: Path, at_a_resume: bool, began: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SPEC.replace("asha_promote, grace_epochs: 1, reduction: 2", "pbt, quantile: 0.5")
    spec, paths = parse_spec(text, "s.yaml"), SweepPaths(tmp_path, "s")
    paths.directory.mkdir()
    Ledger.create(paths.ledger, mode="min", sweep_id="s")
    driver = Driver(paths, spec, MemoryRecorder())
    for _ in range(5):  # all four to the first rung, and trial 0 beyond it
        driver.run_one()
    assert [len(trial.lineage) for trial in driver.ledger.trials()] == [1, 1, 0, 0]
    append_rows(
        paths.trial(1), [Row(step, 0, {"train/loss": 0.5}) for step in range(1, 2 + began)]
    )

    def end() -> None:
        if at_a_resume:
            ended = [UnrecordedEnd(1, "pruned", BY_THE_SWEEP + "why")]
            apply(ended, paths, spec, driver.ledger, driver.recorder)
        else:
            driver.book.stop(1, BY_THE_USER, live=False)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "finish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            end()
    assert len(driver.ledger.trial(1).lineage) == 1, "it may go on, from whom it was to"
    driver = Driver(paths, spec, driver.recorder)
    end()
    record, run = driver.ledger.trial(1), driver.recorder.runs[1]
    assert len(record.lineage) == began
    assert (record.params == record.suggested) != began
    if not began:
        assert not any(key.startswith("param_changed.") for key in run.tags)


def test_a_paused_trial_can_be_stopped_by_the_user(driver: Driver) -> None:
    driver.run_one()
    driver.book.stop(0, BY_THE_USER, live=driver.searcher.is_live(0))
    assert driver.states() == ["pruned"]
    assert driver.statuses() == [("KILLED", "user")]
    driver.run_one()
    driver.run_one()
    assert driver.states() == ["pruned", "running"]
    assert len(driver.ledger.trial(1).reports) == 2, "its place is the next one's"


def test_trial_stopped_while_pausing_ends(driver: Driver) -> None:
    real = driver.book.on_trial_result

    def asked_meanwhile(*told: Any) -> None:
        real(*told)
        driver.book.stop(0, BY_THE_USER, live=driver.searcher.is_live(0))

    driver.book.on_trial_result = asked_meanwhile  # type: ignore[method-assign]
    driver.run_one()
    assert driver.states() == ["pruned"]
    assert driver.ledger.trial(0).reason == BY_THE_USER
