"""Windows of micro-batches that can resume in the middle of an epoch.

Randomness is a pure function of the seed, the epoch and one more input: none for the sample order,
the sample's index for augmentation, and the window's number for `collate` (masking, mixing). It
depends neither on loader processes nor on interruptions, except for what a data set reads from
torch's `get_worker_info()`. Without loader processes, `torch.initial_seed()` is the run's seed;
with any number of them it is a seed of the epoch and the window.

Loader processes start anew in each epoch, with the data set as it is then. In a run that resumes
within an epoch they fetch its windows from the first on, so that what they keep (generators,
counters, caches) is what it was. The windows already trained are not sent. What must not live
here: models, losses, or samples without an index (`streams.py`).
"""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Set, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, cast

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from trainable.config import LoaderConfig, TrainConfig
from trainable.errors import CheckpointError, ConfigError, TaskError
from trainable.process_start import end_with_parent
from trainable.ranks import WHOLE, RankShare
from trainable.sample_kinds import is_stream, length_of
from trainable.seeding import (
    HostRngState,
    derive_seed,
    preserved_host_rng,
    seed_generators_of,
    seed_host,
)
from trainable.task import Batch, Samples
from trainable.user_code.task_code import data_code
from trainable.watch import heartbeat

# Tensors move to the accelerator if they fit into this share of the memory free for this process.
_RESIDENT_SHARE = 0.25


def sample_count(samples: Samples) -> int:
    """Return the number of samples of a split; 0 where a stream does not say."""
    if is_stream(samples):
        return length_of(samples) or 0
    return len(samples[0] if isinstance(samples, tuple) else samples)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SplitReading:
    """How a split is read."""

    split: Literal["train", "val", "test"]
    device: torch.device
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    collate: Callable[[list[Any]], Batch] | None = None
    share: RankShare = WHOLE  # the part of each window that this rank keeps


def open_source(
    samples: Samples, plan: IndexPlan, how: SplitReading
) -> TensorSource | LoaderSource:
    """Open the cheapest source that fits the samples."""
    if isinstance(samples, tuple) or (type(samples) is TensorDataset and how.collate is None):
        return TensorSource(samples, plan, device=how.device, share=how.share)
    return LoaderSource(cast("Dataset[Any]", samples), plan, how)


class TensorSource:
    """Samples that are tensors in memory: indexed on the device, or on the host if too large."""

    def __init__(
        self,
        samples: tuple[Tensor, ...] | TensorDataset,
        plan: IndexPlan,
        *,
        device: torch.device,
        share: RankShare = WHOLE,
    ) -> None:
        self.plan = plan
        self.position = position_of(plan)
        self.drawing: list[bool] = []
        self.forks = False
        self._device, self._share = device, share
        self._samples = samples
        self._held: tuple[Tensor, ...] = ()
        self._versions: list[int] = []
        self._update()

    def _update(self) -> None:
        held = self._samples if isinstance(self._samples, tuple) else self._samples.tensors
        # Inference tensors have no version, and cannot be changed by operations of training.
        versions = [0 if one.is_inference() else one._version for one in held]
        if [*map(id, held), *versions] == [*map(id, self._held), *self._versions]:
            return
        self._held, self._versions = held, versions
        self._tensors: tuple[Tensor, ...] = ()  # frees the copies before new ones are made
        resident = _fits(held, self._device)
        self._tensors = tuple(t.to(self._device) for t in held) if resident else held

    def begin(self, epoch: int) -> int:
        """Begin an epoch, with the tensors as they are now; return their length."""
        self._update()
        return _begin(self.plan, epoch, len(self._held[0]), "train")

    def resume(self, epoch: int, num_samples: int) -> None:
        """Resume within an epoch that began with so many samples."""
        _resume(self.plan, epoch, num_samples, len(self._held[0]))

    def windows(self, epoch: int, start: int = 0) -> Iterator[Iterable[Batch]]:
        """Yield the windows of an epoch from `start` on."""
        self._update()
        for index in self.plan.indices(epoch, start, self._tensors[0].device):
            self._update()
            micro = self._share.micro_size(self.plan.micro_size(index.size(0)))
            index = index[self._share.part(index.size(0))]
            gathered = [self._gather(tensor, index) for tensor in self._tensors]
            size = index.size(0)
            if size == 0:
                yield ()
            elif micro >= size:
                yield (tuple(gathered),)
            else:
                yield zip(*(torch.split(tensor, micro) for tensor in gathered), strict=True)

    def close(self) -> None:
        """Free the tensors."""
        self._samples = self._held = self._tensors = ()

    def _gather(self, tensor: Tensor, index: Tensor) -> Tensor:
        rows = tensor.index_select(0, index)
        if rows.device == self._device:
            return rows
        return rows.pin_memory().to(self._device, non_blocking=True)


