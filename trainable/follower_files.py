"""What the ranks after the first have in place of files: they write none.

What must not live here: what the first rank writes (`checkpoint.py`, `metrics_file.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trainable.checkpoint import CheckpointStore
from trainable.errors import RankLost
from trainable.manifest import Shard
from trainable.metrics_file import History, Row
from trainable.sharded_state import Parts, unflat


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
        flat_state: dict[str, Any],
        write_shards: Callable[[Parts], tuple[Shard, ...]],
        **_: Any,
    ) -> None:
        del name
        with contextlib.suppress(RankLost, OSError):  # the first rank knows what is written
            write_shards(unflat(flat_state)[1])


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
