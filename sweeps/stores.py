"""Which stores a sweep may connect to, and where its checkpoints, records and notifications go.

The user must trust a store, and own the sweep that names it; all code that connects to a store
calls these checks first. No other module of `sweeps` chooses a tracking service. The address of a
webhook is read from the environment each time, and stored nowhere. What must not live here: the
trusted stores (`tracking.trusted_stores`), what is recorded (`recording`), and connections.
"""

from __future__ import annotations

import logging
import os
import resource
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.errors import Issue, UserError
from sweeps.paths import RESERVED_NAMES, SweepPaths, artifact_root, tracking_place
from sweeps.spec.document import AFTER_THE_FILE, Document
from sweeps.spec.spec import SweepSpec
from tracking.address import CREDENTIALS, file_path, is_file, sqlite_file, sqlite_uri
from tracking.artifact_addresses import check_inside, is_below, trust_command
from tracking.notifications import (
    NotificationDelivery,
    NotificationQueue,
    Undelivered,
    address_fault,
)
from tracking.outbox_status import read_outbox
from tracking.tracker import StoreUnreadable, Tracker
from tracking.trackers import choose_tracker
from tracking.trusted_stores import (
    StoreUntrusted,
    add_trusted,
    check_trusted,
    is_trusted_directory,
)
from trainable.checkpoint import CheckpointStore, Generation
from trainable.store.generations import RunFiles
from trainable.store.manifest import best_first
from trainable.store.objects import files_of
from trainable.store.private_files import (
    NotPrivate,
    check_links,
    is_ours,
    private_directory,
)
from trainable.store.regular_files import probe_directory

if TYPE_CHECKING:
    from sweeps.ledger.trials import TrialSummary

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
) -> NotificationDelivery:
    """Open the queue of a sweep's notifications and start to deliver it."""
    address = check_webhook(spec)
    return NotificationDelivery(NotificationQueue(paths.outbox), None if offline else address)


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


CHECKPOINTS_KEY = ("storage", "checkpoints")
"""The key of a spec that names the storage of the checkpoints."""


class StorageMoved(ValueError):
    """A resume would change a sweep's name, or where its checkpoints are."""


def address_of(paths: SweepPaths, spec: SweepSpec, number: int) -> str | None:
    """Return the address of a trial's checkpoints, `s3://...`; None: in the trial's directory.

    Below the spec's prefix, objects have the same relative paths as files below the root.
    """
    prefix = spec.storage.checkpoints
    if prefix is None:
        return None
    return f"{prefix}/{paths.trial(number).relative_to(paths.root)}/checkpoints"


def trial_files(paths: SweepPaths, spec: SweepSpec, number: int) -> RunFiles:
    """Return the files of a trial's checkpoints."""
    address = address_of(paths, spec, number)
    if address is not None:
        check_store(paths.directory, address)
    return files_of(paths.trial(number), address)


def trial_store(paths: SweepPaths, spec: SweepSpec, number: int) -> CheckpointStore:
    """Return a trial's checkpoints, for reading."""
    return CheckpointStore(paths.trial(number), files=trial_files(paths, spec, number))


def best_generation(paths: SweepPaths, spec: SweepSpec, record: TrialSummary) -> Generation | str:
    """Return the checkpoint of a trial's value, checked; a sentence if it is missing."""
    if spec.is_of_script:
        return "the function of a script saves no checkpoints; it keeps what it trains itself"
    store = trial_store(paths, spec, record.number)
    if spec.select == "final":
        return _last_generation(store, record)
    found = store.best()
    if found is None:
        where = trial_files(paths, spec, record.number).address("")
        return f"there is no valid checkpoint with a value at {where}"
    if is_of_best_value(found, spec, record):
        return found
    return (
        f"the checkpoint of trial {record.number}'s best value, {record.own_value!r}, is missing; "
        f"the best remaining one has {found.value!r} and is at {found.address}"
    )


def lost_weights(
    paths: SweepPaths, spec: SweepSpec, records: Sequence[TrialSummary]
) -> str | None:
    """Return why none of some trials has weights of its value to export.

    None if one has, or if they are in an object store, which is not asked here.
    """
    why = None
    for record in records:
        found = _lost(paths, spec, record)
        if found is None:
            return None
        why = why or found
    return why


def _lost(paths: SweepPaths, spec: SweepSpec, record: TrialSummary) -> str | None:
    if record.lacks_model:
        return (
            f"the state that trial {record.number} saved has no key 'model'; weights are exported "
            "from there; yield {'model': model.state_dict(), ...}"
        )
    if spec.storage.checkpoints is not None:
        return None
    found = best_generation(paths, spec, record)
    return found if isinstance(found, str) else None


