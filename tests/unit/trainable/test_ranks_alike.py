"""What ranks build, and what hooks and `evaluate()` change, is alike on all, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rank_training import Runs, config, curve, newest_state, to_end, train_in_turn
from tests.saved_objects import saved_values
from trainable.build import open_trainer
from trainable.check.compare_states import state_differences
from trainable.config import TrialConfig
from trainable.errors import TaskError
from trainable.loop import Trainer

pytestmark = pytest.mark.integration

CUT = 6
"""In the second epoch of three, after the first evaluation."""
AS_ALONE = (
    *("EpochDraws", "Unfreezing epoch"),
    *("Apart", "Placed", "Calibrating", "Warming sharded", "Stepping sharded"),
    *("Changing", "Deep sharded", "Saving"),
)
"""Runs whose curve is that of one process."""
UNFROZEN = ("Unfreezing epoch", "Unfreezing step", "Unfreezing loss")
UNFROZEN_APART = (
    *("Unfreezing epoch alone", "Unfreezing step alone sharded"),
    *("Unfreezing loss alone", "Unfreezing loss alone sharded"),
)
RESUMED = ("StepDraws", "Changing")
RUNS = (
    *(*AS_ALONE, *UNFROZEN[1:], *UNFROZEN_APART, "Freezing"),
    *(f"{name}{end}" for name in RESUMED for end in ("", " cut", " resumed")),
    *("Placed more", "Typed", "Averaging", "Stepping"),
    *("Unseeded sharded", "Unseeded cut", "Unseeded resumed"),
    *("Counting", "Making", "Recording sharded", "Exhausting sharded"),
)
MEASURED = ("train/samples_per_second", "memory/process_mb")


def _config(workers: int, run: str) -> TrialConfig:
    name, *words = run.split()
    task: dict[str, Any] = {"name": f"tests.rank_tasks:{name}"}
    if name == "Unfreezing":
        task["where"] = " ".join(word for word in words if word != "sharded")
    if "more" in words:
        task["more"] = True
    sharding = "fsdp" if "sharded" in words and workers > 1 else "none"
    accumulation = 2 if name == "Freezing" else 1
    train = {"accumulation": accumulation, "every": "1 epoch", "sharding": sharding}
    return config(workers, task, epochs=3, **train)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One group of two processes trains all runs."""
    root = tmp_path_factory.mktemp("alike")
    plan = {name: _config(2, name) for name in dict.fromkeys(RUNS)}
    found = train_in_turn(root, plan, cut=CUT)
    for name in AS_ALONE:
        with open_trainer(_config(1, name), root / f"{name}, one", device="cpu") as alone:
            assert isinstance(alone, Trainer)
            to_end(alone)
    return found


