"""Losses that return a sum and its weight, so that a window divides once; the default evaluation.

What must not live here: which loss a task uses (`task.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from trainable.errors import TaskError

Weight = Tensor | float


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Weight]:
    """Cross entropy on raw logits, as a sum with its weight.

    sum / weight equals `torch.nn.functional.cross_entropy(..., reduction="mean")`.

    Args:
        logits: Shape (N, C) or (N, C, ...), not passed through a softmax.
        targets: Class indices of any integer type, shape (N,) or (N, ...), or class probabilities
            of the shape of `logits`.
        weight: One factor for each class, shape (C,).
        label_smoothing: Share of the probability spread evenly over the classes, in [0, 1].
        ignore_index: Targets of this class are ignored.

    Returns:
        The summed loss (scalar), and the number of targets that are not ignored, or the sum of
        their class weights.
    """
    if not targets.is_floating_point():
        targets = targets.long()  # torch takes int64 and uint8 alone, and 156 for -100 in uint8
    total = F.cross_entropy(
        logits,
        targets,
        weight=weight,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction="sum",
    )
    if targets.is_floating_point():
        return total, targets.numel() // targets.shape[1]
    counted = targets != ignore_index
    if weight is None:
        return total, counted.sum()
    return total, weight[targets.where(counted, 0)].mul(counted).sum()


def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Weight]:
    """Binary cross entropy on raw logits, as a sum with its weight.

    Args:
        logits: Any shape.
        targets: 0 or 1 (or a probability), of the shape of `logits`.
        weight: Factor of the positive class, broadcast against `logits`.
        label_smoothing: Pulls targets towards 0.5: `targets * (1 - s) + s / 2`.
        ignore_index: Targets of this value are ignored.

    Returns:
        The summed loss (scalar), and the number of targets that are not ignored.
    """
    counted = targets != ignore_index
    goal = targets.to(logits.dtype).where(counted, 0.0)
    if label_smoothing:
        goal = goal * (1 - label_smoothing) + label_smoothing / 2
    each = F.binary_cross_entropy_with_logits(logits, goal, pos_weight=weight, reduction="none")
    return each.where(counted, 0.0).sum(), counted.sum()


Number = Tensor | float


class EvaluationSums(NamedTuple):
    """Sums over the batches of an evaluation.

    Attributes:
        weight: The targets that the losses count.
        correct: Targets that the model predicted.
        counted: Targets with a prediction; a float where the outputs are no logits over classes.
    """

    loss: Number = 0.0
    weight: Number = 0.0
    correct: Number = 0.0
    counted: Number = 0.0

    def metrics(self) -> dict[str, Number]:
        """Return the loss, and the accuracy where there were predictions."""
        if not self.weight:  # device synchronisation, once for each evaluation
            raise TaskError(
                "the validation batches have no targets that count (their weight is 0), so there "
                "is no val/loss; every evaluation needs at least one target that is not ignored "
                "(-100); correct the targets of val"
            )
        metrics = {"loss": self.loss / self.weight}
        if isinstance(self.counted, Tensor):
            metrics["accuracy"] = self.correct / self.counted
        return metrics


def evaluation_sums(
    loss: Callable[[nn.Module, Any], tuple[Tensor, Weight]],
    model: nn.Module,
    batches: Iterable[Any],
    sums: EvaluationSums | None = None,
) -> EvaluationSums:
    """Return the sums over all batches."""
    total, weight, correct, counted = sums or EvaluationSums()
    with _last_output(model) as output:
        for batch in batches:
            part, share = loss(model, batch)
            total, weight = total + part, weight + share
            hits = _count_correct(output(), batch)
            if hits is not None:
                correct, counted = correct + hits[0], counted + hits[1]
    return EvaluationSums(total, weight, correct, counted)


class _last_output:
    """Keep the model's last output, so that accuracy needs no second forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._output: object = None

    def __enter__(self) -> Callable[[], object]:
        self._hook = self._model.register_forward_hook(self._keep)
        return lambda: self._output

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self._output = None

    def _keep(self, _module: nn.Module, _inputs: object, output: object) -> None:
        self._output = output


def _count_correct(output: object, batch: Any) -> tuple[Tensor, Tensor] | None:
    """Return the number of hits and of targets; None unless `output` and targets are classes."""
    if not isinstance(output, Tensor) or not isinstance(batch, Sequence) or len(batch) != 2:
        return None
    targets = batch[1]
    if not isinstance(targets, Tensor) or targets.is_floating_point() or output.ndim < 2:
        return None
    if output.shape[1] < 2 or output.shape[:1] + output.shape[2:] != targets.shape:
        return None
    targets = targets.long()  # torch compares not all unsigned types
    counted = targets >= 0  # ignored targets are negative by convention (-100)
    return (output.argmax(dim=1) == targets).logical_and(counted).sum(), counted.sum()
