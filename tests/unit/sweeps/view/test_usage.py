"""What a sweep has taken, against its plan, and what stopping saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.ledger.reasons import BY_ANOTHER_REQUEST
from sweeps.trust.findings import find
from sweeps.view.usage import spared_seeds, usage
from tests.golden.messages import compare_messages
from tests.unit.sweeps.sweep_factory import MadeSweep

PLAN = {
    "trials": 4,
    "epochs": 10,
    "rule": "asha",
    "expected_epochs": 20.0,
    "seconds": 90.0,
    "device": "GPU",
    "device_seconds": 100.0,
}


def _train(
    sweep: MadeSweep, epochs: int, seconds: float | None, *, stopped: str | None = None
) -> int:
    """Add a trial that took so long for its epochs, on half a GPU."""
    sweep.ledger.trial_resources = lambda _: (2, 0.5)
    number = sweep.add(None, *[1.0] * epochs)
    sweep.ledger.start(number)
    if seconds is not None:
        sweep.ledger.store_trial_seconds(number, seconds)
    ending = "complete" if stopped is None or stopped.startswith("patience") else "pruned"
    sweep.ledger.finish(number, ending, reason=stopped)
    return number


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    made = MadeSweep(tmp_path, more="early_stopping: {scheduler: asha}")
    made.ledger.store_plan(PLAN)
    _train(made, 10, 40.0)
    _train(made, 2, 10.0, stopped="asha at epoch 2: val/loss 1")
    _train(made, 5, 10.0, stopped="patience at epoch 5: val/loss not better")
    _train(made, 1, 4.0, stopped="stopped by the user")
    made.ledger.store_seconds(80.0)
    return made


def test_totals_are_those_of_all_trials(sweep: MadeSweep) -> None:
    found = usage(sweep.view)
    assert (found.trials, found.epochs, found.seconds) == (4, 18, 80)
    assert (found.trial_seconds.value, found.cpu_seconds.value) == (64, 128)
    assert (found.device, found.device_seconds.value) == ("GPU", 32)
    assert found.planned == PLAN


def test_saved_time_is_that_of_each_trial_at_its_own_speed(sweep: MadeSweep) -> None:
    """But at most at that of the slowest whole trial: a short one is mostly its start."""
    found = usage(sweep.view)
    assert (found.stopped, found.saved_epochs) == (2, 8 + 5)
    assert found.saved_seconds.value == 8 * 4 + 5 * 2
    assert found.saved_device_seconds.value == found.saved_seconds.value / 2


@pytest.mark.parametrize("word", ["seed", "fold"])
def test_seeds_that_never_start_are_saved(tmp_path: Path, word: str) -> None:
    made = MadeSweep(
        tmp_path, more=f"repeats: {{{word}s: 3}}\nearly_stopping: {{scheduler: asha}}"
    )
    first = made.add("complete", *[0.5] * 10)
    made.repeat(first, "complete", *[0.5] * 10)
    made.repeat(first, "complete", *[0.5] * 10)
    stopped = _train(made, 2, 10.0, stopped="asha at epoch 2: val/loss 1")
    made.ledger.store_seconds(80.0)
    assert spared_seeds(made.view) == {stopped: 2}
    found = usage(made.view)
    assert found.saved_epochs == 8 + 2 * 10
    assert found.saved_seconds.value == 28 * 5
    said = f"28 epochs of 1 trial that was stopped, and of 2 further {word}s that never started"
    assert said in found.sentences()[-1]
    saved = [one.sentence for one in find(made.view).sentences if one.topic == "epochs"]
    assert saved == [
        f"4 trials trained 32 of 60 epochs, those of 2 further {word}s that never started "
        "included: early stopping saved 47 %."
    ]


def test_trial_that_was_finished_later_saved_nothing(sweep: MadeSweep) -> None:
    new = sweep.ledger.add_extra("finish", 1).number
    for epoch in range(1, 11):
        sweep.ledger.report(new, epoch=epoch, step=epoch * 10, value=1.0)
    sweep.ledger.finish(new, "complete", seconds=16.0)
    found = usage(sweep.view)
    assert found.epochs == 18 + 8
    assert (found.stopped, found.saved_epochs) == (1, 5)


def test_run_of_a_confirmation_that_another_request_ended_saved_nothing(
    sweep: MadeSweep,
) -> None:
    before = usage(sweep.view)
    run = sweep.ledger.add_extra("confirm", 0, 0).number
    sweep.ledger.start(run)
    sweep.ledger.report(run, epoch=1, step=10, value=1.0)
    sweep.ledger.finish(run, "pruned", reason=BY_ANOTHER_REQUEST)
    found = usage(sweep.view)
    assert (found.trials, found.epochs) == (before.trials + 1, before.epochs + 1)
    assert (found.stopped, found.saved_epochs) == (before.stopped, before.saved_epochs)


def test_unknown_times_are_said(sweep: MadeSweep) -> None:
    _train(sweep, 3, None, stopped="asha at epoch 3: val/loss 1")
    found = usage(sweep.view)
    assert (found.trial_seconds.known, found.trial_seconds.of) == (4, 5)
    assert (found.saved_seconds.known, found.saved_seconds.of) == (2, 3)
    assert all("trials)" in sentence for sentence in found.sentences())


def test_trials_that_confirm_are_not_of_the_plan(sweep: MadeSweep) -> None:
    for seed in (0, 1):
        new = sweep.ledger.add_extra("confirm", 0, seed).number
        sweep.ledger.start(new)
        sweep.ledger.report(new, epoch=1, step=10, value=1.0)
    used, *_ = usage(sweep.view).sentences()
    assert used.startswith(
        "used: 18 epochs in 1m 20s, and 2 epochs of 2 trials beside the search, in all"
    )
    assert "started" not in used


def test_much_more_time_than_planned_is_explained(sweep: MadeSweep) -> None:
    sweep.ledger.store_seconds(162.0)  # 9 s an epoch; planned are 4.5
    used, *_ = usage(sweep.view).sentences()
    assert "; 2.0 times as long for each epoch: the plan counts neither the start of Ray" in used
    sweep.ledger.store_seconds(121.0)  # 1.49 times
    used, *_ = usage(sweep.view).sentences()
    assert "times as long" not in used


def test_nothing_is_said_before_the_first_epoch(tmp_path: Path) -> None:
    assert usage(MadeSweep(tmp_path).view).sentences() == []


def test_wording_of_what_was_used(
    sweep: MadeSweep, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    lines = usage(sweep.view).sentences()
    _train(sweep, 3, None)
    sweep.ledger.store_plan(PLAN | {"trials": 9, "seconds": None, "device_seconds": None})
    lines += usage(sweep.view).sentences()
    other = MadeSweep(tmp_path, "other")
    _train(other, 2, 5.0, stopped="asha at epoch 2: val/loss 1")
    other.ledger.store_seconds(6.0)
    compare_messages(request, [*lines, *usage(other.view).sentences()])
