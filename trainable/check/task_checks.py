"""Check a task before each sweep, on a few of its samples.

A task that cannot be trained raises `TaskError`. A probable mistake gives a caution. An unusual
task gives neither: losses that are not sums over samples, batches of other forms, methods that
the task calls itself. What must not live here: checks that build a task more than once
(`testing.py`).
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import gc
import inspect
import math
import operator
import re
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from trainable.built import summary_of
from trainable.data import move, sample_count
from trainable.errors import TaskError
from trainable.evaluation import evaluation_mode
from trainable.forms import (
    batch_problem,
    broadcast_targets,
    mean_problem,
    of_whole_batch,
    output_problem,
    result_problem,
    unweighted_sum,
    wrong_type,
)
from trainable.object_kinds import by_attributes, kind_of
from trainable.optim import Scalar, builds_own
from trainable.ranks import WHOLE
from trainable.sample_kinds import gives_batches, has_state, is_stream
from trainable.seeding import HostRngState, preserved_host_rng
from trainable.step import translate_torch_errors
from trainable.streams import StreamReader, StreamSource, first_items, stream_name
from trainable.task import Batch, Data, Task
from trainable.train_state import check_state
from trainable.user_code.task_code import task_code
from trainable.user_code.task_import import listed

if TYPE_CHECKING:
    from trainable.build import Parts

_SAMPLES = 4  # two halves with two samples each, which BatchNorm needs
_CLOSE = 1e-3  # relative; float32 sums in another order differ by far less
_EXACT = 1e-5  # relative; a loss with a large constant comes close to its own mean
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


def quick_check(
    parts: Parts, *, resumed: bool = False, workers: int = 1, begun: bool = False
) -> list[str]:
    """Check a task's methods, a few samples and their loss; `begun` tells that it has trained.

    This changes the model's state and the random generators: do not train the model afterwards.
    """
    task, data, device = parts.task, parts.data, parts.precision.device
    cautions = uncalled_methods(task)
    try:
        with translate_torch_errors(device), task_code(), preserved_host_rng():
            if not begun:
                with contextlib.suppress(Exception):  # a user's code may raise anything
                    task.on_epoch_start(0)
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
                cautions += _loss_cautions(
                    task,
                    parts.model,
                    batch,
                    [] if drawn else halves,
                    resumed=resumed,
                    workers=workers,
                )
    except TaskError as problem:
        if problem.__cause__ is None:
            raise
    # A user's code may raise anything for so few samples; a whole batch decides (`FirstBatches`).
    except Exception:
        if begun:
            raise
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
                    "build_model, build_data, build_optimizer, loss, evaluate, param_groups and "
                    f"the hooks; name it {meant}, or remove it"
                )
    return found


def has_literal(task: Task, names: Collection[str]) -> bool:
    """Whether the module of a task's class has one of these texts, or has no source to search."""
    nodes = _nodes(type(task))
    return nodes is None or any(isinstance(n, ast.Constant) and n.value in names for n in nodes)


def _is_mentioned(name: str, kinds: set[type]) -> bool:
    """Whether the modules of these classes use a name, or have no source to search."""
    found = [_nodes(kind) for kind in kinds]
    return any(
        nodes is None
        or any(name in (getattr(n, key, None) for key in ("attr", "id", "value")) for n in nodes)
        for nodes in found
    )


def _nodes(kind: type) -> list[ast.AST] | None:
    """Return the syntax of the module of a class; None without a source."""
    try:
        return [*ast.walk(ast.parse(inspect.getsource(sys.modules[kind.__module__])))]
    except (OSError, TypeError, KeyError, SyntaxError):
        return None


def draws_in_validation(data: Data) -> bool:
    """Whether validation samples pass through the training `collate`, and it draws random numbers.

    This advances the random generators.
    """
    if data.collate is None or data.collate_val is not None or isinstance(data.val, tuple):
        return False
    if is_stream(data.val) and gives_batches(data.val, data):
        return False  # which are not collated
    return first_batch(data, "val", _SAMPLES)[2]