def _both(runs: Runs, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last state of a run, and that of its second rank."""
    assert name not in runs.errors
    state = newest_state(runs.root / name)
    (second,) = state["ranks"]
    return state, second


def _differing(one: dict[str, Any], other: dict[str, Any], *parts: str) -> list[Any]:
    states = ({key: state[key] for key in parts} for state in (one, other))
    return list(state_differences(*states))


@pytest.mark.parametrize("name", AS_ALONE)
def test_curve_is_that_of_one_process(runs: Runs, name: str) -> None:
    assert name not in runs.errors
    rows, expected = curve(runs.root / name), curve(runs.root / f"{name}, one")
    assert len(rows) == len(expected) == 12
    for row, other in zip(rows, expected, strict=True):
        assert row.metrics == pytest.approx(other.metrics, rel=1e-12, abs=1e-7)
        assert row.metrics["train/loss"] == pytest.approx(other.metrics["train/loss"], rel=1e-12)


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_is_exact(runs: Runs, name: str) -> None:
    assert runs.others[f"{name} cut"] == runs.others[f"{name} resumed"] == ""
    assert curve(runs.root / f"{name} cut") == curve(runs.root / name)
    states = [newest_state(runs.root / one) for one in (name, f"{name} cut")]
    assert list(state_differences(*states, ignored=MEASURED)) == []


@pytest.mark.parametrize("name", ["EpochDraws", "StepDraws"])
def test_ranks_draw_the_same_in_hooks_and_own_numbers_after_them(runs: Runs, name: str) -> None:
    state, second = _both(runs, name)
    assert _differing(state, second, "objects") == []
    drawn = saved_values(state, "task")["drawn"]
    assert len(drawn) == (12 if name == "EpochDraws" else 36)
    assert len(set(drawn)) >= len(drawn) - 3, "each hook draws anew"
    for generator in ("torch", "numpy", "python"):
        assert _differing(state["random"], second["random"], generator), generator


def test_hooks_of_an_epoch_draw_as_in_one_process(runs: Runs) -> None:
    several, alone = (newest_state(runs.root / f"EpochDraws{end}") for end in ("", ", one"))
    assert saved_values(several, "task")["drawn"] == saved_values(alone, "task")["drawn"]
    assert _differing(several, alone, "random") == []


@pytest.mark.parametrize("name", UNFROZEN)
def test_weight_unfrozen_alike_has_moments(runs: Runs, name: str) -> None:
    state, _ = _both(runs, name)
    assert len(state["optimizer"]["state"]) == 4


def test_parameter_frozen_within_a_step_takes_the_sum_of_all_ranks(runs: Runs) -> None:
    """Each report compares the weights of the ranks."""
    assert "Freezing" not in runs.errors
    assert runs.others["Freezing"] == ""
    assert len(curve(runs.root / "Freezing")) == 12


@pytest.mark.parametrize("name", UNFROZEN_APART)
def test_unfreezing_on_one_rank_is_refused(runs: Runs, name: str) -> None:
    error = runs.errors[name]
    assert isinstance(error, TaskError), error
    said = "the parameter 0.weight requires a gradient on rank 1 and not on rank 0"
    if "loss alone sharded" in name:  # within a pass the ranks cannot ask each other
        said = "rank 1: loss() has changed which parameters"
    assert said in str(error)
    assert runs.others[name].startswith("task: ")


def test_all_ranks_keep_what_the_first_one_has_built(runs: Runs) -> None:
    state, second = _both(runs, "Apart")
    assert _differing(state, second, "task", "objects") == []
    sent = saved_values(state, "task").keys()
    assert sent >= {"table", "array", "by_name", "rate", "mode", "more", "weight", "own"}
    assert saved_values(state, "model").keys() == {"rate"}


def test_resumed_run_keeps_what_was_drawn(runs: Runs) -> None:
    assert not runs.errors.keys() & {"Unseeded cut", "Unseeded resumed", "Unseeded sharded"}
    for name in ("Unseeded cut", "Unseeded sharded"):
        drawn = [row.metrics["offset"] for row in curve(runs.root / name)]
        assert drawn == pytest.approx(drawn[:1] * 12, rel=1e-12)
        _, second = _both(runs, name)
        assert saved_values(second, "task")["offset"] == pytest.approx(drawn[0], rel=1e-12)


def test_what_a_process_has_of_its_own_stays(runs: Runs) -> None:
    assert runs.others["Placed"] == runs.others["Placed more"] == ""
    assert newest_state(runs.root / "Placed")["objects"] == {}


def test_all_ranks_have_what_an_evaluation_changes(runs: Runs) -> None:
    state, second = _both(runs, "Changing")
    alone = newest_state(runs.root / "Changing, one")
    assert _differing(state, second, "task", "objects") == []
    changed = saved_values(state, "task").keys()
    written = {"smooth", "newest", "gone", "kept", "queue", "table", "array", "found", "own"}
    written |= {"python", "arguments[0]", "noise", "strength", "weight", "p"}
    assert changed >= written
    assert changed == saved_values(alone, "task").keys()
    assert saved_values(state, "model").keys() >= {"rate", "weight", "bias"}
    for name in ("Changing", "Changing, one", "Deep sharded"):
        seen = [row.metrics["val/seen"] for row in curve(runs.root / name)[3::4]]
        assert seen == [13.0] * 3, name  # the samples count once


def test_all_ranks_have_what_is_saved_by_own_methods_or_made(runs: Runs) -> None:
    state, second = _both(runs, "Saving")
    assert state["task"] == second["task"] == {"smooth": 0.3 / 8, "outer": pytest.approx(1.1**3)}
    assert state["model"]["1._extra_state"] == {"factor": pytest.approx(0.9**3)}
    made = [saved_values(one, "task")["best"].value for one in _both(runs, "Making")]
    assert made[0] == made[1] > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Typed", ("Typed.best", "is another one on another rank", "resources.workers: 1")),
        ("Counting", ("Counting.numbers", "evaluate() runs on the first rank alone")),
        ("Averaging", ("the weights of rank 1 differ", "the first of them is temperature;")),
        ("Stepping", ("the weights of rank 1 differ", "the first of them is last.bias;")),
        ("Exhausting sharded", ("Exhausting.numbers", "calls loss() once more on a batch that")),
    ],
)
def test_what_cannot_be_made_alike_is_refused(
    runs: Runs, name: str, said: tuple[str, ...]
) -> None:
    for message in (str(runs.errors[name]), runs.others[name].removeprefix("task: ")):
        for part in said:
            assert part in message


TRAINED, EVALUATED = [[6, 6, 6, 1], [6, 6, 6]], [[6, 1], [6]]
"""The samples of each pass of an epoch on each of two ranks: of 37 in windows of 12, and of 13."""


def test_passes_for_other_ranks_change_nothing(runs: Runs) -> None:
    for rank, own in enumerate(_both(runs, "Recording sharded")):
        held, of_model = saved_values(own, "task"), saved_values(own, "model")
        lengths = (TRAINED[rank] + EVALUATED[rank]) * 3
        calls = len(lengths)
        assert held["lengths"] == [0, *lengths]
        assert held["queue"] == lengths[-3:]
        assert held["table['all']"] == list(range(1, calls + 1))
        assert held["calls"] == held["newest"] == held["value"] == of_model["calls"] == calls
        assert held["array"].numpy().view("float64").tolist() == [calls, calls]
        drawn = torch.Generator()
        noise = [torch.randn(3, generator=drawn).double() / 10 for _ in range(calls)][-1]
        assert torch.equal(held["noise"], noise)
