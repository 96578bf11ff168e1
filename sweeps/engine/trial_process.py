"""A trial as a Ray actor of this sweep: `TuneTrial`, and the plain MLflow API led to its own run.

What must not live here: training (`trainable`), and how MLflow is led (`tracking`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tracking.trial_store_compat import redirect
from trainable.metrics_file import ARTIFACTS
from trainable.ray_adapter import TuneTrial


class SweepTrial(TuneTrial):
    """A trial in whose process `mlflow.log_metric` and its like log into the trial's own run."""

    def setup(self, config: dict[str, Any]) -> None:
        """Get ready, as `TuneTrial` does."""
        redirect(RunTaker())
        super().setup(config)


class RunTaker:
    """Takes what the plain MLflow API is given, for the run that is open in this process."""

    def metrics(self, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Add values under their own steps."""
        for key, value, step, timestamp_ms in points:
            self._log().add_row(key, value, step, timestamp_ms)

    def params(self, params: Mapping[str, str]) -> None:
        """Note parameters."""
        self._log().note("params", params)

    def tags(self, tags: Mapping[str, str]) -> None:
        """Note tags."""
        self._log().note("tags", tags)

    def directory(self) -> Path | None:
        """Return where files are put."""
        from trainable.logged import current_run

        run = current_run()
        return None if run is None else run[1].absolute() / ARTIFACTS

    def _log(self) -> Any:
        from trainable.logged import current_run

        run = current_run()
        if run is None:
            raise RuntimeError(
                "the plain MLflow API was used in a trial while no run was open; a run is open "
                "from before the task is built to its end; log within that time"
            )
        return run[0]
