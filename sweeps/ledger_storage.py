"""Optuna's relational storage, for a search space that may be edited between two drivers.

What must not live here: opening a ledger, and what is stored (`ledger`).
"""

from __future__ import annotations

from typing import Any

import optuna
from optuna.distributions import BaseDistribution


class EditableStorage(optuna.storages.RDBStorage):
    """Stores each parameter with the distribution that it was drawn from, whatever the first trial
    of the study drew it from.

    Optuna refuses a parameter that has changed its kind or its choices, because samplers would
    trip over it. Here samplers are never shown the stored trials as they are (see `proposals`).
    There is no documented entrance for this; a test edits a space through a real ledger.
    """

    def _set_trial_param_without_commit(
        self,
        session: Any,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
        previous_distribution: BaseDistribution | None = None,
    ) -> None:
        del previous_distribution
        super()._set_trial_param_without_commit(
            session,
            trial_id,
            param_name,
            param_value_internal,
            distribution,
            previous_distribution=distribution,
        )
