"""CheckpointStore: generations on disk that are either whole or not there.

A generation is a directory `checkpoints/step-00000120/` with `state.pt` and `manifest.json`. It is
written aside, synced, described by the manifest (length and sha256 of each file), synced, and
renamed into place; only then does anyone see it. Readers trust nothing but a manifest that
verifies, and the newest one that does wins. "Newest" is a counter in the manifest, never a time.
All of that happens in a thread beside the training, which waits only while its state is copied.
What must not live here: what a state consists of (see `state.py`), how it is copied and turned
into bytes (`snapshot.py`), or Ray.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from trainable.config import CheckpointConfig
from trainable.errors import AllCheckpointsDamaged, CheckpointError
from trainable.manifest import (
    MANIFEST,
    STATE,
    Generation,
    Pointer,
    describe_damage,
    format_manifest,
    rank,
    read_manifest,
    read_state,
)

__all__ = ["CheckpointStore", "Files", "Generation", "Pointer", "rank"]

_QUARANTINE = "quarantine"
_ASIDE = ".aside-"
# A second generation of the same step is `step-00000120.1`: it exists when a run returned to a
# step from elsewhere, or when fp16 skipped every window between a checkpoint and the end of its
# epoch.
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class Files:
    """Every call that persists something, so that a test can record and stop at any of them."""

    def make_directory(self, path: Path) -> None:
        """Make a directory and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        """Write a whole file."""
        path.write_bytes(content)

    def sync(self, path: Path) -> None:
        """Return once the file's content, or the directory's entries, survive a power loss."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Move within one file system, atomically."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a directory and what is in it."""
        shutil.rmtree(path)


