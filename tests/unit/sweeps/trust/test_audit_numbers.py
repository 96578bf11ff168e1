"""The numbers that cards compare: by hand, or by SciPy's distributions."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from sweeps.spec.space import Choice, Distribution, Uniform
from sweeps.statistics.proportions import RankCorrelation, kendall
from sweeps.statistics.variance_shares import Share, VarianceShares
from sweeps.trust.audit import bounds, effects, stopping
from sweeps.trust.audit.bounds import _at_ends
from sweeps.trust.audit.card import Card
from sweeps.trust.audit.data import AuditData, AuditTrial, Clipping, top_fifth
from sweeps.trust.audit.registry import CARDS
from sweeps.trust.evidence import NearBound

stats = pytest.importorskip("scipy.stats")


def _trials(*values: float) -> list[AuditTrial]:
    return [AuditTrial(n, "complete", {}, value) for n, value in enumerate(values)]


def test_gap_of_two_values_is_compared_with_the_noise_of_two() -> None:
    """Variance 3 with two degrees of freedom, from three seeds of one trial."""
    data = AuditData(trials=_trials(1.0, 2.0, 9.0), repeats={2: {0: 1.0, 1: 2.0, 2: 4.4641016}})
    card = CARDS["noise"](data)
    deviation = math.sqrt(stats.tvar([1.0, 2.0, 4.4641016]))
    half = stats.t.ppf(0.975, 2) * deviation * math.sqrt(2)
    assert card.figure["least_visible_gap"] == pytest.approx(half)
    assert card.figure["gap"] == 1.0


def test_gap_of_means_is_compared_with_the_noise_of_both() -> None:
    """Without common seeds: the pooled variance of 2 + 3 values, with 1 + 2 degrees of freedom."""
    repeats = {0: {0: 1.0, 1: 3.0}, 1: {2: 4.0, 3: 5.0, 4: 9.0}}
    card = CARDS["noise"](AuditData(trials=_trials(1.0, 2.0), repeats=repeats))
    deviation = math.sqrt((2 + 14) / 3)
    half = stats.t.ppf(0.975, card.figure["freedom"]) * deviation * math.sqrt(1 / 2 + 1 / 3)
    assert card.figure["least_visible_gap"] == pytest.approx(half)
    assert card.figure["gap"] == pytest.approx(4.0)


@pytest.mark.parametrize(("samples", "verdict"), [(505, "warn"), (506, "pass")])
def test_validation_shows_a_third_of_the_gain(samples: int, verdict: str) -> None:
    """The best is 0.9 and the median of the first ten 0.78; 0.86 is a third of that away.

    1.96 ** 2 * (0.9 * 0.1 + 0.86 * 0.14) / 0.04 ** 2 is 505.2.
    """
    trials = _trials(0.9, *[0.78] * 9, *[0.899] * 20)
    data = AuditData(trials=trials, metric="val/acc", minimize=False, num_validation=samples)
    card = CARDS["validation"](data)
    assert card.figure["gap"] == pytest.approx(0.04)
    expected = 1.96 * math.sqrt((0.9 * 0.1 + 0.86 * 0.14) / samples)
    assert card.figure["least_visible_gap"] == pytest.approx(expected)
    assert card.verdict == verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.59, "warn"),
        (0.1, 0.6, "not enough data"),
        (0.2, 0.9, "not enough data"),
        (0.21, 0.9, "pass"),
    ],
)
def test_rungs_agree_by_the_ends_of_their_interval(
    low: float, high: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "kendall", lambda *_: RankCorrelation(0.5, low, high, 8))
    trials = [AuditTrial(n, "complete", {}, float(n), {1: n, 3: n}, exempt=True) for n in range(8)]
    card = CARDS["stopping"](AuditData(trials=trials, rungs=(1,), reports=3))
    assert card.verdict == verdict


def test_wrong_stops_by_hand() -> None:
    """Of ten trials four continue, up to a loss of 3; of eight exempt ones the best two are good.

    Exempt are 2 to 9. Those with a loss above 3 would stop: six of them, of which 8 and 9 ended
    best.
    """
    ends = [0.0, 1.0, *range(4, 10), 2.0, 3.0]
    trials = [
        AuditTrial(n, "complete", {}, ends[n], {1: float(n), 3: ends[n]}, exempt=n > 1)
        for n in range(10)
    ]
    data = AuditData(trials=trials, rungs=(1,), reports=3, reduction=3)
    wrong = CARDS["stopping"](data).figure["wrong_stops"]["1"]
    assert (wrong["num_wrong"], wrong["num_would_stop"]) == (2, 6)
    interval = stats.binomtest(2, 6).proportion_ci(method="wilson")
    assert (wrong["low"], wrong["high"]) == pytest.approx((interval.low, interval.high))


def _gaining(num_late: int, late: float, usual: float) -> Card:
    """Fifteen trials that gain 1 in all; some much in the last tenth, the best three a little."""
    trials = []
    for number in range(15):
        gain = late if number >= 15 - num_late else usual
        level = -1.0 if number < 3 else 0.0
        curve = dict.fromkeys(range(2, 20), level + gain) | {1: level + 1.0, 20: level}
        trials.append(AuditTrial(number, "complete", {}, level, curve))
    return CARDS["budget"](AuditData(trials=trials, reports=20))


@pytest.mark.parametrize(
    ("num_late", "late", "usual", "verdict"),
    [
        (0, 0.0, 0.0099, "pass"),  # less than one per cent, all alike
        (0, 0.0, 0.0101, "warn"),
        # Three of 15 with 0.9: mean 0.18, standard error 0.9 * sqrt(0.2 * 0.8 / 14) = 0.096.
        (3, 0.9, 1e-6, "pass"),
        (4, 0.9, 1e-6, "warn"),  # mean 0.24, standard error 0.106
    ],
)
def test_gain_of_the_last_tenth_is_clear(
    num_late: int, late: float, usual: float, verdict: str
) -> None:
    card = _gaining(num_late, late, usual)
    assert card.verdict == verdict
    gains = [late] * num_late + [usual] * (15 - num_late)
    assert card.figure["gain_of_last_tenth"] == pytest.approx(sum(gains) / 15)
    assert card.figure["standard_error"] == pytest.approx(stats.sem(gains), abs=1e-12)


@pytest.mark.parametrize(("failed", "of", "found"), [(6, 10, True), (5, 9, False)])
def test_most_trials_of_a_failing_region_fail(failed: int, of: int, found: bool) -> None:
    trials = [
        AuditTrial(
            n,
            "failed" if n < failed else "complete",
            {"kind": "x" if n < of else "y"},
            float(n),
            counts=n >= failed,
        )
        for n in range(60)
    ]
    region = CARDS["failures"](
        AuditData(trials=trials, space={"kind": Choice(("x", "y"))})
    ).figure["region"]
    assert (region is not None) == found
    if region is not None:
        # Two options, and no region at all; half of the risk is for regions of two parameters.
        expected = 2 * 3 * stats.hypergeom.sf(failed - 1, 60, failed, of)
        assert region["chance"] == pytest.approx(expected)


def _shares(share: Share, explained: float = 0.9) -> VarianceShares:
    return VarianceShares({"x": share}, {}, explained, 60)


@pytest.mark.parametrize(
    ("high", "chance", "explained", "verdict"),
    [
        (0.049, 0.021, 0.9, "warn"),
        (0.05, 0.021, 0.9, "pass"),
        (0.049, 0.02, 0.9, "pass"),
        (0.049, 0.021, 0.3, "warn"),
        (0.049, 0.021, 0.29, "not enough data"),
    ],
)
def test_parameter_is_idle_by_its_share(
    high: float, chance: float, explained: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Share(0.01, 0.0, high, chance)
    monkeypatch.setattr(AuditData, "importance", _shares(share, explained))
    draw = random.Random(0)
    trials = [
        AuditTrial(n, "complete", {"x": draw.random()}, draw.random(), {1: draw.random()})
        for n in range(60)
    ]
    card = effects.effects(AuditData(trials=trials, space={"x": Uniform(0.0, 1.0)}))
    assert card.verdict == verdict


@pytest.mark.parametrize(("chance", "acts"), [(0.009, True), (0.01, False)])
def test_parameter_at_a_bound_acts_by_its_chance(
    chance: float, acts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Share(0.1, 0.0, 0.2, chance)
    monkeypatch.setattr(AuditData, "importance", _shares(share))
    at_end: Any = bounds._AtEnd(NearBound("x", "above", 1.0, 0.9, 3), 3, 0)
    assert bounds._acting(AuditData(trials=[]), [], [])(at_end) == acts


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
