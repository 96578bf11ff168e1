"""Tell tensors, data sets and streams apart, and check streams and samplers.

What must not live here: reading a stream (`streams.py`), or drawing an order (`data.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from trainable.task import Data


def is_stream(samples: object) -> bool:
    """Whether samples are read one after the other, from the start."""
    if isinstance(samples, IterableDataset | DataLoader):
        return True
    if isinstance(samples, Sequence | Mapping) or hasattr(type(samples), "__getitem__"):
        return False
    return hasattr(type(samples), "__iter__") and has_state(samples)


def has_state(stream: object) -> bool:
    """Whether a stream can continue from a saved state.

    That of a data set of Hugging Face lacks the content of its shuffle buffer, so it cannot.
    """
    methods = (getattr(type(stream), name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not _has_unsaved_buffer(stream)


def begins_anew(stream: object) -> bool:
    """Whether each epoch of a stream depends on the seed and its number alone.

    Any other stream may count epochs or go on with a generator: the next epoch then begins with
    the state in which the last one ended. A loader's state at the end of an epoch says only that.
    """
    of_torchdata = any(
        one.__module__.partition(".")[0] == "torchdata" for one in type(stream).mro()
    )
    return isinstance(stream, DataLoader) or of_torchdata or hasattr(stream, "set_epoch")


def _has_unsaved_buffer(stream: object) -> bool:
    waiting = [getattr(stream, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if type(part).__name__.startswith("BufferShuffled"):
            return True
        inner = getattr(part, "ex_iterables", [getattr(part, "ex_iterable", None)])
        waiting += [one for one in inner if one is not None]
    return False


def gives_batches(stream: object, data: Data) -> bool:
    """Whether the items of a stream are batches: as `Data` says, or else by its type."""
    if data.batched is not None:
        return data.batched
    if isinstance(stream, DataLoader):
        return stream.batch_sampler is not None or stream.batch_size is not None
    return not isinstance(stream, IterableDataset)


def length_of(stream: object) -> int | None:
    """Return how many items a stream promises; None where it does not say."""
    try:
        return len(stream)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return None


def stream_problems(stream: object) -> Iterator[str]:
    """Yield what is wrong with a stream, as the end of a sentence."""
    if isinstance(stream, Iterator) or not hasattr(type(stream), "__iter__"):
        yield (
            f"is {_kind(stream)}, which can be read only once; each epoch reads a stream from "
            "its start; give an IterableDataset whose __iter__() makes a new iterator"
        )
    elif length_of(stream) == 0:
        yield "has no samples; give at least one"
    if getattr(stream, "persistent_workers", False) and not has_state(stream):
        yield (
            f"is {_kind(stream)} with persistent_workers=True; loader processes start anew in "
            "each epoch, so that they have what a hook changed, and a resumed run has what they "
            "keep; remove persistent_workers"
        )


def sampler_problems(data: Data) -> Iterator[str]:
    """Yield what is wrong with the samplers of a `Data`, as a sentence."""
    given = [name for name in ("sampler", "batch_sampler") if getattr(data, name) is not None]
    if len(given) > 1:
        yield (
            "sampler and batch_sampler are both given; a sampler chooses the samples of an "
            "epoch, a batch sampler those of each step; give one of them"
        )
    for name in given:
        sampler = getattr(data, name)
        if is_stream(data.train):
            yield (
                f"{name} is given and train is a stream ({_kind(data.train)}); only samples with "
                "an index can be chosen; give a map-style Dataset, or remove the sampler"
            )
        if isinstance(sampler, Iterator) or not isinstance(sampler, Iterable):
            yield (
                f"{name} is {_kind(sampler)}; it must be an object that can be iterated anew in "
                "each epoch, such as torch.utils.data.WeightedRandomSampler; give one, or None"
            )
        for one in (sampler, getattr(sampler, "sampler", None)):
            if (processes := getattr(one, "num_replicas", 1)) not in (1, None):
                yield (
                    f"{name} is {_kind(one)} for {processes} processes; a run shuffles the "
                    "samples itself and divides them among its ranks, and would see only a share "
                    "of them; remove it"
                )


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"
