"""What `sweep resume --retry` takes, from where a trial runs again, and what a kill leaves."""

from __future__ import annotations

import copy
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import OriginChanged, UserError
from sweeps.ledger.ledger import Ledger
from sweeps.paths import TRIAL_CONFIG
from sweeps.reconcile import retrying
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.extra_training import NO_EXTRA, ExtraTraining
from sweeps.reconcile.reconcile import MissingReport, OrphanedRun, reconcile
from sweeps.reconcile.repairs import apply, follow_logs
from sweeps.reconcile.retrying import RetryRequest, complete_retries
from sweeps.recording.tags import end_tags
from sweeps.run import session
from sweeps.run.session import open_ledger
from sweeps.spec.resume_checks import Origin
from sweeps.spec.revisions import read_spec
from sweeps.spec.spec import trial_yaml
from sweeps.view.outcome import num_retryable
from tests.curves import append_rows
from tests.fake_checkpoints import commit
from tests.memory_recorder import MemoryRecorder
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep, prepared
from tracking.outbox import Outbox
from tracking.outbox_status import read_outbox
from tracking.unsent_rows import Target
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import LOGGED, Row

FAILED, COMPLETE, PRUNED, WAITING, DIVERGED = range(5)
ALL = RetryRequest()


def _row(epoch: int) -> Row:
    return Row(10 * epoch, epoch, {"epoch": epoch, "val/loss": 1.0 / epoch})


def _with_files(sweep: MadeSweep, number: int, *, saved: int = 1) -> Path:
    """Give a trial its configuration, a curve of two epochs, a checkpoint, figures and a run."""
    directory = sweep.paths.trial(number)
    append_rows(directory, [_row(1), _row(2)])
    config = sweep.spec.trial_config(number, sweep.ledger.trial(number).params)
    (directory / TRIAL_CONFIG).write_text(trial_yaml(config))
    (directory / "figures").mkdir()
    if saved:
        commit(directory, saved, step=10 * saved)
    outbox = Outbox(sweep.paths.outbox)
    outbox.append(number, "start", {"params": {}, "tags": {}, "time": 1, "step": 0})
    outbox.append_rows(number, [_row(1), _row(2)])
    outbox.append(number, "finish", {"status": "FAILED", "time": 9, "tags": {}})
    outbox.close()
    return directory


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> MadeSweep:
    made = MadeSweep(tmp_path_factory.mktemp("template"))
    made.add("failed", 1.0, 0.5, reason="ValueError: the bug")
    made.add("complete", 1.0)
    made.add("pruned", 1.0, reason="asha at epoch 1")
    made.add(None, 1.0)
    made.add("failed", 1.0, 0.5, reason="non_finite: the loss is nan")
    for number in (FAILED, DIVERGED):
        _with_files(made, number)
    return made


@pytest.fixture
def sweep(template: MadeSweep, tmp_path: Path) -> MadeSweep:
    """A copy of a sweep of a failed, a complete, a pruned, a waiting and a diverged trial."""
    made = copy.copy(template)
    made.paths = replace(template.paths, root=tmp_path)
    shutil.copytree(template.paths.directory, made.paths.directory)
    made.ledger = Ledger.open(made.paths.ledger)
    return made


def _open(
    sweep: MadeSweep, extra: ExtraTraining, said: list[str] | None = None, **more: Any
) -> Ledger:
    warn: Callable[[str], None] = (said if said is not None else []).append
    ready = prepared(
        sweep.paths,
        more.pop("spec", sweep.spec),
        origin=more.pop("origin", Origin()),
        accept_changes=more.pop("accepted", True),
        extra=extra,
    )
    return open_ledger(ready, warn)


def _reopen(sweep: MadeSweep, extra: ExtraTraining) -> Ledger:
    """Do what a driver does before it reconciles."""
    ledger = _open(sweep, extra)
    complete_retries(sweep.paths, sweep.spec, ledger)
    return ledger


