"""What a run's task built, as a summary that the run keeps and compares at each start.

A run that is resumed builds its model and data again. Where that gives something else than when it
was begun (hash order, a clock, a file that was replaced), its curve would go on as another run's:
it is refused, with what differs. Numbers are compared with a tolerance, as another processor may
round otherwise. What must not live here: what a sweep was run from (`fingerprint`).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainable.data import end_with_parent
from trainable.errors import ConfigError, TaskError
from trainable.fingerprint import ARGUMENTS, COLLATED, differences
from trainable.rules import BUILT
from trainable.seeding import derive_seed, isolated_host_randomness, seed_host
from trainable.storage.regular_files import LARGEST_TEXT, read_regular, replace_regular
from trainable.task import Data, Samples, Task

_ITEMS = 8
"""Looked at of each split: the first, the last, and some between."""
_ENTRIES = 64
"""Looked at of a list or a mapping in an item."""
_VALUES = 1 << 16
"""Looked at of a tensor, evenly spread; more would be felt with large models."""
_BOUND = 2000
"""Characters that a sweep keeps of an item or a batch; less is looked at of larger ones."""
_SHOWN = 3

Summary = dict[str, Any]


def summarise(
    task: Task,
    model: nn.Module,
    data: Data,
    *,
    arguments: Mapping[str, Any],
    apart: bool,
) -> Summary:
    """Summarise what a task built; generators are put back as they were.

    Args:
        task: With the files that it named.
        model: With its initial weights.
        data: Its samples.
        arguments: Those of the task's constructor.
        apart: Fetch items in a process of their own, as loader processes do: what a data set
            opens when its first item is fetched, such as an HDF5 file, must not be open before
            they are forked.
    """
    kinds = [[name, type(module).__name__] for name, module in model.named_modules()]
    weights = (*model.named_parameters(), *model.named_buffers())
    with isolated_host_randomness():
        found: Summary = {f"file {path}": digest for path, digest in task.files_read.items()}
        found[ARGUMENTS] = _digest(arguments)
        found["model: its modules"] = _digest(kinds)
        found |= {f"model: initial values of {name}": _summary(value) for name, value in weights}
        found |= _splits_apart(data) if apart else _splits(data)
    return _as_read_back(found)


def summarise_data(data: Data, *, arguments: Mapping[str, Any]) -> Summary:
    """Summarise the data alone, small enough for a sweep to keep; generators are put back.

    Items are fetched always: call it where no loader process is forked afterwards.
    """
    found: Summary = {ARGUMENTS: _digest(arguments)}
    with isolated_host_randomness():
        for split in ("train", "val"):
            found |= _split(split, data, _bounded)
    return _as_read_back(found)


def check_built(directory: Path, now: Summary, *, resumed: bool) -> None:
    """Refuse to resume a run whose task builds something else than when it was begun; note what a
    new one builds. A run that has not said what it began with is noted from now on, and so is one
    whose task has other arguments than before.

    Raises:
        ConfigError: It does; the message says what differs.
    """
    file = directory / BUILT
    before = _read(file) if resumed else None
    if before is None or before.get(ARGUMENTS) != now[ARGUMENTS]:  # as populations change them
        replace_regular(file, json.dumps(now).encode())
        return
    differing = differences(before, now)
    if not differing:
        return
    more = len(differing) - _SHOWN
    shown = ", ".join([*differing[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])
    raise ConfigError(
        f"builds something else than when this run was begun ({shown}); a run is resumed with the "
        "model and the data that it had; draw only from the generators of Python, NumPy and "
        "torch, let nothing depend on the order of a set or a directory, on time or process, and "
        f"restore files that were changed; to go on nevertheless remove {file}",
        key="task",
    )


def _read(file: Path) -> Summary | None:
    try:
        found = json.loads(read_regular(file, LARGEST_TEXT))
    # of an earlier release; cut short with the power
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _as_read_back(found: Summary) -> Summary:
    summary: Summary = json.loads(json.dumps(found))  # the lists of JSON are no tuples
    return summary


def _splits(data: Data) -> Summary:
    return _split("train", data, _summary) | _split("val", data, _summary)


def _splits_apart(data: Data) -> Summary:
    """Summarise the data in a child process, made as a DataLoader makes its own.

    Raises:
        TaskError: The process did not live to the end.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=_send_splits, args=(data, sender), daemon=True)
    child.start()
    sender.close()
    with receiver:
        try:
            found: Summary | None = receiver.recv()
        except EOFError:
            found = None
    child.join()
    if found is None:
        raise TaskError(
            "a process that fetched items of the data sets, as loader processes do, ended with "
            f"exit status {child.exitcode}; an item must not end its process; look for the reason "
            "with train.loader.num_workers: 0"
        )
    return found


