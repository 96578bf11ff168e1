"""CheckpointStore: saves, finds and removes a run's checkpoints; each is complete or not visible.

A checkpoint, here called a generation, is a directory `checkpoints/step-00000120/` with `state.pt`
and `manifest.json`, which has the length and the sha256 of the state. The writer writes it under a
temporary name, syncs it, and renames it into place. Readers use the newest generation that
verifies; a counter in the manifest says which is newest, never a time. A background thread writes,
and copies the entries that only the next optimizer step changes (`async_copy_keys`). Training
waits only while its state is copied.
What must not live here: Ray, the parts of a state (`train_state.py`), how it is copied and
serialized (`store/snapshot.py`), made durable, and kept from a stale writer (`store`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

from redaction.secrets import redact
from trainable.config import CheckpointConfig
from trainable.errors import (
    AllCheckpointsDamaged,
    CheckpointError,
    ForeignCheckpoint,
    RankLost,
    StorageError,
    TrainingError,
)
from trainable.store.generations import STATE, Files, remedy
from trainable.store.manifest import (
    Generation,
    Pointer,
    Shard,
    best_first,
    describe_damage,
    format_manifest,
    read_manifest,
    read_state,
)
from trainable.store.metrics_file import History, Row
from trainable.store.objects import files_of
from trainable.store.private_files import is_ours
from trainable.store.sharded_state import SHARDS, Parts
from trainable.watch import heartbeat

if TYPE_CHECKING:
    from trainable.store.shard_files import ShardGroup
    from trainable.store.snapshot import Snapshots

__all__ = ["CheckpointStore", "Generation", "Pointer"]


def check_owner(address: str) -> None:
    """Refuse checkpoints of another user: a resume makes objects of classes that they name.

    Whatever copies a checkpoint from which a run resumes calls this before: a copy belongs to who
    made it. Checkpoints in an object store have no owner.
    """
    if "://" in address:
        return
    place = Path(address)
    for path in (place, *place.glob("*"), *place.glob("*/*")):
        for follow in (False, True):  # who placed a link, and who wrote what it names
            try:
                owner = os.stat(path, follow_symlinks=follow).st_uid
            except FileNotFoundError:
                continue
            if not is_ours(owner):
                raise ForeignCheckpoint(
                    f"{path} belongs to user {owner}, and resuming from it would run what that "
                    "user wrote there; resume as that user, or take over the files with chown if "
                    "you trust them"
                )


class StateObserver(Protocol):
    """Looks at the states of a run in training."""

    def wants(self, step: int) -> bool:
        """Whether it looks at the state of this step, at which the run may save."""

    def __call__(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Look at the state of a step."""


