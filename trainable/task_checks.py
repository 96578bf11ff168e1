"""Check a task before each sweep, on a few of its samples.

A task that cannot be trained raises `TaskError`. A probable mistake gives a caution. An unusual
task gives neither: losses that are not sums over samples, batches of other forms, methods that
the task calls itself. What must not live here: checks that build a task more than once
(`testing.py`).
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from trainable.batches import move
from trainable.data import sample_count
from trainable.errors import TaskError
from trainable.evaluation import evaluation_mode
from trainable.hooks import check_hooks
from trainable.optim import Scalar
from trainable.seeding import HostRngState, preserved_host_rng
from trainable.step import translate_torch_errors
from trainable.task import Batch, Data, Task
from trainable.task_code import task_code

if TYPE_CHECKING:
    from trainable.build import Parts

_SAMPLES = 4  # two halves with two samples each, which BatchNorm needs
_CLOSE = 1e-3  # relative; float32 sums in another order differ by far less
_NEAR = 0.8  # least difflib ratio: `evalute` resembles `evaluate`; `evaluate_batch` does not

_OTHER_NAMES = {
    "training_step": "loss(self, model, batch)",
    "compute_loss": "loss(self, model, batch)",
    "loss_fn": "loss(self, model, batch)",
    "validation_step": "evaluate(self, model, batches)",
    "test_step": "evaluate(self, model, batches)",
    "on_validation_epoch_end": "evaluate(self, model, batches)",
    "validation_epoch_end": "evaluate(self, model, batches)",
    "compute_metrics": "evaluate(self, model, batches)",
    "configure_optimizers": "build_optimizer(self, model, config)",
    "configure_model": "build_model(self)",
    "on_epoch_begin": "on_epoch_start(self, epoch)",
    "on_train_epoch_start": "on_epoch_start(self, epoch)",
    "on_train_epoch_end": "on_epoch_end(self, epoch)",
    "training_epoch_end": "on_epoch_end(self, epoch)",
    "on_train_batch_end": "on_step_end(self, step)",
    "train_dataloader": "build_data(self)",
    "val_dataloader": "build_data(self)",
    "prepare_data": "build_data(self)",
    "collate_fn": "build_data(self), which returns Data(..., collate=...)",
}
"""Methods of Lightning and of the Hugging Face trainer, and the method of a task for each."""


def quick_check(parts: Parts) -> list[str]:
    """Check a task's methods, a few samples and their loss.

    This changes the model's state and the random generators: do not train the model afterwards.

    Args:
        parts: The parts of a run; not compiled.

    Returns:
        Cautions, a sentence each.

    Raises:
        TaskError: The first step of any run would fail; the message says why and what to do.
    """
    task, data, device = parts.task, parts.data, parts.precision.device
    check_hooks(task)
    cautions = uncalled_methods(task)
    try:
        with translate_torch_errors(device), task_code(), preserved_host_rng():
            if draws_in_validation(data):
                cautions.append(
                    "collate draws random numbers, and validation samples pass through it too: "
                    "their scores would depend on what it draws; give validation a function of "
                    "its own, `Data(train=..., val=..., collate=collate, collate_val=plain)`, "
                    "with `plain` such as torch.utils.data.default_collate"
                )
            batch, halves, drawn = first_batch(data, "train", _SAMPLES)
            batch, *halves = (move(one, device) for one in (batch, *halves))
            with parts.precision.autocast():
                cautions += _loss_cautions(task, parts.model, batch, [] if drawn else halves)
    except TaskError as problem:
        if problem.__cause__ is None:
            raise
    # A user's code may raise anything for so few samples; a whole batch decides (`FirstBatches`).
    except Exception:
        return cautions
    return cautions


def raised(what: str, problem: Exception) -> str:
    """Return the caution for an exception of the user's code."""
    frames = traceback.extract_tb((problem.__cause__ or problem).__traceback__)
    return (
        f"{what} raised {type(problem).__name__}: {problem} (at {frames[-1].filename}:"
        f"{frames[-1].lineno}); the first epoch of a run probably does so too; correct the data, "
        "the model, loss() or evaluate()"
    )


