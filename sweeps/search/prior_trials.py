"""Trials whose values are drawn around priors instead of by the sampler.

The first such trial has the priors themselves. About half of the first trials are drawn around
them; the share then falls with the number of trials, and with the evidence. Priors that turn out
wrong so cost a few trials that early stopping ends, and right ones lead the sampler, which learns
from these trials as from its own.

J. Hvarfner et al., "piBO: augmenting acquisition functions with user beliefs for Bayesian
optimization" (2022), weight an acquisition by priors, ever less with the number of trials. N.
Mallik et al., "PriorBand: practical hyperparameter optimization in the age of deep learning"
(2023), draw a share of the configurations from priors, by the evidence at rungs; that works with
every sampler, and so is what is done here.

The seed of the sweep, the number of the trial and the ledger decide everything. What must not live
here: the form of priors (`sweeps.spec.priors`), and what samplers suggest (`suggest`).
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from optuna.trial import FrozenTrial

from sweeps.ledger.attributes import PRIORS
from sweeps.ledger.ranking import is_finite
from sweeps.ledger.trials import NO_LIMITS
from sweeps.search.shown_trials import values_at
from sweeps.spec.applied_priors import OPTIMIZER, applied_priors, default_prior
from sweeps.spec.priors import Prior
from sweeps.spec.sections import Select
from sweeps.spec.space import Choice, Distribution, Powers
from sweeps.spec.spec import SweepSpec
from sweeps.statistics.feasibility import Limits
from sweeps.stopping.metric_values import losses
from trainable.seeding import derive_seed

Value = Callable[[str, Distribution, Mapping[str, Any]], Prior | None]

_SEEDS = 2.0**63
_FIRST_SHARE = 0.5
_HALVED_AFTER = 20
"""The share is half of the first one after so many trials, a third after twice as many."""
_LEAST_SHARE = 0.02
"""Below it no trial is drawn around priors."""
_WRONG, _RIGHT = 0.35, 0.5
"""Priors whose trials win no more often get no trial; from the second on, their full share."""


class PriorTrials:
    """Which trials of a sweep are drawn around priors, and with which values."""

    def __init__(self, spec: SweepSpec) -> None:
        self._seed = spec.seed
        self._use_defaults = spec.search.priors == "defaults"
        self._optimizer = spec.train.optimizer.name
        reports = spec.budget.reports
        self._comparison = Comparison(
            rungs=spec.early_stopping.rule.comparable_epochs(reports) or rungs_of(reports),
            minimizes=tuple(mode == "min" for mode in spec.modes),
            select=spec.select,
            limits=spec.limits,
        )
        found = applied_priors(spec.space, self._optimizer, with_defaults=self._use_defaults)
        keys = [key for key, _ in spec.search_space().ordered()]
        before = keys[: keys.index(OPTIMIZER)] if OPTIMIZER in keys else []
        late = any(prior.default_of is not None and prior.key in before for prior in found)
        self._first = (OPTIMIZER,) if late else ()
        data = "".join(sorted(json.dumps(prior.as_dict()) for prior in found))
        self.digest = _digest("".join((data, *self._first)))
        """Identifies the priors; a trial that is drawn around them keeps it."""
        self.any = bool(found)
        """Whether there are priors."""

    def takes(self, number: int, trials: Sequence[FrozenTrial]) -> bool:
        """Return whether a trial is drawn around priors, if there are any."""
        own = self._own(trials)
        if not own:
            return True
        share = _FIRST_SHARE * _HALVED_AFTER / (_HALVED_AFTER + number - own[0].number)
        drawn = derive_seed(self._seed, "prior", number) / _SEEDS
        if share < _LEAST_SHARE or drawn >= share:
            return False
        drawn_around = {trial.number for trial in own}
        others = [trial for trial in trials if trial.number not in drawn_around]
        wins = self._comparison.wins(own, others)
        if wins is None:  # the priors themselves come first, unless they ended and showed nothing
            return all(trial.state.is_finished() for trial in own)
        return drawn < share * min(max((wins - _WRONG) / (_RIGHT - _WRONG), 0.0), 1.0)

    def values(self, number: int, attempt: int, trials: Sequence[FrozenTrial]) -> PriorValues:
        """Return the values of a trial that is drawn around priors."""
        exact = not attempt and not self._own(trials)
        return PriorValues(
            self._prior,
            derive_seed(self._seed, "prior", number, attempt),
            exact,
            self.digest,
            self._first,
        )

    def _own(self, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
        return [trial for trial in trials if trial.user_attrs.get(PRIORS) == self.digest]

    def _prior(
        self, key: str, distribution: Distribution, point: Mapping[str, Any]
    ) -> Prior | None:
        if distribution.prior is not None or not self._use_defaults:
            return distribution.prior
        return default_prior(key, distribution, str(point.get(OPTIMIZER, self._optimizer)))


class PriorValues:
    """The values of one trial that is drawn around priors."""

    def __init__(
        self, prior: Value, seed: int, exact: bool, digest: str, first: Sequence[str]
    ) -> None:
        self._prior, self._seed, self._exact = prior, seed, exact
        self.digest, self.first = digest, first
        self.used = False
        """Whether the trial has a parameter with a prior: all such ones may be conditional."""

    def has(self, key: str, distribution: Distribution, point: Mapping[str, Any]) -> bool:
        """Return whether a parameter has a prior; see `of`."""
        return self._prior(key, distribution, point) is not None

    def of(self, key: str, distribution: Distribution, point: Mapping[str, Any]) -> Any:
        """Return the value of a parameter that has a prior."""
        prior = self._prior(key, distribution, point)
        assert prior is not None
        self.used = True
        if self._exact:
            return prior.value
        return draw(prior, distribution, random.Random(derive_seed(self._seed, key)))


def _digest(data: str) -> str:
    return hashlib.sha256(data.encode()).hexdigest()[:16]


def draw(prior: Prior, distribution: Distribution, generator: random.Random) -> Any:
    """Draw a value around a prior.

    Of a range, from a normal distribution that is cut off at its ends, on the range's own scale.
    Of a choice, another option is drawn with the probability `width`, all of them alike.
    """
    at = generator.random()
    if isinstance(distribution, Choice) and not isinstance(distribution, Powers):
        others = [option for option in distribution.options if option != prior.value]
        if at >= prior.width or not others:
            return prior.value
        return others[int(at / prior.width * len(others))]
    around = NormalDist(distribution.share(prior.value), prior.width)
    low, high = around.cdf(0.0), around.cdf(1.0)
    # A share of exactly 0 or 1 has no quantile of a normal distribution.
    share = around.inv_cdf(min(max(low + at * (high - low), 1e-12), 1 - 1e-12))
    return distribution.at(min(max(share, 0.0), math.nextafter(1.0, 0.0)))


@dataclass(frozen=True)
class Comparison:
    """Compares trials.

    Attributes:
        rungs: The epochs at which trials of different lengths are compared, ascending.
    """

    rungs: Sequence[int]
    minimizes: tuple[bool, ...]
    select: Select
    limits: Limits = NO_LIMITS

    def wins(self, own: Sequence[FrozenTrial], others: Sequence[FrozenTrial]) -> float | None:
        """Return the estimated chance that a trial is better than another one.

        None before a trial of `own` has reached a rung or failed. One more rival counts as better,
        so that there is no chance without rivals, and one more trial wins half of the time.
        """
        rivals = [one for one in map(self._losses, others) if one]
        shares = [
            sum(_points(one, other) for other in rivals) / (len(rivals) + 1)
            for one in map(self._losses, own)
            if one
        ]
        return (sum(shares) + 0.5) / (len(shares) + 1) if shares else None

    def _losses(self, trial: FrozenTrial) -> list[tuple[float, ...]]:
        """Return the losses at each rung reached; infinite ones where values are not finite."""
        found: list[tuple[float, ...]] = []
        for rung in self.rungs:
            values = values_at(trial, rung, minimize=self.minimizes[0], select=self.select)
            if values is None:
                break
            if is_finite(values):
                if self.limits:
                    values = self.limits.compared(values, self.minimizes)
                found.append(losses(values, self.minimizes))
            else:
                found.append((math.inf,) * len(self.minimizes))
        return found


def _points(one: Sequence[tuple[float, ...]], other: Sequence[tuple[float, ...]]) -> float:
    """Return 1 if a trial is better than another one, 0 if it is worse, else a half."""
    common = min(len(one), len(other)) - 1
    mine, theirs = one[common], other[common]
    if mine == theirs:
        return 0.5
    better, worse = (all(map(operator.le, *pair)) for pair in ((mine, theirs), (theirs, mine)))
    return 0.5 if better == worse else float(better)


def rungs_of(epochs: int) -> tuple[int, ...]:
    """Return where trials are compared that no rule stops: at doubling lengths, and at the end."""
    return (*(2**power for power in range(epochs.bit_length()) if 2**power < epochs), epochs)
