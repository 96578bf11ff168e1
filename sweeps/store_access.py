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
from tracking.address import CREDENTIALS
from tracking.store_origin import is_file
from tracking.trusted_stores import StoreUntrusted, add_trusted, check_trusted
from trainable.storage.private_directories import is_ours

_STORES = (("tracking", "uri"), ("storage", "checkpoints"))


def check_store(directory: Path, uri: str) -> None:
    """Check that a sweep's store may be connected to.

    Args:
        directory: The sweep's directory; it need not exist yet.
        uri: The store's address.

    Raises:
        StoreUntrusted: The user does not trust the store, or another user owns the sweep.
    """
    if is_file(uri):
        return
    check_owner(directory)
    check_trusted(uri)


def check_owner(directory: Path) -> None:
    """Check that a sweep may have this process connect to anything outside of its directory.

    Args:
        directory: The sweep's directory; it need not exist yet.

    Raises:
        StoreUntrusted: Another user owns the sweep.
    """
    for path in (directory, directory / "sweep.yaml"):
        try:
            found = os.stat(path)
        except FileNotFoundError:
            continue  # a new sweep
        if not is_ours(found.st_uid):
            raise StoreUntrusted(
                f"{path} belongs to user {found.st_uid}, and names a store outside of its "
                "directory; credentials are never sent for a sweep of another user, and no "
                "connection was made; run the command as that user, or run a sweep of your own"
            )


def check_sampler_state(paths: SweepPaths, spec: SweepSpec) -> None:
    """Check that a resume loads no pickle of another user, because loading a pickle runs code.

    Optuna stores the state of the sampler `cmaes` as a pickle.

    Raises:
        StoreUntrusted: The sweep's directory or its ledger belongs to another user.
    """
    if spec.search.sampler != "cmaes":
        return
    for path in (paths.directory, paths.ledger):
        if path.exists() and not is_ours(owner := os.stat(path).st_uid):
            raise StoreUntrusted(
                f"{path} belongs to user {owner}; the sampler cmaes stores its state there as a "
                "pickle, and loading it could run that user's code; resume as that user, or run a "
                "sweep of your own"
            )


def reach_tracking(paths: SweepPaths, spec: SweepSpec) -> tuple[str, Path | None]:
    """Return a sweep's tracking URI and artifact directory, checked. See `paths.tracking_place`.

    Raises:
        StoreUntrusted: See `check_store`.
    """
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

    Raises:
        StoreUntrusted: See `check_store`.
    """
    for path in _STORES:
        uri = getattr(getattr(spec, path[0]), path[1])
        if uri is not None and document.position(path).order != AFTER_THE_FILE:
            check_store(paths.directory, uri)


def remember_named(spec: SweepSpec, document: Document, file: Path | None = None) -> None:
    """Trust the stores that this user names by options, or in a file that only the user can write.

    Args:
        spec: The spec with the stores.
        document: Knows where each key of the spec was written.
        file: The spec file that the user runs; None: a resumed sweep, whose own file is not
            evidence of the user's trust.

    Raises:
        StoreUntrusted: The list of trusted stores cannot be written.
    """
    is_own = file is not None and _is_own(file)
    for path in _STORES:
        uri = getattr(getattr(spec, path[0]), path[1])
        if uri is not None and (is_own or document.position(path).order == AFTER_THE_FILE):
            add_trusted(uri)


def _is_own(file: Path) -> bool:
    found = os.stat(file)
    return is_ours(found.st_uid) and not found.st_mode & 0o002