def uncalled_methods(task: Task) -> list[str]:
    """Return a sentence for each method that resembles one of `Task` and that nobody calls."""
    found = []
    known = [n for n in vars(Task) if not n.startswith("_") and callable(vars(Task)[n])]
    for kind in type(task).__mro__:
        if kind is Task:
            break
        if not issubclass(kind, Task):
            continue
        for name, value in vars(kind).items():
            if hasattr(Task, name) or not inspect.isroutine(inspect.unwrap(value)):
                continue
            near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
            meant = _OTHER_NAMES.get(name) or (f"{near[0]}()" if near else None)
            if meant is not None and not _is_mentioned(name, {kind, type(task)}):
                found.append(
                    f"{kind.__name__}.{name}() is called by nothing: a task is trained through "
                    "build_model, build_data, loss, evaluate, param_groups and build_optimizer; "
                    f"name it {meant}, or remove it"
                )
    return found


def has_literal(task: Task, names: Collection[str]) -> bool:
    """Whether the module of a task's class has one of these texts, or has no source to search."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[type(task).__module__]))
    except (OSError, TypeError, KeyError, SyntaxError):
        return True
    return any(isinstance(n, ast.Constant) and n.value in names for n in ast.walk(tree))


def _is_mentioned(name: str, kinds: set[type]) -> bool:
    """Whether the modules of these classes use a name, or have no source to search."""
    for kind in kinds:
        try:
            tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
        except (OSError, TypeError, KeyError, SyntaxError):
            return True
        for node in ast.walk(tree):
            used = (
                getattr(node, "attr", None),
                getattr(node, "id", None),
                getattr(node, "value", None) if isinstance(node, ast.Constant) else None,
            )
            if name in used:
                return True
    return False


def draws_in_validation(data: Data) -> bool:
    """Whether validation samples pass through the training `collate`, and it draws random numbers.

    This advances the random generators.
    """
    if data.collate is None or data.collate_val is not None or isinstance(data.val, tuple):
        return False
    return first_batch(data, "val", _SAMPLES)[2]


def first_batch(data: Data, split: str, most: int) -> tuple[Batch, list[Batch], bool]:
    """Return a batch of a split's first samples, and the same samples as two batches.

    The third value tells whether collating them drew random numbers.
    """
    samples = data.train if split == "train" else data.val
    count = min(most, sample_count(samples))
    middle = count // 2
    if isinstance(samples, tuple):
        whole, *halves = (
            tuple(tensor[first:last] for tensor in samples)
            for first, last in ((0, count), (0, middle), (middle, count))
        )
        return whole, halves if middle else [], False
    found = [samples[index] for index in range(count)]
    collate: Callable[[list[Any]], Batch] = data.collate_of(split) or default_collate
    before = HostRngState()
    whole = collate(found)
    drawn = before.has_changed()
    halves = [collate(found[:middle]), collate(found[middle:])] if middle and not drawn else []
    return whole, halves, drawn


def _loss_cautions(
    task: Task, model: nn.Module, batch: Batch, halves: Sequence[Batch]
) -> Iterator[str]:
    if type(task).loss is Task.loss:
        if (problem := batch_problem(batch)) is not None:
            raise TaskError(problem)
        inputs, targets = batch
        if (problem := output_problem(model(inputs), targets)) is not None:
            raise TaskError(problem)
    result = task.loss(model, batch)
    if (problem := result_problem(result)) is not None:
        raise TaskError(problem)
    weight = result[1]
    if not float(weight):
        yield no_targets(len(halves) * _SAMPLES // 2 or 1)
        return
    before = HostRngState()
    with evaluation_mode(model), torch.no_grad():
        whole, *parts = (task.loss(model, one) for one in (batch, *halves))
    if len(parts) == 2 and not before.has_changed() and is_mean(whole, parts):
        first, rest = (float(part[0]) for part in parts)
        yield MEAN_LOSS.format(whole=float(whole[0]), first=first, rest=rest)


MEAN_LOSS = (
    "loss() seems to return a mean: {whole:g} for a batch, {first:g} and {rest:g} for its two "
    "halves; return a sum over samples, not a mean, and the number of targets as the weight, "
    "because a step divides by the weight once; such as (loss * n, n), or reduction='sum'"
)


def is_mean(whole: tuple[Scalar, Scalar], halves: Sequence[tuple[Scalar, Scalar]]) -> bool:
    """Whether the loss of a batch is the mean, and not the sum, of the losses of its halves."""
    total, parts = float(whole[0]), [float(part[0]) for part in halves]
    return _close(total, sum(parts) / len(parts)) and not _close(total, sum(parts))


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _CLOSE * max(abs(one), abs(other)) + 1e-6


def no_targets(samples: int) -> str:
    """Return the message for a batch whose weight is 0."""
    return (
        f"the first {samples} samples have no targets that count: loss() gives them the weight 0, "
        "and nothing is learned from them; check the targets, and that they are not all ignored "
        "(-100)"
    )


def result_problem(result: object) -> str | None:
    """Return what is wrong with the result of `loss()`; None if a step can use it."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        return (
            f"loss() returned {type(result).__name__}; return (sum of losses, weight), "
            "as trainable.cross_entropy does"
        )
    if not isinstance(result[0], Tensor) or result[0].numel() != 1:
        shape = f" of shape {tuple(result[0].shape)}" if isinstance(result[0], Tensor) else ""
        return (
            f"loss() returned {type(result[0]).__name__}{shape} as its first part; it must be a "
            "scalar tensor; sum over the batch"
        )
    return None


