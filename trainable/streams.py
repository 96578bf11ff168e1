"""Windows read from a stream, which resume in the middle of an epoch.

A checkpoint keeps the stream's own state, if it has one, as it was after the last trained window.
Loader processes send it with each window, because they have read ahead. A stream without a state
is read again from the epoch's start, and the trained samples are dropped. Loader processes start
anew in each epoch, each with its own copy of the stream. What must not live here:
samples with an index (`data.py`), or what counts as a stream (`sample_kinds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from trainable.built import summary_of
from trainable.config import LoaderConfig, TrainConfig
from trainable.data import (
    LoaderSource,
    MicroBatches,
    SampledPlan,
    SplitReading,
    TensorSource,
    WindowPlan,
    begin_loader,
    end_processes,
    first_tensor,
    move,
    pin,
)
from trainable.errors import CheckpointError, ConfigError, TaskError
from trainable.object_state import dumps, loads
from trainable.ranks import ALIKE_REMEDY, ALONE, WHOLE, Ranks, RankShare
from trainable.sample_kinds import begins_anew, gives_batches, has_state, length_of
from trainable.seeding import (
    HostRngState,
    derive_seed,
    preserved_host_rng,
    seed_generators_of,
    seed_host,
)
from trainable.task import Batch, Data
from trainable.user_code.fingerprint import differences
from trainable.user_code.task_code import data_code


@dataclass
class StreamPlan:
    """What is known of a stream before its end."""

    samples: int  # of an epoch; 0 if the stream does not say
    batch_size: int  # samples of a window; 1 if the stream gives batches
    batched: bool
    windows: int  # about the steps of an epoch; 0 if the stream does not say
    last_size: int = 0  # samples of the window that was given last
    num_read: int = 0  # samples of all windows that were given
    num_built: int = 0  # none are counted when it is built

    def num_windows(self, epoch: int) -> int:
        """Return 0: only the stream's end tells."""
        del epoch
        return 0

    def size(self, window: int) -> int:
        """Samples of the window that was given last."""
        del window
        return self.last_size


