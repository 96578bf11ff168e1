"""Hooks on several ranks: they draw the same on each, and train the same parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rank_training import Runs, config, curve, newest_state, to_end, train_in_turn
from tests.saved_objects import saved_values
from trainable.build import open_trainer
from trainable.check.compare_states import state_differences
from trainable.config import TrialConfig
from trainable.errors import TaskError
from trainable.loop import Trainer

pytestmark = pytest.mark.integration

CUT = 6
"""In the second epoch of three."""
ALIKE = ("epoch", "step", "loss")
APART = [f"{where} alone{sharded}" for where in ALIKE for sharded in ("", " sharded")]


def _config(workers: int, name: str, where: str = "", **train: Any) -> TrialConfig:
    task = {"name": f"tests.rank_sync_tasks:{name}", **({"where": where} if where else {})}
    return config(workers, task, **{"epochs": 3, "accumulation": 1, "every": "1 epoch", **train})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One group of two processes trains all runs."""
    root = tmp_path_factory.mktemp("hooks")
    plan = {
        "epochs": _config(2, "EpochDraws"),
        "steps": _config(2, "StepDraws"),
        "cut": _config(2, "StepDraws"),
        "resumed": _config(2, "StepDraws"),
        **{where: _config(2, "Unfreezing", where) for where in ALIKE},
        "freezing": _config(2, "Freezing", accumulation=2),
    }
    for name in APART:
        where, _, sharded = name.partition(" alone")
        train = {"sharding": "fsdp"} if sharded else {}
        plan[name] = _config(2, "Unfreezing", f"{where} alone", **train)
    found = train_in_turn(root, plan, cut=CUT)
    for name in ("EpochDraws", "Unfreezing"):
        made = _config(1, name, "epoch" if name == "Unfreezing" else "")
        with open_trainer(made, root / name, device="cpu") as alone:
            assert isinstance(alone, Trainer)
            to_end(alone)
    return found


def _drawn(state: dict[str, Any]) -> list[float]:
    drawn: list[float] = saved_values(state, "task")["drawn"]
    return drawn


def _compare_curves(first: Path, second: Path) -> None:
    rows, expected = curve(first), curve(second)
    assert len(rows) == len(expected) == 12
    for row, other in zip(rows, expected, strict=True):
        assert row.metrics == pytest.approx(other.metrics, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["epochs", "steps"])
def test_ranks_draw_the_same_in_hooks(runs: Runs, name: str) -> None:
    state = newest_state(runs.root / name)
    (second,) = state["ranks"]
    assert (
        list(state_differences({"objects": state["objects"]}, {"objects": second["objects"]}))
        == []
    )
    drawn = _drawn(state)
    assert len(drawn) == (12 if name == "epochs" else 36)
    assert len(set(drawn)) >= len(drawn) - 3, "each hook draws anew"


def test_ranks_have_numbers_of_their_own_after_hooks(runs: Runs) -> None:
    for name in ("epochs", "steps"):
        state = newest_state(runs.root / name)
        (second,) = state["ranks"]
        for generator in ("torch", "numpy", "python"):
            both = ({"": state["random"][generator]}, {"": second["random"][generator]})
            assert list(state_differences(*both)), (name, generator)


def test_hooks_of_an_epoch_draw_as_in_one_process(runs: Runs) -> None:
    several, alone = (newest_state(runs.root / name) for name in ("epochs", "EpochDraws"))
    assert _drawn(several) == _drawn(alone)
    both = ({"random": several["random"]}, {"random": alone["random"]})
    assert list(state_differences(*both)) == []
    _compare_curves(runs.root / "epochs", runs.root / "EpochDraws")


def test_resumed_run_draws_on_exactly(runs: Runs) -> None:
    assert runs.others["cut"] == runs.others["resumed"] == ""
    assert curve(runs.root / "cut") == curve(runs.root / "steps")
    states = [newest_state(runs.root / name) for name in ("steps", "cut")]
    measured = ("train/samples_per_second", "memory/process_mb")
    assert list(state_differences(*states, ignored=measured)) == []


def test_unfreezing_alike_trains_as_one_process(runs: Runs) -> None:
    _compare_curves(runs.root / "epoch", runs.root / "Unfreezing")
    for name in ALIKE:
        assert name not in runs.errors
        state = newest_state(runs.root / name)
        moments = [len(one) for one in state["optimizer"]["state"].values()]
        assert len(moments) == 4, "the unfrozen weight has moments, too"


def test_parameter_frozen_within_a_step_takes_the_sum_of_all_ranks(runs: Runs) -> None:
    """Each report compares the weights of the ranks."""
    assert "freezing" not in runs.errors
    assert runs.others["freezing"] == ""
    assert len(curve(runs.root / "freezing")) == 12


@pytest.mark.parametrize("name", APART)
def test_unfreezing_on_one_rank_is_refused(runs: Runs, name: str) -> None:
    error = runs.errors[name]
    assert isinstance(error, TaskError), error
    said = "the parameter 0.weight requires a gradient on rank 1 and not on rank 0"
    if name == "loss alone sharded":  # within a pass the ranks cannot ask each other
        said = "rank 1: loss() has changed which parameters"
    assert said in str(error)
    assert runs.others[name].startswith("task: ")