def batch_problem(batch: object) -> str | None:
    """Return why the default loss cannot use a batch; None if it can."""
    remedy = "give batches of (inputs, targets), or define loss() and evaluate()"
    rule = "the default loss takes batches of (inputs, targets)"
    if isinstance(batch, Tensor):
        shape = tuple(batch.shape)
        return f"a batch is one tensor of shape {shape}, without targets; {rule}; {remedy}"
    if isinstance(batch, Mapping):
        keys = ", ".join(map(repr, batch))
        return f"a batch is a {type(batch).__name__} of {keys}; {rule}; {remedy}"
    if isinstance(batch, Sequence) and len(batch) != 2:
        without = ", without targets" if len(batch) == 1 else ""
        return f"a batch has {len(batch)} part(s){without}; {rule}; {remedy}"
    return None


def output_problem(output: object, targets: object) -> str | None:
    """Return why cross entropy cannot compare a model's output with targets; None if it can."""
    remedy = "or define loss() and evaluate()"
    if not isinstance(output, Tensor):
        names = f" of {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
        return (
            f"the model returns a {type(output).__name__}{names}; the default loss takes a tensor "
            f"of logits; return that one alone, {remedy}"
        )
    if not isinstance(targets, Tensor):
        return (
            f"the targets of a batch are a {type(targets).__name__}; the default loss takes a "
            f"tensor of class indices; collate them to one, {remedy}"
        )
    shapes = f"outputs of shape {tuple(output.shape)} and targets of shape {tuple(targets.shape)}"
    if targets.is_floating_point():
        if output.ndim >= 2 and output.shape == targets.shape and output.shape[1] > 1:
            return None  # probabilities
        return (
            f"the targets are {targets.dtype} numbers ({shapes}); the default loss is cross "
            "entropy, for class indices; for a regression define loss(), such as "
            "`return F.mse_loss(model(x), y, reduction='sum'), y.numel()`, and for classes give "
            "targets.long()"
        )
    if output.ndim < 2 or output.shape[1] == 1:
        return (
            f"the model gives one output for each target ({shapes}); the default loss is cross "
            "entropy, which needs one logit for each of at least 2 classes; give the last layer 2 "
            "outputs, or define loss() with "
            "F.binary_cross_entropy_with_logits(..., reduction='sum')"
        )
    if output.shape == targets.shape:
        return (
            f"the targets are one-hot, of shape {tuple(targets.shape)}; the default loss takes "
            "class indices; give targets.argmax(dim=1), or probabilities as floats"
        )
    expected = output.shape[:1] + output.shape[2:]
    if targets.shape != expected:
        return (
            f"the model and the targets do not fit ({shapes}); the default loss takes logits of "
            f"shape (N, C, ...) and targets of shape (N, ...), here {tuple(expected)}; transpose "
            f"the logits or squeeze the targets, {remedy}"
        )
    counted = targets[targets != -100]
    if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= output.shape[1]):
        return (
            f"the targets reach from {int(counted.min())} to {int(counted.max())} and the model "
            f"gives {output.shape[1]} logits; class indices begin at 0 and must be below the "
            "number of logits; correct the targets, or give the last layer more outputs"
        )
    return None
