"""Remove a sweep: its directory, and what it keeps in an object store and MLflow.

The directory is first renamed to `<root>/.removed/<sweep>`, where no command finds it. What lies
elsewhere goes before `sweep.yaml`, which says where that is: so the next removal continues an
interrupted one. Links are never followed. What must not live here: printing, questions (`cli.rm`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.engine.process_cleanup import end_orphans
from sweeps.errors import SweepLockedError, UserError
from sweeps.ledger.reader import LedgerReader
from sweeps.paths import SweepPaths
from sweeps.spec.revisions import read_spec
from sweeps.spec.spec import SweepSpec
from sweeps.stores import check_store, find_tracker
from sweeps.sweep_lock import SweepLock, is_held, read_holder, sweep_locked
from sweeps.view.sweep_view import UnknownSweep
from sweeps.view.usage import directory_usage, objects_prefix, sweep_objects
from tracking.outbox_status import read_outbox
from trainable.store.regular_files import make_directory, sync_directory


@dataclass
class Removal:
    """What `sweep list --remove` removes, or has removed, of one directory of a sweep."""

    paths: SweepPaths
    """The sweep, at the place that its name says."""
    directory: Path
    """Where its files are: there, or in `.removed`."""
    spec: SweepSpec | None
    """None: what is elsewhere is removed already, and only files are left."""
    num_trials: int = 0
    num_bytes: int = 0
    num_waiting: int = 0
    """Records that are not delivered to the tracking store yet."""
    links: list[Path] = field(default_factory=list)
    """Symbolic links among its files; what they lead to stays."""
    owner: str | None = None
    """The sweep to which everything outside of the directory belongs, if this one is a copy."""
    objects: str | None = None
    """The address of its objects; None without an object store."""
    num_objects: int = 0
    num_object_bytes: int = 0
    run_ids: list[str] = field(default_factory=list)
    """Its runs in the tracking store that are deleted, too."""
    sweep_id: str | None = None
    """The tag of these runs."""

    def as_dict(self) -> dict[str, Any]:
        """Return an object of `--json`."""
        return {
            "name": self.paths.name,
            "trials": self.num_trials,
            "bytes": self.num_bytes,
            "object_store": self.objects,
            "objects": self.num_objects,
            "object_bytes": self.num_object_bytes,
            "mlflow_runs": len(self.run_ids),
            "kept": list(map(str, self.links)),
        }


def plan_removal(paths: SweepPaths, *, runs: bool) -> list[Removal]:
    """Return what there is to remove of a sweep: first the rest of an interrupted removal."""
    rest = paths.removed
    for directory in (rest.root, rest.directory, paths.directory):
        _check_no_link(directory)
    if not paths.exists() and not rest.directory.is_dir():
        raise UnknownSweep(paths.name, paths.root)
    if is_held(paths.lock):  # also a driver that has not written its sweep.yaml yet
        raise sweep_locked(paths.directory, read_holder(paths.lock))
    found, current = [], None
    if paths.exists():
        current = read_spec(paths.spec).spec
    if rest.directory.is_dir():
        spec = read_spec(rest.spec).spec if rest.exists() else None
        found.append(_planned(paths, rest, spec, current, runs=runs))
    if current is not None:
        found.append(_planned(paths, paths, current, None, runs=runs))
    return found


def remove(planned: Removal) -> None:
    """Remove a sweep. After an interruption, plan and remove again."""
    paths = planned.paths
    with _locked(planned):
        if planned.directory == paths.directory:
            make_directory(paths.removed.root)
            os.rename(paths.directory, paths.removed.directory)
            sync_directory(paths.removed.root)
            sync_directory(paths.root)
        if planned.spec is not None:
            _remove_elsewhere(planned, planned.spec)
            paths.removed.spec.unlink(missing_ok=True)
            sync_directory(paths.removed.directory)
        _remove_files(paths.removed)


def _planned(
    paths: SweepPaths,
    where: SweepPaths,
    spec: SweepSpec | None,
    newer: SweepSpec | None,
    *,
    runs: bool,
) -> Removal:
    """Measure what is to be removed."""
    usage = directory_usage(where.directory)
    planned = Removal(
        paths,
        where.directory,
        spec,
        num_trials=sum(1 for _ in where.trial(0).parent.glob("[0-9]*")),
        num_bytes=usage.total,
        num_waiting=read_outbox(where.outbox).pending,
        links=usage.links,
    )
    if spec is None:
        return planned
    for uri in (spec.storage.checkpoints, spec.tracking.uri):
        if uri is not None and (runs or uri != spec.tracking.uri):
            check_store(where.directory, uri)
    if spec.name != paths.name:
        planned.owner = f"sweep '{spec.name}'"
        if runs:
            raise UserError(
                f"--mlflow: sweep '{paths.name}' is a copy, and its runs belong to "
                f"{planned.owner}; runs are deleted with the sweep that recorded them; omit "
                "--mlflow"
            )
        return planned
    if spec.storage.checkpoints is not None and not (
        newer and newer.storage.checkpoints == spec.storage.checkpoints
    ):
        planned.objects = objects_prefix(paths, spec)
        sizes = sweep_objects(paths, spec)
        planned.num_objects, planned.num_object_bytes = len(sizes), sum(sizes.values())
    if runs:
        planned.sweep_id = LedgerReader(where.ledger).sweep_id
        reader = find_tracker(paths, spec).reader(spec.name, None)
        found = reader.runs(planned.sweep_id)
        planned.run_ids = [run.run_id for run in found if not run.deleted]
    return planned


@contextlib.contextmanager
def _locked(planned: Removal) -> Iterator[None]:
    """Hold the lock of the sweep, and end the processes that a dead driver has left running."""
    paths = planned.paths
    lock = SweepLock(planned.directory / paths.lock.name)
    if not planned.directory.is_dir():  # another process has removed it meanwhile
        raise UnknownSweep(paths.name, paths.root)
    try:
        lock.acquire()
    except SweepLockedError as error:
        if planned.directory == paths.directory:
            raise
        who = error.holder.describe() if error.holder else "another process"
        raise SweepLockedError(
            f"sweep '{paths.name}' is already being removed by {who}; one process removes a "
            "sweep; wait until it has ended",
            error.holder,
        ) from error
    try:
        if lock.previous is not None:
            end_orphans(lock.previous.token)
        yield
    finally:
        lock.release()


def _remove_elsewhere(planned: Removal, spec: SweepSpec) -> None:
    """Remove what is not in the directory."""
    if planned.run_ids:
        assert planned.sweep_id is not None, "the runs were found by it"
        tracker = find_tracker(planned.paths, spec)
        tracker.delete_runs(spec.name, planned.sweep_id, planned.run_ids)
    if planned.objects is not None and planned.num_objects:
        from trainable.store.objects import remove_objects

        remove_objects(planned.objects)


def _remove_files(rest: SweepPaths) -> None:
    """Remove a directory; the lock in it last, so that nobody else removes it meanwhile."""
    names = sorted(os.listdir(rest.directory), key=lambda name: name == rest.lock.name)
    for name in names:
        path = rest.directory / name
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    rest.directory.rmdir()
    with contextlib.suppress(OSError):  # another removal is not complete
        rest.root.rmdir()


def _check_no_link(directory: Path) -> None:
    if directory.is_symlink():
        raise UserError(
            f"{directory} is a symbolic link to {os.readlink(directory)}; `sweep list "
            "--remove` removes only directories below the root; remove what it leads to yourself, "
            "then the link"
        )
