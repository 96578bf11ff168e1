"""The runs of a sweep in a tracking store, as MLflow's own client finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.entities import Run


def runs_of_sweep(uri: str, experiment: str, sweep_id: str) -> dict[int | None, Run]:
    """The runs that are not deleted, by trial, None for the sweep's own; one run per trial."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return {}
    runs = client.search_runs(
        [found.experiment_id], f"tags.`gradsweep.sweep_id` = '{sweep_id}'", max_results=1000
    )
    numbers = [run.data.tags.get("gradsweep.trial") for run in runs]
    assert len(numbers) == len(set(numbers)), "one run per trial"
    return {
        None if number is None else int(number): run
        for number, run in zip(numbers, runs, strict=True)
    }
