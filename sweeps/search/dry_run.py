"""The rehearsal of a search before there is a sweep: a few trials without training.

Many an argument of a sampler is looked at only when trials have ended, and would stop a sweep by
an error after its first ones. What must not live here: what a proposal is (`proposals`), and how
samplers are built (`samplers`).
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

from sweeps.config.errors import Issue, UserError
from sweeps.config.search_validators import SAMPLERS
from sweeps.config.spec import SweepSpec
from sweeps.config.yaml_scalars import write_flow
from sweeps.ledger.warm_start import PriorTrial, WarmStart
from sweeps.search.samplers import SamplerRejected, check_sampler
from sweeps.search.suggest import Suggester

_FIRST_GENERATION = {"NSGAIISampler:generation": 0}  # where chance's points belong
_STARTUP = 3  # trials before a sampler of ours learns, where a spec has more
_LEARNT = 3  # proposals after them
_WARM = 12  # trials of a warm start, more than any sampler asks for before it learns from them


def rehearse(spec: SweepSpec, warm: WarmStart | None = None) -> None:
    """Build a sweep's sampler, and let it propose before and after trials have ended.

    Args:
        spec: The sweep.
        warm: What it is given of earlier ones; None: made up, where it names some.

    Raises:
        SamplerRefused: It cannot be built, or fails: with what is wrong, the rule and the remedy.
        Refused: A package is missing for the model of a population.
    """
    if (missing := spec.early_stopping.rule.missing_package()) is not None:
        raise UserError([Issue(("early_stopping", "scheduler"), missing)])
    check_sampler(spec)
    search = spec.search
    ours = search.sampler in SAMPLERS
    if ours:  # for one of somebody else's the number may matter, and its notes of each trial
        few = min(search.startup_trials, _STARTUP)
        search = search.model_copy(update={"startup_trials": few})
    search = search.model_copy(update={"try_first": []})
    made_up = _MadeUp(spec, warm)
    proposer = Suggester(spec.model_copy(update={"search": search}), made_up)
    space = spec.search_space()
    distributions = {key: one.to_optuna() for key, one in space.distributions.items()}
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it tells of each study
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is only tried
            for number in range(min(max(search.startup_trials, 1) + _LEARNT, spec.trials)):
                if ours and 0 < number < search.startup_trials:
                    made_up.end(space.drawn(number) or {}, distributions, _FIRST_GENERATION)
                else:
                    proposal = proposer.propose(number)
                    made_up.end(proposal.params, proposal.distributions, proposal.notes)
    except SamplerRejected:
        raise
    except Exception as error:  # whatever a sampler does with what it was given
        given = f" with {write_flow(search.arguments)}" if search.arguments else ""
        raise SamplerRejected(
            f"{search.sampler}{given} fails at trial {number} of a rehearsal "
            f"({type(error).__name__}: {error}); a sampler suggests a point whatever has ended; "
            f"change {'search.arguments' if given else 'the space'}, or choose another sampler",
            *(("arguments",) if given else ()),
        ) from error


class _MadeUp:
    """Trials that nobody trained, as a ledger has them, behind those of a warm start."""

    def __init__(self, spec: SweepSpec, warm: WarmStart | None) -> None:
        self._epochs = spec.budget.epochs
        self._random = random.Random(0)
        if warm is None:
            points = map(spec.search_space().drawn, range(_WARM if spec.search.warm_start else 0))
            taken = [
                PriorTrial(one or {}, self._random.random(), self._epochs, True) for one in points
            ]
        else:
            taken = sorted(warm.trials, key=lambda one: not one.complete)
        self.warm_start = WarmStart(taken[:_WARM])  # each costs a sampler time
        self._trials: list[FrozenTrial] = []
        self.directions = [
            StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE
            for mode in spec.modes
        ]
        self.minimize = spec.modes[0] == "min"

    def frozen_trials(self) -> list[FrozenTrial]:
        """All of them."""
        return self._trials

    def end(
        self,
        params: Mapping[str, Any],
        distributions: Mapping[str, BaseDistribution],
        notes: Mapping[str, Any],
    ) -> None:
        """Add a trial that came to its end."""
        values = [self._random.random() for _ in self.directions]
        trial = optuna.trial.create_trial(
            values=values,
            params=dict(params),
            distributions={key: distributions[key] for key in params},
            intermediate_values={self._epochs: values[0]},
            system_attrs=dict(notes),
        )
        trial.number = len(self._trials)
        trial._trial_id = trial.number + 1
        self._trials.append(trial)