class CheckpointStore:
    """The generations of one run.

    Without `config` it only reads, and never changes anything: any process may look at a run. With
    one it is the run's only writer. At most one generation is being written at any time: it takes
    the memory of one copy of the state and of its bytes.

    Args:
        directory: The run's directory; generations lie in `checkpoints/` below it.
        config: When to save and what to keep.
        metric: The metric whose best generation is kept.
        mode: Whether a lower (`min`) or a higher (`max`) value is better.
        files: The file layer.
        clock: Seconds that only go forward, for intervals in seconds.
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
        self._root = directory / "checkpoints"
        self._config = config
        self._metric, self._mode = metric, mode
        self._files = files or Files()
        self._clock = clock
        self._last_time = clock()
        self._last_step: int | None = None
        self._kept: list[Generation] = []  # changed by the thread that writes, while there is one
        self._writing: Future[None] | None = None
        if config is not None:
            self._files.make_directory(self._root)
            for leftover in self._root.glob(f"{_ASIDE}*"):
                self._files.remove(leftover)
            self._kept = self.generations()

    # Reading

    def generations(self) -> list[Generation]:
        """Return the generations whose manifest and file length are sound, oldest first."""
        found = [read_manifest(path) for path in self._directories()]
        return sorted((g for g in found if isinstance(g, Generation)), key=lambda g: g.number)

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
        for generation in sorted(rated, key=rank):
            if read_state(generation) is not None:
                return generation
        return None

    def load(self, generation: Generation | Pointer | Path | str) -> dict[str, Any]:
        """Return a generation's state, with every tensor on the CPU.

        Raises:
            CheckpointError: It is not there, or its digest does not verify.
        """
        if isinstance(generation, (Pointer, str)):
            generation = Path(generation.path if isinstance(generation, Pointer) else generation)
        found = generation if isinstance(generation, Generation) else read_manifest(generation)
        content = read_state(found) if isinstance(found, Generation) else None
        if content is None:
            reason = (
                found
                if isinstance(found, str)
                else f"{found.path / STATE} does not have the sha256 {found.sha256}"
            )
            raise CheckpointError(
                f"the checkpoint cannot be used: {reason}; choose another generation"
            )
        return _parse(content)

    # Writing

    def resume(self) -> dict[str, Any] | None:
        """Return the newest state that verifies; None when the run has never saved one.

        Damaged generations newer than it are moved to `quarantine/`, where they can be looked at
        and are never read again.

        Raises:
            AllCheckpointsDamaged: There are or were generations, and not one verifies. They stay
                where they are.
        """
        newest = self._newest_with_content()
        if newest is None:
            return None
        usable, content = newest
        for path in self._directories():
            found = read_manifest(path)
            sound = isinstance(found, Generation) and (
                found.number <= usable.number or read_state(found) is not None
            )
            if not sound:
                self._quarantine(path)
        self._kept = self.generations()
        self._last_step = usable.step
        return _parse(content)

    def offer(
        self,
        state: Callable[[], dict[str, Any]],
        *,
        step: int,
        epoch: int,
        boundary: bool = False,
        value: float | None = None,
        new_best: bool = False,
        final: bool = False,
        covered: Callable[[], None] = lambda: None,
    ) -> bool:
        """Save if the interval, a new best or the end asks for it.

        Called after every step, whether or not it saves. Returns as soon as the state is copied;
        it is written beside the training. A save that is due while another one is being written
        waits for it; only an interval in seconds lets it end first, so that no disk is slow
        enough to hold up the training.

        Args:
            state: Makes the state; called only when it is saved. It may change afterwards.
            step: Optimizer steps taken.
            epoch: Epochs completed.
            boundary: An epoch has just been completed.
            value: The metric, when this state was evaluated.
            new_best: The value is the best so far.
            final: The run ends here: returns only when everything is committed.
            covered: Makes durable what the state refers to; returns before the generation is
                committed. Called in the thread that writes.

        Returns:
            Whether it saves.

        Raises:
            CheckpointError: This generation, or the one before it, could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()  # an error is raised at the first step after it
        if not (final or new_best or self._is_due(step, epoch, boundary)):
            return False
        self.wait()
        from trainable.snapshot import snapshot

        copied = snapshot(state())
        self._last_step, self._last_time = step, self._clock()
        # A thread for each: none is left behind when a run is dropped, or where a loader forks.
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing = thread.submit(self._write, copied, covered, step, epoch, value)
        thread.shutdown(wait=False)
        if final:
            self.wait()
        return True

    def wait(self) -> None:
        """Return once everything offered is committed.

        Raises:
            CheckpointError: It could not be written. Raised once, here or by the next `offer`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @property
    def pointer(self) -> Pointer | None:
        """The newest committed generation of this writer; never one that is being written."""
        return self._kept[-1].pointer if self._kept else None

    def _newest_with_content(self) -> tuple[Generation, bytes] | None:
        for generation in reversed(self.generations()):
            content = read_state(generation)
            if content is not None:
                return generation, content
        self._raise_if_all_damaged()
        return None

    def _is_due(self, step: int, epoch: int, boundary: bool) -> bool:
        assert self._config is not None, "a store without a config only reads"
        every = self._config.every
        if every.unit == "epoch":
            return boundary and epoch % every.count == 0
        if every.unit == "step":
            return step % every.count == 0 and step not in (0, self._last_step)
        return self._writing is None and self._clock() - self._last_time >= every.count

    def _write(
        self,
        state: dict[str, Any],
        covered: Callable[[], None],
        step: int,
        epoch: int,
        value: float | None,
    ) -> None:
        """Commit a generation and remove what is no longer kept, beside the training."""
        from trainable.snapshot import format_state

        try:
            covered()
            content = format_state(state)
            self._kept.append(self._commit(content, step=step, epoch=epoch, value=value))
            self._retain()
        except CheckpointError:
            raise
        except Exception as problem:  # what cannot be pickled decides itself what it raises
            raise CheckpointError(
                f"saving the checkpoint of step {step} failed ({type(problem).__name__}: "
                f"{problem}); earlier checkpoints are untouched; correct this, then resume"
            ) from problem

    def _commit(self, content: bytes, *, step: int, epoch: int, value: float | None) -> Generation:
        generation = Generation(
            path=self._free_path(step),
            number=self._kept[-1].number + 1 if self._kept else 1,
            step=step,
            epoch=epoch,
            metric=self._metric,
            mode=self._mode,
            value=None if value is None or not math.isfinite(value) else value,
            length=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
        )
        files, aside = self._files, self._root / f"{_ASIDE}{generation.path.name}"
        try:
            files.make_directory(aside)
            files.write(aside / STATE, content)
            files.sync(aside / STATE)
            files.write(aside / MANIFEST, format_manifest(generation))
            files.sync(aside / MANIFEST)
            files.sync(aside)
            files.rename(aside, generation.path)
            files.sync(self._root)
        except OSError as problem:
            raise CheckpointError(
                f"the checkpoint of step {step} ({len(content)} bytes) could not be written to "
                f"{generation.path}: "
                f"{problem}; earlier checkpoints are untouched; free space or correct the "
                "permissions, then resume"
            ) from problem
        return generation

    def _retain(self) -> None:
        """Remove what is neither among the newest nor the best."""
        assert self._config is not None
        keep = self._kept[-self._config.keep :]
        rated = [g for g in self._kept if g.value is not None]
        if rated:
            keep.append(min(rated, key=rank))
        for generation in self._kept:
            if generation not in keep:
                # Renamed first: a reader sees it whole or not at all, and a kill leaves only what
                # the next writer removes.
                aside = self._root / f"{_ASIDE}{generation.path.name}"
                self._files.rename(generation.path, aside)
                self._files.remove(aside)
        self._kept = [g for g in self._kept if g in keep]

    def _free_path(self, step: int) -> Path:
        path, revision = self._root / f"step-{step:08d}", 0
        while path.exists():
            revision += 1
            path = self._root / f"step-{step:08d}.{revision}"
        return path

    def _quarantine(self, path: Path) -> None:
        room = self._root / _QUARANTINE
        self._files.make_directory(room)
        target, count = room / path.name, 0
        while target.exists():
            count += 1
            target = room / f"{path.name}-{count}"
        self._files.rename(path, target)
        self._files.sync(room)
        self._files.sync(self._root)

    def _directories(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return sorted(path for path in self._root.iterdir() if _NAME.fullmatch(path.name))

    def _raise_if_all_damaged(self) -> None:
        quarantine = self._root / _QUARANTINE
        damaged = self._directories() + (
            sorted(quarantine.iterdir()) if quarantine.is_dir() else []
        )
        if damaged:
            listed = "; ".join(describe_damage(path) for path in damaged)
            raise AllCheckpointsDamaged(
                f"every checkpoint below {self._root} is damaged: {listed}; the run does not "
                "start again at step 0; "
                "restore one from a backup, or remove the directory to begin anew"
            )


def _parse(content: bytes) -> dict[str, Any]:
    # Imports torch: only who reads or writes a state pays for it; looking at manifests needs none.
    from trainable.snapshot import parse_state

    return parse_state(content)