def _send_splits(data: Data, sender: Connection) -> None:
    torch.set_num_threads(1)  # the parent's threads are not there after a fork; a loader does so
    end_with_parent()
    with sender:
        sender.send(_splits(data))


def _split(split: str, data: Data, told: Callable[[object], Any]) -> Summary:
    samples: Samples = data.train if split == "train" else data.val
    if isinstance(samples, tuple):
        return {f"{split}: tensor {place}": told(one) for place, one in enumerate(samples)}
    size = len(samples)  # type: ignore[arg-type]
    found: Summary = {f"{split}: its length": size}
    # Of a reader that a data set opens at its first item, the run opens its own.
    with contextlib.suppress(TypeError, ValueError, AttributeError):  # a class may refuse
        samples = copy.copy(samples)
    fetched: list[Any] = []
    count = min(_ITEMS, size)
    for index in sorted({place * (size - 1) // max(1, count - 1) for place in range(count)}):
        seed_host(derive_seed("built", split, index))
        try:
            fetched.append(samples[index])
            item = told(fetched[-1])
        # What a user's data set raises is told by the step that needs the item.
        except Exception as error:
            item = f"raises {type(error).__name__}"
        found[f"{split}[{index}]"] = item
    collate = data.collate_of(split)
    batch: Any = "by torch's default"
    if collate is not None:
        seed_host(derive_seed("built", split, "collate"))
        try:
            batch = told(collate(fetched))
        # As above; it may also need as many samples as a batch has.
        except Exception as error:
            batch = f"raises {type(error).__name__}"
    found[f"{split}: {COLLATED}"] = batch
    return found


def _bounded(value: object) -> Any:
    for entries in (_ENTRIES, 8, 2):
        found = _summary(value, entries=entries)
        if len(json.dumps(found)) <= _BOUND:
            return found
    return type(value).__name__


def _summary(value: object, depth: int = 0, entries: int = _ENTRIES) -> Any:
    """Return what identifies a value as plain data: floats stand for what may be rounded."""
    if isinstance(value, Tensor):
        if is_lazy(value) or value.is_meta or value.layout is not torch.strided:
            return [type(value).__name__, str(value.dtype)]
        return _numbers(value.detach().flatten(), list(value.shape))
    if isinstance(value, numpy.ndarray | numpy.generic):
        if value.dtype.kind not in "biufc":
            return [str(value.dtype), list(value.shape), _digest(numpy.asarray(value).tolist())]
        return _summary(torch.as_tensor(numpy.array(value)))
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, int | str | bytes | complex):
        return _digest(repr(value))
    if depth > 8:
        return type(value).__name__
    inner = _entries(value)
    if inner is not None:
        parts = [[key, _summary(one, depth + 1, entries)] for key, one in inner[:entries]]
        return [type(value).__name__, len(inner), parts]
    if hasattr(value, "__array__"):  # such as an image of PIL's
        return [type(value).__name__, _summary(numpy.asarray(value), depth + 1)]
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _entries(value: object) -> list[tuple[str, object]] | None:
    if isinstance(value, Mapping):
        return [(repr(key), one) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [("", one) for one in value]
    if isinstance(value, set | frozenset):
        return [("", one) for one in sorted(map(repr, value))]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def _numbers(flat: Tensor, shape: list[int]) -> list[Any]:
    kind = str(flat.dtype)
    if flat.numel() == 0:
        return [kind, shape]
    looked_at = flat[:: max(1, flat.numel() // _VALUES)].cpu().contiguous()
    if not (flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.uint8):
        return [kind, shape, hashlib.sha256(looked_at.numpy().tobytes()).hexdigest()[:16]]
    values = torch.view_as_real(looked_at) if flat.is_complex() else looked_at
    values = torch.nan_to_num(values.flatten().to(torch.float64))
    places = torch.linspace(0, len(values) - 1, min(8, len(values))).long()
    size = float(values.square().mean().sqrt())
    # Against which differences count, then values, and a sum that knows their order.
    order = torch.cos(torch.arange(len(values), dtype=torch.float64))
    told = [*values[places].tolist(), float((values * order).sum() / len(values) ** 0.5)]
    return [kind, shape, size, [one / size if size else 0.0 for one in told]]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()[:16]
