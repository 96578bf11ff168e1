"""Where each trial's checkpoints lie, and whether any can be kept there.

Everybody who reads or writes a trial's checkpoints asks here. What must not live here: what a
generation is and how it is committed (`trainable`).
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from sweeps.config.spec import SweepSpec
from sweeps.errors import Issue, UserError
from sweeps.paths import SweepPaths
from sweeps.store_access import check_store
from tracking.trusted_stores import StoreUntrusted
from trainable.checkpoint import CheckpointStore, Generation
from trainable.storage.durable import probe_directory
from trainable.storage.generations import RunFiles
from trainable.storage.locate import files_of

if TYPE_CHECKING:
    from sweeps.ledger.reader import TrialSummary

KEY = ("storage", "checkpoints")
"""Of a spec: where checkpoints lie."""


def address_of(paths: SweepPaths, spec: SweepSpec, number: int) -> str | None:
    """Return where a trial's generations lie, `s3://...`; None: in its directory.

    Below the prefix that the spec names the names are those below the root.
    """
    prefix = spec.storage.checkpoints
    if prefix is None:
        return None
    return f"{prefix}/{paths.trial(number).relative_to(paths.root)}/checkpoints"


def trial_files(paths: SweepPaths, spec: SweepSpec, number: int) -> RunFiles:
    """Return a trial's generations as files.

    Raises:
        StoreUntrusted: They lie in an object store that the user has not named.
    """
    address = address_of(paths, spec, number)
    if address is not None:
        check_store(paths.directory, address)
    return files_of(paths.trial(number), address)


def trial_store(paths: SweepPaths, spec: SweepSpec, number: int) -> CheckpointStore:
    """Return a trial's generations, to be read."""
    return CheckpointStore(paths.trial(number), files=trial_files(paths, spec, number))


def best_generation(paths: SweepPaths, spec: SweepSpec, record: TrialSummary) -> Generation | str:
    """Return the checkpoint that a trial's best value is of; where it is gone, a sentence that
    says so and what is left.
    """
    found = trial_store(paths, spec, record.number).best()
    if found is None:
        where = trial_files(paths, spec, record.number).address("")
        return f"there is no sound checkpoint with a value at {where}"
    if is_of_best_value(found, spec, record):
        return found
    return (
        f"the checkpoint of trial {record.number}'s best value, {record.value!r}, is gone; the "
        f"best that is left has {found.value!r} and lies at {found.address}"
    )


def is_of_best_value(found: Generation, spec: SweepSpec, record: TrialSummary) -> bool:
    """Return whether a trial's best checkpoint that is there is of its best value, and not of a
    lesser one. It may be better than what was reported: the driver ended in between.
    """
    saved, value = found.value, record.value
    if saved is None or value is None or record.others or saved == value:
        return True
    return (saved < value) is (spec.modes[0] == "min")


def takes_checkpoints(paths: SweepPaths, spec: SweepSpec, number: int) -> bool:
    """Whether this process can keep a file where a trial's checkpoints and curve lie, and is under
    no limit of its own on how large one is.
    """
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return False  # its workers have it from this process: every trial meets it
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
    """Find out, within seconds, whether a sweep's checkpoints can be kept where its spec says.

    A directory needs no proof here: it was written to before.

    Args:
        new: The sweep is to be created: nothing of that name may be there.

    Raises:
        Refused: They cannot; nothing was created.
        StoreUntrusted: The user has not named the object store.
    """
    if spec.storage.checkpoints is not None:
        check_store(paths.directory, spec.storage.checkpoints)
        from trainable.storage.objects import StoreUnusable, probe

        try:
            probe(spec.storage.checkpoints, empty=paths.name if new else None)
        except StoreUnusable as error:
            raise UserError([Issue(KEY, str(error))]) from error
