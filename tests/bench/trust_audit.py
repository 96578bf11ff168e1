"""Sweeps made to be sound, or to have one fault, for the cards of the audit.

All are random searches with early stopping by rungs, with some trials exempt from it, and with the
leaders trained again under common seeds. What must not live here: what the cards look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sweeps.config.space import Distribution, LogUniform, Uniform
from sweeps.results.audit.card import Verdict
from sweeps.results.audit.data import AuditData, AuditTrial, Clipping
from sweeps.results.audit.registry import CARDS

Array = NDArray[np.float64]
_REPORTS = 27
_RUNGS = (1, 3, 9)
_REDUCTION = 3


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
        rare: Good trials are rare: the accuracy has a tail longer than the exponential one.
        confirmed: Whether the leaders were trained again under common seeds.
        seed_noise: The standard deviation over seeds of one configuration, the part that seeds
            have in common left out.
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
    rare: bool = False
    confirmed: bool = True
    seed_noise: float = 0.005


SOUND = Making()
_NO_EFFECT = replace(SOUND, spread=0.0, num_validation=1_000)
_ONE_SEED = replace(SOUND, confirmed=False)
SOUND_KINDS: Mapping[str, tuple[Sequence[str], Making]] = {
    "sound": (tuple(CARDS), SOUND),
    "sound, 40 trials": (tuple(CARDS), replace(SOUND, num_trials=40, num_validation=100_000)),
    "sound, a tenth fails anywhere": (("failures",), replace(SOUND, failing_anywhere=0.1)),
    "sound, 64 trials, one seed each": (("convergence",), replace(_ONE_SEED, num_trials=64)),
    "sound, 40 trials, one seed each": (("convergence",), replace(_ONE_SEED, num_trials=40)),
    "nothing but chance": (("bounds", "effects", "failures", "convergence"), _NO_EFFECT),
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
    "32 trials where good ones are rare": (
        "convergence",
        replace(SOUND, num_trials=32, rare=True, seed_noise=5e-4),
    ),
    "200 samples decide": ("validation", replace(SOUND, num_validation=200, spread=0.05)),
}
"""By what is wrong, the card that must warn of it."""


def verdicts(making: Making, cards: Sequence[str], num_sweeps: int) -> dict[str, list[Verdict]]:
    """Return the verdicts of some cards on sweeps that are made alike."""
    found: dict[str, list[Verdict]] = {card: [] for card in cards}
    for seed in range(num_sweeps):
        data = make_sweep(making, np.random.default_rng((37, seed)))
        for card in cards:
            found[card].append(CARDS[card](data).verdict)
    return found


def make_sweep(making: Making, random: np.random.Generator) -> AuditData:
    """Return one sweep as the audit looks at it."""
    space = _space(making)
    places = random.random((making.num_trials, len(space)))
    truth = _truth(making, random, places)
    chance = np.full(making.num_trials, making.failing_anywhere)
    if making.failing:
        chance[(places[:, 0] > 0.75) & (places[:, 1] < 0.5)] = making.failing
    fails = random.random(making.num_trials) < chance
    curves = _curves(making, random, truth)
    exempt = np.arange(making.num_trials) % 5 == 0
    lengths = _lengths(curves, exempt, fails, random)
    trials = [
        AuditTrial(
            number,
            _state(bool(fails[number]), lengths[number]),
            {key: one.at(places[number, i]) for i, (key, one) in enumerate(space.items())},
            None if fails[number] else float(curves[number, : lengths[number]].max()),
            {at + 1: float(curves[number, at]) for at in range(lengths[number])},
            counts=not fails[number],
            stopped_early=not fails[number] and lengths[number] < _REPORTS,
            exempt=bool(exempt[number]),
            clipping=_clipping(making, random),
        )
        for number in range(making.num_trials)
    ]
    data = AuditData(
        trials=trials,
        space=space,
        metric="val/accuracy",
        minimize=False,
        reports=_REPORTS,
        rungs=_RUNGS,
        reduction=_REDUCTION,
        num_validation=making.num_validation,
        random_search=True,
    )
    return replace(data, repeats=_repeats(making, random, data)) if making.confirmed else data


def _space(making: Making) -> dict[str, Distribution]:
    kinds: tuple[Callable[[], Distribution], ...] = (
        lambda: LogUniform(1e-4, 1.0),
        lambda: Uniform(0.0, 0.5),
    )
    names = [f"x{index}" for index in range(making.num_parameters + making.idle)]
    return {name: kinds[index % 2]() for index, name in enumerate(names)}


def _truth(making: Making, random: np.random.Generator, places: Array) -> Array:
    """Return the accuracy of each trial at its end, without noise."""
    if making.rare:
        return np.minimum(0.95, 0.5 + 0.05 * random.weibull(0.8, len(places)))
    optimum = random.uniform(0.3, 0.7, making.num_parameters)
    if making.beyond is not None:
        optimum[0] = 1.0 + making.beyond
    distances = (places[:, : making.num_parameters] - optimum) ** 2
    return np.asarray(0.85 - making.spread * distances.mean(axis=1) * 2.0)


def _curves(making: Making, random: np.random.Generator, truth: Array) -> Array:
    """Return the accuracy after each report: a row for each trial."""
    at = np.arange(1, _REPORTS + 1)
    done = 1.0 - np.exp(-at / making.constant)
    early = random.permutation(truth) if making.crossing else truth
    curves = np.where(at <= _RUNGS[-1], early[:, None], truth[:, None]) - 0.4 * (1.0 - done)
    if making.overfits is not None:
        late = np.maximum(at - making.overfits, 0)
        curves = curves - 0.004 * late
    # A trial meets the same validation samples after each report, so that most of it stays.
    noise = math.sqrt(0.85 * 0.15 / making.num_validation)
    stays = random.normal(0.0, math.sqrt(0.8) * noise, (len(truth), 1))
    changes = random.normal(0.0, math.sqrt(0.2) * noise, curves.shape)
    return np.clip(curves + stays + changes, 0.0, 1.0)


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


def _state(fails: bool, length: int) -> str:
    return "failed" if fails else "complete" if length == _REPORTS else "pruned"


def _clipping(making: Making, random: np.random.Generator) -> Clipping:
    share = float(np.clip(making.clipped * random.uniform(0.5, 1.5), 0.0, 1.0))
    return Clipping(1.0, share, 500, 0.9)


def _repeats(
    making: Making, random: np.random.Generator, data: AuditData
) -> dict[int, dict[int, float]]:
    """Return the leaders' values under five common seeds, the first leader ahead of the others."""
    noise = making.seed_noise
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
