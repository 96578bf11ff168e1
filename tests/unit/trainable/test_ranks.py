"""Runs of several ranks: equal to one process, exact when resumed, failing together."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.rank_training import TIMEOUT, Groups, config, curve, parameters, to_end
from trainable.build import open_trainer
from trainable.check.compare_states import state_differences
from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.errors import (
    ConfigError,
    NonFiniteLoss,
    OutOfMemory,
    RankFailed,
    RankLost,
    TaskError,
    TrainingCaution,
    TrainingError,
)
from trainable.loop import Trainer
from trainable.parallel.rank_group import RankGroup
from trainable.processes.local_ranks import LocalRanks
from trainable.store.metrics_file import Row
from trainable.watch.diagnostics import MEASURED

pytestmark = pytest.mark.integration

CUT = 13
"""In the fourth epoch of eight, and after a saved step."""
# dropout draws on each rank; buffers, an average and random numbers must be restored
DRAWING = {"dropout": 0.3, "batch_norm": True, "samples": 43}
DRAWN: dict[str, Any] = {
    "epochs": 8,
    "accumulation": 1,
    "ema": {"decay": 0.9},
    "clip": {"max_norm": 0.5, "value": 0.1},
    "every": "4 steps",
}
# the plateau's drops and the end by patience follow from the metric, which the first rank tells
REDUCED = {"name": "tests.rank_training:Reduced"}
IN_EQUAL_PARTS: dict[str, Any] = {"accumulation": 1, "loader": {"drop_last": True}, "epochs": 3}
LATE = {"name": "tests.rank_training:LateHooks"}
GROUPED: dict[str, Any] = {
    "ema": {"decay": 0.5},
    "schedule": {"name": "plateau", "patience": 0, "gamma": 0.5, "warmup": 0},
    "patience": 2,
    "optimizer": {"name": "adamw", "lr": 0.5},
}


class Trained(NamedTuple):
    """What a run left."""

    weights: list[Tensor]
    rows: list[Row]
    state: dict[str, Any]
    workers: dict[str, str]


class Ends(NamedTuple):
    """All runs, by name; how they failed on the first rank, and how each ended on the others.

    `operations`: the collective operations of one run, by the number of steps before them.
    """

    runs: dict[str, Trained]
    errors: dict[str, TrainingError]
    seconds: dict[str, float]
    others: dict[str, list[str]]
    operations: dict[int, list[str]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    """Train all runs with one group of processes."""
    root = tmp_path_factory.mktemp("ranks")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runs: dict[str, tuple[TrialConfig, str]] = {
        "two": (config(2), "two"),
        "three": (config(3), "three"),
        "passes within": (config(3, {"checkpoints": True}), "within"),
        "grouped": (_grouped(3), "grouped"),
        "late hooks": (config(3, LATE, accumulation=1), "hooks"),
        "whole": (config(3, DRAWING, **DRAWN), "whole"),
        "cut": (config(3, DRAWING, **DRAWN), "cut"),
        "resumed": (config(3, DRAWING, **DRAWN), "cut"),
        "copied": (config(3, DRAWING, **DRAWN), "copy"),
        "raising": (config(3, {"fails": "1 value 9"}), "raising"),
        "oom": (config(3, {"fails": "2 oom 5"}), "oom"),
        "hook": (config(3, {"fails": "2 hook 3"}), "hook"),
        "nan": (config(3, {"fails": "1 nan 5"}), "nan"),
        "drift": (config(3, {"fails": "1 drift 3"}), "drift"),
        "reduced": (config(3, REDUCED, **IN_EQUAL_PARTS), "reduced"),
        "grows": (config(3, _growing("samples")), "grows"),
        "grows in hook": (config(3, _growing("rank 1")), "grows in hook"),
        "grows alike": (config(3, _growing("batches"), epochs=2), "grows alike"),
        "begun": (config(2), "begun"),
        "refused": (config(3), "begun"),
        "more": (config(3), "begun"),
        "killed": (config(3, {"fails": "1 kill 5"}), "killed"),
    }
    done = Ends({}, {}, {}, {}, {})
    try:
        with LocalRanks(3) as children, warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingCaution)  # BatchNorm
            groups = Groups(children, [(made, root / where) for made, where in runs.values()])
            groups.begin(accept_workers=[list(runs).index("more")])
            for number, (name, (_, where)) in enumerate(runs.items()):
                _train(groups, number, name, root / where, done)
                if name == "cut":
                    shutil.copytree(root / "cut", root / "copy")
            ended = children.ends()
        for number, name in enumerate(runs):
            done.others[name] = [end.result[number] for end in ended if end.result]
        _train_alone("one", config(), root, done)
        _train_alone("within", config(task={"checkpoints": True}), root, done)
        _train_alone("hooks alone", config(task=LATE, accumulation=1), root, done)
        _train_alone("reduced alone", config(task=REDUCED, **IN_EQUAL_PARTS), root, done)
        _train_alone("grouped alone", _grouped(1), root, done)
        yield done
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode("default")


def _growing(counts: str) -> dict[str, Any]:
    """Return a task whose windows give the three ranks 4, 4 and 4 samples, at the end 4, 3, 3."""
    return {"name": "tests.rank_training:Growing", "counts": counts, "samples": 46}


def _grouped(workers: int) -> TrialConfig:
    return config(workers, {"name": "tests.rank_training:Grouped"}, **GROUPED)


def _train(groups: Groups, number: int, name: str, directory: Path, done: Ends) -> None:
    asked = CUT if name == "begun" else 10**6
    opened: list[Trainer] = []
    started = time.monotonic()
    try:
        with groups.first(number, should_stop=lambda: opened[-1].position >= asked) as trainer:
            opened.append(trainer)
            trainer.stop_at = CUT if name == "cut" else trainer.stop_at
            if name == "three":
                _note_operations(trainer, done.operations)
            to_end(trainer)
            done.runs[name] = _trained(trainer, directory)
    except TrainingError as error:
        done.errors[name] = error
    done.seconds[name] = time.monotonic() - started


def _note_operations(trainer: Trainer, found: dict[int, list[str]]) -> None:
    assert isinstance(trainer._ranks, RankGroup)
    collectives = trainer._ranks.collectives

    def noted(name: str) -> Any:
        operation = getattr(collectives, name)

        def call(*arguments: Any) -> Any:
            found.setdefault(trainer.position, []).append(name)
            return operation(*arguments)

        return call

    for name in ("add_up", "broadcast", "gather"):
        setattr(collectives, name, noted(name))


def _train_alone(name: str, made: TrialConfig, root: Path, done: Ends) -> None:
    directory = root / f"alone-{name}"
    with open_trainer(made, directory, device="cpu") as trainer:
        assert isinstance(trainer, Trainer)
        to_end(trainer)
        done.runs[name] = _trained(trainer, directory)


def _trained(trainer: Trainer, directory: Path) -> Trained:
    trainer.store.wait()
    store = CheckpointStore(directory)
    newest = store.newest()
    assert newest is not None
    workers = trainer.workers(trainer._ranks.size)
    return Trained(parameters(trainer), curve(directory), store.load(newest), workers)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("two", "one"),
        ("three", "one"),
        ("passes within", "within"),
        ("late hooks", "hooks alone"),
        ("reduced", "reduced alone"),
        ("grouped", "grouped alone"),
    ],
)
def test_ranks_train_as_one_process_does(ends: Ends, name: str, alone: str) -> None:
    one, several = ends.runs[alone], ends.runs[name]
    for mine, other in zip(several.weights, one.weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    assert len(several.rows) == len(one.rows)
    assert alone in ("grouped alone", "reduced alone") or len(one.rows) == 52
    for mine, other in zip(several.rows, one.rows, strict=True):
        assert mine.metrics == pytest.approx(other.metrics, rel=0, abs=1e-12)


def test_patience_and_plateau_end_ranks_alike(ends: Ends) -> None:
    rows = ends.runs["grouped"].rows
    assert len(rows) < 52
    assert ends.others["grouped"] == [""]  # of the rank that lives to the end
    assert len({row.metrics["train/lr"] for row in rows}) > 2
    assert rows[-1].metrics["num_averaged_weights"] == len(rows)


def test_a_step_is_one_message_and_one_sum(ends: Ends) -> None:
    inside = [ends.operations[position] for position in (1, 2, 6, 9)]  # nothing is saved there
    assert inside == [["gather", "add_up"]] * 4


def test_a_report_takes_few_agreements(ends: Ends) -> None:
    """Of logged values, three windows of validation, metrics, a decision, and sizes of states."""
    after = ends.operations[4]
    assert after[: after.index("broadcast")] == ["gather"] * 7


def test_a_resumed_run_of_three_ranks_is_exact(ends: Ends) -> None:
    whole = ends.runs["whole"]
    assert ends.runs["cut"].rows == whole.rows[:CUT]
    for name in ("resumed", "copied"):
        again = ends.runs[name]
        assert again.rows == whole.rows
        assert list(state_differences(again.state, whole.state, ignored=MEASURED)) == []


def test_each_rank_draws_and_saves_its_own_numbers(ends: Ends) -> None:
    state = ends.runs["whole"].state
    generators = [state["random"]["torch"], *(one["random"]["torch"] for one in state["ranks"])]
    assert len({tuple(one.tolist()) for one in generators}) == 3


def test_one_process_saves_nothing_of_ranks(ends: Ends) -> None:
    assert "ranks" not in ends.runs["one"].state


@pytest.mark.parametrize(
    ("name", "rank", "said", "where"),
    [
        ("raising", "rank 1", "bad sample 17", "in loss"),
        ("hook", "rank 2", "bad hook", "in on_step_end"),
    ],
)
def test_an_exception_of_one_rank_fails_all(
    ends: Ends, name: str, rank: str, said: str, where: str
) -> None:
    error = ends.errors[name]
    assert isinstance(error, RankFailed)
    assert rank in str(error)
    assert said in str(error)
    assert where in error.__notes__[0]
    if name == "raising":
        assert ends.others[name] == [f"error: {error}"]


def test_one_rank_out_of_memory_stops_all_alike(ends: Ends) -> None:
    error = ends.errors["oom"]
    assert isinstance(error, OutOfMemory)
    assert "rank 2" in str(error)
    assert all(end.startswith("oom") for end in ends.others["oom"])


def test_a_loss_that_is_nan_on_one_rank_stops_all(ends: Ends) -> None:
    error = ends.errors["nan"]
    assert isinstance(error, NonFiniteLoss)
    assert error.step == 3
    assert ends.others["nan"] == [f"non_finite: {error}"]


def test_weights_that_drift_on_one_rank_are_refused(ends: Ends) -> None:
    error = ends.errors["drift"]
    assert isinstance(error, TaskError)
    assert "rank 1" in str(error)
    assert ends.others["drift"] == [f"task: {error}"]


def test_buffers_that_grow_apart_are_refused(ends: Ends) -> None:
    error = ends.errors["grows"]
    assert isinstance(error, TaskError)
    assert "buffer norm.rows has the shape (15, 2) on rank 1, and (16, 2) on rank 0" in str(error)
    assert ends.others["grows"] == [f"task: {error}"]
    error = ends.errors["grows in hook"]
    assert isinstance(error, TaskError)
    assert "rank 1: the buffer norm.rows has had the shape (0, 2), and has (1, 2)" in str(error)


def test_buffers_may_grow_alike(ends: Ends) -> None:
    assert ends.runs["grows alike"].state["model"]["norm.rows"].shape == (16, 2)


def test_a_killed_rank_is_lost_to_the_others(ends: Ends) -> None:
    assert isinstance(ends.errors["killed"], RankLost)
    (second,) = ends.others["killed"]
    assert second.startswith("rank_lost")


def test_the_first_rank_hears_of_a_failure_at_once(ends: Ends) -> None:
    assert {"raising", "oom", "hook", "nan", "killed"} <= ends.errors.keys()
    for name in ends.errors:
        assert ends.seconds[name] < TIMEOUT / 2, name


def test_another_number_of_ranks_must_be_accepted(ends: Ends) -> None:
    error = ends.errors["refused"]
    assert isinstance(error, ConfigError)
    assert error.key == "resources.workers"
    for mine, other in zip(ends.runs["more"].weights, ends.runs["one"].weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    assert len(ends.runs["more"].rows) == 52


def test_run_names_its_ranks_and_earlier_ones(ends: Ends) -> None:
    assert ends.runs["one"].workers == {}
    assert ends.runs["three"].workers == {"workers": "3"}
    # within an epoch, the ranks stop after the step in which they were asked to
    stopped = f"workers.before_step_{CUT + 1}"
    assert ends.runs["more"].workers == {"workers": "3", stopped: "2, within an epoch"}
