"""Locate each trial's checkpoints, and check that their storage accepts files.

All code that reads or writes a trial's checkpoints uses these functions. What must not live here:
what a generation is and how it is committed (`trainable`).
"""

from __future__ import annotations

import resource
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sweeps.errors import Issue, UserError
from sweeps.paths import SweepPaths
from sweeps.spec.spec import SweepSpec
from sweeps.store_access import check_store
from tracking.trusted_stores import StoreUntrusted
from trainable.checkpoint import CheckpointStore, Generation
from trainable.store.generations import RunFiles
from trainable.store.manifest import best_first
from trainable.store.objects import files_of
from trainable.store.regular_files import probe_directory

if TYPE_CHECKING:
    from sweeps.ledger.trials import TrialSummary

KEY = ("storage", "checkpoints")
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
    """Check within seconds that the spec's object store accepts checkpoints.

    Directories are not checked here; the sweep's directory was checked before.
    """
    if spec.storage.checkpoints is not None:
        check_store(paths.directory, spec.storage.checkpoints)
        from trainable.store.objects import StoreUnusable, probe

        try:
            probe(spec.storage.checkpoints, empty=paths.name if new else None)
        except StoreUnusable as error:
            raise UserError([Issue(KEY, str(error))]) from error


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