def first_batch(data: Data, split: str, most: int) -> tuple[Batch, list[Batch], bool]:
    """Return a batch of a split's first samples, and the same samples as two batches.

    The third value tells whether collating them drew random numbers, also from a generator of its
    own: then it gives another batch the second time.
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
    if is_stream(samples):
        found = first_items(samples, most)
        if gives_batches(samples, data):
            return found[0], [], False
        middle = len(found) // 2
    else:
        found = [samples[index] for index in range(count)]  # type: ignore[index]
    collate: Callable[[list[Any]], Batch] = data.collate_of(split) or default_collate
    before = HostRngState()
    whole = collate(found)
    drawn = before.has_changed() or not is_same(whole, collate(found))
    halves = [collate(found[:middle]), collate(found[middle:])] if middle and not drawn else []
    return whole, halves, drawn


def _loss_cautions(
    task: Task,
    model: nn.Module,
    batch: Batch,
    halves: Sequence[Batch],
    *,
    resumed: bool,
    workers: int,
) -> Iterator[str]:
    if type(task).loss is Task.loss and (problem := batch_problem(batch)) is not None:
        raise TaskError(problem)
    try:
        if type(task).loss is Task.loss:
            inputs, targets = batch
            if (problem := output_problem(model(inputs), targets)) is not None:
                raise TaskError(problem)
        result = task.loss(model, batch)
    except RuntimeError as error:
        raise (_of_types(error, model, batch) or error) from None
    if (problem := result_problem(result)) is not None:
        raise TaskError(problem)
    if not float(result[1]):
        yield no_targets(len(halves) * _SAMPLES // 2 or 1)
        return
    before, outputs = HostRngState(), list[object]()
    with (
        evaluation_mode(model),
        torch.no_grad(),
        model.register_forward_hook(lambda *given: outputs.append(given[-1])),
    ):
        whole, *parts = (_numbers(task.loss(model, one)) for one in (batch, *halves))
    if len(parts) != 2 or before.has_changed():
        return
    yield from _sum_cautions(whole, parts, resumed=resumed)
    targets = batch[1] if isinstance(batch, Sequence) and len(batch) == 2 else None
    if len(outputs) == 3 and _is_broadcast(outputs[0], targets, whole, parts):
        yield broadcast_targets(outputs[0], targets)  # type: ignore[arg-type]
    elif workers > 1 and math.isfinite(whole[0]) and not _is_sum_or_mean(whole, parts):
        yield of_whole_batch(workers)


_Numbers = tuple[float, float]
"""A loss and its weight."""


def _numbers(result: tuple[Scalar, Scalar]) -> _Numbers:
    return float(result[0]), float(result[1])


def _of_types(error: RuntimeError, model: nn.Module, batch: Batch) -> TaskError | None:
    """Return the error that explains one of torch's about types, if that is what it is."""
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(types) != 1 or not re.search("dtype|scalar type", str(error)):
        return None
    said = wrong_type(batch, types.pop())
    return None if said is None else TaskError(said)


def _sum_cautions(whole: _Numbers, parts: Sequence[_Numbers], *, resumed: bool) -> Iterator[str]:
    """Compare the loss of a batch with those of its halves."""
    (total, weight), losses = whole, [loss for loss, _ in parts]
    counts = _close(weight, sum(share for _, share in parts))
    if is_mean(whole, parts):
        said = mean_problem(total, losses, weight)
        if counts and not resumed and math.isclose(total, sum(losses) / 2, rel_tol=_EXACT):
            raise TaskError(said)
        yield said
    elif _close(total, sum(losses)) and all(_close(weight, share) for _, share in parts):
        yield unweighted_sum(weight)


def _is_broadcast(
    output: object, targets: object, whole: _Numbers, parts: Sequence[_Numbers]
) -> bool:
    """Whether outputs of shape (N, 1) seem to meet targets of shape (N,), or the reverse."""
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor) or len(output) < 2:
        return False
    longer, shorter = sorted((output, targets), key=lambda one: -one.ndim)
    if longer.shape != (*shorter.shape[:1], 1, *shorter.shape[1:]):
        return False
    return not _is_sum_or_mean(whole, parts)