def saved_generation(
    saved: Sequence[Generation], spec: SweepSpec, record: TrialSummary
) -> Generation | None:
    """Return the checkpoint of a trial's value by its manifest alone; None if it is missing."""
    if spec.select == "final":
        return next((one for one in reversed(saved) if one.step == record.best_step), None)
    best = min((one for one in saved if one.value is not None), key=best_first, default=None)
    return best if best is not None and is_of_best_value(best, spec, record) else None


def _last_generation(store: CheckpointStore, record: TrialSummary) -> Generation | str:
    """Return the checkpoint of a trial's last report, checked; a sentence if it is missing."""
    for found in reversed(store.generations()):
        if found.step == record.best_step and store.is_sound(found):
            return found
    return (
        f"the checkpoint of trial {record.number}'s last report, at step {record.best_step}, is "
        f"missing or damaged; others may be at {store.address}"
    )


def is_of_best_value(found: Generation, spec: SweepSpec, record: TrialSummary) -> bool:
    """Return whether a trial's best existing checkpoint has at least its best reported value.

    The checkpoint may be better, if the driver ended before it received the report.
    """
    saved, value = found.value, record.own_value
    if saved is None or value is None or record.others or saved == value:
        return True
    return (saved < value) is (spec.modes[0] == "min")


def accepts_checkpoints(paths: SweepPaths, spec: SweepSpec, number: int) -> bool:
    """Return whether this process can write a trial's checkpoints and metrics.

    If it can, an error of the trial's own process is not an error of the storage.
    """
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return False  # workers inherit this limit, so it concerns every trial
    try:
        for place in (
            paths.trial(0).parent,
            paths.trial(number),
            paths.trial(number) / "checkpoints",
        ):
            if place.is_dir():
                probe_directory(place)
        probe_store(paths, spec, new=False)
    except (OSError, UserError, StoreUntrusted):
        return False
    return True


def probe_store(paths: SweepPaths, spec: SweepSpec, *, new: bool) -> None:
    """Check within seconds that the spec's store accepts checkpoints, if it is an object store."""
    if spec.storage.checkpoints is not None:
        check_store(paths.directory, spec.storage.checkpoints)
        from trainable.store.objects import StoreUnusable, probe

        try:
            probe(spec.storage.checkpoints, empty=paths.name if new else None)
        except StoreUnusable as error:
            raise UserError([Issue(CHECKPOINTS_KEY, str(error))]) from error


def check_kept(paths: SweepPaths, before: SweepSpec, after: SweepSpec) -> None:
    """Check that a resumed sweep keeps its name and its checkpoint storage."""
    if before.name != paths.name:
        back = shlex.join(("mv", "-T", str(paths.directory), str(paths.root / before.name)))
        raise StorageMoved(
            f"{paths.directory} holds the sweep '{before.name}', copied or renamed: its runs in "
            "tracking, and what it keeps elsewhere, are found by that name, and two copies would "
            f"write into the same ones; rename it if it is the only one: {back}"
        )
    was, wanted = before.storage.checkpoints, after.storage.checkpoints
    if was != wanted:
        raise StorageMoved(
            f"storage.checkpoints is {was or 'null'} and cannot become {wanted or 'null'}: a "
            "sweep's trials stay where they were written down; leave it out, or run a new sweep, "
            "which can learn from this one (search.warm_start)"
        )


logger = logging.getLogger("tracking")
_OF_TRIALS = {
    *("artifacts", "checkpoints", "figures", "inherited"),
    *("logged.jsonl", "metrics.jsonl", "test.jsonl", "trial.log"),
}
"""The directories and files of a trial that are written in their place; a task may have others."""
_WITH_FOLDERS = {"artifacts", "figures"}
"""Those in which a task names folders and files. Others' files are new at each save."""


class OutsideRoot(UserError):
    """A sweep would write to files outside of its root, or to those of another sweep."""


def check_below_root(
    paths: SweepPaths, spec: SweepSpec, warn: Callable[[str], object] = logger.warning
) -> None:
    """Check that what a sweep writes lies below its root, links followed.

    If the root was moved or copied, the addresses of its artifacts in MLflow are corrected first.
    """
    try:
        check_links(paths.root)
    except NotPrivate as error:
        raise OutsideRoot(f"--root {paths.root}: {error}") from error
    for sentence in links_outside(paths):
        raise OutsideRoot(sentence)
    try:
        private_directory(paths.root, sticky=True)
    except NotPrivate as error:  # a root for many users, whose owner they trust
        warn(f"--root {paths.root}: {error}")
    tracker, artifacts = tracker_at(spec.tracking.uri, paths.root), artifact_root(paths.root)
    for former in tracker.correct_addresses():
        warn(
            f"the root was at {former.parent}: the artifacts of its runs in MLflow are now those "
            f"below {artifacts}"
        )
    for address in addresses_outside(paths, spec):
        check_inside(address, artifacts)


