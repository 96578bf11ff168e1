"""A dry run of the search before a sweep exists: a few suggestions without training.

Samplers check many of their arguments only after trials have ended. Without a dry run, a wrong
argument would stop a sweep after its first trials. What must not live here: how a suggestion is
made (`suggest`), and how samplers are built (`samplers`).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from sweeps.errors import Issue, UserError
from sweeps.ledger.attributes import REPORT
from sweeps.ledger.warm_start import PriorTrial, WarmStart
from sweeps.optuna_compat.storage import set_trial_id
from sweeps.search.samplers import SamplerRejected, check_sampler
from sweeps.search.suggest import Suggester
from sweeps.spec.sections import SAMPLERS
from sweeps.spec.spec import SweepSpec
from sweeps.spec.yaml_scalars import write_flow

_STARTUP = 3  # random trials before a named sampler learns, if the spec has more
_LEARNT = 3  # suggestions after them
_WARM = 12  # trials of a warm start, more than any sampler needs before it learns from them


def dry_run(spec: SweepSpec, warm: WarmStart | None = None) -> None:
    """Build the sampler of a sweep and let it suggest before and after trials have ended."""
    if (missing := spec.early_stopping.rule.missing_package()) is not None:
        raise UserError([Issue(("early_stopping", "scheduler"), missing)])
    check_sampler(spec)
    search = spec.search
    is_named = search.sampler in SAMPLERS
    if is_named:  # a sampler of the user may depend on the number, and on its trial attributes
        few = min(search.startup_trials, _STARTUP)
        search = search.model_copy(update={"startup_trials": few})
    search = search.model_copy(update={"try_first": []})
    history = _InventedHistory(spec, warm)
    suggester = Suggester(spec.model_copy(update={"search": search}), history)
    space = spec.search_space()
    distributions = {key: one.to_optuna() for key, one in space.distributions.items()}
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it logs each new study
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a sampler that is only tried
            for number in range(min(max(search.startup_trials, 1) + _LEARNT, spec.num_trials)):
                if is_named and 0 < number < search.startup_trials:
                    history.end(space.draw(number) or {}, distributions, {})
                else:
                    suggestion = suggester.propose(number)
                    history.end(
                        suggestion.params, suggestion.distributions, suggestion.system_attrs
                    )
    except SamplerRejected:
        raise
    except Exception as error:  # a sampler of the user may raise anything
        given = f" with {write_flow(search.arguments)}" if search.arguments else ""
        raise SamplerRejected(
            f"{search.sampler}{given} fails at trial {number} of a dry run "
            f"({type(error).__name__}: {error}); a sampler suggests a point whatever has ended; "
            f"change {'search.arguments' if given else 'the space'}, or choose another sampler",
            *(("arguments",) if given else ()),
        ) from error


class _InventedHistory:
    """Trials without training in the form of a ledger, after those of a warm start."""

    def __init__(self, spec: SweepSpec, warm: WarmStart | None) -> None:
        self._epochs = spec.budget.reports
        self._random = random.Random(0)
        if warm is None:
            points = map(spec.search_space().draw, range(_WARM if spec.search.warm_start else 0))
            taken = [
                PriorTrial(one or {}, self._random.random(), self._epochs, True) for one in points
            ]
        else:
            taken = sorted(warm.trials, key=lambda one: not one.complete)
        self.earlier_budgets: tuple[int, ...] = ()
        self.warm_start = WarmStart(taken[:_WARM])  # each one costs the sampler time
        self._trials: list[FrozenTrial] = []
        self.directions = [
            StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE
            for mode in spec.modes
        ]
        self.minimize = spec.modes[0] == "min"

    def frozen_trials(self) -> list[FrozenTrial]:
        """Return all trials that have ended so far."""
        return self._trials

    def end(
        self,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        system_attrs: Mapping[str, Any],
    ) -> None:
        """Add a complete trial with random values."""
        values = [self._random.random() for _ in self.directions]
        several = len(values) > 1
        trial = optuna.trial.create_trial(
            values=values,
            params=dict(params),
            distributions={key: distributions[key] for key in params},
            intermediate_values={} if several else {self._epochs: values[0]},
            user_attrs={f"{REPORT}{self._epochs}": values} if several else {},
            system_attrs=dict(system_attrs),
        )
        trial.number = len(self._trials)
        set_trial_id(trial, trial.number + 1)
        self._trials.append(trial)
