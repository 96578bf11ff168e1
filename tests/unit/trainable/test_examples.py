"""The examples that ship: each spec is valid, and each loop runs and resumes."""

from __future__ import annotations

import importlib.util
import itertools
import os
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from sweeps.engine.resources import ResourcePlan
from sweeps.engine.task_check import TaskInspector
from sweeps.spec.spec import load_with_positions
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.errors import ConfigError
from trainable.find_task import load_loop, load_task
from trainable.loop_context import Context
from trainable.store.metrics_file import read_rows
from trainable.watch.diagnostics import MEASURED

EXAMPLES = Path(str(files("sweeps.examples")))
NEEDS_ACCELERATE = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None and os.environ.get("CI") != "true",
    reason="needs the extra: pip install 'gradsweep[accelerate]'",
)


@pytest.mark.parametrize(
    "name",
    [
        path.stem
        if path.stem != "accelerate_loop"
        else pytest.param(path.stem, marks=NEEDS_ACCELERATE)
        for path in sorted(EXAMPLES.glob("*.yaml"))
    ],
)
def test_spec_is_valid_and_its_task_loads(name):
    spec = load_with_positions(EXAMPLES / f"{name}.yaml")[0]
    assert spec.name == name
    for distribution in spec.space.values():
        assert distribution.boundary_values()
    config = spec.trial_config(0, spec.example_params())
    if load_loop(config.task.name) is None:
        load_task(config.task.name, config.task.arguments)


@pytest.mark.seeds("S24")
def test_lab_is_configured_as_it_is_taught():
    """FashionMNIST: AdamW, one cycle with warmup, norm 1, 128 = 4 x 32, saved every 100 steps."""
    spec = load_with_positions(EXAMPLES / "fashion_mnist.yaml")[0]
    train = spec.train
    assert (train.optimizer.name, train.schedule.name) == ("adamw", "onecycle")
    assert 0 < train.schedule.warmup < 1
    assert train.clip.max_norm == 1.0
    assert (train.batch_size, train.accumulation, train.micro_batch_size) == (128, 4, 32)
    assert str(spec.checkpoint.every) == "100 steps"


class Crash(BaseException):
    """Stands for a kill."""


def _stop_after(count):
    asked = itertools.count(1)

    def should_stop():
        if next(asked) == count:
            raise Crash
        return False

    return should_stop


@pytest.mark.parametrize(
    "name", ["plain_loop", pytest.param("accelerate_loop", marks=NEEDS_ACCELERATE)]
)
def test_loop_learns_and_resumes_exactly(tmp_path, name):
    config = TrialConfig.model_validate(
        {
            "task": {"name": f"sweeps.examples.{name}:run", "width": 32},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 4},
            "train": {"batch_size": 64, "accumulation": 2, "optimizer": {"lr": 0.01}},
        }
    )
    with open_trainer(config, tmp_path / "whole", device="cpu") as loop:
        last = list(loop.events())[-1]
    assert last.metrics["val/accuracy"] > 0.8
    with (
        pytest.raises(Crash),
        open_trainer(
            config, tmp_path / "cut", device="cpu", should_stop=_stop_after(3)
        ) as crashed,
    ):
        list(crashed.events())
    with open_trainer(config, tmp_path / "cut", device="cpu") as resumed:
        assert resumed.resumed_at == 2
        list(resumed.events())
    curves = [
        [
            (row.step, {k: v for k, v in row.metrics.items() if k not in MEASURED})
            for row in read_rows(tmp_path / run)
        ]
        for run in ("whole", "cut")
    ]
    assert curves[0] == curves[1]


@NEEDS_ACCELERATE
def test_batch_that_ranks_cannot_divide_is_refused():
    from sweeps.examples.accelerate_loop import run

    train = {"batch_size": 64, "accumulation": 2, "optimizer": {"lr": 0.01}}
    config = TrialConfig.model_validate(
        {"task": {"name": "loop"}, "metric": "val/loss", "mode": "min", "train": train}
    )
    context = Context(Path(), 0, 1, torch.device("cpu"), world_size=3)
    with pytest.raises(ConfigError, match=r"train.batch_size: 64 .* 32 samples.*multiple of 6"):
        next(run(config, context))


def test_check_finds_a_loop_without_starting_it():
    """This project may be installed to be edited: its packages then lie on no path."""
    spec = load_with_positions(EXAMPLES / "plain_loop.yaml")[0]
    facts = TaskInspector(spec, ResourcePlan(1, 0, 1)).facts()
    assert facts.own_loop
    assert facts.lines() == ["a custom loop: one report for each epoch or interval of the budget"]
