"""Successive halving: promotions, dropped trials, and brackets."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.stopping.halving import (
    SuccessiveHalving,
    bracket_graces,
    bracket_of,
    promotable,
    rungs,
)
from sweeps.stopping.rule import Standing

EPOCHS = 10
VALUES = st.sampled_from([0.1, 0.2, 0.3, 0.4, math.nan, math.inf])


def _choose(
    waiting: dict[int, float], seen: int, promoted: int = 0, *, minimize: bool = True
) -> list[int]:
    return promotable(
        waiting, num_seen=seen, num_promoted=promoted, reduction=3, minimize=minimize
    )


@pytest.mark.parametrize(
    ("grace", "reduction", "epochs", "expected"),
    [
        (1, 3, 12, (1, 3, 9)),
        (1, 3, 11, (1, 3)),  # 9 lies in the last fifth
        (1, 3, 9, (1, 3)),
        (2, 2, 16, (2, 4, 8)),
        (4, 3, 5, (4,)),
        (5, 3, 6, ()),
        (9, 3, 9, ()),
    ],
)
def test_rungs_lie_below_the_last_fifth_of_the_budget(
    grace: int, reduction: int, epochs: int, expected: tuple[int, ...]
) -> None:
    assert rungs(grace, reduction, epochs) == expected


def test_best_are_promoted_and_ties_go_to_the_lower_number() -> None:
    waiting = {4: 0.2, 0: 0.3, 2: 0.2, 1: 0.5, 3: 0.9, 5: 0.8}
    assert _choose(waiting, seen=6) == [2, 4]
    assert _choose(waiting, seen=6, minimize=False) == [3, 5]
    assert _choose(waiting, seen=5) == [2]
    assert _choose(waiting, seen=2) == []


def test_non_finite_trial_is_never_promoted() -> None:
    assert _choose({0: math.nan, 1: math.inf, 2: -math.inf}, seen=9) == []


def test_early_promotion_takes_the_place_of_a_better_trial() -> None:
    # 0 was the best of three; 3 and 4 are better, and six trials have two places.
    assert _choose({1: 0.6, 2: 0.7, 3: 0.1, 4: 0.2, 5: 0.9}, seen=6, promoted=1) == [3]


@given(
    st.dictionaries(st.integers(0, 40), VALUES, max_size=20),
    st.integers(0, 20),
    st.integers(2, 4),
    st.booleans(),
)
def test_at_most_one_in_reduction_is_promoted(
    waiting: dict[int, float], promoted: int, reduction: int, minimize: bool
) -> None:
    seen = len(waiting) + promoted
    chosen = promotable(
        waiting, num_seen=seen, num_promoted=promoted, reduction=reduction, minimize=minimize
    )
    assert len(chosen) + promoted <= max(seen // reduction, promoted)
    left = [v for n, v in waiting.items() if n not in chosen and math.isfinite(v)]
    for number in chosen:
        assert all((waiting[number] <= v) if minimize else (waiting[number] >= v) for v in left)
    shuffled = dict(random.Random(0).sample(list(waiting.items()), len(waiting)))
    assert chosen == promotable(
        shuffled, num_seen=seen, num_promoted=promoted, reduction=reduction, minimize=minimize
    )


LADDER = SuccessiveHalving(rungs=rungs(1, 2, EPOCHS), minimize=True, num_trials=0, reduction=2)
"""Rungs at 1, 2, 4 and 8 of ten epochs."""


class Serial:
    """A sweep of one trial at a time, that knows nothing but what is in its ledger.

    Args:
        curves: The metric after each epoch, of each trial.
        end: The epoch after which each training ends; below the budget: by itself.
    """

    def __init__(self, curves: list[list[float]], end: int = EPOCHS) -> None:
        self.curves, self.end = curves, end
        self.ladder = replace(LADDER, num_trials=len(curves))
        self.reports: dict[int, dict[int, float]] = {}
        self.complete: set[int] = set()
        self.handed_out: list[tuple[int, int]] = []

    @property
    def unfinished(self) -> set[int]:
        return self.reports.keys() - self.complete

    def run(self, dies_after: int = -1) -> bool:
        """Run until nothing is left, or until so many epochs were trained; True at the end."""
        while (number := self._next()) is not None:
            reports = self.reports.setdefault(number, {})
            rung = self.ladder.pause_at_epoch(max(reports, default=0)) or EPOCHS
            until = min(rung, self.end)
            while max(reports, default=0) < until:
                if dies_after == 0:
                    return False
                epoch = max(reports, default=0) + 1
                reports[epoch] = self.curves[number][epoch - 1]
                dies_after -= 1
            self.handed_out.append((number, until))
            if until == self.end:
                self.complete.add(number)
        return True

    def _next(self) -> int | None:
        begun = [n for n in self.unfinished if not self.ladder.pauses_at(self.reports[n])]
        # A trial that was trained to its end, and died before that was told, has ended.
        for number in [n for n in begun if max(self.reports[n], default=0) == self.end]:
            self.complete.add(number)
            begun.remove(number)
        if begun:
            return begun[0]
        number = self.ladder.next_promotion(
            Standing(self.reports, self.unfinished, complete=self.complete)
        )
        if number is not None:
            return number
        return len(self.reports) if len(self.reports) < len(self.curves) else None


def _curves(seed: int, count: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [[round(rng.random(), 1) for _ in range(EPOCHS)] for _ in range(count)]


@given(st.integers(0, 1000), st.integers(1, 20))
@settings(max_examples=50)
def test_each_rung_promotes_as_many_as_it_has_places(seed: int, count: int) -> None:
    """And one where there is none."""
    sweep = Serial(_curves(seed, count))
    sweep.run()
    places = count
    for rung, above in zip(LADDER.rungs, [*LADDER.rungs[1:], EPOCHS], strict=True):
        there = [n for n in sweep.reports if rung in sweep.reports[n]]
        assert len(there) == places
        places = max(len(there) // 2, 1)
        assert sum(above in sweep.reports[n] for n in there) == places
    behind = sweep.ladder.never_promoted(
        Standing(sweep.reports, sweep.unfinished, complete=sweep.complete)
    )
    assert behind == sweep.unfinished


@given(st.integers(0, 1000), st.lists(st.integers(0, 20), max_size=6))
@settings(max_examples=100)
def test_promotions_are_the_same_after_any_kill(seed: int, deaths: list[int]) -> None:
    once, killed = Serial(_curves(seed, 10)), Serial(_curves(seed, 10))
    once.run()
    for epochs in deaths:
        killed.run(dies_after=epochs)
    assert killed.run()
    assert killed.reports == once.reports
    assert killed.complete == once.complete


def test_the_highest_rung_promotes_first() -> None:
    low = {number: {1: number / 10} for number in range(2, 6)}
    reports = {0: {1: 0.8, 2: 0.8}, 1: {1: 0.9, 2: 0.9}, **low}
    assert LADDER.next_promotion(Standing(reports, set(reports))) == 0
    assert LADDER.next_promotion(Standing(reports, set(low))) == 2, (
        "there is a place on the lowest, too"
    )


def test_a_promotion_comes_before_a_new_trial() -> None:
    sweep = Serial([[float(n)] * EPOCHS for n in range(8)])
    sweep.run()
    assert sweep.handed_out == [
        *[(0, 1), (1, 1), (0, 2)],  # the better of two goes on
        *[(2, 1), (3, 1), (1, 2), (0, 4)],  # and of two that came as far
        *[(4, 1), (5, 1), (2, 2)],
        *[(6, 1), (7, 1), (3, 2), (1, 4), (0, 8)],
        (0, EPOCHS),  # nobody else would train to the end
    ]


def test_best_of_few_trials_trains_to_the_end() -> None:
    ladder = replace(LADDER, num_trials=3)
    reports = {0: {1: 0.9, 2: math.nan}, 1: {1: 0.5}, 2: {1: 0.4}}
    assert ladder.next_promotion(Standing(reports, {0, 1, 2}, live={2})) is None
    assert replace(ladder, num_trials=4).next_promotion(Standing(reports, {0, 1, 2})) is None
    assert ladder.next_promotion(Standing(reports, {0, 1, 2})) == 2
    assert replace(ladder, minimize=False).next_promotion(Standing(reports, {0, 1, 2})) == 1
    assert ladder.next_promotion(Standing(reports, {0})) is None, "none that could be the best"
    assert ladder.never_promoted(Standing(reports, {0})) == {0}
    failed = {0: dict.fromkeys(range(1, EPOCHS), 0.1), 1: {1: 0.5}, 2: {1: 0.4}}
    assert ladder.next_promotion(Standing(failed, {1, 2})) == 2, "who had gone on came to no end"


@pytest.mark.parametrize("end", [3, 5, 7, 9, EPOCHS])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_one_trial_trains_to_its_end_wherever_that_is(end: int, count: int) -> None:
    """By patience, or because a loop of the user has its own early stopping."""
    sweep = Serial(_curves(0, count), end)
    sweep.run()
    assert len(sweep.complete) == 1
    behind = sweep.ladder.never_promoted(
        Standing(sweep.reports, sweep.unfinished, complete=sweep.complete)
    )
    assert behind == sweep.unfinished


def test_running_trial_takes_its_place_only_once() -> None:
    reports = {0: {1: 0.1}, 1: {1: 0.2}, 2: {1: 0.3}, 3: {1: 0.4}}
    assert LADDER.next_promotion(Standing(reports, {0, 1, 2, 3})) == 0
    assert LADDER.next_promotion(Standing(reports, {0, 1, 2, 3}, live={0})) == 1
    assert LADDER.next_promotion(Standing(reports, {0, 1, 2, 3}, live={0, 1})) is None


def test_trial_that_ended_while_waiting_makes_room() -> None:
    reports = {0: {1: 0.1}, 1: {1: 0.2}, 2: {1: 0.3}}
    assert LADDER.next_promotion(Standing(reports, {1, 2})) == 1


def test_no_trial_is_dropped_while_others_can_arrive() -> None:
    reports = {0: {1: 0.1}, 1: {1: 0.2}, 2: {1: 0.3, 2: 0.3}}
    assert (
        replace(LADDER, num_trials=4).never_promoted(Standing(reports, {0, 1, 2})) == frozenset()
    )
    assert (
        replace(LADDER, num_trials=3).never_promoted(Standing(reports, {0, 1, 2})) == frozenset()
    )
    at_the_end = {**reports, 2: dict.fromkeys(range(1, EPOCHS + 1), 0.3)}
    ended = replace(LADDER, num_trials=3).never_promoted(
        Standing(at_the_end, {0, 1}, complete={2})
    )
    assert ended == {0, 1}
    under_way = {**reports, 2: {1: 0.3, 2: 0.3, 3: 0.2}}
    assert (
        replace(LADDER, num_trials=3).never_promoted(Standing(under_way, {0, 1, 2})) == frozenset()
    )


@pytest.mark.parametrize(
    ("epochs", "graces", "shares"),
    [(9, (1, 3, 9), [9, 4.5, 3]), (12, (1, 3, 9, 12), [27, 12, 6, 4]), (2, (1, 2), [3, 2])],
)
def test_brackets_have_hyperbands_shares(
    epochs: int, graces: tuple[int, ...], shares: list[float]
) -> None:
    assert bracket_graces(1, 3, epochs) == graces
    many = 400
    counts = Counter(bracket_of(number, graces, 3) for number in range(many))
    for index, share in enumerate(shares):
        assert counts[index] == pytest.approx(many * share / sum(shares), abs=1)
