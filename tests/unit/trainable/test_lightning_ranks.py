"""A `LightningModule` in a trial of two ranks: what it asks about them is as in Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optional_packages import skip_without
from tests.rank_training import Runs, config, curve, newest_state, to_end, train_in_turn
from trainable.build import open_trainer
from trainable.check.compare_states import state_differences
from trainable.config import TrialConfig
from trainable.loop import Trainer

skip_without("lightning", "torchmetrics")

from tests.lightning_rank_tasks import NUM_SAMPLES  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::Warning:lightning"),
    pytest.mark.filterwarnings("ignore::Warning:torchmetrics"),
]

EQUAL = {
    "hooked": ("Hooked", "Points"),
    "hooked odd": ("Hooked", "Odd"),
    "contrastive": ("Contrastive", "Points"),
    "skewed": ("Skewed", "Odd"),
}
"""Runs whose curve is that of one process."""
REFUSED = {
    "unequal": ("Contrastive", "Odd"),
    "shapes": ("Contrastive", "Uneven"),
    "failing": ("CallsWhere", "Points"),
}
CUT = 6
_DIFFERENT = {"processes", "seen_mean", "ranks"}


def _config(workers: int, module: str, data: str) -> TrialConfig:
    task = {"name": "tests.lightning_rank_tasks:Ranked", "module": module, "data": data}
    return config(
        workers,
        task,
        epochs=2,
        batch_size=8,
        accumulation=1,
        every="1 epoch",
        schedule={"name": "constant"},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One group of two processes trains all runs."""
    root = tmp_path_factory.mktemp("lightning")
    plan = {name: _config(2, *which) for name, which in EQUAL.items()}
    plan |= {"cut": _config(2, "Contrastive", "Points")}
    plan |= {"resumed": plan["cut"]}
    plan |= {name: _config(2, *which) for name, which in REFUSED.items()}
    found = train_in_turn(root, plan, cut=CUT)
    for name, which in EQUAL.items():
        with open_trainer(_config(1, *which), root / f"{name} alone", device="cpu") as alone:
            assert isinstance(alone, Trainer)
            to_end(alone)
    return found


@pytest.mark.parametrize("name", EQUAL)
def test_curve_and_weights_are_those_of_one_process(runs: Runs, name: str) -> None:
    assert name not in runs.errors
    rows, expected = curve(runs.root / name), curve(runs.root / f"{name} alone")
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row.metrics.keys() == other.metrics.keys()
        same = {key: value for key, value in other.metrics.items() if key not in _DIFFERENT}
        assert same == pytest.approx({key: row.metrics[key] for key in same}, rel=1e-6, abs=1e-7)
        for key in ("train/loss", "both_step"):
            if key in same:
                assert row.metrics[key] == pytest.approx(same[key], rel=1e-12)
    states = [newest_state(runs.root / f"{name}{end}") for end in ("", " alone")]
    weights = [state["model"] for state in states]
    for key, value in weights[1].items():
        torch.testing.assert_close(weights[0][key], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("data", ["hooked", "hooked odd"])
def test_hooks_see_all_ranks(runs: Runs, data: str) -> None:
    row = curve(runs.root / data)[-1].metrics
    num_samples = NUM_SAMPLES + ("odd" in data)
    assert row["seen"] == num_samples
    assert row["seen_mean"] == num_samples / 2
    assert (row["ranks"], row["processes"], row["val/processes"]) == (1.0, 2.0, 1.0)
    assert (row["first"], row["noted"], row["of_first"], row["own_first"]) == (1, 1, 3, 0)


def test_resumed_run_is_exact(runs: Runs) -> None:
    assert runs.others["cut"] == runs.others["resumed"] == ""
    assert curve(runs.root / "cut") == curve(runs.root / "contrastive")
    states = [newest_state(runs.root / name) for name in ("contrastive", "cut")]
    measured = ("train/samples_per_second", "memory/process_mb")
    assert list(state_differences(*states, ignored=measured)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unequal", "train.loader.drop_last: true"),
        ("shapes", "different shapes or types"),
        ("failing", "bad sample 17"),
    ],
)
def test_what_cannot_be_right_fails_on_all_ranks(runs: Runs, name: str, said: str) -> None:
    error: Any = runs.errors[name]
    assert said in str(error)
    assert said in runs.others[name]
    assert ";" in str(error) or name == "failing"
