"""How long a sweep still takes."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from sweeps.ledger.trials import ENDINGS
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.view.observer import TrialProgress, TrialStart
from sweeps.view.sweep_progress import SweepProgress, epochs_left

SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 9
budget: {epochs: 9}
space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}
"""


def _spec(more: str = "") -> SweepSpec:
    return parse_spec(SPEC + more, "s.yaml")


def test_trials_train_the_mean_of_those_that_came_further() -> None:
    assert epochs_left(_spec(), Counter([]), [3], 2) == 6 + 2 * 9
    assert epochs_left(_spec(), Counter([1, 3]), [0, 1, 2, 9], 4) == 2 + 2 + 1 + 0 + 4 * 2
    assert epochs_left(_spec(), Counter([1, 1, 1]), [4], 0) == 5, (
        "none came further: to the budget"
    )
    assert epochs_left(_spec(), Counter([0, 0]), [], 1) == 9, (
        "failures before an epoch say nothing"
    )


def test_promotions_shorten_the_expected_training() -> None:
    """Of 9 trials, 9 train epoch 1, 3 train epochs 2 and 3, and 1 trains the other 6."""
    promoting = "early_stopping: {scheduler: asha_promote, grace_epochs: 1, reduction: 3}"
    assert epochs_left(_spec(promoting), {}, [], 9) == pytest.approx(9 * 1 + 3 * 2 + 1 * 6)
    assert epochs_left(_spec(promoting), Counter([9]), [1, 1, 3], 5) == pytest.approx(21 - 9 - 5)


def test_epochs_of_earlier_drivers_do_not_make_it_faster() -> None:
    now = 0.0
    progress = SweepProgress(_spec(), [], total=1, clock=lambda: now)
    progress.started(TrialStart(0, {}))
    assert progress.seconds_left() is None
    now = 30.0
    progress.reported(TrialProgress(0, {}, 3, 30, {}))
    assert progress.seconds_left() == pytest.approx(60.0)
    progress.ended(0, "complete")
    assert progress.seconds_left() is None


@pytest.mark.parametrize("seed", range(5))
def test_counts_follow_any_order_of_events(seed: int) -> None:
    """Retries and pauses included, the estimate is that of all trials counted anew."""
    draw, now = random.Random(seed), itertools.count(1.0)
    progress = SweepProgress(_spec(), clock=lambda: next(now))
    for _ in range(60):
        number = draw.randrange(9)
        match draw.choice(["start", "report", "end"]):
            case "start":
                progress.started(TrialStart(number, {}))
            case "report" if number in {row.number for row in progress.rows}:
                progress.reported(TrialProgress(number, {}, draw.randint(1, 9), 1, {}))
            case "end":
                progress.ended(number, draw.choice(["waiting", "complete", "pruned", "failed"]))
    rows = progress.rows
    over = [row for row in rows if row.state in ENDINGS]
    assert progress.num_finished == len(over)
    assert +progress._ended == Counter(row.epoch for row in over)
    assert sorted(progress._open) == sorted({r.number for r in rows} - {r.number for r in over})
    assert progress._epochs == sum(row.epoch for row in rows)
