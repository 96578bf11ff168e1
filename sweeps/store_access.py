"""Which of the stores that a sweep names may be connected to: those that this user trusts, and
none for a sweep that another user could have written.

Whoever connects to a ledger's database, a tracking store or an object store asks here first. What
must not live here: what is trusted (`tracking.trusted_stores`), and connections.
"""

from __future__ import annotations

import os
from pathlib import Path

from sweeps.config.document import AFTER_THE_FILE, Document
from sweeps.config.spec import SweepSpec
from sweeps.path_checks import is_ours
from sweeps.paths import SweepPaths, tracking_place
from tracking.store_origin import is_file
from tracking.trusted_stores import StoreUntrusted, add_trusted, check_trusted

_STORES = (("tracking", "uri"), ("storage", "ledger"), ("storage", "checkpoints"))


def check_store(directory: Path, uri: str) -> None:
    """Make sure that a sweep's store may be connected to.

    Args:
        directory: The sweep's; it need not exist yet.
        uri: The store's address.

    Raises:
        StoreUntrusted: The user has not named the store, or the sweep belongs to another user.
    """
    if is_file(uri):
        return
    for path in (directory, directory / "sweep.yaml"):
        try:
            found = os.stat(path)
        except FileNotFoundError:
            continue  # a sweep that is about to be made
        if not is_ours(found.st_uid):
            raise StoreUntrusted(
                f"{path} belongs to user {found.st_uid}, and names a store beyond its directory: "
                "no credentials go anywhere for a sweep of another user; nothing was connected "
                "to; look at it as that user, or run a sweep of your own"
            )
    check_trusted(uri)


def check_sampler_state(paths: SweepPaths, spec: SweepSpec) -> None:
    """Make sure that resuming a sweep reads no pickle of another user: Optuna keeps the state of
    `cmaes` as one, and reading a pickle runs code.

    Raises:
        StoreUntrusted: The sweep's directory or its ledger belongs to another user.
    """
    if spec.search.sampler != "cmaes" or spec.storage.ledger is not None:
        return
    for path in (paths.directory, paths.ledger):
        if path.exists() and not is_ours(owner := os.stat(path).st_uid):
            raise StoreUntrusted(
                f"{path} belongs to user {owner}, and the sampler cmaes keeps its state there as "
                "a pickle, which runs that user's code where it is read; resume it as that "
                "user, or run a sweep of your own"
            )


def reach_tracking(paths: SweepPaths, spec: SweepSpec) -> tuple[str, Path | None]:
    """Return where a sweep is recorded, to be connected to. See `layout.tracking_place`.

    Raises:
        StoreUntrusted: See `check_store`.
    """
    address, artifacts = tracking_place(spec.tracking.uri, paths.root)
    check_store(paths.directory, address)
    return address, artifacts


def remember_named(spec: SweepSpec, document: Document, file: Path | None = None) -> None:
    """Remember the stores that this user names for a sweep: by options, or in a file that nobody
    else can have written.

    Args:
        document: Says where each key of the spec was written.
        file: What the user named to be run; None: what the sweep's own spec says is not the
            user's word.

    Raises:
        StoreUntrusted: They cannot be remembered.
    """
    is_own = file is not None and _is_own(file)
    for path in _STORES:
        uri = getattr(getattr(spec, path[0]), path[1])
        if uri is not None and (is_own or document.position(path).order == AFTER_THE_FILE):
            add_trusted(uri)


def _is_own(file: Path) -> bool:
    found = os.stat(file)
    return is_ours(found.st_uid) and not found.st_mode & 0o002