def _refused(sweep: MadeSweep, *numbers: int, fresh: bool = False) -> str:
    with pytest.raises(UserError) as error:
        _open(sweep, RetryRequest(numbers, fresh))
    return str(error.value)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (COMPLETE, "train small 1"),
        (PRUNED, "resume small 2 --finish"),
        (WAITING, "it continues with"),
        (7, "no such trial"),
    ],
)
def test_only_failed_trials_run_again(sweep: MadeSweep, number: int, why: str) -> None:
    before = sweep.ledger.trials()
    files = sorted(sweep.paths.directory.rglob("*"))
    assert why in _refused(sweep, FAILED, number)
    assert Ledger.open(sweep.paths.ledger).trials() == before
    assert sorted(sweep.paths.directory.rglob("*")) == files
    assert read_spec(sweep.paths.spec).number == 1


def test_member_of_a_population_is_refused(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more="early_stopping: {scheduler: pbt, interval_epochs: 2}")
    made.add("failed", 1.0, reason="ValueError: no")
    assert "population" in _refused(made)
    assert num_retryable(made.spec, made.ledger.trials()) == 0


def test_ended_by_a_criterion_is_refused(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more="stop: {value: 0.5}")
    made.add("complete", 0.4)
    made.add("failed", 1.0, reason="ValueError: no")
    assert re.search(
        r"stop.value ended the sweep .* resume small --retry -s stop.value=", _refused(made)
    )


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [(ALL, [FAILED, DIVERGED]), (RetryRequest((DIVERGED, DIVERGED)), [DIVERGED])],
)
def test_chosen_trials_are_reopened(
    sweep: MadeSweep, request_: RetryRequest, numbers: list[int]
) -> None:
    before = sweep.ledger.trials()
    said: list[str] = []
    after = _open(sweep, request_, said).trials()
    assert [t.number for t in after if t.failed_attempts] == numbers
    for was, now in zip(before, after, strict=True):
        assert (now.params, now.number) == (was.params, was.number)
        if now.number in numbers:
            assert (now.state, now.reports, now.step) == ("running", {1: 1.0}, 10)
        else:
            assert now == was
    each = ", ".join(f"trial {number} from epoch 1" for number in numbers)
    assert said[0] == f"retry {each}"
    assert read_spec(sweep.paths.spec).number == 2
    assert f": retry {each}\n" in sweep.paths.spec.read_text()


def test_damaged_checkpoints_are_refused(sweep: MadeSweep) -> None:
    (sweep.paths.trial(FAILED) / "checkpoints/step-00000010/state.pt").write_bytes(b"x" * 16)
    assert "--fresh" in _refused(sweep, FAILED)
    assert _open(sweep, RetryRequest((FAILED,), fresh=True)).trial(FAILED).state == "running"


def test_trial_with_nothing_left_to_train_is_refused(sweep: MadeSweep) -> None:
    commit(sweep.paths.trial(FAILED), 10, step=100)
    assert "resume small 0 --retry --fresh" in _refused(sweep, FAILED)


def test_earlier_attempt_leaves_no_report(sweep: MadeSweep) -> None:
    """What the failed attempt reported after its checkpoint is not found again in its files."""
    ledger = _reopen(sweep, ALL)
    state = read_sweep_state(sweep.paths, sweep.spec, ledger.trials(), live=False)
    assert not [wrong for wrong in reconcile(state) if isinstance(wrong, MissingReport)]
    recorder = MemoryRecorder(outbox=sweep.paths.outbox)
    apply(reconcile(state), sweep.paths, sweep.spec, ledger, recorder)
    follow_logs(state, sweep.spec, recorder)
    run = recorder.runs[FAILED]
    assert {step for _, step in run.points} == {10}
    assert run.status == "KILLED"
    assert "ValueError: the bug" in run.tags["gradsweep.failed_attempts"]
    assert not (sweep.paths.trial(FAILED) / "figures").exists()


def test_rows_of_an_earlier_attempt_are_not_sent_any_more(sweep: MadeSweep) -> None:
    """The server was away when the trial failed; its new attempt may log other values."""
    commit(sweep.paths.trial(FAILED), 2, step=20)
    with (sweep.paths.trial(FAILED) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "time": 1, "metrics": {"train/loss": 1.0}}\n')
    outbox = Outbox(sweep.paths.outbox)
    outbox.follow(FAILED, Target(20, every=1, ended=True))
    _reopen(sweep, RetryRequest((FAILED,)))
    batch = outbox.next_batch(FAILED)
    assert batch is not None
    assert batch.part is not None
    assert batch.part.step == 20
    outbox.close()


