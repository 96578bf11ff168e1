"""Read the windows of a stream in one process: the trial's, or a loader process.

Each window is read and collated under its own seed, a function of the run's seed, the epoch, the
loader process and the window's number. So what a stream draws from the generators of Python, NumPy
and torch depends neither on training nor on interruptions. Every rank of a trial reads all items
and keeps its part. What must not live here: how processes take turns, and what a checkpoint keeps
(`streams.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from trainable.built import summary_of
from trainable.data import MicroBatches, pin
from trainable.errors import CheckpointError
from trainable.object_state import dumps, loads
from trainable.rank_data import WHOLE, RankShare
from trainable.seeding import (
    HostRngState,
    derive_seed,
    preserved_host_rng,
    seed_generators_of,
    seed_host,
)
from trainable.splits import has_state
from trainable.task import Batch
from trainable.task_code import data_code


@dataclass(frozen=True)
class StreamFormat:
    """How the items of a stream become windows.

    Attributes:
        seed: The run's seed.
        split: `train`, `val` or `test`; each draws random numbers of its own.
        items: Items of a window.
        micro_items: Items of a forward pass.
        batched: Items are batches.
        collate: Makes a batch of a list of samples.
        drop_last: Leave out a last window that is short.
        skips: Resume by reading again, even if the stream has a state.
        most: Read only so many windows; None: all.
        share: The part of each window that this rank keeps; every rank reads all of it.
    """

    seed: int
    split: str
    items: int
    micro_items: int
    batched: bool
    collate: Callable[[list[Any]], Batch]
    drop_last: bool
    skips: bool
    most: int | None = None
    share: RankShare = WHOLE


class Place(NamedTuple):
    """Where the reading of one process is: after `windows` windows of `items` items in all."""

    windows: int = 0
    items: int = 0
    state: Any = None
    """The stream's own state, encoded; None if it has none."""
    ended: bool = False
    """Whether the stream has ended; its state is then the one with which the next epoch begins."""


class Window(MicroBatches):
    """A window, and where the stream is after it; in this process, the place is read later."""

    def __init__(
        self,
        batches: Iterator[Batch] | list[Batch],
        size: int,
        reader: int,
        place: Place | None = None,
        summary: Any = None,
    ) -> None:
        super().__init__(batches)
        self.size, self.reader, self.place = size, reader, place
        self.summary = summary  # of the items of all ranks; None unless they compare it

    def pin_memory(self) -> Window:
        """Return the window with its tensors in pinned memory."""
        return Window(list(map(pin, self)), self.size, self.reader, self.place, self.summary)


class StreamReader:
    """Reads the windows of an epoch in one process."""

    def __init__(
        self, stream: Any, format: StreamFormat, number: int, epoch: int, place: Place | None
    ) -> None:
        self._stream, self._format = stream, format
        self._number, self._epoch = number, epoch
        self._has_state = has_state(stream) and not format.skips
        self._windows = self._items = 0
        self._ended, self._summarised = False, format.share.size == 1
        self._ahead: tuple[Place, Any, HostRngState] | None = None
        place = place or Place()
        with preserved_host_rng():
            self._start(place)
            self._skip_to(place.items)

    def _start(self, place: Place) -> None:
        stream = self._stream
        with data_code(f"{self._format.split}: the start of the stream"):
            self._seed("start")
            if callable(getattr(stream, "set_epoch", None)):
                stream.set_epoch(self._epoch)
            else:  # alike in all loader processes, which may share out what it shuffles
                own = derive_seed(self._format.seed, self._format.split, self._epoch, "own")
                seed_generators_of(stream, own)
            if place.state is not None and self._has_state:
                load_state(stream, place.state)
                self._windows, self._items = place.windows, place.items
            self._iterator = iter(stream)

    def _skip_to(self, wanted: int) -> None:
        format = self._format
        while self._items < wanted:
            if not self._take(min(format.items, wanted - self._items)):
                raise CheckpointError(
                    f"{format.split}: the stream ended after {self._items} items of epoch "
                    f"{self._epoch + 1}, and {wanted} had been trained before the interruption; "
                    "a stream without a state is read again and must give the same items; give "
                    "it state_dict() and load_state_dict(), or start a new run"
                )

    def place(self) -> Place:
        """Return where the reading is now.

        Afterwards reads one item ahead: if there is none, the state must be that after the end.
        """
        if self._ahead is not None:
            return self._ahead[0]  # the stream's state has the item that was read ahead
        state = save_state(self._stream) if self._has_state else None
        place = Place(self._windows, self._items, state, self._ended)
        if self._ended:
            return place
        with preserved_host_rng():
            items = self._read_items(1)
            if items:
                self._ahead = place, items[0], HostRngState()
                return place
        self._ended = True
        return self.place()

    def read(self) -> Window | None:
        """Return the next window, without its place; None at the end."""
        format, share = self._format, self._format.share
        with preserved_host_rng():
            items = self._take(format.items)
            if not items or (format.drop_last and len(items) < format.items):
                return None
            summary = None if self._summarised else summary_of(items)
            self._summarised = True
            if format.batched:
                first = self._items - len(items)
                own = [item for number, item in enumerate(items, first) if share.has(number)]
                size = sum(map(_batch_length, items))
                return Window(own, size, self._number, summary=summary)
            with data_code(f"{format.split}: collate"):
                seed_host(share.seed(self._derived("collate", self._windows - 1)))
                size, own = share.micro_size(format.micro_items), items[share.part(len(items))]
                parts = [own[first : first + size] for first in range(0, len(own), size)]
                batches = [format.collate(part) for part in parts]
                return Window(batches, len(items), self._number, summary=summary)

    def _take(self, most: int) -> list[Any]:
        items: list[Any] = []
        if self._ahead is not None:
            _, item, generators = self._ahead
            self._ahead = None
            generators.restore()
            items = [item, *self._continue_items(most - 1)]
        elif not self._ended:
            items = self._read_items(most)
        self._windows += 1
        self._items += len(items)
        self._ended = len(items) < most
        return items

    def _read_items(self, most: int) -> list[Any]:
        """Read the first items of the next window, under its seed."""
        self._seed("window", self._windows)
        return self._continue_items(most)

    def _continue_items(self, most: int) -> list[Any]:
        format = self._format
        with data_code(f"{format.split}: window {self._windows + 1} of epoch {self._epoch + 1}"):
            return list(islice(self._iterator, most))

    def _seed(self, *parts: int | str) -> None:
        seed_host(self._derived(*parts))

    def _derived(self, *parts: int | str) -> int:
        format = self._format
        return derive_seed(format.seed, format.split, self._epoch, self._number, *parts)


def save_state(stream: Any) -> Any:
    """Return a stream's own state, as a checkpoint has it."""
    with data_code("state_dict() of the stream"):
        return dumps(stream.state_dict(), "state_dict() of the stream")


def load_state(stream: Any, state: Any) -> None:
    """Let a stream continue from a state that `save_state` returned."""
    with data_code("load_state_dict() of the stream"):
        stream.load_state_dict(loads(state))


def _batch_length(batch: Any) -> int:
    """Return the samples of a batch: the length of its first tensor; 1 without a tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, dict) else batch
    if isinstance(batch, dict | list | tuple):
        return next((_batch_length(part) for part in parts if _has_tensor(part)), 1)
    return 1


def _has_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)