class CheckpointStore:
    """The generations of one run.

    Without `config` the store only reads, which any process may do. With one it is the run's only
    writer, and blocks the writer before it. It writes at most one generation at a time. The copy
    of the state takes host memory, which is kept for the next copy.

    Args:
        directory: The run's directory; generations lie in `checkpoints/` below it.
        config: When to save and what to keep.
        metric: The metric whose best generation is kept.
        mode: Whether a lower (`min`) or a higher (`max`) value is better.
        files: Where the generations lie; None: in that directory.
        clock: A monotonic clock in seconds, for intervals in seconds.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig | None = None,
        *,
        metric: str = "",
        mode: Literal["min", "max"] = "min",
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files_of(directory) if files is None else files
        self._config = config
        self._metric, self._mode = metric, mode
        self._clock = clock
        self._last_time = clock()
        self._last_step: int | None = None
        self._kept: list[Generation] = []  # while a thread writes, only that thread changes it
        self._writing: Future[None] | None = None
        self._copying: Future[None] | None = None
        self._snapshots: Snapshots | None = None
        self.shard_group: ShardGroup | None = None
        """The ranks that write their shards of the state; None where one file has it all."""
        self.observer: StateObserver | None = None
        """Looks at states at the points where the run may save."""
        self.milestone: int | None = None
        """The newest generation up to this step is kept beside the newest and the best."""
        self.before_commit: Callable[[], None] = lambda: None
        """Makes durable what the states refer to; called by the writing thread before a commit."""
        self.async_copy_keys: Collection[str] = ()
        """The entries of a state that the writing thread copies. Nobody may change their tensors
        before `wait_for_copy` has returned."""
        self.set_aside: list[str] = []
        """For each generation that `resume` found damaged: why, and what replaces it."""
        if config is not None:
            try:
                self._files.open()
            except OSError as problem:
                raise StorageError(
                    f"no checkpoints can be written to {self._files.address('')}: "
                    f"{redact(str(problem))}; {remedy(problem, self._files.remedy)}"
                ) from problem
            self._kept = self.generations()

    # Reading

    def generations(self) -> list[Generation]:
        """Return the generations whose manifest and file length are sound, oldest first."""
        found = [read_manifest(self._files, name) for name in self._files.names()]
        return sorted((g for g in found if isinstance(g, Generation)), key=lambda g: g.number)

    def saved_epoch(self) -> int:
        """Return the number of the last report that the newest generation has.

        A resumed run trains what follows it again and makes the later reports again.
        """
        saved = self.generations()
        return saved[-1].epoch if saved else 0

    def newest(self) -> Generation | None:
        """Return the newest generation whose digest verifies; None when the run has none.

        Raises:
            AllCheckpointsDamaged: There are generations, and not one verifies.
        """
        found = self._newest_with_content()
        return found[0] if found else None

    def best(self) -> Generation | None:
        """Return the best generation whose digest verifies; of equals the earlier one."""
        rated = [g for g in self.generations() if g.value is not None]
        return next(filter(self.is_sound, sorted(rated, key=best_first)), None)

    def is_sound(self, generation: Generation) -> bool:
        """Return whether the digest of a generation verifies."""
        return read_state(self._files, generation) is not None

    @property
    def address(self) -> str:
        """Where the generations are."""
        return self._files.address("")

    def load(self, generation: Generation | Pointer | Path | str) -> dict[str, Any]:
        """Return a generation's state, with every tensor on the CPU.

        Raises:
            CheckpointError: It does not exist, or its digest does not verify.
        """
        address = generation if isinstance(generation, (Path, str)) else generation.address
        parent, _, name = str(address).rpartition("/")
        files = self._files.at(parent)
        found = read_manifest(files, name)
        if isinstance(found, Generation):
            if (content := read_state(files, found)) is not None:
                return _parse(files, found, content)
            found = f"{found.address}/{STATE} does not have the sha256 {found.sha256}"
        raise CheckpointError(f"the checkpoint cannot be used: {found}; choose another generation")

    # Writing

    def resume(self, *, in_shards: bool = False) -> dict[str, Any] | None:
        """Return the newest state that verifies; None when the run has never saved one.

        Args:
            in_shards: Leave a sharded state as its `state.pt` has it, with the generation's
                address: each rank reads its own shard.

        Any newer generations are damaged. They are moved to `quarantine/`, where they can be
        inspected and are never read again.

        Raises:
            AllCheckpointsDamaged: There are or were generations, and not one verifies. They stay
                where they are.
            ForeignCheckpoint: They belong to another user.
            StorageError: The storage cannot be read. The generations may be sound.
        """
        check_owner(self.address)
        newest = self._newest_with_content()
        if newest is None:
            return None
        usable, content = newest
        for name in self._files.names():
            found = read_manifest(self._files, name)
            sound = isinstance(found, Generation) and (
                found.number <= usable.number or self.is_sound(found)
            )
            if not sound:
                damage = describe_damage(self._files, name)
                self._files.quarantine(name)
                self.set_aside.append(
                    f"checkpoint {name} is damaged and was set aside: {damage}; "
                    f"{usable.name} is used instead"
                )
        self._kept = self.generations()
        self._last_step = usable.step
        return _parse(self._files, usable, content, in_shards=in_shards)

    def is_observed(self, step: int) -> bool:
        """Return whether the observer looks at the state of a step."""
        return self.observer is not None and self.observer.wants(step)

    def observe(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Let the observer look at the state of a step."""
        assert self.observer is not None
        self.observer(step, state)

    def is_due(self, *, step: int, epoch: int | None, report: int | None, certain: bool) -> bool:
        """Return whether a checkpoint is due; call it after every step.

        With an interval in seconds none is due during a write, so a slow disk does not delay
        training.

        Args:
            step: Optimizer steps taken.
            epoch: The epoch that has just been completed, if one has.
            report: The report that has just been made, if one has.
            certain: One is due whatever the interval.

        Raises:
            CheckpointError: The generation before could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()  # so an error of the write is raised at the next step
        return certain or self._interval_has_passed(step, epoch, report)

    def save(
        self,
        state: Callable[[], dict[str, Any]],
        *,
        step: int,
        reports: int,
        value: float | None = None,
        final: bool = False,
    ) -> None:
        """Save; return as soon as the state is copied. A background thread writes the copy.

        A previous write is waited for.

        Args:
            state: Returns the state, which may change after the call.
            step: Optimizer steps taken.
            reports: Reports made.
            value: The metric, when this state was evaluated.
            final: The run ends here: return only when everything is committed.

        Raises:
            StorageError: This generation, or the one before it, could not be written.
            WriterReplaced: Another process has opened the run for writing.
            CheckpointError: The state cannot be saved.
        """
        heartbeat.beat("save")
        self.wait()
        if self._snapshots is None:
            # This imports torch, which readers do not need.
            from trainable.store.snapshot import Snapshots

            self._snapshots = Snapshots()
        taken = state()
        begun = self._begin(step)
        copied = self._snapshots.take(taken, self.async_copy_keys)
        self._last_step, self._last_time = step, self._clock()
        # A thread for each save: none remains when a run is dropped or a data loader forks.
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._copying = thread.submit(self._snapshots.finish)
        self._writing = thread.submit(
            self._write, self._copying, copied, begun, step, reports, value
        )
        thread.shutdown(wait=False)
        if final:
            self.close()

    def wait_for_copy(self) -> None:
        """Wait until the state of the last save is copied. Free when no save is in progress."""
        copying, self._copying = self._copying, None
        if copying is not None:
            # Device synchronisation, at the first step after a save: the optimizer must not change
            # tensors that are still being copied. `wait` raises a copy's error, not this method.
            wait_for([copying])

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            CheckpointError: It could not be written. Raised once, here or by the next `is_due`
                or `save`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @property
    def pointer(self) -> Pointer | None:
        """The newest committed generation of this writer; never one that is being written."""
        return self._kept[-1].pointer if self._kept else None

    def close(self) -> None:
        """Wait as `wait` does, and remove this writer's temporary directory."""
        try:
            self.wait()
        finally:
            self._files.close()

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the store when the rest of the run cannot be opened."""
        try:
            yield
        except BaseException:  # KeyboardInterrupt too; raised again
            self.close()
            raise

    def _newest_with_content(self) -> tuple[Generation, bytes] | None:
        while True:
            names = self._files.names()
            for generation in reversed(self.generations()):
                content = read_state(self._files, generation)
                if content is not None:
                    return generation, content
            if names == self._files.names():  # else a writer has replaced generations meanwhile
                break
        self._raise_if_all_damaged()
        return None

    def _interval_has_passed(self, step: int, epoch: int | None, report: int | None) -> bool:
        assert self._config is not None, "a store without a config only reads"
        every = self._config.every
        if every.unit in ("epoch", "report"):
            number = epoch if every.unit == "epoch" else report
            return number is not None and number % every.count == 0
        if every.unit == "step":
            return step % every.count == 0 and step not in (0, self._last_step)
        return self._writing is None and self._clock() - self._last_time >= every.count

    def _begin(self, step: int) -> tuple[str, str]:
        """Return the name of the next generation, and where the ranks write their shards."""
        if self.shard_group is None:
            return "", ""
        return self.shard_group.begin(lambda: self._files.unused(step))

    def _write(
        self,
        copying: Future[None],
        state: dict[str, Any],
        begun: tuple[str, str],
        step: int,
        reports: int,
        value: float | None,
    ) -> None:
        """Write a generation; runs in the background thread."""
        from trainable.store.snapshot import num_bytes

        name = begun[0] or self._files.unused(step)
        shards = partial(self._shards, begun[1])
        try:
            copying.result()
            self.before_commit()
            self._commit(name, state, shards, step=step, reports=reports, value=value)
        except TrainingError:  # also of another rank, which failed or was lost meanwhile
            raise
        except OSError as problem:
            raise StorageError(
                f"the checkpoint of step {step} ({num_bytes(state)} bytes) could not be written "
                f"to {self._files.address(name)}: {redact(str(problem))}; earlier checkpoints are "
                f"untouched; {remedy(problem, self._files.remedy)}, then resume"
            ) from problem
        except Exception as problem:  # an object that cannot be pickled may raise anything
            raise CheckpointError(
                f"saving the checkpoint of step {step} failed ({type(problem).__name__}: "
                f"{problem}); earlier checkpoints are untouched; correct this, then resume"
            ) from problem

    def _shards(self, begun: str, parts: Parts) -> tuple[Shard, ...]:
        """Write this rank's shard; return those of all ranks, or none of a whole state."""
        return () if self.shard_group is None else self.shard_group.write(begun, parts)

    def _commit(
        self,
        name: str,
        state: dict[str, Any],
        write_shards: Callable[[Parts], tuple[Shard, ...]],
        *,
        step: int,
        reports: int,
        value: float | None,
    ) -> None:
        """Commit a generation, and remove those no longer kept."""
        from trainable.store.snapshot import write_state

        committed: list[Generation] = []

        def write(file: BinaryIO) -> bytes:
            shards = write_shards(state.pop(SHARDS, {}))
            if shards:  # so that the digest of the state stands for all of it
                state[SHARDS] = [list(shard) for shard in shards]
            length, sha256 = write_state(state, file)
            generation = Generation(
                address=self._files.address(name),
                number=self._kept[-1].number + 1 if self._kept else 1,
                step=step,
                epoch=reports,
                metric=self._metric,
                mode=self._mode,
                value=None if value is None or not math.isfinite(value) else value,
                length=length,
                sha256=sha256,
                shards=shards,
            )
            committed.append(generation)
            return format_manifest(generation)

        self._files.commit(name, write)
        self._kept += committed
        self._retain()

    def _retain(self) -> None:
        """Remove generations that are not among the newest, the best, or the milestone."""
        assert self._config is not None
        keep = self._kept[-self._config.keep :]
        if self.milestone is not None:
            keep += [g for g in self._kept if g.step <= self.milestone][-1:]
        rated = [g for g in self._kept if g.value is not None]
        if rated:
            keep.append(min(rated, key=best_first))
        for generation in self._kept:
            if generation not in keep:
                self._files.remove(generation.name)
        self._kept = [g for g in self._kept if g in keep]

    def _raise_if_all_damaged(self) -> None:
        damaged = self._files.names() + self._files.damaged()
        if damaged:
            listed = "; ".join(describe_damage(self._files, name) for name in damaged)
            raise AllCheckpointsDamaged(
                f"every checkpoint below {self._files.address('')} is damaged: {listed}; the run "
                "does not start again at step 0; restore one from a backup, or remove the "
                "directory to start from scratch"
            )


