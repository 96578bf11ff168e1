"""Summarise the model and data that a task built, and compare the summary when the run resumes.

A resumed run builds both again, and is refused where hash order, a clock or a replaced file makes
them differ. Numbers are compared with a tolerance: another processor may round differently. What
must not live here: digests of the task's source files (`user_code/fingerprint.py`).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainable.call_in_fork import ForkEnded, in_fork
from trainable.errors import ConfigError, TaskError
from trainable.sample_kinds import is_stream
from trainable.seeding import derive_seed, preserved_host_rng, seed_host
from trainable.store.regular_files import LARGEST_TEXT, read_regular, replace_regular
from trainable.task import Data, Samples, Task
from trainable.user_code.fingerprint import ARGUMENTS, BUILT, COLLATED, differences
from trainable.user_code.task_import import listed

_ITEMS = 8
"""Items compared of each split: the first, the last, and some between."""
_ENTRIES = 64
"""Entries compared of a list or a mapping in an item."""
_VALUES = 1 << 16
"""Values compared of a tensor, evenly spread; more would slow down large models."""
_BOUND = 2000
"""The most characters that a sweep keeps of an item or batch; larger ones are compared in part."""

Summary = dict[str, Any]


def summarise(
    task: Task,
    model: nn.Module,
    data: Data,
    *,
    arguments: Mapping[str, Any],
    apart: bool,
) -> Summary:
    """Summarise what a task built. Random generators are restored afterwards."""
    kinds = [[name, type(module).__name__] for name, module in model.named_modules()]
    weights = (*model.named_parameters(), *model.named_buffers())
    with preserved_host_rng():
        found: Summary = {f"file {path}": digest for path, digest in task.files_read.items()}
        found[ARGUMENTS] = _digest(arguments)
        found["model: its modules"] = _digest(kinds)
        found |= {f"model: initial values of {name}": _summary(value) for name, value in weights}
        found |= _splits_apart(data) if apart else _splits(data)
    return _as_read_back(found)


def summarise_data(data: Data, *, arguments: Mapping[str, Any]) -> Summary:
    """Summarise the data alone, in a form that a sweep can store. Generators are restored.

    It fetches items in this process: call it only if no loader process is forked afterwards.
    """
    found: Summary = {ARGUMENTS: _digest(arguments)}
    with preserved_host_rng():
        for split in ("train", "val"):
            found |= _split(split, data, _bounded)
    return _as_read_back(found)


class BuiltDiffers(ConfigError):
    """A task builds another model or other data than when its run started."""

    def __init__(self, differing: str, file: Path) -> None:
        self.differing = differing
        super().__init__(
            f"builds something else than when this run started ({differing}); a run resumes with "
            "the model and the data that it had; draw only from the generators of Python, NumPy "
            "and torch, let nothing depend on the order of a set or a directory, on time or "
            "process, and restore files that were changed; to resume nevertheless, remove "
            f"{file}",
            key="task",
        )


def check_built(directory: Path, now: Summary, *, resumed: bool) -> None:
    """Refuse to resume a run whose task builds something else than when the run started."""
    file = directory / BUILT
    before = _read(file) if resumed else None
    if before is None or before.get(ARGUMENTS) != now[ARGUMENTS]:  # PBT changes arguments
        replace_regular(file, json.dumps(now).encode())
        return
    differing = differences(before, now)
    if not differing:
        return
    raise BuiltDiffers(listed(differing), file)


def _read(file: Path) -> Summary | None:
    try:
        found = json.loads(read_regular(file, LARGEST_TEXT))
    # a file lost or cut short by a power loss
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _as_read_back(found: Summary) -> Summary:
    summary: Summary = json.loads(json.dumps(found))  # tuples become lists
    return summary


def _splits(data: Data) -> Summary:
    return _split("train", data, _summary) | _split("val", data, _summary)


def _splits_apart(data: Data) -> Summary:
    """Summarise the data in a fork, as a DataLoader fetches items in forks."""
    try:
        found: Summary = in_fork(_splits_in_fork, data, quiet=False)
    except ForkEnded as ended:
        raise TaskError(
            "a process that fetched items of the data sets, as loader processes do, ended with "
            f"exit status {ended.code}; an item must not end its process; find the reason "
            "with train.loader.num_workers: 0"
        ) from None
    return found


def _splits_in_fork(data: Data) -> Summary:
    torch.set_num_threads(1)  # a fork has none of the parent's threads; DataLoader does the same
    return _splits(data)


def _split(split: str, data: Data, describe: Callable[[object], Any]) -> Summary:
    samples: Samples = data.train if split == "train" else data.val
    if isinstance(samples, tuple):
        return {f"{split}: tensor {index}": describe(one) for index, one in enumerate(samples)}
    if is_stream(samples):  # reading it would move it, and may take long
        return {f"{split}: its type": type(samples).__qualname__}
    size = len(samples)  # type: ignore[arg-type]
    found: Summary = {f"{split}: its length": size}
    # A copy, so that the run opens its own reader if the data set opens one for its first item.
    with contextlib.suppress(TypeError, ValueError, AttributeError):  # may not be copyable
        samples = copy.copy(samples)
    fetched: list[Any] = []
    count = min(_ITEMS, size)
    for index in sorted({part * (size - 1) // max(1, count - 1) for part in range(count)}):
        seed_host(derive_seed("built", split, index))
        try:
            fetched.append(samples[index])  # type: ignore[index]
            item = describe(fetched[-1])
        # The training step that needs the item raises its error.
        except Exception as error:
            item = f"raises {type(error).__name__}"
        found[f"{split}[{index}]"] = item
    collate = data.collate_of(split)
    batch: Any = "by torch's default"
    if collate is not None:
        seed_host(derive_seed("built", split, "collate"))
        try:
            batch = describe(collate(fetched))
        # As above; it may also fail because it needs a full batch.
        except Exception as error:
            batch = f"raises {type(error).__name__}"
    found[f"{split}: {COLLATED}"] = batch
    return found


def summary_of(value: object) -> Any:
    """Return plain data that identifies a value, such as a sample."""
    return _as_read_back({"value": _summary(value)})["value"]


def _bounded(value: object) -> Any:
    for entries in (_ENTRIES, 8, 2):
        found = _summary(value, entries=entries)
        if len(json.dumps(found)) <= _BOUND:
            return found
    return type(value).__name__


def _summary(value: object, depth: int = 0, entries: int = _ENTRIES) -> Any:
    """Return plain data that identifies a value. Floats in it are compared with a tolerance."""
    if isinstance(value, Tensor):
        if is_lazy(value) or value.is_meta or value.layout is not torch.strided:
            return [type(value).__name__, str(value.dtype)]
        plain = value.detach().resolve_conj().resolve_neg()
        plain = plain.dequantize() if plain.is_quantized else plain
        return _numbers(plain.flatten(), list(value.shape))
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
    chosen = flat[:: max(1, flat.numel() // _VALUES)].cpu().contiguous()
    if not (flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.uint8):
        # A copy: numpy() forbids the owner of the memory to resize it, as observers of
        # quantization do in their first pass.
        return [kind, shape, hashlib.sha256(chosen.clone().numpy().tobytes()).hexdigest()[:16]]
    values = torch.view_as_real(chosen) if flat.is_complex() else chosen
    values = torch.nan_to_num(values.flatten().to(torch.float64))
    indices = torch.linspace(0, len(values) - 1, min(8, len(values))).long()
    # The root mean square, then some values and a sum that depends on their order, divided by it.
    size = float(values.square().mean().sqrt())
    order = torch.cos(torch.arange(len(values), dtype=torch.float64))
    found = [*values[indices].tolist(), float((values * order).sum() / len(values) ** 0.5)]
    return [kind, shape, size, [one / size if size else 0.0 for one in found]]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()[:16]
