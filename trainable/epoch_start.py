"""EpochStart: the data as loader processes have them, which are forked when an epoch begins.

What a task changes within an epoch reaches them in the next one. So a checkpoint within an epoch
has both: what had changed when the epoch began, and what has changed since. A resumed run restores
the first, starts the loader processes, and restores the second. It costs a pass over the data set
and `collate` in an epoch. What must not live here: how a change is found
and restored (`object_state.py`), and the loader processes (`data.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from trainable.data import Source
from trainable.object_state import ObjectState
from trainable.reachable import signatures_once
from trainable.snapshot import snapshot
from trainable.task import Batch, Data


class EpochStart:
    """Takes and restores the data as they were when the present epoch began."""

    def __init__(self, source: Source, data: Data | None = None) -> None:
        self._source = source
        self._built = None
        if data is not None and source.forks:
            self._built = ObjectState({"data.train": data.train, "data.collate": data.collate})
        self._begun: dict[str, Any] = {}
        self._since: ObjectState | None = None
        self._windows: Iterator[Iterable[Batch]] | None = None

    def take(self) -> None:
        """Take the data as they are, right before the loader processes start."""
        if self._built is not None:
            with signatures_once():
                self._begun = snapshot({"begun": self._built.state_dict()})["begun"]
                self._since = self._built.from_now(lost="a resumed run would lose it")

    def state_dict(self) -> dict[str, Any]:
        """Return what had changed when the epoch began, and since; empty if nothing has."""
        since = {} if self._since is None else self._since.state_dict()
        return {"begun": self._begun, "since": since} if self._begun or since else {}

    def forget(self) -> None:
        """Forget the data of an epoch that is over."""
        self._begun, self._since = {}, None

    def load_state_dict(self, state: dict[str, Any], progress: dict[str, Any]) -> None:
        """Start the loader processes of an epoch with the data as they were; restore the data.

        To be called with the data as they were built, before anything else of them is restored.
        """
        if self._built is None or progress["batch_size"] != self._source.plan.batch_size:
            return  # the run resumes with other options, and not exactly
        epoch = progress["epoch"]
        self._built.load_state_dict(state["begun"])
        self.take()
        self._source.resume(epoch, progress["epoch_samples"])
        windows = iter(self._source.windows(epoch, progress["window"]))
        self._windows = chain(list(islice(windows, 1)), windows)  # the processes start
        self._built.load_state_dict(state["since"])

    def windows(self, epoch: int, window: int) -> Iterator[Iterable[Batch]]:
        """Return the windows of the epoch from `window` on."""
        started, self._windows = self._windows, None
        return iter(self._source.windows(epoch, window)) if started is None else started
