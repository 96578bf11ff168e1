"""What the ranks after the first have in place of files: they write none.

What must not live here: what the first rank writes (`checkpoint.py`, `metrics_file.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trainable.checkpoint import CheckpointStore
from trainable.errors import RankLost
from trainable.metrics_file import History, Row
from trainable.sharded_state import unflat


class NoCheckpoints(CheckpointStore):
    """Saves nothing; hands this rank's state to the first rank when that one saves."""

    def is_observed(self, step: int) -> bool:
        """Return False: the first rank decides."""
        del step
        return False

    def observe(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Hand over the state for the first rank's observer."""
        del step
        state()

    def is_due(self, *, step: int, epoch: int | None, report: int | None, certain: bool) -> bool:
        """Return False: the first rank decides."""
        del step, epoch, report, certain
        return False

    def save(
        self,
        state: Callable[[], dict[str, Any]],
        *,
        step: int,
        reports: int,
        value: float | None = None,
        final: bool = False,
        before_commit: Callable[[], None] = lambda: None,
        async_copy_keys: Collection[str] = (),
    ) -> None:
        """Hand over the state for the first rank's checkpoint."""
        del step, reports, value, final, before_commit, async_copy_keys
        state()

    def close(self) -> None:
        """Do nothing."""


class ShardStore(NoCheckpoints):
    """Writes this rank's shard when the first rank saves the state of a sharded model."""

    def is_due(self, *, step: int, epoch: int | None, report: int | None, certain: bool) -> bool:
        """Return False: the first rank decides."""
        del step, epoch, report, certain
        if self._writing is not None and self._writing.done():
            self.wait()
        return False

    def save(
        self,
        state: Callable[[], dict[str, Any]],
        *,
        step: int,
        reports: int,
        value: float | None = None,
        final: bool = False,
        before_commit: Callable[[], None] = lambda: None,
        async_copy_keys: Collection[str] = (),
    ) -> None:
        """Write this rank's shard in the background; the next save waits for it."""
        del value, before_commit
        CheckpointStore.save(
            self,
            state,
            step=step,
            reports=reports,
            final=final,
            async_copy_keys=async_copy_keys,
        )

    def close(self) -> None:
        """Wait for the shard that is being written."""
        self.wait()

    def _write(
        self,
        copying: Future[None],
        state: dict[str, Any],
        before_commit: Callable[[], None],
        begun: tuple[str, str],
        step: int,
        reports: int,
        value: float | None,
    ) -> None:
        del before_commit, step, reports, value
        copying.result()
        with contextlib.suppress(RankLost):  # the first rank knows whether the shard is there
            self._shards(begun[1], unflat(state)[1])


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