class LoaderSource:
    """Windows of samples that a DataLoader fetches, with or without loader processes.

    The loader's batch is a whole window, a list of micro-batches. So the loader's overhead occurs
    once per optimizer step, whatever the accumulation. In exchange the host holds whole windows.

    Attributes:
        position: What a checkpoint keeps besides the number of windows; None: nothing.
        drawing: Whether the windows, and the samples alone, have drawn random numbers in this
            process.
        forks: Whether loader processes start in each epoch, with a copy of the data set.
    """

    def __init__(self, dataset: Dataset[Any], plan: IndexPlan, how: SplitReading) -> None:
        self.plan = plan
        self.position = position_of(plan)
        self._dataset, self._share, self._split = dataset, how.share, how.split
        self._device, loader = how.device, how.loader
        workers = loader.num_workers
        self._requests = _Requests(plan, how.share, replays=workers > 0)
        # The loader draws a seed for its processes at each epoch; its own generator keeps the
        # global one unchanged.
        self._generator = torch.Generator()
        seeded = _SeededWindows(
            dataset, plan, how.split, how.collate or default_collate, how.share
        )
        self.drawing, self.forks = seeded.drawing, workers > 0
        self._loader: DataLoader[Any] = DataLoader(
            seeded,
            batch_sampler=self._requests,
            num_workers=workers,
            prefetch_factor=loader.prefetch_factor if workers else None,
            pin_memory=self._device.type == "cuda" and loader.pin_memory is not False,
            collate_fn=MicroBatches,  # they are collated already
            generator=self._generator,
            worker_init_fn=_begin_process,
        )
        self._windows: Iterator[list[Batch]] | None = None

    def begin(self, epoch: int) -> int:
        """Begin an epoch, with the data set as it is now; return how many samples it has."""
        self._set_epoch(epoch)
        return _begin(self.plan, epoch, self._length(), self._split)

    def resume(self, epoch: int, num_samples: int) -> None:
        """Resume within an epoch that began with so many samples."""
        _resume(self.plan, epoch, num_samples, self._length())

    def _length(self) -> int:
        with data_code(f"{self._split}: len(dataset)"):
            return len(cast("Sized", self._dataset))

    def _set_epoch(self, epoch: int) -> None:
        if self._split != "train":  # is the same at each evaluation
            return
        with data_code("set_epoch() of train"):
            for one in _within(self._dataset):
                if callable(getattr(one, "set_epoch", None)):
                    one.set_epoch(epoch)

    def windows(self, epoch: int, start: int = 0) -> Iterator[Iterable[Batch]]:
        """Yield the windows of an epoch from `start` on."""
        self.close()
        self._requests.epoch, self._requests.start = epoch, start
        seed = self._share.seed(derive_seed(self.plan.seed, "loader", self._split, epoch))
        self._generator.manual_seed(seed)
        self._windows = iter(self._loader)
        count = self._requests.first
        for window in self._windows:
            count += 1
            if count <= start:  # fetched for what the loader processes keep, and not sent
                heartbeat.beat("step")
                continue
            # Not `map`: a StopIteration raised by a batch's own `to` would end it silently.
            yield (self._move(batch) for batch in window)
        if count < (promised := self.plan.num_windows(epoch)):
            raise TaskError(
                f"{self._split}: {count} of {promised} windows of epoch {epoch + 1} came "
                "and the data ended; an epoch has as many windows as len(dataset) promises; "
                "return a sample for every index below len(dataset)"
            )

    def close(self) -> None:
        """End the loader processes."""
        end_processes(self._windows)
        self._windows = None

    def _move(self, batch: Batch) -> Batch:
        return batch if self._device.type == "cpu" else move(batch, self._device)