def _is_sum_or_mean(whole: _Numbers, parts: Sequence[_Numbers]) -> bool:
    return _close(whole[0], sum(loss for loss, _ in parts)) or is_mean(whole, parts)


def is_mean(whole: tuple[Scalar, Scalar], halves: Sequence[tuple[Scalar, Scalar]]) -> bool:
    """Whether the loss of a batch is the mean, and not the sum, of the losses of its halves."""
    total, parts = float(whole[0]), [float(part[0]) for part in halves]
    return _close(total, sum(parts) / len(parts)) and not _close(total, sum(parts))


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _CLOSE * max(abs(one), abs(other)) + 1e-6


def is_same(first: object, second: object) -> bool:
    """Compare tensors, arrays and plain values deeply; other objects count as equal."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and bool(
            ((first == second) | ((first != first) & (second != second))).all()
        )
    if isinstance(first, numpy.ndarray) and isinstance(second, numpy.ndarray):
        return numpy.array_equal(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(is_same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(is_same, first, second))
    if isinstance(first, (bool, int, float, str, bytes)):
        return bool(first == second) or first != first
    return True


def no_targets(samples: int) -> str:
    """Return the message for a batch whose weight is 0."""
    return (
        f"the first {samples} samples have no targets that count: loss() gives them the weight 0, "
        "and nothing is learned from them; check the targets, and that they are not all ignored "
        "(-100)"
    )


_CHECKED = 2
"""Items before the state that `check_stream` takes."""
_COMPARED = 20
"""Windows of so many items compared with those read again, if they come in these seconds."""
_SECONDS = 2.0


def check_stream(source: StreamSource) -> None:
    """Refuse a stream with which a resumed run would train on other samples.

    Reads a few items, and then again, from a state saved on the way or from the epoch's start.
    Read nothing else from the stream afterwards.
    """
    stream = source.stream
    format = replace(source.format, items=_CHECKED, batched=True, drop_last=False, share=WHOLE)
    if format.skips or not has_state(stream):
        first = _read_some(StreamReader(stream, format, 0, 0, None))
        _read_some(StreamReader(stream, format, 0, 1, None))
        if not _agree(first, _read_some(StreamReader(stream, format, 0, 0, None))):
            raise TaskError(
                f"train: {stream_name(stream)} gives other samples when an epoch is read again "
                "under the same seed, as a resumed run does that drops the trained ones; draw "
                "from the global generators of Python, NumPy or torch, or from a generator in an "
                "attribute (webdataset: .shuffle(1000, rng=random.Random(0))), and count epochs "
                "in set_epoch(epoch)"
            )
        return
    reader = StreamReader(stream, format, 0, 0, None)
    reader.read()
    place = reader.place()
    check_state(place.state, "the state of the stream")
    expected = _read_some(reader)
    if place.ended:
        return
    if not _agree(expected, _read_some(StreamReader(stream, format, 0, 0, place))):
        raise TaskError(
            f"train: {stream_name(stream)} continues with other samples after load_state_dict() "
            f"of the state that state_dict() returned after {_CHECKED} items: a resumed run would "
            "train on others than an uninterrupted one; save the position (set before each "
            "yield), the shuffle buffer and the generators, and continue from them in "
            "__iter__(); or write train.loader.resume: skip, to read again from the epoch's start"
        )


def _agree(first: list[Any], again: list[Any]) -> bool:
    """Whether two readings agree as far as both went."""
    return bool(first) == bool(again) and all(map(operator.eq, first, again))


def _read_some(reader: StreamReader) -> list[Any]:
    """Return summaries of the next items, as many as can be read in a short time."""
    found: list[Any] = []
    started = time.monotonic()
    while len(found) < _COMPARED and (window := reader.read()) is not None:
        found.append(summary_of(list(window)))
        if time.monotonic() - started > _SECONDS:
            break
    return found


_CODE = (type, types.ModuleType, types.FunctionType)
_CALLS = 8
"""The losses that are looked at: walking their graphs takes time."""


class Untrained:
    """Stands in for a task in a step, and looks at the graphs of its losses.

    A tensor that one loss alone uses, such as inputs that require a gradient, is not looked for:
    it is made anew for each batch. Nor is one that a task updates by itself.
    """

    def __init__(self, task: Task, model: nn.Module, trained: Iterable[Tensor]) -> None:
        self._task, self._model = task, model
        self._known = {id(p) for p in (*model.parameters(), *trained)}
        self._calls = 0
        self._found: dict[int, tuple[Tensor, Tensor, int]] = {}

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        """Return the task's loss of a batch."""
        result = self._task.loss(model, batch)
        self._calls += 1
        loss = result[0] if isinstance(result, (tuple, list)) and result else None
        if self._calls <= _CALLS and isinstance(loss, Tensor):
            for leaf in _leaves(loss):
                if id(leaf) not in self._known:
                    _, value, count = self._found.get(id(leaf), (leaf, leaf.detach().clone(), 0))
                    self._found[id(leaf)] = leaf, value, count + 1
        return result

    @property
    def is_suspected(self) -> bool:
        """Whether there may be such a tensor: a further step tells."""
        return bool(self._found)

    def problem(self) -> str | None:
        """Return the sentence for what is not trained; None if all is. Call it after the hooks."""
        later = {id(p) for p in self._model.parameters()}  # registered in the first pass
        same = [
            leaf
            for leaf, value, count in self._found.values()
            if id(leaf) not in later
            and count > 1
            and leaf.shape == value.shape
            and bool((leaf == value).all())
        ]
        optimized = _in_optimizers() if same else set()
        found = [leaf for leaf in same if id(leaf) not in optimized]
        return _described(self._task, found) if found else None


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that receive gradients when the loss is differentiated."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            yield leaf
        waiting.extend(following for following, _ in node.next_functions)


