"""Read a sweep's runs from a tracking server through MLflow's client.

What must not live here: writing, and what `tracking.outbox_status` can read without mlflow.
"""

from __future__ import annotations

from typing import NamedTuple

from tracking.outbox import SWEEP


class RecordedRun(NamedTuple):
    """One run of a sweep."""

    trial: int | None
    """The trial's number; None for the sweep's own run."""
    run_id: str
    status: str
    """`RUNNING`, `FINISHED`, `KILLED`, `FAILED` or `SCHEDULED`."""
    tags: dict[str, str]


def runs_of_sweep(uri: str, experiment: str, sweep_id: str) -> list[RecordedRun]:
    """Return the runs of a sweep that are not deleted: the sweep's own first, then by trial.

    Args:
        uri: An MLflow tracking URI.
        experiment: The experiment's name; a missing one has no runs.

    Raises:
        MlflowException: The server does not answer or refuses the request.
    """
    from tracking.mlflow_server import connect, search, trial_of

    client = connect(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    runs: list[RecordedRun] = []
    for run in search(client, found.experiment_id, sweep_id):
        trial = trial_of(run)
        if trial is not None and run.info.lifecycle_stage == "active":
            number = None if trial == SWEEP else trial
            runs.append(RecordedRun(number, run.info.run_id, run.info.status, dict(run.data.tags)))
    return sorted(runs, key=lambda run: (run.trial is not None, run.trial or 0, run.run_id))
