"""Steps whose values are still on the device, and the one transfer that fetches them.

What must not live here: what is made of the values (`step_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.optim import Scalar
from trainable.step import StepOutcome
from trainable.sums import Sums


class PendingStep(NamedTuple):
    """A step whose values may still be on the device."""

    step: int
    timestamp_ms: int
    outcome: StepOutcome
    lr: float
    layers: list[str] | None
    logged: Sums


def fetch_values(pending: list[PendingStep]) -> list[tuple[float, ...]]:
    """Return loss, gradient norm, whether clipped, and weight of each step."""
    rows = [(o.loss, o.grad_norm, o.clipped, o.weight) for _, _, o, *_ in pending]
    if not any(isinstance(value, Tensor) for row in rows[:1] for value in row):
        return [tuple(map(float, row)) for row in rows]
    columns = [_column(values) for values in zip(*rows, strict=True)]
    fetched = torch.stack(columns).tolist()  # device synchronisation: one for all these steps
    return list(zip(*fetched, strict=True))


def _column(values: Sequence[Scalar | bool]) -> Tensor:
    """Stack one value of many steps, on the device where it was computed."""
    return torch.stack([v for v in values if isinstance(v, Tensor)]).double()
