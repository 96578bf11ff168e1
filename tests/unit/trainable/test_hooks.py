"""Hooks of a task and sums over an epoch, also of a run that was killed in the middle of one."""

# ruff: noqa: ARG001, ARG002, ARG005  what stands in for something keeps its signature

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.optimizers import TwoOptimizers
from tests.resumption import Crash, crash_at, curve, to_end
from trainable.build import build_parts, build_step
from trainable.check.first_batches import FirstBatches
from trainable.check.rehearsal import rehearse
from trainable.check.task_checks import quick_check
from trainable.check.testing import check_task
from trainable.config import TaskConfig
from trainable.errors import TaskError
from trainable.export import load_model
from trainable.logged import Log, means
from trainable.optim import members
from trainable.task import Data, Task

pytestmark = pytest.mark.usefixtures("patient")


class Curriculum(Task):
    """Unfreezes its first layer, lowers its dropout, and counts what it sees."""

    calls: list[tuple[str, int]]

    def __init__(self):
        self.calls = []
        self.seen = 0

    def build_model(self):
        norm = nn.BatchNorm1d(8)
        self.net = nn.Sequential(nn.Linear(5, 8), norm, nn.Dropout(0.5), nn.Linear(8, 3))
        self.net[0].requires_grad_(False)
        return self.net

    def build_data(self):
        x = torch.randn(44, 5, generator=torch.Generator().manual_seed(1))
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        return Data(train=(x, y), val=(x[:10], y[:10]))

    def on_epoch_start(self, epoch):
        self.calls.append(("start", epoch))
        self.net[0].requires_grad_(epoch >= 1)
        self.net[1].momentum = 0.1 / (epoch + 1)
        self.log("dropout", self.net[2].p)

    def on_step_end(self, step):
        self.calls.append(("step", step))
        self.net[2].p *= 0.95
        with torch.no_grad():
            self.net[3].weight.clamp_(-0.5, 0.5)
        self.log("noise", torch.rand(()))

    def on_epoch_end(self, epoch):
        self.calls.append(("end", epoch))
        self.log("seen", self.seen, reduce="sum")
        self.seen = 0

    def loss(self, model, batch):
        total, weight = super().loss(model, batch)
        if model.training:
            self.seen += len(batch[0])
            self.log("train/mean", total.detach() / weight, over="epoch", weight=weight)
            self.log("train/samples", len(batch[0]), over="epoch", reduce="sum")
        return total, weight


def _run(opened, config, directory, task=None):
    """Train to the end; return the trainer and its task."""
    trainer = opened(config, directory, task or Curriculum())
    to_end(trainer)
    return trainer, trainer.task


EPOCH = [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 4), ("end", 0)]
CALLS = [(name, at + by * (4 if name == "step" else 1)) for by in range(3) for name, at in EPOCH]


@pytest.mark.seeds("S15")
@pytest.mark.parametrize("every", ["1 epoch", "1 step", "2 steps"])
def test_hooks_and_epoch_sums_survive_a_kill(resumes_exactly, configure, every):
    whole, resumed = resumes_exactly(configure(every=every), Curriculum, 1, 3, 4, 6, 7, 9)
    # saved with the task: nothing twice, nothing left out
    assert whole.task.calls == resumed.task.calls == CALLS


@pytest.mark.filterwarnings("ignore:accumulation is 2 and the model has BatchNorm")
def test_epoch_sums_are_those_of_all_samples(tmp_path, opened, configure):
    _run(opened, configure(accumulation=2), tmp_path)
    rows = dict(curve(tmp_path))
    ends = [rows[4], rows[8], rows[12]]
    assert [row["train/samples"] for row in ends] == [44, 44, 44]
    assert [row["seen"] for row in ends] == [44, 44, 44]
    assert ends[0]["dropout"] == 0.5
    assert "train/samples" not in rows[3]
    assert "noise" in rows[3]
    losses = sum(rows[step]["train/loss"] * (8 if step == 4 else 12) for step in range(1, 5))
    assert ends[0]["train/mean"] == pytest.approx(losses / 44)


@pytest.mark.parametrize("every", ["1 step", "3 steps", "1 report"])
def test_hooks_follow_epochs_and_sums_follow_reports(tmp_path, resumes_exactly, configure, every):
    config = configure(budget={"steps": 12, "report_every": 5}, every=every)
    whole, resumed = resumes_exactly(config, Curriculum, 2, 4, 5, 8, 9)
    assert whole.task.calls == resumed.task.calls == CALLS
    rows = dict(curve(tmp_path / "whole"))
    assert [rows[step]["train/samples"] for step in (5, 10, 12)] == [56, 56, 20]
    assert [rows[step]["seen"] for step in (5, 10, 12)] == [44, 44, 44]