def _parse(
    files: Files, generation: Generation, content: bytes, *, in_shards: bool = False
) -> dict[str, Any]:
    # Imports torch: reading manifests alone does not need it.
    from trainable.store.shard_files import read_whole

    return read_whole(files, generation, content, in_shards=in_shards)


class FollowerStore(CheckpointStore):
    """What both kinds of stores have: the first rank decides when all save."""

    def observe(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Hand over the state for the first rank's observer."""
        del step
        state()

    def is_due(self, **_: Any) -> bool:
        """Return False: the first rank decides."""
        if self._writing is not None and self._writing.done():
            self.wait()
        return False

    def close(self) -> None:
        """Wait for what is being written."""
        self.wait()


class NoCheckpoints(FollowerStore):
    """Saves nothing; hands this rank's state to the first rank when that one saves."""

    def save(self, state: Callable[[], dict[str, Any]], **_: Any) -> None:
        """Hand over the state for the first rank's checkpoint."""
        state()


class ShardStore(FollowerStore):
    """Writes this rank's shard in the background when the first rank saves a sharded state."""

    def _commit(
        self,
        name: str,
        state: dict[str, Any],
        write_shards: Callable[[Parts], tuple[Shard, ...]],
        **_: Any,
    ) -> None:
        del name
        with contextlib.suppress(RankLost, OSError):  # the first rank knows what is written
            write_shards(state.get(SHARDS, {}))


class NoHistory(History):
    """Writes no rows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def append(self, rows: Iterable[Row]) -> None:
        """Do nothing."""

    def append_logged(self, step: int, rows: Sequence[Row]) -> None:
        """Do nothing."""

    def sync(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
