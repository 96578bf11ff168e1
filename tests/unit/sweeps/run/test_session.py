"""Opening a sweep: which changes are refused, and how many trials remain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import OriginChanged, SearchChanged
from sweeps.run.session import SweepSession, open_ledger
from sweeps.spec.resume_checks import check_search_changes
from sweeps.spec.spec import SweepSpec
from tests.fake_checkpoints import commit
from tests.message_parts import assert_parts
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import RATE, MadeSweep, prepared

NO_RECORDER: Any = None


@pytest.mark.parametrize("trials", [1, 2, 3, 4, 6])
def test_unfinished_trials_remain_whatever_the_limit(tmp_path: Path, trials: int) -> None:
    made = MadeSweep(tmp_path)
    for ending in ("complete", None, "failed", None):
        made.add(ending, 0.5)
    spec = with_overrides(made.spec, [f"trials={trials}"])
    sweep = SweepSession(made.paths, spec, made.ledger, NO_RECORDER, lambda: None)
    assert sweep.trials().num_left == 2 + max(0, trials - 4)
    assert sweep.most_trials() == max(4, trials)
    for number in (1, 3):
        made.ledger.finish(number, "complete")
    assert sweep.trials().num_left == max(0, trials - 4)


def test_stop_keeps_unfinished_trials_and_starts_none(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, more="stop: {value: 0.5}")
    made.add("complete", 0.5)
    made.add(None, 0.7)
    sweep = made.session(NO_RECORDER)
    assert sweep.trials().num_left == 1
    made.ledger.finish(1, "pruned")
    assert sweep.trials().num_left == 0


def _resume(made: MadeSweep, *overrides: str, accepted: bool = False) -> SweepSpec:
    spec = with_overrides(made.spec, overrides)
    open_ledger(prepared(made.paths, spec, new=False, accept_changes=accepted), print)
    return spec


@pytest.mark.parametrize("counted", [True, False])
def test_checkpoint_before_first_report_keeps_its_settings(tmp_path: Path, counted: bool) -> None:
    """Also where the driver died before it had counted the attempt."""
    made = MadeSweep(tmp_path)
    number = made.add(None)
    if counted:
        made.ledger.start(number)
    _resume(made, "seed=1")  # nothing was trained
    commit(made.paths.trial(number), 0, step=29)
    with pytest.raises(OriginChanged, match="seed 1 -> 2"):
        _resume(made, "seed=2")
    _resume(made, "seed=2", accepted=True)
    made.ledger.finish(number, "failed", reason="KeyError: 'width'")
    _resume(made, "seed=3")  # of which nothing goes on, and which has no value to compare


def _told_beyond_its_checkpoint(made: MadeSweep) -> int:
    """Add a trial that reported three epochs, of which its checkpoint has one."""
    made.ledger.start(number := made.add(None, 0.5, 0.4, 0.3))
    commit(made.paths.trial(number), 1, step=10)
    return number


def test_reported_trials_are_not_retrained_with_other_settings(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path)
    _told_beyond_its_checkpoint(made)
    before = made.paths.spec.read_bytes()
    with pytest.raises(OriginChanged) as refused:
        _resume(made, "train.clip.max_norm=2.5")
    assert_parts(
        str(refused.value),
        *("trial 0", "reported epoch 3", "saved epoch 1", "(train.clip.max_norm: 1.0 -> 2.5)"),
        *("saved epoch 3", "--accept-changes"),
    )
    assert made.paths.spec.read_bytes() == before
    _resume(made, "train.clip.max_norm=2.5", accepted=True)


@pytest.mark.parametrize(
    "override",
    [
        "trials=9",
        "concurrency=1",
        "budget.epochs=20",
        "stop.hours=2",
        "early_stopping.scheduler=asha",
        "checkpoint.every=5 epochs",
        "resources.cpu=2",
        "tracking.every=10",
        "failures.max_retries=2",
        "search.sampler=random",
        "space.train.optimizer.lr={uniform: [0.1, 0.2]}",
        "train.optimizer.lr=0.5",  # each trial has its own
    ],
)
def test_settings_a_step_ignores_may_always_change(tmp_path: Path, override: str) -> None:
    made = MadeSweep(tmp_path)
    _told_beyond_its_checkpoint(made)
    _resume(made, override)


@pytest.mark.parametrize(
    "overrides",
    [
        ["budget.report_every=0.5"],
        ["budget.val_batches=3"],
        ["budget.epochs=null", "budget.steps=90", "budget.report_every=10"],
    ],
)
def test_what_a_report_is_cannot_change(tmp_path: Path, overrides: list[str]) -> None:
    made = MadeSweep(tmp_path)
    after = with_overrides(made.spec, overrides)
    check_search_changes(made.spec, after, 0)
    with pytest.raises(SearchChanged, match="epochs: 10 in this sweep and cannot become"):
        check_search_changes(made.spec, after, 1)
    check_search_changes(after, with_overrides(after, [f"budget.{after.budget.unit}=200"]), 1)


NOTHING_LEFT = "no trials remain; the changes affect only new trials; "
ANOTHER = "start a new sweep with: sweep run FILE --name NAME"


@pytest.mark.parametrize(
    ("more", "overrides", "remedy"),
    [
        ("", ["budget.epochs=20"], "add trials with: {resume} -s trials=6 --root {root}"),
        ("", ["train.batch_size=32"], "add trials with: {resume} -s trials=6 --root {root}"),
        ("search: {sampler: grid}", ["budget.epochs=20"], ANOTHER),
        ("", ["tracking.every=2"], None),
        ("", ["budget.epochs=20", "trials=4"], None),
        ("", [], None),
    ],
)
def test_change_without_remaining_trials_warns(
    tmp_path: Path, more: str, overrides: list[str], remedy: str | None
) -> None:
    space = "{train.batch_size: {choice: [8, 16, 32]}}" if "grid" in more else RATE
    made = MadeSweep(tmp_path, more=more, space=space)
    for _ in range(3):
        made.add("complete", 0.7)
    spec = with_overrides(made.spec, overrides)
    told = SweepSession(
        made.paths, spec, made.ledger, NO_RECORDER, lambda: None
    ).no_effect_warning(made.spec)
    if remedy is not None:
        remedy = NOTHING_LEFT + remedy.format(resume="sweep resume small", root=tmp_path)
    assert told == remedy
