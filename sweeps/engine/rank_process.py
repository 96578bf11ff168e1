"""A further rank of a trial as a Ray actor of a sweep: MLflow's fluent API logs nothing there.

What must not live here: training (`trainable`), how MLflow is redirected (`fluent_mlflow`), and an
import of Ray Tune, which these actors do not need.
"""

from __future__ import annotations

from sweeps.engine import fluent_mlflow, fork_server
from trainable.ray_ranks import RankProcess


class SweepRank(RankProcess):
    """A rank whose calls of `mlflow.log_metric` and the like do nothing."""

    template_command = staticmethod(fork_server.template_command)
    before_trial = f"{fluent_mlflow.__name__}:log_nothing"
