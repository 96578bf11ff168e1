"""The trackers, and the choice of one for an address; MLflow's is the only one today.

A new tracker needs a class and a line in `TRACKERS`. What must not live here: the calls of
MLflow's client (`mlflow_server`), and how a store is checked and read (`probe`, `store_reader`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from tracking import artifact_addresses, probe, store_reader
from tracking.address import file_path, is_supported, sqlite_file, store_identity
from tracking.delivery import TrackingServer
from tracking.tracker import StoredRun, StoreReader, Tracker


class MlflowTracker(Tracker):
    """Records a sweep as one MLflow run, and each trial as one child of it."""

    name = "MLflow"

    @classmethod
    def handles(cls, uri: str) -> bool:
        """Return whether MLflow, or a plugin of it, has a store for such an address."""
        return is_supported(uri)

    def open_server(self, experiment: str, sweep_id: str) -> TrackingServer:
        """Import MLflow, which takes seconds, and connect."""
        from tracking.mlflow_server import MlflowServer

        return MlflowServer(self.uri, self.artifact_root, experiment, sweep_id)

    def check_address(self) -> None:
        """Check that MLflow can parse the address."""
        probe.check_address(self.uri)

    def probe(self, *, known: bool = False, thorough: bool = False) -> None:
        """Ask a server, or open a database and compare its tables with this MLflow."""
        probe.probe(self.uri, known=known, thorough=thorough)

    def identity(self) -> str:
        """Return the address without the parts that may differ for the same store."""
        return store_identity(self.uri)

    def has_lost(self, run_ids: list[str]) -> bool:
        """Look into the file of a store; return False for a server."""
        return probe.is_gone(self.uri, run_ids)

    def reader(self, experiment: str, experiment_id: str | None) -> StoreReader:
        """Read a database by SQL, and a server through MLflow's client."""
        return store_reader.open_reader(self.uri, experiment, experiment_id)

    def read_runs(
        self,
        experiment: str,
        experiment_id: str | None,
        sweep_id: str,
        environment: Mapping[str, str],
    ) -> list[StoredRun]:
        """Read the runs of a sweep; a child process imports MLflow where it is needed."""
        return store_reader.read_runs(self.uri, experiment, experiment_id, sweep_id, environment)

    def correct_addresses(self, *, dry_run: bool = False) -> list[Path]:
        """Correct them in the file of a store; a database elsewhere may serve other roots, too."""
        former, store = self._former_addresses(), sqlite_file(self.uri)
        if former and store is not None and not dry_run:
            try:
                artifact_addresses.correct_addresses(store, former)
            except sqlite3.Error:  # each upload is checked, and `probe` says what is wrong
                return []
        paths = (file_path(before) for before in former)
        return sorted({path.parent for path in paths if path is not None})

    def _former_addresses(self) -> dict[str, str]:
        store, artifacts = sqlite_file(self.uri), self.artifact_root
        if store is None or artifacts is None:
            return {}
        if not artifact_addresses.is_below(store, artifacts.parent):
            return {}
        try:
            return artifact_addresses.former_addresses(store, artifacts)
        except sqlite3.Error:
            return {}

    def addresses_outside(self, experiment: str) -> list[str]:
        """Read the addresses of the experiment and of its runs in the file of a store."""
        artifacts = self.artifact_root
        if artifacts is None or sqlite_file(self.uri) is None:
            return []  # no server is asked; each upload is checked
        found = store_reader.artifact_addresses(self.uri, experiment)
        former = tuple(f"{one}/" for one in self._former_addresses())
        return sorted(
            one
            for one in found
            if artifact_addresses.is_outside(one, artifacts) and not f"{one}/".startswith(former)
        )


TRACKERS: list[type[Tracker]] = [
    MlflowTracker,
]
"""All trackers. The first that handles an address is chosen, else the last."""


def choose_tracker(uri: str, artifact_root: Path | None = None) -> Tracker:
    """Return the tracker for an address.

    If none handles the address, the last one is returned: its `check_address` raises the reason.
    `artifact_root` is the artifact location of a new experiment; None: the service chooses it.
    """
    kind = next((one for one in TRACKERS if one.handles(uri)), TRACKERS[-1])
    return kind(uri, artifact_root)