def _in_optimizers() -> set[int]:
    """Return the ids of the parameters of all optimizers, which a task may step by itself."""
    kinds = (one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer))
    groups = (group for one in kinds for group in getattr(one, "param_groups", ()))
    return {id(p) for group in groups for p in group["params"]}


def _described(task: Task, found: list[Tensor]) -> str:
    wanted = {id(leaf): f"a tensor of shape {tuple(leaf.shape)}" for leaf in found}
    roots: dict[str, str] = {}
    for place, root, leaf in _places(task, set(wanted)):
        wanted[id(leaf)] = place
        roots[root] = f"*{root}.parameters()" if root != place else root
    names = list(wanted.values())
    lines = ", ".join(roots.values()) or "..."
    if builds_own(task):
        line = f"add `[{lines}]` to the parameters of an optimizer in build_optimizer()"
    elif type(task).param_groups is not Task.param_groups:
        line = f'add `{{"params": [{lines}]}}` to the list that param_groups() returns'
    else:
        line = (
            "write `def param_groups(self, model): return [*super().param_groups(model), "
            f'{{"params": [{lines}]}}]`'
        )
    frozen = " and ".join(f"`{root}.requires_grad_(False)`" for root in roots)
    return (
        f"loss() gives gradients to {listed(names)}, in no optimizer, which "
        f"would never change; what is trained is in a parameter group; {line}, or freeze what is "
        f"not to be trained with {frozen or 'requires_grad_(False)'}"
    )


def _places(task: Task, wanted: set[int]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield where a task holds tensors: the place, the outermost module there, and the tensor."""
    seen = {id(task)}
    waiting: deque[tuple[str, str, Any]] = deque([("self", "", task)])
    while waiting:
        owner, module, value = waiting.popleft()
        kind = by_attributes(task) if value is task else kind_of(value)
        for step, part in () if kind is None else kind.parts(value):
            if id(part) in seen or isinstance(part, (Dataset, *_CODE)):
                continue
            seen.add(id(part))
            place = owner + step
            if id(part) in wanted:
                yield place, module or place, part
            root = module or (place if isinstance(part, nn.Module) else "")
            waiting.append((place, root, part))
