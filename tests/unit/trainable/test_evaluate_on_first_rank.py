"""A task's own `evaluate()`, which the first rank alone runs: all ranks have what it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.rank_training import Groups, config, curve, to_end
from trainable.build import open_trainer
from trainable.checkpoint import CheckpointStore
from trainable.compare_states import state_differences
from trainable.config import TrialConfig
from trainable.errors import TaskError
from trainable.local_ranks import LocalRanks
from trainable.loop import Trainer

pytestmark = pytest.mark.integration

CUT = 6
"""In the second epoch of three, after the first evaluation."""


def _config(workers: int, name: str, **train: Any) -> TrialConfig:
    task = {"name": f"tests.rank_sync_tasks:{name}"}
    return config(workers, task, **{"epochs": 3, "accumulation": 1, "every": "1 epoch", **train})


class _Runs(NamedTuple):
    """The directories of the runs, errors of those that failed, and how others saw them."""

    root: Path
    errors: dict[str, TaskError]
    others: dict[str, str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> _Runs:
    """One group of two processes trains all runs."""
    root = tmp_path_factory.mktemp("evaluate")
    torch.set_num_threads(1)
    plan = {
        "two": _config(2, "Changing"),
        "cut": _config(2, "Changing"),
        "resumed": _config(2, "Changing"),
        "sharded": _config(2, "Deep", sharding="fsdp"),
        "saving": _config(2, "Saving"),
        "Counting": _config(2, "Counting"),
        "Making": _config(2, "Making"),
    }
    errors: dict[str, TaskError] = {}
    with LocalRanks(2) as children:
        places = {"resumed": "cut"}
        groups = Groups(children, [(c, root / places.get(n, n)) for n, c in plan.items()])
        groups.begin()
        for number, name in enumerate(plan):
            try:
                with groups.first(number) as trainer:
                    if name == "cut":
                        trainer.stop_at = CUT
                    to_end(trainer)
            except TaskError as error:
                errors[name] = error
        (other,) = children.ends()
    assert other.error is None
    for name, task in (("one", "Changing"), ("one deep", "Deep"), ("one saving", "Saving")):
        with open_trainer(_config(1, task), root / name, device="cpu") as alone:
            assert isinstance(alone, Trainer)
            to_end(alone)
    return _Runs(root, errors, dict(zip(plan, other.result, strict=True)))


def _state(directory: Path) -> dict[str, Any]:
    store = CheckpointStore(directory)
    newest = store.newest()
    assert newest is not None
    return store.load(newest)


def _kept(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("task", "modules")}


def test_all_ranks_have_what_an_evaluation_changes(runs: _Runs) -> None:
    state, alone = _state(runs.root / "two"), _state(runs.root / "one")
    (second,) = state["ranks"]
    assert list(state_differences(_kept(state), _kept(second))) == []
    changed = {path[-1][1] for path, *_ in state["task"]["held"]}
    written = {"smooth", "newest", "gone", "kept", "queue", "table", "array", "found", "own"}
    written |= {"python", "numpy", "noise", "strength", "weight", "p"}
    assert changed >= written
    assert changed == {path[-1][1] for path, *_ in alone["task"]["held"]}
    assert {path[-1][1] for path, *_ in state["modules"]} >= {"shift", "rate", "weight", "bias"}


def test_curve_is_that_of_one_process(runs: _Runs) -> None:
    for name, alone in (("two", "one"), ("sharded", "one deep"), ("saving", "one saving")):
        rows, expected = curve(runs.root / name), curve(runs.root / alone)
        assert len(rows) == len(expected) == 12
        for row, other in zip(rows, expected, strict=True):
            assert row.metrics == pytest.approx(other.metrics, rel=1e-12, abs=1e-7)
            assert row.metrics["train/loss"] == pytest.approx(
                other.metrics["train/loss"], rel=1e-12
            )


def test_all_ranks_have_what_is_saved_by_own_methods(runs: _Runs) -> None:
    assert "saving" not in runs.errors
    state = _state(runs.root / "saving")
    (second,) = state["ranks"]
    assert state["task"] == second["task"] == {"smooth": 0.3 / 8, "outer": pytest.approx(1.1**3)}
    assert state["model"]["1._extra_state"] == {"factor": pytest.approx(0.9**3)}


def test_logged_sums_count_the_samples_once(runs: _Runs) -> None:
    for name in ("one", "two", "sharded"):
        seen = [row.metrics["val/seen"] for row in curve(runs.root / name)[3::4]]
        assert seen == [13.0] * 3, name


def test_resumed_run_is_exact(runs: _Runs) -> None:
    assert runs.others["cut"] == runs.others["resumed"] == ""
    assert curve(runs.root / "cut") == curve(runs.root / "two")
    states = [_state(runs.root / name) for name in ("two", "cut")]
    measured = ("train/samples_per_second", "memory/process_mb")
    assert list(state_differences(*states, ignored=measured)) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Counting", "Counting.numbers"),
        ("Making", "Making.best.value"),
    ],
)
def test_change_that_no_other_rank_can_have_is_refused(runs: _Runs, name: str, said: str) -> None:
    message = str(runs.errors[name])
    assert said in message
    assert "evaluate() runs on the first rank alone" in message
    assert runs.others[name].startswith("task: ")
    assert said in runs.others[name]
