"""Warnings of metrics whose mode contradicts their name."""

from __future__ import annotations

import pytest

from sweeps.spec.spec import parse_spec
from tests.golden.messages import compare_messages


def _warnings(metric: str, mode: str) -> list[str]:
    text = f"name: s\ntask: digits\nmetric: {metric}\nmode: {mode}\ntrials: 2\n"
    return parse_spec(text, "s.yaml").direction_warnings()


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("val/accuracy", "max"),
        ("val/top5_acc", "max"),
        ("val/AUROC", "max"),
        ("F1-macro", "max"),
        ("val/R2", "max"),
        ("val/loss", "min"),
        ("val/total_loss", "min"),
        ("val/RMSE", "min"),
        ("val/error.rate", "min"),
    ],
)
def test_mode_against_a_name_is_warned_of(metric: str, better: str) -> None:
    worse = "max" if better == "min" else "min"
    assert _warnings(metric, better) == []
    (warning,) = _warnings(metric, worse)
    assert f"write {better}" in warning


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    "metric", ["val/score", "val/accuracy_loss", "val/lossless", "precision/size", "train/lr"]
)
def test_name_without_a_direction_is_accepted(metric: str, mode: str) -> None:
    assert _warnings(metric, mode) == []


def test_wording_of_the_warning(request: pytest.FixtureRequest) -> None:
    compare_messages(request, _warnings("[val/loss, val/accuracy]", "[max, min]"))