def test_run_without_later_points_is_kept(sweep: MadeSweep) -> None:
    commit(sweep.paths.trial(FAILED), 2, step=20)
    ledger = _reopen(sweep, RetryRequest((FAILED,)))
    delivered = read_outbox(sweep.paths.outbox)
    assert delivered.tracked_statuses[FAILED] == "FAILED"
    state = read_sweep_state(sweep.paths, sweep.spec, ledger.trials(), live=False)
    assert OrphanedRun(FAILED, 2) in reconcile(state)
    # The tags of its end are cleared, and written anew.
    ledger.finish(FAILED, "complete")
    tags = end_tags(ledger.trial(FAILED), sweep.spec, sweep.paths)
    assert (tags["outcome"], tags["failure.kind"], tags["reason"]) == ("complete", "", "")


def test_own_steps_are_compared_with_own_steps(sweep: MadeSweep) -> None:
    """What a task logs under its own steps may be far above the steps of training."""
    directory = sweep.paths.trial(FAILED)
    commit(directory, 2, step=20)
    lines = '{{"step": {}, "own_step": {}, "time": 1, "metrics": {{"seen": 1.0}}}}\n'
    (directory / LOGGED).write_text(lines.format(20, 5000))
    outbox = Outbox(sweep.paths.outbox)
    outbox.append_rows(FAILED, [Row(5000, 1, {"seen": 1.0})])
    outbox.close()
    plan = retrying.plan_retry(sweep.paths, sweep.spec, sweep.ledger.trial(FAILED), fresh=False)
    assert not plan.reopened.replaces_run
    (directory / LOGGED).write_text(lines.format(20, 10) + lines.format(21, 5000))
    plan = retrying.plan_retry(sweep.paths, sweep.spec, sweep.ledger.trial(FAILED), fresh=False)
    assert plan.reopened.replaces_run


def test_change_of_code_is_recorded(sweep: MadeSweep) -> None:
    sweep.ledger.store_origin(Origin({"task.py": "a" * 64}))
    changed = Origin({"task.py": "b" * 64})
    with pytest.raises(OriginChanged, match=r"task.py aaaaaaaaaaaa -> bbbbbbbbbbbb"):
        _open(sweep, ALL, origin=changed, accepted=False)
    spec = with_overrides(sweep.spec, ["train.batch_size=32"])
    one = _open(sweep, ALL, origin=changed, spec=spec).trial(FAILED)
    assert one.failed_attempts[0].changes == (
        "task.py aaaaaaaaaaaa -> bbbbbbbbbbbb; train.batch_size: 64 -> 32"
    )


