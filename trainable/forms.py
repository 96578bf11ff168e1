"""Forms of data, batches, outputs and losses that cannot be used, and what to write instead.

Each message names what was found and the rule, and ends with the lines to write. What must not
live here: running a task to find out (`check/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

_TARGETS = ("labels", "label", "targets", "target", "y")
"""Usual keys of the targets in a batch that is a dict."""


def _write(*code: str) -> str:
    """Return the end of a message: the lines to write."""
    return f"; write {' and '.join(f'`{line}`' for line in code)}"


def _define(result: str, *, function: str = "cross_entropy") -> str:
    """Return the end of a message: the lines that define `loss` with one of our losses."""
    return _write(
        f"from trainable import {function}", f"def loss(self, model, batch): return {result}"
    )


def _squared(output: str, targets: str, count: str) -> str:
    """Return the end of a message: the lines that define `loss` as a squared error."""
    return _write(
        "import torch.nn.functional as F",
        "def loss(self, model, batch): return "
        f'F.mse_loss({output}, {targets}, reduction="sum"), {count}',
    )


def split_problem(samples: object, collate: Callable[..., Any] | None) -> str | None:
    """Return why a split of `Data` cannot be used, for usual mistakes; None for all else."""
    if isinstance(samples, str | bytes):
        return f"is the text {samples!r}; give the samples themselves" + _write(
            "x, y = torch.load(path)", "Data(train=(x, y), val=...)"
        )
    if isinstance(samples, Mapping) and 0 not in samples:  # else samples by their numbers
        return _mapping_problem(samples)
    if hasattr(samples, "iloc"):
        return (
            f"is a {type(samples).__name__} of {type(samples).__module__.partition('.')[0]}, "
            "whose items are columns, not samples; give tensors"
            + _write(
                'x = torch.tensor(table.drop(columns="target").to_numpy()).float()',
                'Data(train=(x, torch.tensor(table["target"].to_numpy())), val=...)',
            )
        )
    if not isinstance(samples, tuple | list) or not _are_arrays(samples):
        return None
    if isinstance(samples, tuple):
        if all(isinstance(part, Tensor) for part in samples):
            return None
        return "has NumPy arrays; give tensors" + _write(_data_of(samples))
    # Samples, unless there are fewer of them than rows in each.
    same_length = len({len(part) for part in samples}) == 1
    if collate is None and same_length and 1 < len(samples) < len(samples[0]):
        return (
            f"is a list of {len(samples)} arrays of {len(samples[0])} rows, which would be "
            f"{len(samples)} samples; give a tuple of tensors" + _write(_data_of(samples))
        )
    return None


def _mapping_problem(samples: Mapping[Any, Any]) -> str:
    keys = ", ".join(map(repr, samples))
    found = f"is a {type(samples).__name__} of {keys}"
    if not _are_arrays(list(samples.values())):
        return f"{found}; give one data set" + _write(
            f"Data(train=data[{next(iter(samples), 'train')!r}], val=...)"
        )
    return f"{found}; give a tuple of tensors, whose batches are tuples" + _write(
        _data_of(samples.values(), [f"train[{key!r}]" for key in samples]),
    )


def _are_arrays(parts: Sequence[object]) -> bool:
    return len(parts) > 0 and all(
        isinstance(part, Tensor | numpy.ndarray) and part.ndim > 0 for part in parts
    )


def _data_of(parts: Any, names: Sequence[str] = ()) -> str:
    """Return the line that makes `Data` of arrays."""
    given = names or (["x", "y"] if len(parts) == 2 else [f"x{n}" for n in range(len(parts))])
    tensors = [
        name
        if isinstance(part, Tensor)
        else f"torch.tensor({name}).{'float' if part.dtype.kind == 'f' else 'long'}()"
        for name, part in zip(given, parts, strict=True)
    ]
    return f"Data(train=({', '.join(tensors)}), val=...)"


def batch_problem(batch: object) -> str | None:
    """Return why the default loss cannot use a batch; None if it can."""
    rule = "the default loss takes batches of (inputs, targets); define loss()"
    if isinstance(batch, Tensor):
        return (
            f"a batch is one tensor of shape {tuple(batch.shape)}, without targets; {rule}, or "
            "give targets"
            + _write("Data(train=(x, y), val=(x_val, y_val))")
            + ", or for an autoencoder"
            + _squared("model(batch)", "batch", "batch.numel()")
        )
    if isinstance(batch, Mapping):
        keys = ", ".join(map(repr, batch))
        found = f"a batch is a {type(batch).__name__} of {keys}"
        return f"{found}; {rule}{_loss_of_mapping(list(batch))}"
    if isinstance(batch, Sequence) and len(batch) != 2:
        if len(batch) == 1:
            return f"a batch has 1 part(s), without targets; {rule}, as for an autoencoder" + (
                _squared("model(*batch)", "*batch", "batch[0].numel()")
            )
        inputs = ", ".join(f"batch[{n}]" for n in range(len(batch) - 1))
        return f"a batch has {len(batch)} part(s); {rule}" + _define(
            f"cross_entropy(model({inputs}), batch[{len(batch) - 1}])"
        )
    return None


def _loss_of_mapping(keys: list[Any]) -> str:
    """Return the end of a message: the lines that define `loss` for batches with these keys."""
    if len(keys) == 1:
        part = f"batch[{keys[0]!r}]"
        return f", as for an autoencoder{_squared(f'model({part})', part, f'{part}.numel()')}"
    targets = next((key for name in _TARGETS for key in keys if key == name), keys[-1])
    inputs = [key for key in keys if key != targets]
    if "input_ids" in keys:  # as models of transformers take them
        given = ", ".join(f"{key}=batch[{key!r}]" for key in inputs)
        return _define(f"cross_entropy(model({given}).logits, batch[{targets!r}])")
    given = ", ".join(f"batch[{key!r}]" for key in inputs)
    return _define(f"cross_entropy(model({given}), batch[{targets!r}])")


def output_problem(output: object, targets: object) -> str | None:
    """Return why cross entropy cannot compare a model's output with targets; None if it can."""
    if not isinstance(output, Tensor):
        return _no_tensor(output)
    if not isinstance(targets, Tensor):
        return (
            f"the targets of a batch are a {type(targets).__name__}; the default loss takes a "
            "tensor of class indices; collate them to one, or define loss()"
            + _write("Data(..., collate=collate)")
        )
    shapes = f"outputs of shape {tuple(output.shape)} and targets of shape {tuple(targets.shape)}"
    if targets.is_floating_point():
        if output.ndim >= 2 and output.shape == targets.shape and output.shape[1] > 1:
            return None  # probabilities
        return _float_targets(output, targets, shapes)
    if output.ndim < 2 or output.shape[1] == 1:
        return (
            f"the model gives one output for each target ({shapes}); the default loss is cross "
            "entropy, which needs one logit for each of at least 2 classes; give the last layer 2 "
            "outputs, or define loss()"
            + _define(
                f"binary_cross_entropy(model(batch[0]){_squeeze(output, targets)}, batch[1])",
                function="binary_cross_entropy",
            )
        )
    if output.shape == targets.shape:
        return (
            f"the targets are one-hot, of shape {tuple(targets.shape)}; the default loss takes "
            "class indices, or probabilities as floats" + _write("y = y.argmax(dim=1)")
        )
    expected = output.shape[:1] + output.shape[2:]
    if targets.shape != expected:
        return (
            f"the model and the targets do not fit ({shapes}); the default loss takes logits of "
            f"shape (N, C, ...) and targets of shape (N, ...), here {tuple(expected)}; transpose "
            "the logits or squeeze the targets, or define loss()" + _reshaped(output, targets)
        )
    targets = targets.long()  # torch has no minimum of unsigned types
    counted = targets[targets != -100]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= output.shape[1]):
        low, high = int(counted.min()), int(counted.max())
        return (
            f"the targets reach from {low} to {high} and the model gives {output.shape[1]} "
            "logits; class indices begin at 0 and must be below the number of logits; correct "
            "the targets, or give the last layer more outputs"
            + _write(f"y = y - {low}" if low else f"nn.Linear(..., {high + 1})")
        )
    return None