def test_smaller_batches_do_not_begin_the_epoch_again(tmp_path, opened, configure):
    config = configure(every="1 step", batch_size=6)
    with pytest.raises(Crash):
        to_end(opened(config, tmp_path, Curriculum(), should_stop=crash_at(2)))
    trainer, task = _run(opened, configure(batch_size=40), tmp_path)
    assert trainer.resumed_at == 1
    assert [call for call in task.calls if call[0] == "start"] == [("start", n) for n in range(3)]


def test_epoch_value_is_a_metric_of_the_sweep(tmp_path, opened, configure):
    config = configure(metric="train/mean")
    assert rehearse(config, Curriculum).problem is None
    parts = build_parts(config, device=torch.device("cpu"), task=Curriculum())
    assert quick_check(parts) == []
    first = FirstBatches(parts, config, build_step(parts, config.train))
    first.compute()
    assert first.cautions == []
    trainer, _ = _run(opened, config, tmp_path)
    means = [metrics["train/mean"] for _, metrics in curve(tmp_path) if "epoch" in metrics]
    assert trainer.state.progress.best == min(means)
    check_task(Curriculum(), metrics=["train/mean", "seen"])


def test_skipped_fp16_steps_count_for_no_epoch(tmp_path, opened, configure):
    class Overflowing(Curriculum):
        def loss(self, model, batch):
            part, weight = super().loss(model, batch)
            if model.training and self.seen == 24:
                part.register_hook(lambda gradient: gradient * torch.inf)
            return part, weight

    trainer, task = _run(opened, configure(epochs=1, precision="fp16"), tmp_path, Overflowing())
    assert trainer.state.progress.step == 3
    assert [number for name, number in task.calls if name == "step"] == [1, 2, 3]
    assert dict(curve(tmp_path))[3]["train/samples"] == 32


def _grow(self, epoch):
    self.net.add_module("late", nn.Linear(3, 3))


def _unfreeze(self, epoch):
    self.net[0].requires_grad_(True)


def _step(self, step):
    self.optimizer.step()


def _leave_out(self, model):
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"on_epoch_start": _grow}, "'late.weight' requires a gradient .*make all modules in"),
        ({"on_epoch_end": _unfreeze, "on_epoch_start": Task.on_epoch_start,
          "param_groups": _leave_out}, "'0.weight' requires .*list frozen parameters"),
        ({"on_epoch_start": lambda self: None}, "def on_epoch_start.self, epoch.:`; .*self.net"),
        ({"on_step_end": lambda self, model, step: None}, "def on_step_end.self, step.:"),
        ({"on_step_end": lambda self, step: next(iter(()))}, "StopIteration was raised at"),
    ],
)  # fmt: skip
def test_harmful_hooks_are_refused_before_a_run(configure, methods, said):
    with pytest.raises(TaskError, match=said):
        _check(type("Custom", (Curriculum,), methods)(), configure())


def _check(task, config):
    parts = build_parts(config, device=torch.device("cpu"), task=task)
    quick_check(parts)
    first = FirstBatches(parts, config, build_step(parts, config.train))
    first.compute()
    if first.cautions:
        raise TaskError("; ".join(first.cautions))


@pytest.mark.parametrize("number", [None, 0, 1])
def test_hook_cannot_step_the_runs_optimizer(tmp_path, opened, configure, number):
    """The only one, or one of two."""
    kinds = (Curriculum,) if number is None else (TwoOptimizers, Curriculum)
    task = type("Custom", kinds, {"on_step_end": _step})()
    trainer = opened(configure(), tmp_path, task)
    task.optimizer = members(trainer._step.optimizer)[number or 0]
    with pytest.raises(TaskError, match=r"on_step_end\(\) calls step\(\) of the run's optimizer"):
        next(trainer.events())


def test_average_is_that_of_the_weights_a_hook_leaves(tmp_path, opened, configure):
    """A pruned weight is pruned in the average, which is evaluated and exported."""

    class Pruned(Curriculum):
        def on_step_end(self, step):
            with torch.no_grad():
                self.net[3].weight[:, :4] = 0

    trainer = opened(configure(ema={"decay": 0.9}), tmp_path, Pruned())
    list(trainer.events())
    average = trainer.state.state_dict()["average"]["values"]["model.3.weight"]
    assert (average[:, :4] == 0).all()
    assert (average[:, 4:] != 0).all()


class Tempered(Task):
    """Its loss needs what a hook has set."""

    def build_model(self):
        return nn.Linear(5, 3)

    def build_data(self):
        samples = (torch.ones(6, 5), torch.zeros(6, dtype=torch.long))
        return Data(train=samples, val=samples)

    def on_epoch_start(self, epoch):
        self.temperature = 1.0 / (epoch + 1)

    def loss(self, model, batch):
        return super().loss(model, (batch[0] / self.temperature, batch[1]))


