"""Choose a winner by a race over common seeds, and by the best value of the sweep.

A sweep trains each configuration under one seed that all share. The race then trains its leaders
again under further common seeds, as `sweep confirm` does: after each seed it drops who cannot win,
and it ends when the winner is certain enough. What must not live here: the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.statistics.race import Race, race
from tests.bench.trust_tables import Array, KnownSweep, Table

NUM_TRIALS = 64


@dataclass(frozen=True)
class Plan:
    """How many leaders are trained again, under how many seeds at most."""

    top: int
    seeds: int

    def __str__(self) -> str:
        return f"--top {self.top} --seeds {self.seeds}"


PLANS = (Plan(5, 5), Plan(3, 3), Plan(4, 2))
"""The command's defaults, and two that cost at most 15 % of the sweep's trainings."""


@dataclass(frozen=True)
class Choice:
    """One choice of a winner, and what is known about it.

    Attributes:
        rank: Its true rank among all trials of the sweep.
        optimism: By how much its value looked better than it is, as a share of its true value.
        error: That of the value that stands for it now: for a race, the mean over the new seeds.
        share: Trainings after the sweep, as a share of the sweep's.
        covered: For each leader, whether the interval of its mean holds the truth; the winner's
            first.
        optimism_covered: The same for the optimism of the winner's value in the sweep.
        claimed: The probability that the winner is the best of the leaders, as the race has it.
        best_leader: Whether it is.
        dropped_best: Whether the race dropped the best of the leaders.
    """

    rank: int
    optimism: float
    error: float
    share: float = 0.0
    covered: tuple[bool, ...] = ()
    optimism_covered: bool = True
    claimed: float = 0.0
    best_leader: bool = True
    dropped_best: bool = False


def choices(table: Table, repeats: int, seed: int) -> Iterator[dict[str, Choice]]:
    """Yield for each of some sweeps what each way of choosing chooses."""
    random = np.random.default_rng((seed, *table.name.encode()))
    for _ in range(repeats):
        sweep = KnownSweep(table.values, random, min(NUM_TRIALS, len(table.values)))
        originals = sweep.draw(1)[:, 0]
        further = sweep.draw(max(plan.seeds for plan in PLANS))
        order = [int(number) for number in np.argsort(originals)]
        made = {"best value": _by_value(sweep, originals, order[0])}
        for plan in PLANS:
            made[str(plan)] = _by_race(sweep, originals, further, order[: plan.top], plan)
        known = min(order[: PLANS[0].top], key=lambda leader: float(sweep.truth[leader]))
        made["best leader"] = _by_value(sweep, originals, known)
        yield made


def _by_value(sweep: KnownSweep, originals: Array, number: int) -> Choice:
    optimism = _share(sweep, number, sweep.truth[number] - originals[number])
    return Choice(sweep.rank(number), optimism, optimism)


def _by_race(
    sweep: KnownSweep, originals: Array, further: Array, leaders: Sequence[int], plan: Plan
) -> Choice:
    values: dict[int, list[float]] = {number: [] for number in leaders}
    known = {number: float(originals[number]) for number in leaders}
    found = run_race(values, further, plan.seeds, known)
    winner = found.leader
    number = winner.number
    best = min(leaders, key=lambda leader: float(sweep.truth[leader]))
    true_optimism = float(sweep.truth[number] - originals[number])
    assert winner.optimism_low is not None
    assert winner.optimism_high is not None
    return Choice(
        rank=sweep.rank(number),
        optimism=_share(sweep, number, true_optimism),
        error=_share(sweep, number, float(sweep.truth[number]) - winner.mean),
        share=sum(map(len, values.values())) / len(sweep.truth),
        covered=tuple(
            one.low <= sweep.truth[one.number] <= one.high
            for one in found.contenders
            if one.low is not None and one.high is not None
        ),
        optimism_covered=winner.optimism_low <= true_optimism <= winner.optimism_high,
        claimed=winner.p_best or 0.0,
        best_leader=number == best,
        dropped_best=best not in found.alive,
    )


def run_race(
    values: dict[int, list[float]], further: Array, seeds: int, originals: dict[int, float]
) -> Race:
    """Race until the winner is certain enough, or the seeds are used up; adds to `values`."""
    alive: Sequence[int] = tuple(values)
    for seed in range(seeds):
        for number in alive:
            values[number].append(float(further[number, seed]))
        found = race(values, minimize=True, original=originals)
        alive = found.alive
        if found.decided or len(alive) == 1:
            break
    return found


def _share(sweep: KnownSweep, number: int, difference: float) -> float:
    return float(difference / abs(sweep.truth[number]))


def as_recorded(table: Table, repeats: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Return ranks as the table has them: the best value's, the race's, and what they start from.

    One seed of the table is the sweep's, two are the race's, and the others judge. They judge with
    noise of their own, so that nobody comes out first each time: the third list has the ranks of
    the leader that the judges' own seeds put first.
    """
    random = np.random.default_rng((seed, *table.name.encode()))
    by_value: list[int] = []
    by_race: list[int] = []
    floor: list[int] = []
    for _ in range(repeats):
        values = table.values
        values = values[random.choice(len(values), min(NUM_TRIALS, len(values)), replace=False)]
        seeds = random.permutation(values.shape[1])
        values = values[:, seeds]
        order = [int(number) for number in np.argsort(values[:, 0])]
        judged = values[:, 3:].mean(axis=1)
        leaders: dict[int, list[float]] = {number: [] for number in order[:4]}
        found = run_race(leaders, values[:, 1:3], 2, {})
        for ranks, number in (
            (by_value, order[0]),
            (by_race, found.leader.number),
            (floor, min(order[:4], key=lambda leader: float(judged[leader]))),
        ):
            ranks.append(1 + int((judged < judged[number]).sum()))
    return by_value, by_race, floor