def _no_tensor(output: object) -> str:
    names = ""
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        keys = list(output) if isinstance(output, Mapping) else ["logits"]
        names = f" of {', '.join(map(repr, keys))}"
        key = "logits" if "logits" in keys else next(iter(keys), "logits")
        part = f".{key}" if hasattr(output, str(key)) else f"[{key!r}]"
    else:
        part = "[0]"
    return (
        f"the model returns a {type(output).__name__}{names}; the default loss takes a tensor of "
        "logits; return that one alone, or define loss()"
        + _define(f"cross_entropy(model(batch[0]){part}, batch[1])")
    )


def _float_targets(output: Tensor, targets: Tensor, shapes: str) -> str:
    """Tell regressions, two classes and class indices in the wrong type apart."""
    found = (
        f"the targets are {targets.dtype} numbers ({shapes}); the default loss is cross entropy, "
        "for class indices; for a regression define loss()"
    )
    whole = bool((targets == targets.round()).all())
    several = output.ndim >= 2 and output.shape[1] > 1
    if whole and several and targets.shape == output.shape[:1] + output.shape[2:]:
        return f"{found}, and for classes give whole numbers{_write('y = y.long()')}"
    given = f"model(batch[0]){_squeeze(output, targets)}"
    if not several and bool(((targets == 0) | (targets == 1)).all()):
        return f"{found}, and for two classes too" + _define(
            f"binary_cross_entropy({given}, batch[1])", function="binary_cross_entropy"
        )
    return found + _squared(given, "batch[1]", "batch[1].numel()")