def test_model_is_loaded_with_what_hooks_have_set(tmp_path, opened, configure):
    config = configure(epochs=2)
    config = config.model_copy(update={"task": TaskConfig(name=f"{__name__}:Tempered")})
    trainer = opened(config, tmp_path, None)
    list(trainer.events())
    loaded = load_model(config, trainer.store.generations()[-1].address)
    assert torch.equal(loaded.inputs[0], torch.full((6, 5), 2.0))


class Forgetful(Tempered):
    """Its state cannot be restored outside of a run."""

    def loss(self, model, batch):
        return Task.loss(self, model, batch)

    def load_state_dict(self, state):
        raise KeyError("the optimizer")


def test_state_that_is_not_restored_is_said(tmp_path, opened, configure):
    config = configure(epochs=1)
    config = config.model_copy(update={"task": TaskConfig(name=f"{__name__}:Forgetful")})
    trainer = opened(config, tmp_path, None)
    list(trainer.events())
    with pytest.warns(UserWarning, match="what Forgetful keeps.*KeyError: 'the optimizer'"):
        load_model(config, trainer.store.generations()[-1].address)


def test_hook_without_a_savable_change_is_refused_early(configure):
    class Holding(Curriculum):
        def on_step_end(self, step):
            self.lines = (number for number in (1, 2))
            next(self.lines)

    assert "lines" in str(rehearse(configure(), Holding).problem)


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({}, {"over": "epoch"}, "a name has one meaning"),
        ({"over": "epoch"}, {"over": "epoch", "reduce": "sum"}, "a name has one meaning"),
        ({"reduce": "sum"}, {"reduce": "sum", "weight": 2}, "only a mean has weights"),
        ({"weight": 2}, {"weight": "heavy"}, "weight= as 'heavy'; a metric is one number"),
    ],
)
def test_contradicting_options_of_log_are_refused(first, then, said):
    log = Log()
    log.add("x", 1.0, **first)
    with pytest.raises(TaskError, match=said):
        log.add("x", 1.0, **then)


@pytest.mark.parametrize("option", ["over", "reduce"])
def test_unknown_options_of_log_are_refused(option):
    with pytest.raises(TaskError, match=f"given {option}='run'; it must be"):
        Log().add("x", 1.0, **{option: "run"})


def test_means_are_weighted_and_sums_are_not_divided():
    log = Log()
    for value, weight in ((1.0, 3), (5.0, 1)):
        log.add("mean", value, weight=weight)
        log.add("sum", value, reduce="sum")
        log.add("nothing", value, weight=0)
    (found,) = means([log.take()])
    assert (found["mean"], found["sum"]) == (2.0, 6.0)
    assert math.isnan(found["nothing"])


def test_evaluation_has_one_value_of_each_name():
    log = Log()
    log.add("hits", 3, over="epoch", reduce="sum")
    log.prefix = "val/"
    for _ in range(2):
        log.add("hits", 2, over="epoch", reduce="sum")
    assert means([log.take(), log.take_epoch()]) == [{"val/hits": 4.0}, {"hits": 3.0}]


class Annealed(Curriculum):
    """Keeps what it is told of the length of its run, and when."""

    def __init__(self):
        super().__init__()
        self.known = [self.total_steps]

    def build_optimizer(self, model, config):
        self.at_build = self.total_steps

    def on_step_end(self, step):
        self.known = [*self.known[-3:], self.total_steps]
        self.net[2].p = 0.5 * (1 - step / self.total_steps)


class OwnName(Annealed):
    """Has an attribute of this name itself."""

    def __init__(self):
        self.total_steps = 24
        super().__init__()


def test_task_knows_the_steps_of_its_run_also_of_a_longer_one(tmp_path, opened, configure):
    config = configure(every="1 epoch")
    steps = 4 * config.budget.epochs
    task = Annealed()
    with pytest.raises(Crash):
        to_end(opened(config, tmp_path / "run", task, should_stop=crash_at(6)))
    assert task.known[-1] == task.at_build == steps
    assert "total_steps" not in vars(task)
    longer = config.model_copy(update={"budget": config.budget.model_copy(update={"epochs": 5})})
    trainer, task = _run(opened, longer, tmp_path / "run", Annealed())
    assert task.known[-1] == task.at_build == 20
    assert "total_steps" not in str(trainer.state.state_dict()["task"])
    assert Annealed().total_steps is None
    _, own = _run(opened, config, tmp_path / "own", OwnName())
    assert own.known[-1] == own.at_build == own.total_steps == 24
