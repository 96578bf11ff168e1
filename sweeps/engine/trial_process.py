"""A trial as a Ray actor of a sweep: `TuneTrial`, with MLflow's fluent API redirected to its run.

What must not live here: training (`trainable`), and how MLflow is redirected (`fluent_mlflow`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import tune

from sweeps.engine import fluent_mlflow, fork_server
from trainable.adapters.ray import TuneTrial
from trainable.adapters.ray_ranks import RankProcess


class SweepRank(RankProcess):
    """A rank whose calls of `mlflow.log_metric` and the like do nothing."""

    template_command = staticmethod(fork_server.template_command)
    before_trial = f"{fluent_mlflow.__name__}:log_nothing"


def group_of(
    bundle: Mapping[str, float], strategy: str, suggestion: Mapping[str, Any]
) -> tune.PlacementGroupFactory:
    """Return the resources of a trial for Tune, which places them as one group."""
    # Here and not in the driver, because Tune has it with the class: workers import it.
    workers = suggestion["workers"]
    return tune.PlacementGroupFactory(
        [dict(bundle) for _ in range(workers)], strategy=strategy if workers > 1 else "PACK"
    )


class SweepTrial(TuneTrial):
    """A trial whose calls of `mlflow.log_metric` and the like log into the trial's own run."""

    rank_process = SweepRank
    template_command = staticmethod(fork_server.template_command)
    before_trial = f"{fluent_mlflow.__name__}:log_into_run"
