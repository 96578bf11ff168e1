"""EpochStart: the data as loader processes have them, which are forked when an epoch begins.

What a task changes within an epoch reaches them in the next one. So a checkpoint within an epoch
has both: what had changed when the epoch began, and what has changed since. A resumed run restores
the first, starts the loader processes, and restores the second. It costs two passes over the data
set and `collate` in an epoch, and one at each save. What must not live here: how a change is found
and restored (`object_state.py`), and the loader processes (`data.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from trainable.data import Source
from trainable.object_state import ObjectState
from trainable.snapshot import snapshot
from trainable.task import Batch, Data

_REMEDY = (
    "keep what changes as numbers, tensors, arrays, generators and collections of them; or write "
    "train.loader.num_workers: 0"
)


class EpochStart:
    """Takes and restores the data as they were when the present epoch began.

    Args:
        source: Windows to train on.
        data: The task's samples, as they were built; None: nothing of them is saved.
    """

    def __init__(self, source: Source, data: Data | None = None) -> None:
        self._source = source
        named = {"train": data.train, "collate": data.collate} if data and source.forks else {}
        self._built = [
            ObjectState(one, name=name, remedy=_REMEDY, stored={})
            for name, one in named.items()
            if one is not None and not isinstance(one, list)
        ]
        self._begun: list[Any] = []
        self._since: list[ObjectState] = []
        self._windows: Iterator[Iterable[Batch]] | None = None

    def take(self) -> None:
        """Take the data as they are, right before the loader processes start."""
        present = [one.state_dict() for one in self._built]
        self._begun = snapshot({"begun": present})["begun"]
        self._since = [one.from_now(lost="a resumed run would lose it") for one in self._built]

    def state_dict(self) -> dict[str, Any]:
        """Return what had changed when the epoch began, and since; empty if nothing has.

        Raises:
            TaskError: A change cannot be restored.
        """
        since = [one.state_dict() for one in self._since]
        return {"begun": self._begun, "since": since} if any(self._begun + since) else {}

    def forget(self) -> None:
        """Forget the data of an epoch that is over."""
        self._begun, self._since = [], []

    def load_state_dict(self, state: dict[str, Any], progress: dict[str, Any]) -> None:
        """Start the loader processes of an epoch with the data as they were; restore the data.

        To be called with the data as they were built, before anything else of them is restored.

        Args:
            state: What `state_dict` returned.
            progress: The counters of the run, with which it was saved.
        """
        if not self._built or progress["batch_size"] != self._source.plan.batch_size:
            return  # the run resumes with other options, and not exactly
        epoch = progress["epoch"]
        for one, entries in zip(self._built, state["begun"], strict=True):
            one.load_state_dict(entries)
        self.take()
        self._source.resume(epoch, progress["epoch_samples"])
        windows = iter(self._source.windows(epoch, progress["window"]))
        self._windows = chain([*_first(windows)], windows)
        for one, entries in zip(self._built, state["since"], strict=True):
            one.load_state_dict(entries)

    def windows(self, epoch: int, window: int) -> Iterator[Iterable[Batch]]:
        """Return the windows of the epoch from `window` on."""
        started, self._windows = self._windows, None
        return iter(self._source.windows(epoch, window)) if started is None else started


def _first(windows: Iterator[Iterable[Batch]]) -> Iterator[Iterable[Batch]]:
    for window in windows:
        yield window
        return
