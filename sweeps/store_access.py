"""Check that a store may be connected to before credentials are sent to it.

The user must trust the store, and own the sweep that names it. All code that connects to a
tracking store or an object store calls these checks first. What must not live
here: the list of trusted stores (`tracking.trusted_stores`), and connections.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sweeps.errors import Issue, UserError
from sweeps.paths import SweepPaths, tracking_place
from sweeps.spec.document import AFTER_THE_FILE, Document
from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import flatten
from tracking.address import CREDENTIALS
from tracking.notification_delivery import NotificationDelivery
from tracking.notification_queue import NotificationQueue, Undelivered
from tracking.outbox_recorder import open_recorder
from tracking.outbox_status import read_outbox
from tracking.store_origin import is_file
from tracking.tracker import OpenTracker, TrackedSweep, Tracker
from tracking.trackers import choose_tracker
from tracking.trusted_stores import StoreUntrusted, add_trusted, check_trusted
from tracking.webhook import address_fault
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


def check_address(spec: SweepSpec) -> None:
    """Check that the tracking address of a spec names a store, without contacting it."""
    if spec.tracking.uri is not None:
        choose_tracker(spec.tracking.uri).check_address()


def find_tracker(paths: SweepPaths, spec: SweepSpec) -> Tracker:
    """Return the tracker of a sweep, to be connected to."""
    return choose_tracker(*reach_tracking(paths, spec))


def tracker_at(uri: str | None, root: Path) -> Tracker:
    """Return the tracker for an address, whether or not it may be connected to."""
    return choose_tracker(*tracking_place(uri, root))


def open_tracker(
    paths: SweepPaths,
    spec: SweepSpec,
    sweep_id: str,
    *,
    tags: Mapping[str, str],
    inherited: Mapping[str, str],
    experiment_tags: Mapping[str, str],
    announce: bool = True,
    environment: Mapping[str, str] | None = None,
) -> OpenTracker:
    """Open the recorder of a sweep and its delivery."""
    offline = environment is None
    tracker = tracker_at(spec.tracking.uri, paths.root) if offline else find_tracker(paths, spec)
    sweep = TrackedSweep(
        experiment=spec.name,
        sweep_id=sweep_id,
        outbox=paths.outbox,
        tags=tags,
        params=dict(flatten(spec.model_dump(mode="json"))),
        inherited=inherited,
        experiment_tags=experiment_tags,
    )
    return open_recorder(tracker, sweep, announce=announce, environment=environment)


def check_webhook(spec: SweepSpec) -> str | None:
    """Return the address of a sweep's webhook without contacting it; None if it has no webhook."""
    name = spec.notify.variable
    if name is None:
        return None
    without = "or turn notifications off with -s notify.webhook=null"
    address = os.environ.get(name, "")
    if not address:
        raise _refused(
            f"the variable {name} is not set; it holds the address that gets notifications; set "
            f"it in the environment, {without}"
        )
    if fault := address_fault(address):
        raise _refused(
            f"the value of {name} {fault}; notifications go to an https:// address, or to an "
            f"http:// address of this machine; correct the variable, {without}"
        )
    return address


def _refused(message: str) -> UserError:
    return UserError([Issue(("notify", "webhook"), message)])


def open_notifications(
    paths: SweepPaths, spec: SweepSpec, *, offline: bool
) -> tuple[NotificationQueue, NotificationDelivery]:
    """Open the queue of a sweep's notifications and start to deliver it."""
    address = check_webhook(spec)
    queue = NotificationQueue(paths.outbox)
    return queue, NotificationDelivery(queue, None if offline else address)


def deliver_waiting(paths: SweepPaths, spec: SweepSpec, *, seconds: float) -> Undelivered | None:
    """Deliver the notifications that a driver left behind."""
    before = read_outbox(paths.outbox).notifications
    if not before or spec.notify.variable is None:
        return None
    check_owner(paths.directory)
    try:
        address = check_webhook(spec)
    except UserError as error:
        return Undelivered(before, error.faults[0].message)
    return NotificationDelivery(NotificationQueue(paths.outbox), address).close(seconds)
