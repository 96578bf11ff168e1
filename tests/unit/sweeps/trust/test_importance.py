"""What mattered: the places of stopped trials, and what is said of the shares; by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sweeps.spec.space import Choice, LogUniform, Uniform
from sweeps.statistics.variance_shares import Share, VarianceShares
from sweeps.trust.audit.data import AuditData, AuditTrial
from sweeps.trust.audit.effects import effects
from sweeps.trust.importance import (
    _positions,
    final_places,
    importance,
    importance_sentence,
    least_trials,
)


def test_stopped_trials_keep_their_rank_among_those_that_trained_on() -> None:
    """Trial 3 had a better value at epoch 1 than trial 2, which was exempt and trained on."""
    curves = {
        0: {1: 0.5, 2: 0.4, 3: 0.1},
        1: {1: 0.4, 2: 0.3, 3: 0.2},
        2: {1: 0.9, 2: 0.8, 3: 0.7},
        3: {1: 0.6},
        4: {1: 1.0},
        5: {1: 0.55, 2: 0.5},
    }
    order = [0, 1, 5, 3, 2, 4]
    assert final_places(curves, minimize=True) == {n: at for at, n in enumerate(order)}
    upside_down = {n: {at: -v for at, v in one.items()} for n, one in curves.items()}
    assert final_places(upside_down, minimize=False) == final_places(curves, minimize=True)


def test_value_is_the_best_report_or_the_last_one() -> None:
    curves = {0: {1: 0.1, 2: 0.9}, 1: {1: 0.2, 2: 0.3}}
    assert final_places(curves, minimize=True) == {0: 0, 1: 1}
    assert final_places(curves, minimize=True, final=True) == {0: 1, 1: 0}


def test_equal_trials_share_their_place_and_one_without_a_value_has_none() -> None:
    curves = {0: {1: 0.5}, 1: {1: 0.5}, 2: {1: math.nan}, 3: {}, 4: {1: 0.1, 2: math.inf}}
    assert final_places(curves, minimize=True) == {4: 0, 0: 1.5, 1: 1.5}


def test_trials_outside_of_a_changed_space_have_a_position() -> None:
    space = {"lr": LogUniform(1e-2, 1e-1), "kind": Choice(("a",)), "size": Choice((32, 128))}
    params: dict[int, dict[str, Any]] = {
        0: {"lr": 1e-3, "kind": "a", "size": 64},
        1: {"lr": 1e-1, "kind": "b", "size": 32},
        2: {"lr": 1e-2, "size": 128},
    }
    found = _positions(space, params, [0, 1, 2])
    assert found["lr"] == pytest.approx([0.0, 1.0, 0.5])
    assert found["kind"] == ["'a'", "'b'", None]
    assert found["size"] == [0.5, 0.0, 1.0]


def test_so_many_trials_are_needed() -> None:
    """Two columns for each parameter and a constant, and two trials for each of these."""
    space = {"x": Uniform(0.0, 1.0), "y": Uniform(0.0, 1.0)}
    params = {n: {"x": n / 9, "y": n * 3 % 10 / 9} for n in range(10)}
    places = {n: float(n) for n in range(10)}
    assert least_trials(space, params) == 10
    assert importance(space, params, places) is not None
    del places[9]
    assert importance(space, params, places) is None


CLEAR = Share(0.52, 0.3, 0.74, 0.0)
LITTLE = Share(0.02, 0.0, 0.04, 0.5)
PERHAPS = Share(0.1, 0.0, 0.3, 0.2)
UNKNOWN = Share(0.4, 0.0, 0.9, 0.1)
REAL = Share(0.67, 0.0, 1.0, 0.009)
WHERE = "how 40 trials rank by val/loss at the end"


@pytest.mark.parametrize(
    ("shares", "sentence"),
    [
        (
            {"lr": CLEAR, "wd": LITTLE, "clip": PERHAPS, "size": UNKNOWN},
            f"lr mattered most: it explains 52 % (30 to 74 %) of {WHERE}. No clear effect of wd "
            "(at most 4 %) and clip (at most 30 %). Not known yet: size 40 % (0 to 90 %).",
        ),
        (
            {"lr": CLEAR, "size": Share(0.2, 0.1, 0.3, 0.0)},
            f"lr mattered most: it explains 52 % (30 to 74 %) of {WHERE}; size 20 % (10 to 30 %).",
        ),
        (
            {"lr": REAL, "wd": LITTLE},
            f"lr had an effect on {WHERE}; how large is not known yet: 67 % (0 to 100 %). "
            "No clear effect of wd (at most 4 %).",
        ),
        ({"wd": LITTLE}, f"No clear effect of wd (at most 4 %) on {WHERE}."),
        ({"size": UNKNOWN}, f"Not known yet of {WHERE}: size 40 % (0 to 90 %)."),
    ],
)
def test_sentence_says_what_is_known(shares: dict[str, Share], sentence: str) -> None:
    found = VarianceShares(shares, {}, 0.9, 40)
    assert importance_sentence(found, {key: key for key in shares}, "val/loss") == sentence


@pytest.mark.parametrize(
    ("share", "is_known", "is_clear", "verdict"),
    [
        (PERHAPS, True, False, "pass"),
        (UNKNOWN, False, False, "not enough data"),
        (Share(0.5, 0.05, 0.5, 0.0), False, False, "not enough data"),
        (Share(0.5, 0.05, 0.49, 0.0), True, True, "pass"),
    ],
)
def test_unknown_share_is_no_pass(
    share: Share, is_known: bool, is_clear: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (share.is_known, share.is_clear) == (is_known, is_clear)
    monkeypatch.setattr(AuditData, "importance", VarianceShares({"x": share}, {}, 0.9, 60))
    data = AuditData(trials=[AuditTrial(0, "complete", {"x": 1}, 0.5)])
    assert effects(data).verdict == verdict
