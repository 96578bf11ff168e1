"""Sweeps made to be sound, or to have one fault, for the cards of the audit.

All have early stopping by rungs, with some trials exempt from it, and leaders that were trained
again under common seeds. Some are random searches; some are made by the sampler and the rule that
a sweep has by default. What must not live here: what the cards look at.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweeps.spec.space import Distribution, LogUniform, Uniform
from sweeps.spec.spec import SweepSpec
from sweeps.trust.audit.card import Verdict
from sweeps.trust.audit.data import AuditData, AuditTrial, Clipping
from sweeps.trust.audit.registry import CARDS
from tests.bench.quality_problems import METRIC
from tests.bench.quality_sweeps import Ours, drive

Array = NDArray[np.float64]
_REPORTS = 27
_RUNGS = (1, 3, 9)
_REDUCTION = 3
_AT_ONCE = 4


@dataclass(frozen=True)
class Making:
    """What a sweep is made of; as it stands here, it is sound.

    Attributes:
        num_trials: Of the search.
        num_parameters: Each changes the accuracy by as much.
        idle: One further parameter has no effect.
        beyond: How far the first parameter's optimum lies outside its range, in widths of it.
        lead: By how much the first leader is better than the others, in standard deviations over
            seeds.
        crossing: Whether early reports say nothing about the end.
        failing: The probability of failing for a large first parameter with a small second one.
        failing_anywhere: The probability of failing elsewhere.
        clipped: The share of clipped steps.
        constant: How many reports a curve takes for two thirds of its way.
        overfits: From which report on a trial becomes worse.
        num_validation: How many samples decide an accuracy.
        spread: The accuracy lost at the far end of all ranges.
    """

    num_trials: int = 128
    num_parameters: int = 2
    idle: bool = False
    beyond: float | None = None
    lead: float = 5.0
    crossing: bool = False
    failing: float = 0.0
    failing_anywhere: float = 0.03
    clipped: float = 0.1
    constant: float = 4.0
    overfits: int | None = None
    num_validation: int = 20_000
    spread: float = 0.3


SOUND = Making()
_NO_EFFECT = replace(SOUND, spread=0.0, num_validation=1_000)
SOUND_KINDS: Mapping[str, tuple[Sequence[str], Making]] = {
    "sound": (tuple(CARDS), SOUND),
    "sound, 40 trials": (tuple(CARDS), replace(SOUND, num_trials=40, num_validation=100_000)),
    "sound, a tenth fails anywhere": (("failures",), replace(SOUND, failing_anywhere=0.1)),
    "nothing but chance": (("bounds", "effects", "failures"), _NO_EFFECT),
}
"""By kind, the cards that must not warn of it."""
FAULTS: Mapping[str, tuple[str, Making]] = {
    "the optimum lies outside a range": ("bounds", replace(SOUND, beyond=0.1)),
    "the leaders are equal": ("noise", replace(SOUND, lead=0.0)),
    "early reports say nothing": ("stopping", replace(SOUND, crossing=True)),
    "a parameter has no effect": ("effects", replace(SOUND, idle=True)),
    "a corner of two parameters fails": ("failures", replace(SOUND, failing=0.9)),
    "a quarter of the trials fails": ("failures", replace(SOUND, failing_anywhere=0.25)),
    "four of five steps are clipped": ("clipping", replace(SOUND, clipped=0.8)),
    "no step is clipped": ("clipping", replace(SOUND, clipped=0.0)),
    "curves still rise at the end": ("budget", replace(SOUND, constant=40.0)),
    "curves fall after a third": ("budget", replace(SOUND, constant=2.0, overfits=9)),
    "200 samples decide": ("validation", replace(SOUND, num_validation=200, spread=0.05)),
}
"""By what is wrong, the card that must warn of it."""


def verdicts(
    making: Making, cards: Sequence[str], num_sweeps: int, *, by_default: bool = False
) -> dict[str, list[Verdict]]:
    """Return the verdicts of some cards on sweeps that are made alike."""
    found: dict[str, list[Verdict]] = {card: [] for card in cards}
    for seed in range(num_sweeps):
        data = make_sweep(making, np.random.default_rng((37, seed)), by_default=by_default)
        for card in cards:
            found[card].append(CARDS[card](data).verdict)
    return found


def make_sweep(
    making: Making, random: np.random.Generator, *, by_default: bool = False
) -> AuditData:
    """Return one sweep as the audit looks at it.

    Args:
        making: What it is made of.
        random: Draws it.
        by_default: Whether the default sampler and the default stopping rule make it; else it is a
            random search.
    """
    space, trainings = _space(making), _Trainings(making, random)
    made = (_searched if by_default else _drawn)(making, space, trainings, random)
    data = AuditData(
        trials=made,
        space=space,
        metric="val/accuracy",
        minimize=False,
        reports=_REPORTS,
        rungs=_RUNGS,
        reduction=_REDUCTION,
        num_validation=making.num_validation,
    )
    return replace(data, repeats=_repeats(making, random, data))


class _Trainings:
    """What trainings of a sweep report, and which of them fail."""

    def __init__(self, making: Making, random: np.random.Generator) -> None:
        self._making, self._random = making, random
        self._optimum = random.uniform(0.3, 0.7, making.num_parameters)
        if making.beyond is not None:
            self._optimum[0] = 1.0 + making.beyond

    def curves(self, places: Array) -> Array:
        """Return the accuracy after each report: a row for each place in the unit cube."""
        making, random, at = self._making, self._random, np.arange(1, _REPORTS + 1)
        truth = self._truth(places)
        early = self._truth(random.random(places.shape)) if making.crossing else truth
        done = 1.0 - np.exp(-at / making.constant)
        curves = np.where(at <= _RUNGS[-1], early[:, None], truth[:, None]) - 0.4 * (1.0 - done)
        if making.overfits is not None:
            curves = curves - 0.004 * np.maximum(at - making.overfits, 0)
        # A trial meets the same validation samples after each report, so that most of it stays.
        noise = math.sqrt(0.85 * 0.15 / making.num_validation)
        stays = random.normal(0.0, math.sqrt(0.8) * noise, (len(truth), 1))
        changes = random.normal(0.0, math.sqrt(0.2) * noise, curves.shape)
        return np.clip(curves + stays + changes, 0.0, 1.0)

    def failures(self, places: Array) -> NDArray[np.bool_]:
        """Return which trainings fail."""
        chance = np.full(len(places), self._making.failing_anywhere)
        if self._making.failing:
            chance[(places[:, 0] > 0.75) & (places[:, 1] < 0.5)] = self._making.failing
        return np.asarray(self._random.random(len(places)) < chance)

    def _truth(self, places: Array) -> Array:
        """Return the accuracy of each trial at its end, without noise."""
        distances = (places[:, : self._making.num_parameters] - self._optimum) ** 2
        return np.asarray(0.85 - self._making.spread * distances.mean(axis=1) * 2.0)


def _drawn(
    making: Making,
    space: Mapping[str, Distribution],
    trainings: _Trainings,
    random: np.random.Generator,
) -> list[AuditTrial]:
    """Return the trials of a random search, stopped by a rule that compares them at rungs."""
    places = random.random((making.num_trials, len(space)))
    fails, curves = trainings.failures(places), trainings.curves(places)
    exempt = np.arange(making.num_trials) % 5 == 0
    lengths = _lengths(curves, exempt, fails, random)
    return [
        _trial(
            number,
            {key: one.at(places[number, i]) for i, (key, one) in enumerate(space.items())},
            curves[number, : lengths[number]],
            fails=bool(fails[number]),
            exempt=bool(exempt[number]),
            clipping=_clipping(making, random),
        )
        for number in range(making.num_trials)
    ]


def _searched(
    making: Making,
    space: Mapping[str, Distribution],
    trainings: _Trainings,
    random: np.random.Generator,
) -> list[AuditTrial]:
    """Return the trials of the sampler and the stopping rule that a sweep has by default."""
    spec = SweepSpec.model_validate(
        {
            "name": "audited",
            "task": {"name": "invented:run"},
            "metric": METRIC,
            "mode": "min",
            "trials": making.num_trials,
            "concurrency": _AT_ONCE,
            "resources": {"cpu": 0.5, "gpu": 0},
            "seed": int(random.integers(2**31)),
            "budget": {"epochs": _REPORTS},
            "early_stopping": {"exempt": 0.2},
            "space": {key: one.to_data() for key, one in space.items()},
        }
    )
    side, curves, failed = Ours(spec), defaultdict[int, list[float]](list), set[int]()

    def train(number: int, params: Mapping[str, Any]) -> Iterator[float]:
        place = np.array([[one.position(params[key]) for key, one in space.items()]])
        fails, end = bool(trainings.failures(place)[0]), random.integers(0, 3)
        for report, accuracy in enumerate(trainings.curves(place)[0]):
            if fails and report == end:
                failed.add(number)
                yield math.nan
            curves[number].append(float(accuracy))
            yield -curves[number][-1]

    for _ in drive(side, train, epochs=_REPORTS, at_once=_AT_ONCE):
        pass
    return [
        _trial(
            one.number,
            one.params,
            np.array(curves[one.number]),
            fails=one.number in failed,
            exempt=one.exempt,
            clipping=_clipping(making, random),
        )
        for one in side.trials()
    ]


def _trial(
    number: int,
    params: Mapping[str, Any],
    curve: Array,
    *,
    fails: bool,
    exempt: bool,
    clipping: Clipping,
) -> AuditTrial:
    whole = len(curve) == _REPORTS
    return AuditTrial(
        number,
        "failed" if fails else "complete" if whole else "pruned",
        params,
        None if fails else float(curve.max()),
        {at: float(value) for at, value in enumerate(curve, start=1)},
        counts=not fails,
        stopped_early=not fails and not whole,
        exempt=exempt,
        clipping=clipping,
    )


def _space(making: Making) -> dict[str, Distribution]:
    kinds: tuple[Callable[[], Distribution], ...] = (
        lambda: LogUniform(1e-4, 1.0),
        lambda: Uniform(0.0, 0.5),
    )
    names = [f"task.x{index}" for index in range(making.num_parameters + making.idle)]
    return {name: kinds[index % 2]() for index, name in enumerate(names)}


def _lengths(
    curves: Array, exempt: NDArray[np.bool_], fails: NDArray[np.bool_], random: np.random.Generator
) -> list[int]:
    """Return how many reports each trial made, under a rule that compares trials at rungs."""
    lengths = np.full(len(curves), _REPORTS)
    lengths[fails] = random.integers(0, 3, int(fails.sum()))
    for rung in _RUNGS:
        there = np.flatnonzero(lengths >= rung)
        reports = curves[there, rung - 1]
        kept = max(1, math.ceil(len(there) / _REDUCTION))
        bar = np.sort(reports)[-kept]
        lengths[there[(reports < bar) & ~exempt[there]]] = rung
    return [int(length) for length in lengths]


def _clipping(making: Making, random: np.random.Generator) -> Clipping:
    share = float(np.clip(making.clipped * random.uniform(0.5, 1.5), 0.0, 1.0))
    return Clipping(1.0, share, 500, 0.9)


def _repeats(
    making: Making, random: np.random.Generator, data: AuditData
) -> dict[int, dict[int, float]]:
    """Return the leaders' values under five common seeds, the first leader ahead of the others."""
    noise = 0.005
    shared = random.normal(0.0, 2 * noise, 5)
    return {
        trial.number: {
            seed: 0.8
            + noise * making.lead * (place == 0)
            + float(shared[seed] + random.normal(0.0, noise))
            for seed in range(5)
        }
        for place, trial in enumerate(data.ranked[:5])
    }
