"""What `--finish` refuses, and what it makes of a pruned trial's files, once and not twice."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import OriginChanged, UserError
from sweeps.paths import TRIAL_CONFIG
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.finishing import (
    FinishTrials,
    can_offer_finish,
    check_free,
    check_unfinished,
    finishing_trial,
    make_directories,
    trials_to_finish,
)
from sweeps.reconcile.reconcile import MissingReport, MissingRun, reconcile
from sweeps.reconcile.stop_criteria import active_stop_criterion
from sweeps.run.session import open_ledger
from sweeps.spec.revisions import read_spec
from sweeps.spec.spec import trial_yaml
from sweeps.stopping.rule import Standing
from tests.curves import append_rows
from tests.fake_checkpoints import commit
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep, prepared
from trainable.checkpoint import CheckpointStore
from trainable.errors import ForeignCheckpoint
from trainable.store.metrics_file import ARTIFACTS, LOGGED, Row, read_logged, read_rows

ASHA = "early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 3}"
POPULATION = "early_stopping: {scheduler: pbt, interval_epochs: 2}"


def _with_files(sweep: MadeSweep, number: int) -> Path:
    """Give a trial its configuration, a curve of two epochs, and a checkpoint of the first."""
    directory = sweep.paths.trial(number)
    append_rows(
        directory,
        [Row(10 * epoch, epoch, {"epoch": epoch, "val/loss": 1.0 / epoch}) for epoch in (1, 2)],
    )
    config = sweep.spec.trial_config(number, sweep.ledger.trial(number).params)
    (directory / TRIAL_CONFIG).write_text(trial_yaml(config))
    commit(directory, 1, step=10)
    return directory


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    """A sweep of a pruned, a complete and a failed trial, and one that waits."""
    made = MadeSweep(tmp_path, more=ASHA)
    made.add("pruned", 1.0, 0.5, reason="asha at epoch 2")
    made.add("complete", 1.0)
    made.add("failed", 1.0, reason="nan: loss")
    made.add(None, 1.0)
    _with_files(made, 0)
    return made


def _open(sweep: MadeSweep, *numbers: int) -> Any:
    ready = prepared(
        sweep.paths,
        read_spec(sweep.paths.spec).spec,
        accept_changes=True,
        extra=FinishTrials(numbers),
    )
    return open_ledger(ready, print)


def _refused(sweep: MadeSweep, number: int) -> str:
    with pytest.raises(UserError) as error:
        trials_to_finish(sweep.paths, sweep.spec, sweep.ledger.trials(), [number])
    return str(error.value)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (1, "cannot be read"),
        (2, "failed (nan: loss)"),
        (3, "has not ended"),
        (4, "has no trial 4"),
    ],
)
def test_only_a_pruned_trial_can_be_finished(sweep: MadeSweep, number: int, why: str) -> None:
    assert why in _refused(sweep, number)
    files = sorted(sweep.paths.directory.rglob("*"))
    with pytest.raises(UserError, match=re.escape(why)):
        _open(sweep, 0, number)
    assert len(sweep.ledger.trials()) == 4
    assert sorted(sweep.paths.directory.rglob("*")) == files
    assert read_spec(sweep.paths.spec).number == 1


WSD = "train: {batch_size: 128, schedule: {name: wsd, decay: 0.25}}\ncheckpoint: {every: 2 epochs}"


def _complete(root: Path, more: str = WSD) -> MadeSweep:
    """A sweep whose trial was trained for 4 epochs of 10 steps, with checkpoints of each."""
    made = MadeSweep(root, more=more)
    made.add("complete", 1.0, 0.5, 0.4, 0.3)
    directory = made.paths.trial(0)
    rows = [Row(10 * n, n, {"epoch": n, "val/loss": 1.0 / n}) for n in (1, 2, 3, 4)]
    append_rows(directory, rows)
    config = made.spec.trial_config(0, made.ledger.trial(0).params)
    (directory / TRIAL_CONFIG).write_text(trial_yaml(config))
    for epoch in (1, 2, 3, 4):
        commit(directory, epoch, step=10 * epoch)
    return made


def _longer(made: MadeSweep, epochs: int) -> None:
    made.spec = with_overrides(made.spec, [f"budget.epochs={epochs}"])


def test_complete_trial_is_trained_longer_from_where_the_rate_begins_to_fall(
    tmp_path: Path,
) -> None:
    made = _complete(tmp_path)
    assert "not longer than its 10 epochs" in _refused(made, 0)
    _longer(made, 5)
    assert _refused(made, 0).endswith("lengthen it with -s budget.epochs=20")
    _longer(made, 20)
    trials = made.ledger.trials()
    assert trials_to_finish(made.paths, made.spec, trials, [0]) == [0]
    make_directories(made.paths, made.spec, [*trials, made.ledger.add_extra("finish", 0)])
    target = made.paths.trial(1)
    assert [one.step for one in CheckpointStore(target).generations()] == [10, 20, 30]
    assert [row.step for row in read_rows(target)] == [10, 20, 30]
    assert [row.step for row in read_rows(made.paths.trial(0))] == [10, 20, 30, 40]

    # Once it is trained, only a still longer budget asks for another one.
    config = made.spec.trial_config(0, made.ledger.trial(0).params)
    (target / TRIAL_CONFIG).write_text(trial_yaml(config))
    made.ledger.report(1, epoch=1, step=10, value=0.5)
    made.ledger.finish(1, "complete")
    trials = made.ledger.trials()
    assert trials_to_finish(made.paths, made.spec, trials, [0]) == []
    _longer(made, 40)
    assert trials_to_finish(made.paths, made.spec, trials, [0]) == [0]


@pytest.mark.parametrize(
    "train",
    [
        "schedule: {name: cosine}",
        "schedule: {name: wsd, warmup: 0.1}",
        "schedule: {name: wsd}, ema: {decay: 0.9, start: 0.5}",
        "schedule: {name: constant}, swa: {start: 0.5}",
    ],
)
def test_trial_whose_first_steps_depend_on_its_length_is_not_trained_longer(
    tmp_path: Path, train: str
) -> None:
    made = _complete(tmp_path, f"train: {{{train}}}")
    _longer(made, 20)
    assert "depends on the length of the run" in _refused(made, 0)


def test_member_of_a_population_is_refused(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more=POPULATION)
    made.add("pruned", 1.0)
    _with_files(made, 0)
    assert "population" in _refused(made, 0)
    assert not can_offer_finish(made.spec, made.ledger.trial(0), made.ledger.trials())


def test_changed_configuration_is_refused(sweep: MadeSweep) -> None:
    sweep.spec = with_overrides(sweep.spec, ["train.batch_size=32", "checkpoint.keep=5"])
    assert "train.batch_size: 64 -> 32)" in _refused(sweep, 0)
    sweep.spec = with_overrides(sweep.spec, ["train.batch_size=64"])
    assert trials_to_finish(sweep.paths, sweep.spec, sweep.ledger.trials(), [0]) == [0]


def test_later_change_is_refused_until_it_has_ended(sweep: MadeSweep) -> None:
    ledger = _open(sweep, 0)
    changed = with_overrides(sweep.spec, ["train.batch_size=32"])
    with pytest.raises(OriginChanged, match=r"trial 4 finishes trial 0: .*batch_size: 64 -> 32"):
        check_unfinished(sweep.paths, changed, ledger.trials())
    ledger.finish(3, "failed")  # an ordinary unfinished trial has its own rule
    with pytest.raises(OriginChanged, match="trial 4 finishes trial 0"):
        open_ledger(prepared(sweep.paths, changed, new=False, accept_changes=False), print)
    assert read_spec(sweep.paths.spec).spec == sweep.spec
    ledger.finish(4, "pruned")
    check_unfinished(sweep.paths, changed, ledger.trials())


def test_lost_files_are_refused(sweep: MadeSweep) -> None:
    checkpoint = sweep.paths.trial(0) / "checkpoints/step-00000010"
    checkpoint.rename(checkpoint.with_name("moved"))
    assert "no valid checkpoint" in _refused(sweep, 0)
    checkpoint.with_name("moved").rename(checkpoint)
    (sweep.paths.trial(0) / TRIAL_CONFIG).unlink()
    assert "config.yaml cannot be read" in _refused(sweep, 0)


def test_unknown_directory_is_not_taken_over(sweep: MadeSweep) -> None:
    sweep.paths.trial(4).mkdir()
    with pytest.raises(UserError, match="belongs to no trial"):
        check_free(sweep.paths, 4)
    with pytest.raises(UserError, match="belongs to no trial"):
        _open(sweep, 0)
    assert len(sweep.ledger.trials()) == 4


def test_new_trial_has_parameters_and_seed(sweep: MadeSweep) -> None:
    ledger = _open(sweep, 0)
    pruned, new = ledger.trial(0), ledger.trial(4)
    assert (pruned.state, new.state, new.finishes) == ("pruned", "running", 0)
    assert new.params == pruned.params
    configs = [sweep.spec.trial_config(one.seed, one.params) for one in (pruned, new)]
    assert configs[0] == configs[1]
    assert read_spec(sweep.paths.spec).number == 2  # earlier releases refuse this revision
    assert sweep.paths.spec.read_text().count(": finish trial 0\n") == 1


def test_asking_again_adds_no_trial(sweep: MadeSweep) -> None:
    for _ in range(2):
        ledger = _open(sweep, 0)
        assert len(ledger.trials()) == 5
    ledger.report(4, epoch=1, step=10, value=0.4)
    ledger.finish(4, "complete")
    assert len(_open(sweep, 0).trials()) == 5
    assert not can_offer_finish(sweep.spec, ledger.trial(0), ledger.trials())


@pytest.mark.parametrize("ending", ["pruned", "failed"])
def test_trial_that_came_to_no_end_is_added_again(sweep: MadeSweep, ending: Any) -> None:
    _open(sweep, 0).finish(4, ending, reason="stopped by the user")
    trials = _open(sweep, 0).trials()
    assert [trial.finishes for trial in trials[4:]] == [0, 0]
    assert finishing_trial(0, trials) is trials[5]
    if ending == "pruned":
        sweep.ledger = _open(sweep)
        assert "write 0" in _refused(sweep, 4)


def test_directory_continues_that_of_the_pruned_trial(sweep: MadeSweep, tmp_path: Path) -> None:
    source, target = sweep.paths.trial(0), sweep.paths.trial(4)
    (source / LOGGED).write_text('{"step": 3, "own_step": 1, "time": 1, "metrics": {"a": 1.0}}\n')
    (source / ARTIFACTS).mkdir()
    (source / ARTIFACTS / "notes.txt").write_text("text")
    (source / "trial.log").write_text("printed")
    (source / "test.jsonl").write_text("{}")
    (source / "figures").mkdir()
    (source / "buffer.bin").write_bytes(b"of a custom loop")
    (source / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(source / "pipe")
    ledger = _open(sweep, 0)
    make_directories(sweep.paths, sweep.spec, ledger.trials())
    assert read_rows(target) == read_rows(source)
    assert read_logged(target) == read_logged(source)
    assert (target / ARTIFACTS / "notes.txt").read_text() == "text"
    names = ["artifacts", "buffer.bin", "checkpoints", "link", "logged.jsonl", "metrics.jsonl"]
    assert sorted(os.listdir(target)) == names
    assert (target / "link").is_symlink()
    there, copied = (CheckpointStore(one).generations() for one in (source, target))
    assert [replace(one, address="") for one in copied] == [
        replace(one, address="") for one in there
    ]
    assert not list(sweep.paths.directory.glob(".export-*"))
    before = {path: path.lstat().st_ino for path in target.rglob("*")}
    make_directories(sweep.paths, sweep.spec, ledger.trials())
    assert {path: path.lstat().st_ino for path in target.rglob("*")} == before


def test_killed_driver_leaves_no_partial_directory(
    sweep: MadeSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = _open(sweep, 0)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            make_directories(sweep.paths, sweep.spec, ledger.trials())
    assert not sweep.paths.trial(4).exists()
    make_directories(sweep.paths, sweep.spec, _open(sweep).trials())
    assert [row.step for row in read_rows(sweep.paths.trial(4))] == [10, 20]


def test_saved_epochs_are_reported_and_no_attempt_counted(sweep: MadeSweep) -> None:
    ledger = _open(sweep, 0)
    make_directories(sweep.paths, sweep.spec, ledger.trials())
    stop = "stopped with the sweep: reached"
    state = read_sweep_state(
        sweep.paths, sweep.spec, ledger.trials(), live=False, judge=lambda *_: {}, stop=stop
    )
    found = [one for one in reconcile(state) if getattr(one, "number", None) == 4]
    assert {type(one) for one in found} >= {MissingReport, MissingRun}
    reports = [one.report.epoch for one in found if isinstance(one, MissingReport)]
    assert reports == [1]  # epoch 2 has no checkpoint: it is trained and reported again
    assert not any("ended" in str(one) or "attempt" in str(one) for one in found)


def test_stopping_rule_never_judges_it(sweep: MadeSweep) -> None:
    ledger = _open(sweep, 0)
    seen: list[Standing] = []

    def judge(standing: Standing) -> dict[int, str]:
        seen.append(standing)
        return {}

    read_sweep_state(sweep.paths, sweep.spec, ledger.trials(), live=False, judge=judge)
    assert [set(standing.reports) for standing in seen] == [{0, 1, 2, 3}]
    assert [standing.unfinished for standing in seen] == [{3}]


def test_stop_criteria_do_not_see_it(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more=f"{ASHA}\nstop: {{value: 0.3}}")
    made.add("pruned", 1.0, 0.5)
    _with_files(made, 0)
    ledger = made.ledger = _open(made, 0)
    assert active_stop_criterion(made.spec, ledger.trials(), 0.0) is None
    ledger.report(1, epoch=1, step=10, value=0.1)
    ledger.finish(1, "complete")
    assert active_stop_criterion(made.spec, ledger.trials(), 0.0) is None
    made.add("complete", 0.2)
    trials = _open(made).trials()
    assert active_stop_criterion(made.spec, trials, 0.0) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
def test_checkpoint_of_another_user_is_refused_before_a_trial_is_added(sweep: MadeSweep) -> None:
    os.chown(sweep.paths.trial(0) / "checkpoints/step-00000010/state.pt", 12345, 12345)
    before = sorted(sweep.paths.directory.rglob("*"))
    with pytest.raises(ForeignCheckpoint, match="belongs to user 12345"):
        trials_to_finish(sweep.paths, sweep.spec, sweep.ledger.trials(), [0])
    assert sorted(sweep.paths.directory.rglob("*")) == before