class StreamSource:
    """Windows of a stream, read in this process or in loader processes."""

    def __init__(
        self,
        stream: Any,
        plan: StreamPlan,
        format: StreamFormat,
        *,
        device: torch.device,
        loader: LoaderConfig,
        ranks: Ranks = ALONE,
    ) -> None:
        self.plan, self.position = plan, self
        self.drawing: list[bool] = []
        self.forks = False
        self.stream, self.format = stream, format
        self._device, self._options, self._ranks = device, loader, ranks
        # A DataLoader has loader processes of its own, which a loader process could not start.
        self._workers = 0 if isinstance(stream, DataLoader) else loader.num_workers
        self._epoch, self._ended = -1, False
        self._last_reader = 0
        self._places: list[Place | None] = [None] * max(1, self._workers)
        self._restored = False
        # An evaluation may end before the stream does, and each begins at the same place.
        rewinds = format.split == "val" and not self._workers
        rewinds = rewinds and has_state(stream) and not begins_anew(stream)
        self._initial = Place(state=save_state(stream)) if rewinds else None
        self._reader: StreamReader | None = None
        self._loaded: Iterator[Window] | None = None

    def begin(self, epoch: int) -> int:
        """Return 0: the reading itself begins an epoch, and its length is not asked for."""
        del epoch
        return 0

    def resume(self, epoch: int, num_samples: int) -> None:
        """Do nothing: the position says where the reading resumes."""

    def windows(self, epoch: int, start: int = 0) -> Iterator[MicroBatches]:
        """Yield the windows of an epoch: after a restored position, or else from its start."""
        places = self._places_at_start(epoch)
        resumed = any(place is not None and place.items for place in places)
        if start and not resumed:
            raise CheckpointError(
                f"{self.format.split}: the position in the stream after {start} windows of "
                f"epoch {epoch + 1} is not known; resume from the checkpoint of an epoch's end"
            )
        self._reader = None
        first = (self._last_reader + 1) % len(places) if resumed else 0
        self._epoch, self._ended, self._last_reader = epoch, False, first - 1
        self._places = places
        read = self._read_apart(places, first) if self._workers else self._read_here(places[0])
        came = False
        name = f"{self.format.split}: {stream_name(self.stream)}"
        for window in _alike_on_ranks(islice(read, self.format.most), name, self._ranks):
            came = True
            self.plan.last_size = window.size
            self.plan.num_read += window.size
            yield MicroBatches(map(self._move, window))
        if not came and not resumed:
            raise TaskError(
                f"{self.format.split}: the stream gave no samples in epoch {epoch + 1}; each "
                "epoch calls iter() again and reads from the start; let __iter__() begin anew"
            )
        self._ended = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the window that was given last."""
        if self._reader is not None:
            self._places[0] = self._reader.place()
        places = [None if place is None else list(place) for place in self._places]
        return {
            "seed": self.format.seed,
            "workers": self._workers,
            "epoch": self._epoch,
            "ended": self._ended,
            "last_reader": self._last_reader,
            "places": places,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        if state["workers"] != self._workers:
            raise CheckpointError(
                f"the stream was read by {state['workers']} loader processes and now there are "
                f"{self._workers}; their number decides which samples come when; continue with "
                f"train.loader.num_workers: {state['workers']}"
            )
        self._reader = None
        self._epoch, self._ended = state["epoch"], state["ended"]
        self._last_reader, self._restored = state["last_reader"], True
        self._places = [None if place is None else Place(*place) for place in state["places"]]

    def close(self) -> None:
        """End the loader processes."""
        end_processes(self._loaded)
        self._loaded = self._reader = None

    def _places_at_start(self, epoch: int) -> list[Place | None]:
        """Return where each process begins: in mid-epoch, or with its state at the last end."""
        restored, self._restored = self._restored, False
        nothing: list[Place | None] = [self._initial] * len(self._places)
        if restored and self._epoch == epoch and not self._ended:
            return self._places
        follows = self._ended and self._epoch == epoch - 1
        if not follows or begins_anew(self.stream):
            return nothing
        if not restored and not self._workers:
            return nothing  # the object itself continues, or begins as at first
        return [None if p is None else Place(state=p.state) for p in self._places]

    def _read_here(self, place: Place | None) -> Iterator[Window]:
        if place is not None and place.ended:
            if place.state is not None and not begins_anew(self.stream):
                load_state(self.stream, place.state)
            return
        self._reader = StreamReader(self.stream, self.format, 0, self._epoch, place)
        while (window := self._reader.read()) is not None:
            yield window

    def _read_apart(self, places: list[Place | None], first: int) -> Iterator[Window]:
        """Read in loader processes, which take turns from process `first` on."""
        self.close()
        options = self._options
        loader: DataLoader[Any] = DataLoader(
            _Readers(self.stream, self.format, self._epoch, places, first),
            batch_size=None,
            num_workers=self._workers,
            prefetch_factor=options.prefetch_factor,
            pin_memory=self._device.type == "cuda" and options.pin_memory is not False,
            generator=torch.Generator().manual_seed(0),  # keeps the global one unchanged
            worker_init_fn=begin_loader,
        )
        self._loaded = iter(loader)
        for window in self._loaded:
            if window.place is None:  # it was not this process' turn
                continue
            self._places[window.reader] = window.place
            self._last_reader = window.reader
            yield window

    def _move(self, batch: Batch) -> Batch:
        return batch if self._device.type == "cpu" else move(batch, self._device)


class _Readers(IterableDataset[Any]):
    """The stream in a loader process; yields windows with their places.

    DataLoader asks the processes in turn, from the first on. Those before the process whose turn
    it is yield an empty window first.
    """

    def __init__(
        self,
        stream: Any,
        format: StreamFormat,
        epoch: int,
        places: list[Place | None],
        first: int,
    ) -> None:
        self._stream, self._format, self._epoch = stream, format, epoch
        self._places, self._first = places, first

    def __iter__(self) -> Iterator[Window]:
        info = get_worker_info()
        assert info is not None
        number = info.id
        if number < self._first:
            yield Window([], 0, number)
        start = self._places[number]
        if start is not None and start.ended:
            return
        reader = StreamReader(self._stream, self._format, number, self._epoch, start)
        while (window := reader.read()) is not None:
            window.place = reader.place()
            yield window


def open_stream(
    data: Data,
    config: TrainConfig,
    how: SplitReading,
    *,
    seed: int,
    batches: int | None = None,
    ranks: Ranks = ALONE,
) -> StreamSource:
    """Open a split that is a stream."""
    split, loader = how.split, how.loader
    stream = getattr(data, split)
    if split == "train" and loader.resume == "exact" and not has_state(stream):
        raise ConfigError(
            f"exact, and train is {stream_name(stream)} without state_dict() and "
            "load_state_dict(): a resumed run would read it again from the epoch's start; define "
            "both, or write train.loader.resume: skip",
            key="train.loader.resume",
        )
    batched = gives_batches(stream, data)
    is_train = split == "train"
    # Evaluation uses micro-batches, which are known to fit into memory.
    items = config.batch_size if is_train else config.micro_batch_size
    micro_items = config.micro_batch_size
    if batched:
        items, micro_items = (config.accumulation if is_train else 1), 1
    format = StreamFormat(
        seed=seed,
        split=split,
        items=items,
        micro_items=micro_items,
        batched=batched,
        collate=how.collate or default_collate,
        drop_last=is_train and loader.drop_last,
        skips=is_train and loader.resume == "skip",
        most=batches if batches is None or batched else batches * config.batch_size // items,
        share=how.share,
    )
    length = length_of(stream) or 0
    if format.most is not None:
        length = min(length, format.most * items)
    whole, rest = divmod(length, items)
    windows = whole + (rest > 0 and not format.drop_last)
    plan = StreamPlan(0 if batched else length, 1 if batched else items, batched, windows)
    return StreamSource(stream, plan, format, device=how.device, loader=loader, ranks=ranks)


Source = TensorSource | LoaderSource | StreamSource
"""The windows of a split, with their micro-batches on the device."""
Plan = WindowPlan | SampledPlan | StreamPlan
"""The assignment of samples to windows."""


def first_items(stream: Any, most: int) -> list[Any]:
    """Return the first items of a stream."""
    with data_code("the first samples of the stream"):
        return list(islice(iter(stream), most))


def stream_name(stream: object) -> str:
    """Return what messages call a stream."""
    return f"a stream of type {type(stream).__name__}"


def _alike_on_ranks(windows: Iterator[Window], name: str, ranks: Ranks) -> Iterator[Window]:
    """Yield the windows of a stream while every rank has one; every rank must iterate."""
    if ranks.size == 1:
        yield from windows
        return
    compared = False
    while True:
        with ranks.together() as message:
            window = next(windows, None)
            message.own = window is not None
        count = sum(message.of_ranks)
        if 0 < count < ranks.size:
            raise TaskError(
                f"{name} ended on {ranks.size - count} of {ranks.size} ranks before the "
                f"others; {ALIKE_REMEDY}"
            )
        if window is None:
            return
        if not compared:
            _compare_first(ranks.gather_plain(window.summary), name)
            compared = True
        yield window


def _compare_first(summaries: list[Any], name: str) -> None:
    for rank, summary in enumerate(summaries):
        if differences({name: summaries[0]}, {name: summary}):
            raise TaskError(
                f"{name} gives other samples on rank {rank} than on rank 0; {ALIKE_REMEDY}"
            )


@dataclass(frozen=True)
class StreamFormat:
    """How the items of a stream become windows."""

    seed: int
    split: str
    items: int  # of a window
    micro_items: int  # of a forward pass
    batched: bool  # items are batches
    collate: Callable[[list[Any]], Batch]
    drop_last: bool
    skips: bool  # resume by reading again, even if the stream has a state
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
    found = first_tensor(batch)
    return 1 if found is None or found.ndim == 0 else len(found)
