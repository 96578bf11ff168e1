"""Copy a sweep's trials into an Optuna study in memory.

What must not live here: figures (`report_figures`).
"""

from __future__ import annotations

import optuna

from sweeps.ledger.ledger import Ledger
from sweeps.results.sweep_status import SweepStatus


def copy_study(view: SweepStatus) -> optuna.Study:
    """Return a study in memory with the sweep's trials, under the sweep's name.

    Raises:
        LedgerError: The ledger cannot be read.
    """
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would announce the study
    try:
        study = optuna.create_study(
            study_name=view.paths.name,
            directions=["minimize" if low else "maximize" for low in view.ledger.minimizes],
        )
    finally:
        optuna.logging.set_verbosity(level)
    study.add_trials(Ledger.open(view.ledger_location).frozen_trials())
    return study