def test_killed_retry_still_knows_the_change(
    sweep: MadeSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep.ledger.store_origin(Origin({"task.py": "a" * 64}))
    changed = Origin({"task.py": "b" * 64})
    with monkeypatch.context() as patched:
        _kill(patched, session, "write_spec", after=True)
        with pytest.raises(_Killed):
            _open(sweep, ALL, origin=changed)
    ledger = _open(sweep, ALL, origin=changed)
    assert "task.py" in ledger.trial(FAILED).failed_attempts[0].changes
    assert ledger.origin == changed


def test_fresh_retry_of_all_needs_no_acceptance(tmp_path: Path) -> None:
    """No other trial was trained with the code that has changed."""
    made = MadeSweep(tmp_path)
    made.add("failed", 1.0, reason="ValueError: no")
    made.ledger.store_origin(Origin({"task.py": "a"}))
    changed = Origin({"task.py": "b"})
    with pytest.raises(OriginChanged):
        _open(made, ALL, origin=changed, accepted=False)
    _open(made, RetryRequest(fresh=True), origin=changed, accepted=False)


def test_diverged_trial_is_warned_of(sweep: MadeSweep) -> None:
    said: list[str] = []
    _open(sweep, RetryRequest((DIVERGED,)), said)
    assert "neither its code nor its configuration has changed" in said[1]


@pytest.mark.parametrize(("fresh", "num_said"), [(False, 2), (True, 1)])
def test_changed_diverged_trial_is_offered_a_new_start(
    sweep: MadeSweep, fresh: bool, num_said: int
) -> None:
    said: list[str] = []
    spec = with_overrides(sweep.spec, ["train.clip.max_norm=0.5"])
    _open(sweep, RetryRequest((DIVERGED,), fresh), said, spec=spec)
    assert len(said) == num_said
    assert fresh or "resume small 4 --retry --fresh" in said[1]


def test_asking_twice_runs_it_again_once(sweep: MadeSweep) -> None:
    _open(sweep, ALL)
    ledger = _open(sweep, ALL)
    assert len(ledger.trial(FAILED).failed_attempts) == 1
    assert "has not ended" in _refused(sweep, FAILED, fresh=True)
    assert ALL.choose(sweep.view.with_spec(sweep.spec)) == []


def test_fresh_retry_empties_an_object_store(
    sweep: MadeSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands for objects: the same protocol, in a directory outside of the trial's."""
    files = LocalFiles(sweep.paths.root / "bucket")
    commit(sweep.paths.root / "saved", 1, step=10)
    (sweep.paths.root / "saved/checkpoints").rename(sweep.paths.root / "bucket")
    monkeypatch.setattr(retrying, "address_of", lambda *_: "s3://bucket/0")
    monkeypatch.setattr(retrying, "trial_files", lambda *_: files)
    _reopen(sweep, RetryRequest((FAILED,), fresh=True))
    assert files.names() == []
    assert not files.has_writer()
    assert not sweep.paths.trial(FAILED).exists()


class _Killed(BaseException):
    pass


def _kill(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
    call = getattr(owner, name)

    def killed(*args: Any, **more: Any) -> Any:
        if after:
            call(*args, **more)
        raise _Killed

    monkeypatch.setattr(owner, name, killed)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "after", "is_reopened"),
    [
        (session, "write_spec", True, False),
        (Ledger, "reopen", True, False),  # of the first trial, in the transaction of both
        (sys.modules[__name__], "complete_retries", False, True),
        (Outbox, "replace_run", True, True),
        (retrying, "_remove", False, True),
        (retrying, "sync_directory", True, True),
        (Ledger, "store_reopened", False, True),
        (Ledger, "store_reopened", True, True),
    ],
)
def test_kill_leaves_the_failed_or_the_reopened_trial(
    sweep: MadeSweep,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: bool,
    is_reopened: bool,
    fresh: bool,
) -> None:
    before = sweep.ledger.trials()
    with monkeypatch.context() as patched:
        _kill(patched, owner, name, after=after)
        with pytest.raises(_Killed):
            _reopen(sweep, RetryRequest(fresh=fresh))
    ledger = _reopen(sweep, NO_EXTRA)  # the next driver, which was asked for nothing
    if not is_reopened:
        assert ledger.trials() == before
        for number in (FAILED, DIVERGED):
            assert (sweep.paths.trial(number) / "checkpoints/step-00000010").is_dir()
            assert read_outbox(sweep.paths.outbox).tracked_statuses[number] == "FAILED"
        return
    for number in (FAILED, DIVERGED):
        one, directory = ledger.trial(number), sweep.paths.trial(number)
        assert (one.state, one.reopened, len(one.failed_attempts)) == ("running", None, 1)
        assert one.reports == ({} if fresh else {1: 1.0})
        assert directory.exists() is not fresh
        assert not (directory / "figures").exists()
        assert number not in read_outbox(sweep.paths.outbox).tracked_statuses
    state = read_sweep_state(sweep.paths, sweep.spec, ledger.trials(), live=False)
    recorder = MemoryRecorder(outbox=sweep.paths.outbox)
    apply(reconcile(state), sweep.paths, sweep.spec, ledger, recorder)
    follow_logs(state, sweep.spec, recorder)
    points = {} if FAILED not in recorder.runs else recorder.runs[FAILED].points
    assert {step for _, step in points} == (set() if fresh else {10})


def test_trial_that_finishes_another_cannot_begin_anew(sweep: MadeSweep) -> None:
    """Its first steps are those of the stopped trial, which it did not train."""
    number = sweep.ledger.add_extra("finish", 2).number
    sweep.ledger.report(number, epoch=1, step=10, value=1.0)
    sweep.ledger.finish(number, "failed", reason="ValueError: the bug")
    said = _refused(sweep, number, fresh=True)
    assert "continues trial 2" in said
    assert f"train small {number}" in said
    assert sweep.ledger.trial(number).state == "failed"
