"""Redirect MLflow's fluent API in the process of a trial, or of a further rank of one.

The first rank alone records. What must not live here: how MLflow is redirected (`tracking`), and
an import of Ray, which these processes do not need.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.engine.process_cleanup import TOKEN_VARIABLE, scratch_directory
from tracking.trial_redirect import redirect
from trainable.metrics_file import ARTIFACTS


def log_into_run() -> None:
    """Make the fluent API log into the run that is open in this process."""
    redirect(RunTaker())


def log_nothing() -> None:
    """Make the fluent API log nothing."""
    redirect(RunIgnorer())


class RunTaker:
    """Logs the calls of MLflow's fluent API into the run that is open in this process."""

    def metrics(self, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Log metric values, each with its own step."""
        for key, value, step, timestamp_ms in points:
            self._log().add_row(key, value, step, timestamp_ms)

    def params(self, params: Mapping[str, str]) -> None:
        """Log parameters."""
        self._log().set_values("params", params)

    def tags(self, tags: Mapping[str, str]) -> None:
        """Log tags."""
        self._log().set_values("tags", tags)

    def directory(self) -> Path | None:
        """Return the directory for artifacts; None while no run is open."""
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


class RunIgnorer:
    """Ignores the calls of MLflow's fluent API."""

    _directory: Path | None = None

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
        if self._directory is None:
            token = os.environ.get(TOKEN_VARIABLE)
            scratch = scratch_directory(token) if token else None
            parent = scratch if scratch is not None and scratch.is_dir() else None
            self._directory = Path(tempfile.mkdtemp(prefix="gradsweep-rank-", dir=parent))
        return self._directory
