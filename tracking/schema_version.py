"""The schema version of a tracking database, read without importing MLflow, which takes seconds.

The version is the last of the migrations in MLflow's package; MLflow refuses a store with another
one. What must not live here: opening a store (see `tracking.probe`), and migrating one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

REVISION_QUERY = "SELECT version_num FROM alembic_version"
EXPERIMENT_QUERY = "SELECT 1 FROM experiments WHERE name = ?"
RUN_QUERY = "SELECT 1 FROM runs WHERE run_uuid = ?"

_MIGRATIONS = Path("store", "db_migrations", "versions")
_REVISION = re.compile(r'^(down_)?revision = "(\w+)"', re.MULTILINE)


class TablesDiffer(Exception):
    """A store's schema version is not that of the installed MLflow."""

    def __init__(self, found: str, wanted: str, *, is_older: bool) -> None:
        version = metadata.version("mlflow")
        super().__init__(
            f"was created by another MLflow version: its tables have revision {found}, and MLflow "
            f"{version} needs {wanted}"
        )
        self._is_older = is_older

    def remedy(self, uri: str) -> str:
        """Return the remedy: an upgrade of the database, or another MLflow."""
        if self._is_older:
            return f"take a backup of it and run: mlflow db upgrade '{uri}'"
        return "install the MLflow version that created it"


def check_revision(row: Sequence[Any] | None) -> None:
    """Compare the result of `REVISION_QUERY` with the installed MLflow; None: there are no tables.

    Raises:
        TablesDiffer: The schema version is another one.
    """
    if row is None:
        return
    known, before = _migrations()
    (wanted,) = known - before
    if row[0] != wanted:
        raise TablesDiffer(str(row[0]), wanted, is_older=row[0] in known)


def _migrations() -> tuple[set[str], set[str]]:
    """Return the revisions of all migrations, and those that have a successor."""
    package = util.find_spec("mlflow")
    assert package is not None, "mlflow is a dependency"
    assert package.origin is not None, "mlflow is not a namespace package"
    revisions: tuple[set[str], set[str]] = set(), set()
    for file in Path(package.origin).parent.joinpath(_MIGRATIONS).glob("*.py"):
        for is_before, revision in _REVISION.findall(file.read_text(encoding="utf-8")):
            revisions[bool(is_before)].add(revision)
    return revisions
