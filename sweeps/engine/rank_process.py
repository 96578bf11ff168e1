"""A further rank of a trial as a Ray actor of a sweep: MLflow's fluent API logs nothing there.

The first rank alone records. What must not live here: training (`trainable`), how MLflow is
redirected (`tracking`), and an import of Ray Tune, which these processes do not need.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sweeps.engine.process_cleanup import TOKEN_VARIABLE, scratch_directory
from tracking.trial_redirect import redirect
from trainable.ray_ranks import RankOrder, RankProcess


class SweepRank(RankProcess):
    """A rank whose calls of `mlflow.log_metric` and the like do nothing."""

    def prepare(self, order: RankOrder, rank: int) -> tuple[str, str]:
        """Redirect MLflow's fluent API, then prepare as `RankProcess` does."""
        redirect(RunIgnorer())
        return super().prepare(order, rank)


class RunIgnorer:
    """Ignores the calls of MLflow's fluent API."""

    def metrics(self, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Ignore metric values."""

    def params(self, params: Mapping[str, str]) -> None:
        """Ignore parameters."""

    def tags(self, tags: Mapping[str, str]) -> None:
        """Ignore tags."""

    def directory(self) -> Path | None:
        """Return a directory of this process for artifacts, which nobody reads.

        It goes with the driver's temporary files; on a cluster it stays in the node's.
        """
        scratch = scratch_directory(os.environ.get(TOKEN_VARIABLE, ""))
        parent = scratch if scratch.is_dir() else Path(tempfile.gettempdir())
        path = parent / f"gradsweep-rank-{os.getpid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        return path