def _squeeze(output: Tensor, targets: Tensor) -> str:
    """Return what gives outputs of shape (N, 1) the shape (N,) of the targets; else nothing."""
    return ".squeeze(1)" if output.ndim == targets.ndim + 1 and output.shape[1] == 1 else ""


def _reshaped(output: Tensor, targets: Tensor) -> str:
    """Return the lines for logits of shape (N, ..., C) and for targets of shape (N, 1)."""
    if output.shape[:-1] == targets.shape:
        return _define("cross_entropy(model(batch[0]).movedim(-1, 1), batch[1])")
    if targets.ndim == output.ndim and targets.shape[1] == 1:
        return _write("y = y.squeeze(1)")
    return _define("cross_entropy(model(batch[0]).view(...), batch[1].view(...))")


def result_problem(result: object) -> str | None:
    """Return what is wrong with the result of `loss()`; None if a step can use it."""
    rule = "return the sum of the losses of n targets, and n"
    if isinstance(result, Mapping):
        return f"loss() returned a {type(result).__name__}; {rule}" + _write("return total, n")
    if not isinstance(result, tuple | list) or len(result) == 1:
        return (
            f"loss() returned {type(result).__name__}; {rule}; if it is their mean, write "
            "`return loss * n, n`, and if it is their sum, write `return loss, n`"
        )
    if len(result) != 2:
        return f"loss() returned {len(result)} values; {rule}" + _write(
            'self.log("name", value)', "return total, n"
        )
    total, weight = result
    if not isinstance(total, Tensor) or total.numel() != 1:
        return (
            f"loss() returned {_described(total)} as its first part; it must be a scalar tensor; "
            "sum over the batch" + _write("return loss.sum(), loss.numel()")
        )
    try:
        count = float(weight)
    except (TypeError, ValueError, RuntimeError):
        count = None
    if count is None or isinstance(weight, str):
        return (
            f"loss() returned {_described(weight)} as its second part, the weight; it must be the "
            "number of targets" + _write("return total, len(y)")
        )
    if count < 0:
        return (
            f"loss() returned the weight {count:g}; it must be the number of targets, which is "
            "not negative" + _write("return total, len(y)")
        )
    return None


def _described(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"


def mean_problem(whole: float, halves: Sequence[float], weight: float) -> str:
    """Return the message for a loss that is a mean and not a sum."""
    effect = (
        "val/loss gives a short last batch the same weight as the others"
        if weight == 1
        else f"the gradient is {weight:g} times too small"
    )
    return (
        f"loss() seems to return a mean: {whole:g} for a batch, {halves[0]:g} and {halves[1]:g} "
        f"for its two halves, with the weight {weight:g}; a step divides by the weight once, so "
        f"{effect}; return a sum over samples, and the number of targets as the weight"
        + _write("return loss * n, n")
    )


def unweighted_sum(weight: float) -> str:
    """Return the caution for a sum over samples whose weight does not count them."""
    return (
        f"loss() returns a sum over samples, and the weight {weight:g} for a batch and for each "
        "half of it: a step divides by the weight, so its gradient grows with the batch; return "
        "the number of targets as the weight" + _write("return total, len(y)")
    )


def of_whole_batch(workers: int) -> str:
    """Return the caution for a loss over the samples of a batch, with several ranks."""
    return (
        f"resources.workers is {workers}, and the loss of a batch is not the sum of the losses of "
        "its halves: loss() or the model relates the samples of a batch to each other, as a "
        "contrastive loss does, or adds a term that depends on no sample; each rank knows its own "
        "part of a batch alone, so the loss differs from that of one process; compare only trials "
        "of as many workers, or write workers: 1"
    )


def broadcast_targets(output: Tensor, targets: Tensor) -> str:
    """Return the caution for outputs that are compared with the targets of other samples."""
    squeezed = "prediction = model(x)" if output.ndim > targets.ndim else "y = y"
    return (
        f"loss() compares outputs of shape {tuple(output.shape)} with targets of shape "
        f"{tuple(targets.shape)}, and the losses of the halves of a batch do not add up to that "
        "of the batch: torch seems to compare each output with every target; give both the same "
        "shape" + _write(f"{squeezed}.squeeze(1)")
    )


def wrong_type(batch: object, model_type: torch.dtype) -> str | None:
    """Return why a model cannot take the inputs of a batch: they have another type."""
    parts = batch.values() if isinstance(batch, Mapping) else batch
    first: object = next(iter(parts), None) if isinstance(parts, Iterable) else None
    inputs = batch if isinstance(batch, Tensor) else first
    if not isinstance(inputs, Tensor) or inputs.dtype == model_type:
        return None
    return (
        f"the inputs are {inputs.dtype} and the model's weights {model_type}; both must have one "
        "type" + _write("x = x.float()")
    )
