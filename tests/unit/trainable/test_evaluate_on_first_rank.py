"""A task's own `evaluate()`, which the first rank alone runs: all ranks have what it changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rank_training import Runs, config, curve, newest_state, to_end, train_in_turn
from tests.saved_objects import saved_values
from trainable.build import open_trainer
from trainable.check.compare_states import state_differences
from trainable.config import TrialConfig
from trainable.loop import Trainer

pytestmark = pytest.mark.integration

CUT = 6
"""In the second epoch of three, after the first evaluation."""


def _config(workers: int, name: str, **train: Any) -> TrialConfig:
    task = {"name": f"tests.rank_sync_tasks:{name}"}
    return config(workers, task, **{"epochs": 3, "accumulation": 1, "every": "1 epoch", **train})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One group of two processes trains all runs."""
    root = tmp_path_factory.mktemp("evaluate")
    plan = {
        "two": _config(2, "Changing"),
        "cut": _config(2, "Changing"),
        "resumed": _config(2, "Changing"),
        "sharded": _config(2, "Deep", sharding="fsdp"),
        "saving": _config(2, "Saving"),
        "Counting": _config(2, "Counting"),
        "making": _config(2, "Making"),
    }
    found = train_in_turn(root, plan, cut=CUT)
    for name, task in (("one", "Changing"), ("one deep", "Deep"), ("one saving", "Saving")):
        with open_trainer(_config(1, task), root / name, device="cpu") as alone:
            assert isinstance(alone, Trainer)
            to_end(alone)
    return found


def _kept(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("task", "objects")}


def test_all_ranks_have_what_an_evaluation_changes(runs: Runs) -> None:
    state, alone = newest_state(runs.root / "two"), newest_state(runs.root / "one")
    (second,) = state["ranks"]
    assert list(state_differences(_kept(state), _kept(second))) == []
    changed = saved_values(state, "task").keys()
    written = {"smooth", "newest", "gone", "kept", "queue", "table", "array", "found", "own"}
    written |= {"python", "arguments[0]", "noise", "strength", "weight", "p"}
    assert changed >= written
    assert changed == saved_values(alone, "task").keys()
    assert saved_values(state, "model").keys() >= {"rate", "weight", "bias"}


def test_curve_is_that_of_one_process(runs: Runs) -> None:
    for name, alone in (("two", "one"), ("sharded", "one deep"), ("saving", "one saving")):
        rows, expected = curve(runs.root / name), curve(runs.root / alone)
        assert len(rows) == len(expected) == 12
        for row, other in zip(rows, expected, strict=True):
            assert row.metrics == pytest.approx(other.metrics, rel=1e-12, abs=1e-7)
            assert row.metrics["train/loss"] == pytest.approx(
                other.metrics["train/loss"], rel=1e-12
            )


def test_all_ranks_have_what_is_saved_by_own_methods(runs: Runs) -> None:
    assert "saving" not in runs.errors
    state = newest_state(runs.root / "saving")
    (second,) = state["ranks"]
    assert state["task"] == second["task"] == {"smooth": 0.3 / 8, "outer": pytest.approx(1.1**3)}
    assert state["model"]["1._extra_state"] == {"factor": pytest.approx(0.9**3)}


def test_object_that_an_evaluation_makes_is_sent(runs: Runs) -> None:
    assert "making" not in runs.errors
    state = newest_state(runs.root / "making")
    (second,) = state["ranks"]
    assert saved_values(state, "task")["best"].value == saved_values(second, "task")["best"].value


def test_logged_sums_count_the_samples_once(runs: Runs) -> None:
    for name in ("one", "two", "sharded"):
        seen = [row.metrics["val/seen"] for row in curve(runs.root / name)[3::4]]
        assert seen == [13.0] * 3, name


def test_resumed_run_is_exact(runs: Runs) -> None:
    assert runs.others["cut"] == runs.others["resumed"] == ""
    assert curve(runs.root / "cut") == curve(runs.root / "two")
    states = [newest_state(runs.root / name) for name in ("two", "cut")]
    measured = ("train/samples_per_second", "memory/process_mb")
    assert list(state_differences(*states, ignored=measured)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Counting", "Counting.numbers"),
    ],
)
def test_change_that_no_other_rank_can_have_is_refused(runs: Runs, name: str, said: str) -> None:
    message = str(runs.errors[name])
    assert said in message
    assert "evaluate() runs on the first rank alone" in message
    assert runs.others[name].startswith("task: ")
    assert said in runs.others[name]
