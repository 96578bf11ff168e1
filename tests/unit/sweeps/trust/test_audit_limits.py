"""Each card changes its verdict just where its documentation says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sweeps.spec.space import Distribution, Uniform
from sweeps.statistics.proportions import kendall
from sweeps.trust.audit.bounds import _at_ends
from sweeps.trust.audit.card import Card
from sweeps.trust.audit.data import AuditData, AuditTrial, Clipping, top_fifth
from sweeps.trust.audit.registry import CARDS


def _found_at_ends(num_trials: int, num_there: int, num_keys: int) -> list[str]:
    """The ranges of which some of the best fifth, and no other trial, have the upper end."""
    keys = [f"x{index}" for index in range(num_keys)]
    space: dict[str, Distribution] = {key: Uniform(0.0, 1.0) for key in keys}
    middle = dict.fromkeys(keys, 0.5)
    trials = [
        AuditTrial(
            n, "complete", middle | ({"x0": 0.9 - n / 100} if n < num_there else {}), float(n)
        )
        for n in range(num_trials)
    ]
    data = AuditData(trials=trials, space=space)
    return [one.bound.key for one in _at_ends(data, data.ranked, top_fifth(data.ranked), keys)]


@pytest.mark.parametrize(
    ("num_trials", "num_there", "num_keys", "warns"),
    [
        # scipy.stats.binom.sf(2, 4, 0.2) is 0.0272: twice that, for both ends, is above 5 %.
        (20, 3, 1, False),
        (20, 4, 1, True),  # 0.0016
        # binom.sf(4, 8, 0.2) is 0.0104: 2 ends of 2 ranges stay below 5 %, those of 3 do not.
        (40, 5, 2, True),
        (40, 5, 3, False),
    ],
)
def test_both_ends_of_all_ranges_are_counted(
    num_trials: int, num_there: int, num_keys: int, warns: bool
) -> None:
    assert _found_at_ends(num_trials, num_there, num_keys) == ["x0"] * warns


def test_intervals_of_all_rungs_hold_at_once() -> None:
    draw = random.Random(0)
    trials = []
    for number in range(20):
        curve = {epoch: number + epoch * draw.gauss(0, 3) for epoch in (1, 3, 9)}
        trials.append(AuditTrial(number, "complete", {}, curve[9], curve, exempt=True))
    data = AuditData(trials=trials, rungs=(1, 3), reports=9)
    shown = CARDS["stopping"](data).figure["rungs"]
    for rung in (1, 3):
        pairs = [(trial.curve[rung], trial.curve[9]) for trial in trials]
        expected = kendall(*zip(*pairs, strict=True), level=0.975)
        assert expected is not None
        assert shown[str(rung)] == expected._asdict()


def _budget(reports: int, best: Sequence[int]) -> Card:
    """Trials whose value falls by 1 until their best report, and rises from there on."""
    curves = [
        {at: abs(at - turn) - 100.0 * (n < 3) for at in range(1, reports + 1)}
        for n, turn in enumerate(best)
    ]
    trials = [
        AuditTrial(n, "complete", {}, min(curve.values()), curve) for n, curve in enumerate(curves)
    ]
    return CARDS["budget"](AuditData(trials=trials, reports=reports))


@pytest.mark.parametrize(
    ("reports", "best", "verdict"),
    [
        # Three of three with 2 / reports each: 0.4 ** 3 is 0.064, and 1 / 3 ** 3 is 0.037.
        (5, [5] * 15, "pass"),
        (6, [6] * 15, "warn"),
        # Three of three in the first half with 1/4 each: 0.016; two of three: 0.156.
        (8, [4] * 15, "warn"),
        (8, [4, 4, 5] + [4] * 12, "pass"),
    ],
)
def test_best_reports_are_compared_with_flat_curves(
    reports: int, best: list[int], verdict: str
) -> None:
    assert _budget(reports, best).verdict == verdict


def _with_clipping(*clipped: tuple[float, int]) -> str:
    trials = [
        AuditTrial(n, "complete", {}, float(n), clipping=Clipping(1.0, share, steps, 2.0))
        for n, (share, steps) in enumerate(clipped)
    ]
    return CARDS["clipping"](AuditData(trials=trials)).verdict


def test_half_of_the_steps_may_be_clipped() -> None:
    assert _with_clipping((0.5, 100)) == "pass"
    assert _with_clipping((0.51, 100)) == "warn"
    assert _with_clipping((0.6, 300), (0.2, 100)) == "pass"  # 200 of 400 steps
    assert _with_clipping((0.6, 310), (0.2, 100)) == "warn"
    assert _with_clipping((0.9, 99)) == "not enough data"


@pytest.mark.parametrize(("failed", "of", "verdict"), [(8, 42, "pass"), (10, 55, "warn")])
def test_a_tenth_of_the_trials_may_fail(failed: int, of: int, verdict: str) -> None:
    """Wilson's interval begins at 9.98 % for 8 of 42, and at 10.2 % for 10 of 55."""
    trials = [
        AuditTrial(n, "failed" if n < failed else "complete", {}, float(n), counts=n >= failed)
        for n in range(of)
    ]
    assert CARDS["failures"](AuditData(trials=trials)).verdict == verdict


@pytest.mark.parametrize(("failed", "of", "warns"), [(5, 5, True), (4, 4, True), (3, 3, False)])
def test_failing_region_has_four_trials(failed: int, of: int, warns: bool) -> None:
    points = [0.9 + n / 1000 if n < of else n / 100 for n in range(60)]
    trials = [
        AuditTrial(n, "failed" if n < failed else "complete", {"x": x}, x, counts=n >= failed)
        for n, x in enumerate(points)
    ]
    card = CARDS["failures"](AuditData(trials=trials, space={"x": Uniform(0.0, 1.0)}))
    assert card.verdict == ("warn" if warns else "pass")
    assert (card.figure["region"] is not None) == warns
