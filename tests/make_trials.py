"""Make a trial with given parameters, for tests that do not search."""

from __future__ import annotations

from collections.abc import Mapping

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler

from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.trials import TrialRecord


def ask(
    ledger: Ledger, space: Mapping[str, BaseDistribution], sampler: BaseSampler
) -> TrialRecord:
    """Add a trial with parameters that a sampler draws without a look at the others."""
    return ledger.add(proposal(space, sampler))


def proposal(space: Mapping[str, BaseDistribution], sampler: BaseSampler) -> Suggestion:
    """Draw parameters without a look at any trials."""
    trial = optuna.create_study(sampler=sampler).ask(dict(space))
    return Suggestion(trial.params, trial.distributions)
