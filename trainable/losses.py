"""Losses that return a sum and its weight, so that a window of micro-batches divides once.

What must not live here: which loss a task uses (`task.py`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

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