class _Requests:
    """Batch sampler: yields `[epoch, window, sent, micro_size, place, index, ...]` for a window.

    The place is that of the first index in the window of all ranks.
    """

    def __init__(self, plan: IndexPlan, share: RankShare, *, replays: bool) -> None:
        self._plan, self._share, self._replays = plan, share, replays
        self.epoch = 0
        self.start = 0

    @property
    def first(self) -> int:
        """The first window that is asked for."""
        return 0 if self._replays else self.start

    def __iter__(self) -> Iterator[list[int]]:
        plan, host = self._plan, torch.device("cpu")
        windows = plan.indices(self.epoch, self.first, host)
        for window, index in enumerate(windows, start=self.first):
            micro_size = self._share.micro_size(plan.micro_size(len(index)))
            part, sent = self._share.part(len(index)), window >= self.start
            yield [self.epoch, window, sent, micro_size, part.start, *index[part].tolist()]


def _begin(plan: IndexPlan, epoch: int, num_samples: int, split: str) -> int:
    if num_samples == 0:
        raise TaskError(
            f"{split} has no samples in epoch {epoch + 1}; an epoch needs at least one; let a "
            "data set that shrinks keep some"
        )
    plan.begin(epoch, num_samples)
    return num_samples


def _resume(plan: IndexPlan, epoch: int, num_samples: int, now: int) -> None:
    if now < num_samples:
        raise CheckpointError(
            f"train has {now} samples, and had {num_samples} when epoch {epoch + 1} began, within "
            "which the run resumes; resume with the same data, or start a new run"
        )
    plan.resume(epoch, num_samples)


def _within(dataset: Any) -> Iterator[Any]:
    """Yield a data set, and those that it is made of, as torch's `Subset` and `ConcatDataset`."""
    yield dataset
    parts = [getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())]
    for part in parts:
        if isinstance(part, Dataset):
            yield from _within(part)


