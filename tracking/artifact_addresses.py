"""Keep the artifact addresses of a database below the directory that has its artifacts.

MLflow stores absolute addresses. Those of a root that was moved or copied name the place where the
root was before: what is written there would create that place again, or change the original. What
must not live here: which databases a sweep may use, and other addresses than those of files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from tracking.address import file_path, is_file
from tracking.mlflow_compat import ARTIFACT_ADDRESSES, EXPERIMENT_ADDRESSES_QUERY
from tracking.trusted_stores import StoreUntrusted, is_trusted_directory

_SECONDS = 30.0
"""How long another process may hold the database."""


class ArtifactsElsewhere(StoreUntrusted):
    """Artifacts would be written outside of their directory, and the user has not agreed."""


def is_outside(address: str, root: Path) -> bool:
    """Return whether an address names files that are not below a directory; links are followed."""
    return is_file(address) and not is_below(file_path(address), root)


def check_inside(address: str, root: Path, name: str = "") -> None:
    """Check that an artifact may be written to an address."""
    path = file_path(address)
    target = None if path is None else Path(os.path.realpath(path / name))
    if not is_file(address) or is_below(target, root):
        return
    if target is not None and is_trusted_directory(target):
        return
    leads = "" if target in (None, path) else f", which leads to {target}"
    remedy = "" if target is None else f", or, if sweeps may write there: {trust_command(target)}"
    raise ArtifactsElsewhere(
        f"MLflow has {address} as the address of artifacts{leads}: that is outside of {root}, and "
        "may belong to a root of which this one is a copy; nothing was written there; move the "
        f"files below {root} and correct the address in the database{remedy}"
    )


def trust_command(target: Path) -> str:
    """Return the command by which the user lets sweeps write to a directory outside."""
    return shlex.join(("sweep", "doctor", "--trust", target.as_uri()))


def former_addresses(store: Path, root: Path) -> dict[str, str]:
    """Return the addresses of experiments whose artifacts came to a directory with their database.

    An experiment at `OLD/mlartifacts/NAME` is one of `root`, `NEW/mlartifacts`, if its files are
    not at the old place alone.
    """
    if not store.exists():
        return {}
    found = {}
    with _opened(store, "ro") as db:
        for (address,) in db.execute(EXPERIMENT_ADDRESSES_QUERY):
            path = file_path(address or "")
            if path is None or path.parent.name != root.name or not is_outside(address, root):
                continue
            now = root / path.name
            if now.exists() or not path.exists():
                found[address] = now.as_uri() if address.startswith("file:") else str(now)
    return found


def correct_addresses(store: Path, former: Mapping[str, str]) -> None:
    """Replace addresses of experiments, and of all that lies below them."""
    with _opened(store, "rw") as db, db:
        for before, now in former.items():
            for table, column in ARTIFACT_ADDRESSES:
                db.execute(
                    f"UPDATE {table} SET {column} = :now || substr({column}, length(:before) + 1)"
                    f" WHERE {column} = :before"
                    f" OR substr({column}, 1, length(:before) + 1) = :before || '/'",
                    {"before": before, "now": now},
                )


def _opened(store: Path, mode: str) -> contextlib.closing[sqlite3.Connection]:
    address = f"{store.absolute().as_uri()}?mode={mode}"
    return contextlib.closing(sqlite3.connect(address, uri=True, timeout=_SECONDS))


def is_below(path: Path | None, root: Path) -> bool:
    """Return whether a path is a directory, or below it, after all links are followed."""
    real = os.path.realpath(root)
    return path is not None and Path(os.path.realpath(path)).is_relative_to(real)
