"""The contract of a `Task`, as checks that users run against their own: `check_task(MyTask())`.

One call in a test file is enough; it needs no GPU, no sweep and a second or two. What must not
live here: tests of the platform itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from trainable.errors import TaskError
from trainable.optim import Scalar
from trainable.seeding import isolated_host_randomness, set_seed
from trainable.task import Batch, Data, Samples, Task, check_data

_SAMPLES = 8  # enough for two halves of a batch, few enough for a large model on a CPU
_TOLERANCE = 1e-3  # relative; sums of float32 in another order differ by far less


def check_task(task: Task, *, seed: int = 0) -> None:
    """Check that a task keeps its contract, on the CPU and on a handful of its samples.

    Args:
        task: An instance, as the loop would use it.
        seed: Seeds what is random.

    Raises:
        TaskError: It does not; the message lists every broken promise and what to do about each.
    """
    with isolated_host_randomness():
        problems = list(_problems(task, seed))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise TaskError(f"{type(task).__name__} breaks the contract of a task:\n{listed}")


def _problems(task: Task, seed: int) -> Iterator[str]:
    try:
        data = check_data(task.build_data(), task)
    except TaskError as problem:
        yield str(problem)
        return
    set_seed(seed)
    model = task.build_model()
    if not isinstance(model, nn.Module):
        yield (
            f"build_model() returned an object of type {type(model).__name__}; "
            "return a torch.nn.Module"
        )
        return
    if any(p.device.type != "cpu" for p in model.parameters()):
        yield "build_model() placed the model on a device; leave it on the CPU, the loop moves it"
        return
    yield from _initialisation_problems(task, model, seed)
    yield from _group_problems(task, model)
    batch, halves = _batches(data, data.train)
    broken = list(_loss_problems(task, model, batch, halves))
    yield from broken
    if not broken:  # whatever breaks the loss breaks the evaluation too: say it once
        yield from _training_problems(task, model, batch)
        yield from _evaluation_problems(task, model, _batches(data, data.val)[0])


def _initialisation_problems(task: Task, model: nn.Module, seed: int) -> Iterator[str]:
    set_seed(seed)
    again = task.build_model()
    if again is model:
        yield "build_model() returned the same model twice; make a new one on each call"
        return
    first, second = model.state_dict(), again.state_dict()
    if first.keys() != second.keys() or not all(
        torch.equal(first[key], second[key]) for key in first if isinstance(first[key], Tensor)
    ):
        yield (
            "build_model() gives other weights under the same seed; draw them from torch's, "
            "NumPy's or Python's global generators, which the run seeds"
        )


def _group_problems(task: Task, model: nn.Module) -> Iterator[str]:
    groups = task.param_groups(model)
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and "params" in g for g in groups
    ):
        yield "param_groups() must return a list of dicts, each with 'params'"
        return
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [id(p) for group in groups for p in list(group["params"])]
    twice = sorted({names.get(key, "?") for key in listed if listed.count(key) > 1})
    left = [names[id(p)] for p in model.parameters() if p.requires_grad and id(p) not in listed]
    if twice:
        yield f"param_groups() lists {', '.join(twice)} twice; list each parameter once"
    if left:
        yield (
            f"param_groups() leaves out {', '.join(left)}; add them, or set requires_grad_(False) "
            "where they are not to be trained"
        )


def _loss_problems(
    task: Task, model: nn.Module, batch: Batch, halves: list[Batch]
) -> Iterator[str]:
    model = copy.deepcopy(model).eval()  # dropout off: two halves must add up to the whole
    result = task.loss(model, batch)
    if not isinstance(result, tuple) or len(result) != 2:
        yield (
            f"loss() returned {type(result).__name__}; return (sum of losses, weight), "
            "as trainable.cross_entropy does"
        )
        return
    total, weight = result
    if not isinstance(total, Tensor) or total.ndim or not total.requires_grad:
        yield (
            "loss() must return a scalar tensor that depends on the model's parameters as its "
            "first part; sum over the batch and do not detach"
        )
        return
    total = total.detach()
    if not math.isfinite(float(total)) or not float(weight) > 0:
        yield (
            f"loss() gave {float(total):g} with weight {float(weight):g}; the loss must be finite "
            "and the weight above 0; check the scale of the inputs and the targets"
        )
        return
    parts = [task.loss(model, half) for half in halves]
    for name, whole, pieces in (
        ("sum", total, [part.detach() for part, _ in parts]),
        ("weight", weight, [share for _, share in parts]),
    ):
        if not _close(whole, sum(float(piece) for piece in pieces)):
            yield (
                f"loss() of a batch has {name} {float(whole):g}, its two halves together "
                f"{sum(float(piece) for piece in pieces):g}; return a sum over samples, not a "
                "mean, and the number of targets as the weight"
            )


def _training_problems(task: Task, model: nn.Module, batch: Batch) -> Iterator[str]:
    model = copy.deepcopy(model).train()
    task.loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if len(without) == sum(p.requires_grad for p in model.parameters()):
        yield "no parameter received a gradient; do not detach the model's output in loss()"


def _evaluation_problems(task: Task, model: nn.Module, batch: Batch) -> Iterator[str]:
    model = copy.deepcopy(model).eval()
    with torch.inference_mode():
        metrics = task.evaluate(model, iter([batch]))
    if not isinstance(metrics, dict) or not metrics:
        yield f"evaluate() returned {metrics!r}; return a dict of metrics, such as {{'loss': 0.5}}"
        return
    for name, value in metrics.items():
        if not isinstance(name, str) or "/" in name:
            yield f"evaluate() names a metric {name!r}; use a plain name, the loop adds val/"
        if not isinstance(value, (int, float, Tensor)) or (
            isinstance(value, Tensor) and value.numel() != 1
        ):
            yield f"evaluate() gives {name!r} as {type(value).__name__}; give one number"


def _batches(data: Data, samples: Samples) -> tuple[Batch, list[Batch]]:
    """A batch of the first samples, and the same samples as two batches."""
    if isinstance(samples, tuple):
        count = min(_SAMPLES, len(samples[0]))
        take: Callable[[int, int], Any] = lambda a, b: tuple(t[a:b] for t in samples)  # noqa: E731
    else:
        count = min(_SAMPLES, len(samples))  # type: ignore[arg-type]
        found = [samples[index] for index in range(count)]
        collate = data.collate or default_collate
        take = lambda a, b: collate(found[a:b])  # noqa: E731
    middle = count // 2
    halves = [take(0, middle), take(middle, count)] if middle else [take(0, count)]
    return take(0, count), halves


def _close(whole: Scalar, parts: float) -> bool:
    return math.isclose(float(whole), parts, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
