"""Copy a sweep's trials into Optuna studies in memory.

What must not live here: which trials and values a figure shows (`report_data`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from sweeps.ledger.ledger import Ledger
from sweeps.results.sweep_status import SweepStatus


def copy_study(view: SweepStatus) -> optuna.Study:
    """Return a study in memory with the sweep's trials, under the sweep's name.

    Raises:
        LedgerError: The ledger cannot be read.
    """
    return make_study(stored_trials(view), view.ledger.minimizes, view.paths.name)


def stored_trials(view: SweepStatus) -> list[FrozenTrial]:
    """Return the trials as Optuna has them, without those added after the view was read."""
    return Ledger.open(view.paths.ledger).frozen_trials()[: len(view.records)]


def make_study(
    trials: Iterable[FrozenTrial], minimizes: Sequence[bool], name: str | None = None
) -> optuna.Study:
    """Return a study in memory.

    Args:
        trials: Its trials.
        minimizes: For each of its values, whether lower is better.
        name: Its name; None: Optuna invents one.
    """
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would announce the study
    try:
        up, down = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
        directions = [down if low else up for low in minimizes]
        study = optuna.create_study(study_name=name, directions=directions)
    finally:
        optuna.logging.set_verbosity(level)
    study.add_trials(trials)
    return study
