"""Check that a store may be connected to before credentials are sent to it.

The user must trust the store, and own the sweep that names it. All code that connects to a
tracking store or an object store calls these checks first. What must not live
here: the list of trusted stores (`tracking.trusted_stores`), and connections.
"""

from __future__ import annotations

import os
from pathlib import Path

from sweeps.paths import SweepPaths, tracking_place
from sweeps.spec.document import AFTER_THE_FILE, Document
from sweeps.spec.spec import SweepSpec
from tracking.address import CREDENTIALS, is_file
from tracking.trusted_stores import StoreUntrusted, add_trusted, check_trusted
from trainable.storage.private_directories import is_ours

_STORES = (("tracking", "uri"), ("storage", "checkpoints"))


def check_store(directory: Path, uri: str) -> None:
    """Check that a sweep's store may be connected to."""
    check_owner(directory)
    if not is_file(uri):
        check_trusted(uri)


def check_owner(directory: Path) -> None:
    """Check that a sweep is not another user's, before its code runs or its stores are written to.

    Commands that only look at a sweep need no check. Optuna stores the state of the sampler
    `cmaes` as a pickle in the ledger, and a resume loads it.
    """
    for path in (directory, directory / "sweep.yaml", directory / "ledger.db"):
        try:
            owner = os.stat(path).st_uid
        except (FileNotFoundError, NotADirectoryError):
            continue  # a new sweep
        if not is_ours(owner):
            raise StoreUntrusted(
                f"{path} belongs to user {owner}: the sweep of another user can be looked at, but "
                "its code is not run, and nothing is sent to the stores that it names; run the "
                "command as that user; or, if you trust that user, work on a copy of the root, "
                "which is yours: cp -r"
            )


def reach_tracking(paths: SweepPaths, spec: SweepSpec) -> tuple[str, Path | None]:
    """Return a sweep's tracking URI and artifact directory, checked (`paths.tracking_place`)."""
    address, artifacts = tracking_place(spec.tracking.uri, paths.root)
    check_store(paths.directory, address)
    return address, artifacts


def withheld_variables(spec: SweepSpec) -> tuple[str, ...]:
    """Return the environment variables with credentials, which no trial receives."""
    webhook = spec.notify.variable
    return CREDENTIALS if webhook is None else (*CREDENTIALS, webhook)


def check_stores(paths: SweepPaths, spec: SweepSpec, document: Document) -> None:
    """Check the stores of a spec that another sweep's file names, before a copy is written.

    Who runs the copy trusts what it names; see `remember_named`. Stores that the user names by
    options need no check.
    """
    for path in _STORES:
        uri = getattr(getattr(spec, path[0]), path[1])
        if uri is not None and document.position(path).order != AFTER_THE_FILE:
            check_store(paths.directory, uri)


def remember_named(spec: SweepSpec, document: Document, file: Path | None = None) -> None:
    """Trust the stores that this user names by options, or in a file that only the user writes."""
    is_own = file is not None and _is_own(file)
    for path in _STORES:
        uri = getattr(getattr(spec, path[0]), path[1])
        if uri is not None and (is_own or document.position(path).order == AFTER_THE_FILE):
            add_trusted(uri)


def _is_own(file: Path) -> bool:
    found = os.stat(file)
    return is_ours(found.st_uid) and not found.st_mode & 0o002