def addresses_outside(paths: SweepPaths, spec: SweepSpec) -> list[str]:
    """Return the addresses of artifacts outside of the root and of what the user has trusted.

    None of a server, which is not asked, or if the store cannot be read.
    """
    try:
        found = tracker_at(spec.tracking.uri, paths.root).addresses_outside(spec.name)
        return [
            one
            for one in found
            if (path := file_path(one)) is None or not is_trusted_directory(path)
        ]
    except StoreUnreadable:  # nothing is sent to it now, and each upload is checked
        return []


def links_outside(paths: SweepPaths) -> Iterator[str]:
    """Yield a sentence for each untrusted link out of the root, and for each hard-linked file."""
    root = os.path.realpath(paths.root)
    for place in _written(paths):
        if place.is_symlink():
            target = Path(os.path.realpath(place))
            if not target.is_relative_to(root) and not is_trusted_directory(target):
                yield (
                    f"{place.path} is a link to {target}, outside of the root {paths.root}: a "
                    "sweep writes only below its root, and the link of a copied root leads to the "
                    "original's files; put the files there instead of the link, or, if sweeps "
                    f"may write there: {trust_command(target)}"
                )
        elif place.is_file() and os.stat(place).st_nlink > 1:
            yield (
                f"{place.path} has another name, too (a hard link): a sweep writes into this "
                "file, and so into that of a copy or of the original; make it a file of its own: "
                f"{_own_file(place.path)}"
            )


def _own_file(path: str) -> str:
    old, new = shlex.quote(path), shlex.quote(f"{path}.new")
    return f"cp -p {old} {new} && mv {new} {old}"


def _written(paths: SweepPaths) -> Iterator[os.DirEntry[str]]:
    """Yield the files and directories of a sweep that are written in their place."""
    yield from (e for e in _entries(paths.root) if e.name in (*RESERVED_NAMES, paths.name))
    yield from (*_entries(paths.directory), *_entries(paths.outbox))
    for trial in _entries(paths.trial(0).parent):
        yield trial
        for entry in _entries(trial):
            if entry.name in _OF_TRIALS:
                yield entry
            if entry.name in _WITH_FOLDERS:
                yield from _below(entry)


def _below(entry: os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """Yield what is below a directory, and nothing of a link to one."""
    if entry.is_dir(follow_symlinks=False):
        for inner in _entries(entry):
            yield inner
            yield from _below(inner)


def _entries(directory: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def place_of(paths: SweepPaths) -> dict[str, Any]:
    """Return where a sweep lies, by which `check_no_copy` knows it again."""
    directory = os.path.realpath(paths.directory)
    inode = os.stat(directory).st_ino  # stays when the directory is moved, or mounted elsewhere
    return {"host": socket.gethostname(), "directory": directory, "inode": inode}


def check_no_copy(
    paths: SweepPaths, spec: SweepSpec, before: Mapping[str, Any], *, accepted: bool = False
) -> None:
    """Check that no copy of a sweep writes into the stores of the original."""
    stores = {
        f"{section}.{key}": uri
        for section, key in _STORES
        if (uri := getattr(getattr(spec, section), key)) is not None
        and not is_below(sqlite_file(uri) or Path("/"), paths.root)
    }
    if not before or not stores or accepted:
        return
    now, then = place_of(paths), Path(before["directory"])
    if now["directory"] == str(then):
        return
    for key, uri in stores.items():
        if (file := sqlite_file(uri)) is not None and file.is_relative_to(then.parent):
            there = Path(now["directory"]).parent / file.relative_to(then.parent)
            raise OutsideRoot(
                f"{key} is {uri}, which is below {then.parent}, where the root was before: that "
                "place would be created again, or belongs to the original; continue with: "
                + paths.command("resume", "-s", f"{key}={sqlite_uri(there)}")
            )
    if now["inode"] == before["inode"]:
        return
    if now["host"] == before["host"] and not SweepPaths(then.parent, paths.name).exists():
        return  # it was moved
    raise OutsideRoot(
        f"{paths.directory} may be a copy of the sweep at {before['host']}:{then}, and "
        f"{' and '.join(f'{key} {uri}' for key, uri in stores.items())} would be those of the "
        "original: a copy would overwrite its records; run a new sweep, or, if the original is "
        f"not used any more, continue with: {paths.command('resume', '--accept-changes')}"
    )
