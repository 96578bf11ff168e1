"""Two states are equal bit for bit, or the first entry that differs is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainable.check.compare_states import StateDifference, num_tensors, state_differences

NAN = float("nan")


def _state(**changed: Any) -> dict[str, Any]:
    return {
        "random": {"torch": torch.arange(4, dtype=torch.uint8)},
        "progress": {"step": 3, "metrics": {"val/loss": 0.5, "train/seconds": 1.0}},
        "optimizer": {"state": {0: {"exp_avg": torch.tensor([0.0, 1.0, NAN])}}},
        "model": {"weight": torch.ones(2, 2)},
        **changed,
    }


def test_equal_states_have_no_difference() -> None:
    assert not [*state_differences(_state(), _state())]
    assert num_tensors(_state()) == 3


@pytest.mark.parametrize(
    ("changed", "entry", "what", "largest"),
    [
        ({"model": {"weight": torch.full((2, 2), 1.5)}}, "model.weight", "4 of 4", 0.5),
        ({"model": {"weight": torch.ones(2)}}, "model.weight", "(2,) and was", None),
        ({"model": {}}, "model.weight", "is missing", None),
        ({"average": {"n": 1}}, "average", "is new", None),
        (
            {"optimizer": {"state": {0: {"exp_avg": torch.tensor([-0.0, 1.0, NAN])}}}},
            "optimizer.state.0.exp_avg",
            "1 of 3",
            0.0,
        ),
        (
            {"progress": {"step": 4, "metrics": {"val/loss": 0.5}}},
            "progress.step",
            "is 4 and was 3",
            1.0,
        ),
        (
            {"progress": {"step": 3, "metrics": {"val/loss": math.nextafter(0.5, 1)}}},
            "progress.metrics.val/loss",
            "and was 0.5",
            math.nextafter(0.5, 1) - 0.5,
        ),
    ],
)
def test_first_difference_is_named(
    changed: dict[str, Any], entry: str, what: str, largest: float | None
) -> None:
    found = next(state_differences(_state(), _state(**changed), ignored=["train/seconds"]))
    assert found.entry == entry
    assert what in found.what
    assert found.largest == largest


def test_weights_are_named_before_generators() -> None:
    other = _state(random={}, model={"weight": torch.zeros(2, 2)})
    assert [one.entry for one in state_differences(_state(), other)] == [
        "model.weight",
        "random.torch",
    ]


def test_measured_metrics_are_left_out() -> None:
    other = _state(progress={"step": 3, "metrics": {"val/loss": 0.5, "train/seconds": 2.0}})
    assert not [*state_differences(_state(), other, ignored=["train/seconds"])]
    assert isinstance(next(state_differences(_state(), other)), StateDifference)
