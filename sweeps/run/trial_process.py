"""Prepare the present process to build or evaluate a trial's model, as a worker does.

What must not live here: training (`cli.train`), and evaluating (`evaluation`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sweeps.ledger.trials import TrialSummary
from sweeps.spec.spec import SweepSpec
from sweeps.stores import check_owner, withheld_variables
from sweeps.view.sweep_view import SweepView
from trainable.config import TrialConfig
from trainable.user_code.task_import import check_hash_order, prepared


@contextmanager
def as_a_trial(spec: SweepSpec) -> Iterator[None]:
    """Prepare this process as a trial's worker: import paths, and no credentials.

    The command that calls this is marked `imports_task` (`cli.console`).
    """
    check_hash_order()
    withheld = os.environ.keys() & withheld_variables(spec)
    kept = {name: os.environ[name] for name in withheld}
    with prepared():
        os.environ.update(dict.fromkeys(withheld, ""))
        try:
            yield
        finally:
            os.environ.update(kept)


def checked_config(view: SweepView, record: TrialSummary) -> TrialConfig:
    """Return the configuration of a trial, with which this process may run its task."""
    check_owner(view.paths.directory)
    return TrialConfig.model_validate(view.config(record))