def end_processes(windows: object) -> None:
    """End the loader processes behind an iterator.

    torch has no public way to end them. Without this call they end only at garbage collection, or
    never if the trial is killed, and keep their memory until then.
    """
    shut_down = getattr(windows, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


def begin_loader(_: int) -> None:
    """Begin a loader process: it ends with the thread that started it.

    torch checks every five seconds, between two samples. A process that waits for a missing file
    would outlive a killed trial and keep the trial's memory. What its parent had dropped is never
    collected here: a closed group of ranks waits for threads that a fork does not have.
    """
    end_with_parent()
    gc.freeze()


def _begin_process(_: int) -> None:
    """Begin a loader process of an epoch."""
    begin_loader(_)
    info = get_worker_info()
    assert info is not None
    cast("_SeededWindows", info.dataset).seed_generators(info.seed)


class MicroBatches(list[Batch]):
    """The micro-batches of a window. The loader calls `pin_memory`, which keeps their types."""

    def pin_memory(self) -> MicroBatches:
        """Return the window with its tensors in pinned memory."""
        return MicroBatches(map(pin, self))


class _SeededWindows(Dataset[Any]):
    """Fetch each sample and collate each window under its own seed.

    Augmentation and masking are therefore the same in any process. Seeding costs about ten
    microseconds a sample. It starts with the first window that draws random numbers. This window
    is fetched again under its seed, so its content does not depend on when seeding started.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: IndexPlan,
        split: str,
        collate: Callable[[list[Any]], Batch],
        share: RankShare,
    ) -> None:
        self._dataset, self._share = dataset, share
        self._seed, self._count = plan.seed, plan.windows
        # A sampler may choose a sample several times: then each time is augmented differently.
        self._by_place = position_of(plan) is not None
        self._split = split
        self._collate = collate
        self.drawing = [False, False]

    def seed_generators(self, seed: int) -> None:
        """Seed the generators of a loader process' own copy of data set and `collate`.

        Else they would draw the same numbers in each process, and again in each epoch.
        """
        seed_generators_of([self._dataset, self._collate], seed, in_datasets=True)

    def __getitems__(self, request: list[int]) -> list[Batch]:
        """Return the micro-batches of a window."""
        epoch, window, sent, micro_size, place, *indices = request
        what = f"{self._split}: {window} of {self._count} windows of epoch {epoch + 1} came"
        with data_code(what):
            batches = self._fetch(epoch, window, micro_size, dict(enumerate(indices, place)))
        return batches if sent else []

    def _fetch(
        self, epoch: int, window: int, micro_size: int, indices: dict[int, int]
    ) -> list[Batch]:
        if get_worker_info() is not None:  # a data set may seed its own generator from torch's
            self._seed_rank(epoch, "window", window)
        before = HostRngState()
        if not self.drawing[0]:
            batches = self._collated(self._read(indices), micro_size)
            if not before.has_changed():
                return batches
            self.drawing[0] = True
            before.restore()
        try:
            samples = self._samples(epoch, window, indices, before)
            self._seed_rank(epoch, "collate", window)
            return self._collated(samples, micro_size)
        finally:
            # In the main process, dropout draws from the same generators: restore them.
            before.restore()

    def _samples(
        self, epoch: int, window: int, indices: dict[int, int], before: HostRngState
    ) -> list[Any]:
        if not self.drawing[1]:  # perhaps only the collate function draws
            samples = self._read(indices)
            self.drawing[1] = before.has_changed()
            if not self.drawing[1]:
                return samples
        samples = []
        for place, index in indices.items():
            self._seed_host(epoch, *(("place", window, place) if self._by_place else (index,)))
            samples.append(self._dataset[index])
        return samples

    def _read(self, indices: dict[int, int]) -> list[Any]:
        return [self._dataset[index] for index in indices.values()]

    def _collated(self, samples: list[Any], size: int) -> list[Batch]:
        starts = range(0, len(samples), size)
        return [self._collate(samples[first : first + size]) for first in starts]

    def _seed_host(self, *parts: int | str) -> None:
        """Seed for a sample, alike on all ranks."""
        seed_host(derive_seed(self._seed, self._split, *parts))

    def _seed_rank(self, *parts: int | str) -> None:
        """Seed for what is drawn for a rank's whole part of a window."""
        seed_host(self._share.seed(derive_seed(self._seed, self._split, *parts)))


def _fits(tensors: tuple[Tensor, ...], device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    cap = torch.cuda.get_per_process_memory_fraction(device) * total
    ours = min(free, cap - torch.cuda.memory_allocated(device))
    return sum(t.numel() * t.element_size() for t in tensors) <= _RESIDENT_SHARE * ours


@dataclass
class WindowPlan:
    """The assignment of samples to windows: pure arithmetic."""

    samples: int
    batch_size: int  # samples of a window, for one optimizer step
    micro_batch_size: int  # samples of one forward pass
    seed: int = 0
    drop_last: bool = False
    shuffle: bool = True
    most: int | None = None  # use only so many samples, the first ones
    windows: int = field(init=False)
    """Optimizer steps of the first epoch."""
    num_built: int = field(init=False)
    """Samples of the data set when it was built."""

    def __post_init__(self) -> None:
        self.num_built = self.samples
        self.begin(0, self.samples)
        self.samples, self.windows = self._now, self.num_windows(0)

    def begin(self, epoch: int, num_samples: int) -> None:
        """Begin an epoch on a data set that has so many samples now."""
        self._now = num_samples if self.most is None else min(num_samples, self.most)
        if self.num_windows(epoch) == 0:
            raise ConfigError(
                f"{self.batch_size} and there are {self._now} samples; with drop_last no step "
                "remains; lower it or set train.loader.drop_last: false",
                key="train.batch_size",
            )

    resume = begin

    def num_windows(self, epoch: int) -> int:
        """Optimizer steps of the present epoch; the data set may grow from one to the next."""
        del epoch
        whole, rest = divmod(self._now, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def micro_size(self, size: int) -> int:
        """Samples of one forward pass, in a window of `size` samples."""
        del size
        return self.micro_batch_size

    def size(self, window: int) -> int:
        """Samples of a window."""
        return min(self.batch_size, self._now - window * self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Indices of the samples in the order of an epoch (counted from 0), shape (samples,)."""
        if not self.shuffle:
            return torch.arange(self._now)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(self._now, generator=generator)

    def indices(self, epoch: int, start: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the indices of the samples of each window from `start` on, on a device."""
        order = self.order(epoch).to(device)
        for window in range(start, self.num_windows(epoch)):
            first = window * self.batch_size
            yield order[first : first + self.batch_size]


def position_of(plan: IndexPlan) -> SampledPlan | None:
    """Return the plan if it has a position to save: a sampler's order."""
    return plan if isinstance(plan, SampledPlan) else None


_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.device, torch.dtype, torch.Size}
)
_NOT_ENTERED = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
)
"""Types that the search for tensors does not enter: through them it would reach all objects."""
_MAX_OBJECTS_SEARCHED = 10_000
"""After this many objects, the search for a tensor ends, and the object is not moved. If it does
hold a tensor, torch raises when that tensor meets one on the device.
"""


def first_tensor(batch: Batch) -> Tensor | None:
    """Return the first tensor of a batch; None if it has none."""
    if isinstance(batch, Tensor):
        return batch
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(parts, Iterable) or isinstance(parts, (str, bytes, numpy.ndarray)):
        return None
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def move(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with every tensor on the device; the types of its parts are kept."""

    def move_part(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(device, non_blocking=True)
        kind: type = type(part)
        if not callable(getattr(kind, "to", None)):
            return NotImplemented
        options = {"non_blocking": True} if _takes_non_blocking(kind) else {}
        moved = part.to(device, **options)
        if moved is None:
            raise TaskError(
                f"{_name(kind)}.to(device) returned None; it must return the moved batch; end it "
                "with `return self`"
            )
        return moved

    return _converted(batch, move_part, _refuse_hidden_tensors)


def pin(batch: Batch) -> Batch:
    """Return the batch with its tensors in pinned memory, for asynchronous copies to a GPU."""

    def pin_part(part: Any) -> Any:
        if isinstance(part, Tensor):
            can_pin = part.device.type == "cpu" and part.layout == torch.strided
            return part.pin_memory() if can_pin else part
        if callable(getattr(type(part), "pin_memory", None)):
            return part.pin_memory()
        return part if callable(getattr(type(part), "to", None)) else NotImplemented

    return _converted(batch, pin_part, lambda _: None)


def _converted(
    batch: Any, convert_part: Callable[[Any], Any], unknown: Callable[[Any], None]
) -> Any:
    """Return a copy of a batch with its parts converted."""
    seen: dict[int, Any] = {}  # keeps shared tensors shared, and ends at cycles
    kept: list[Any] = []  # keeps all parts alive, so that no id is used again

    def convert(part: Any) -> Any:
        kind: type = type(part)
        if kind in _PLAIN:
            return part
        if id(part) not in seen:
            kept.append(part)
            found = convert_part(part)
            seen[id(part)] = inside(part, kind) if found is NotImplemented else found
        return seen[id(part)]

    def inside(part: Any, kind: type) -> Any:
        if kind is dict:
            return {key: convert(value) for key, value in part.items()}
        if kind is list or kind is tuple:
            return kind(convert(value) for value in part)
        if isinstance(part, tuple):
            return attributes(part, _tuple_of(kind, [convert(value) for value in part]))
        if isinstance(part, Mapping):
            return attributes(part, mapping(part))
        if isinstance(part, MutableSequence):
            clone = copy.copy(part)
            seen[id(part)] = clone
            for position, value in enumerate(part):
                clone[position] = convert(value)
            return attributes(part, clone)
        if isinstance(part, Set):
            return kind(convert(value) for value in part)
        if _field_names(kind) is not None or kind is types.SimpleNamespace:
            return attributes(part, copy.copy(part))
        unknown(part)
        return part

    def mapping(part: Mapping[Any, Any]) -> Any:
        clone = copy.copy(part) if hasattr(part, "__setitem__") else None
        if clone is None:
            return type(part)({key: convert(value) for key, value in part.items()})  # type: ignore[call-arg]
        seen[id(part)] = clone
        for key, value in part.items():
            clone[key] = convert(value)
        return clone

    def attributes(part: Any, clone: Any) -> Any:
        """Convert the attributes of a container, a dataclass or an attrs object."""
        seen[id(part)] = clone
        fields = _field_names(part.__class__) or ()
        names = dict.fromkeys((*fields, *getattr(part, "__dict__", ())))
        for name in names:
            if name in getattr(part, "__dict__", ()) or hasattr(part, name):
                value = convert(_held(part, name))
                if value is not _held(clone, name, None):
                    object.__setattr__(clone, name, value)
        return clone

    return convert(batch)


def _held(part: Any, name: str, *default: Any) -> Any:
    own = getattr(part, "__dict__", {})
    return own[name] if name in own else getattr(part, name, *default)


def _tuple_of(kind: type, values: list[Any]) -> Any:
    """Build a tuple of that type without calling its constructor."""
    try:
        return tuple.__new__(kind, values)
    except TypeError:  # a type written in C, such as torch.return_types.max
        return kind(values)


@functools.cache
def _takes_non_blocking(kind: type) -> bool:
    try:
        parameters = inspect.signature(kind.to).parameters  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # written in C
        return False
    return "non_blocking" in parameters or any(
        p.kind is p.VAR_KEYWORD for p in parameters.values()
    )


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Names of the fields of a dataclass or an attrs class; None for any other."""
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is not None:
        return tuple(fields)
    attrs = getattr(kind, "__attrs_attrs__", None)
    return tuple(one.name for one in attrs) if attrs is not None else None


def _refuse_hidden_tensors(part: Any) -> None:
    if any(isinstance(held, Tensor) for held in _reached(part)):
        raise TaskError(
            f"the batch holds an object of type {_name(type(part))}, and that holds tensors; only "
            "tensors, mappings, sequences, dataclasses and objects with a method "
            "to(device) are moved to the device; give it a method `def to(self, device, "
            "non_blocking=False)` that returns the moved object, or make it a dataclass"
        )


def _reached(part: Any) -> Iterator[Any]:
    """Yield the objects that an object holds, directly or indirectly."""
    waiting, seen = [part], {id(part)}
    while waiting and len(seen) < _MAX_OBJECTS_SEARCHED:
        current = waiting.pop()
        if isinstance(current, numpy.ndarray) and current.dtype == object:
            held = current.ravel().tolist()
        else:
            held = gc.get_referents(current)
        for one in held:
            if type(one) in _PLAIN or isinstance(one, _NOT_ENTERED) or id(one) in seen:
                continue
            seen.add(id(one))
            yield one
            waiting.append(one)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_MOST_PER_SAMPLE = 100
"""A sampler that gives so many times the number of samples is taken to be endless."""


class SampledPlan:
    """The assignment of samples to windows by a sampler or a batch sampler."""

    def __init__(
        self,
        sampler: Any,
        config: TrainConfig,
        *,
        in_batches: bool,
        num_indices: int,
        seed: int,
    ) -> None:
        self.seed = seed
        batch_size = config.batch_size
        # A change of `train.batch_size` does not move the position in lists.
        self.batch_size = 1 if in_batches else batch_size
        self._size, self._drop_last = batch_size, config.loader.drop_last
        self._sampler, self.in_batches = sampler, in_batches
        self.num_built = self._num_indices = num_indices
        self._accumulation = config.accumulation
        self._epoch = 0
        self._order, self._sizes = self._draw(0)
        self._check_windows()
        self.windows = self.num_windows(0)
        self.samples = sum(self._window_sizes())

    def begin(self, epoch: int, num_samples: int) -> None:
        """Ask the sampler for an epoch, as it is now, of a data set that has so many samples."""
        self._num_indices = num_samples
        self._epoch = -1
        self._go_to(epoch)

    def resume(self, epoch: int, num_samples: int) -> None:
        """Resume within an epoch, whose order was restored."""
        self._num_indices = num_samples
        self._go_to(epoch)

    def num_windows(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""
        self._go_to(epoch)
        return len(self._window_sizes())

    def size(self, window: int) -> int:
        """Samples of a window of the current epoch."""
        return self._window_sizes()[window]

    def micro_size(self, size: int) -> int:
        """Samples of one forward pass, in a window of `size` samples."""
        whole = size if self.in_batches else self._size
        return -(-whole // self._accumulation)

    def indices(self, epoch: int, start: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the indices of the samples of each window from `start` on, on a device."""
        self._go_to(epoch)
        sizes = self._window_sizes()
        order = self._order.to(device)
        first = sum(sizes[:start])
        for size in sizes[start:]:
            yield order[first : first + size]
            first += size

    def digest(self, epoch: int) -> str:
        """Return what tells the order of an epoch, and its windows, from another one."""
        self._go_to(epoch)
        order = hashlib.sha256(self._order.numpy().data)
        order.update(repr(self._window_sizes()).encode())
        return order.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the current epoch."""
        return {
            "seed": self.seed,
            "epoch": self._epoch,
            "order": self._order,
            "sizes": self._sizes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the order of an epoch; that of another run is drawn anew, by this run's seed."""
        if state["seed"] != self.seed:
            return
        self._epoch, self._order = state["epoch"], state["order"]
        self._sizes = state["sizes"]

    def _go_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._order, self._sizes = self._draw(epoch)
            self._epoch = epoch
            self._check_windows()  # a run would begin one empty epoch after the other

    def _check_windows(self) -> None:
        if not self._window_sizes():
            raise ConfigError(
                f"{self._size} and the sampler chooses {len(self._order)} samples; with drop_last "
                "no step remains; lower it or set train.loader.drop_last: false",
                key="train.batch_size",
            )

    def _window_sizes(self) -> list[int]:
        if self._sizes is not None:
            return self._sizes
        whole, rest = divmod(len(self._order), self._size)
        return [self._size] * whole + ([rest] if rest and not self._drop_last else [])

    def _draw(self, epoch: int) -> tuple[Tensor, list[int] | None]:
        """Ask the sampler for an epoch; return its indices, and the sizes of its lists."""
        seed = derive_seed(self.seed, "sampler", epoch)
        with preserved_host_rng(), data_code("the sampler"):
            seed_host(seed)
            seed_generators_of(self._sampler, seed)
            for one in (self._sampler, getattr(self._sampler, "sampler", None)):
                if callable(getattr(one, "set_epoch", None)):
                    one.set_epoch(epoch)  # type: ignore[union-attr]
            most = _MOST_PER_SAMPLE * self._num_indices
            found = list(islice(iter(self._sampler), most + 1))
        where = f"the sampler, asked for epoch {epoch + 1},"
        if not found or len(found) > most:
            raise TaskError(
                f"{where} gave {'more than ' if found else ''}{most if found else 0} items; it "
                "gives those of one epoch and ends; let its __iter__() do so"
            )
        sizes = None
        try:
            if self.in_batches:
                sizes = [len(batch) for batch in found]
                found = [index for batch in found for index in batch]
            order = torch.tensor([int(index) for index in found])
        except (TypeError, ValueError) as problem:
            what = "lists of indices" if self.in_batches else "indices"
            raise TaskError(
                f"{where} gave what cannot be used ({problem}); a "
                f"{'batch ' if self.in_batches else ''}sampler gives {what}; correct it, or give "
                f"it as {'sampler' if self.in_batches else 'batch_sampler'}="
            ) from problem
        if sizes is not None and 0 in sizes:
            raise TaskError(f"{where} gave an empty list; each list is one step; leave it out")
        if int(order.min()) < 0 or int(order.max()) >= self._num_indices:
            raise TaskError(
                f"{where} gave indices from {int(order.min())} to {int(order.max())}, and train "
                f"has {self._num_indices} samples; an index is at least 0 and below that; "
                "correct the sampler"
            )
        return order, sizes


IndexPlan = WindowPlan | SampledPlan
"""The assignment of samples with an index to windows."""


def check_sampler(plan: SampledPlan) -> None:
    """Refuse a sampler that chooses other samples when it is asked again for the same epoch."""
    first = plan._draw(1)
    plan._draw(2)
    again = plan._draw(1)
    if not torch.equal(first[0], again[0]) or first[1] != again[1]:
        raise TaskError(
            f"{type(plan._sampler).__name__} chooses other samples when it is asked again for the "
            "same epoch under the same seed; a resumed run asks a new sampler; draw from the "
            "global generators of Python, NumPy or torch, or from a generator in an attribute, "
            "and count epochs in set_epoch(epoch)"
        )
