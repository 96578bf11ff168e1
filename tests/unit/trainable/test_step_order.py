"""The order of calls in a step, and that nothing of it outlives the step."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from trainable.config import ClipConfig, OptimizerConfig, ScheduleConfig
from trainable.optim import Clipper, build_optimizer
from trainable.precision import Precision
from trainable.schedule import Schedule
from trainable.step import Step, StepParts
from trainable.task import Task, decay_groups

WINDOW = [(torch.ones(2, 3),), (torch.zeros(2, 3),)]


class Summed(Task):
    """The loss is the sum of the model's output; a weak reference to each is kept."""

    def __init__(self):
        self.parts = []

    def loss(self, model, batch):
        part = model(batch[0]).square().sum()
        self.parts.append(weakref.ref(part))
        return part, len(batch[0])


def _step(precision="fp16"):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = build_optimizer(OptimizerConfig(lr=0.1), decay_groups(model))
    schedule = Schedule(ScheduleConfig(name="linear"), peak=0.1, total_steps=9, steps_per_epoch=3)
    scaled = Precision(precision, torch.device("cpu"), initial_scale=4.0)
    parts = StepParts(Summed(), model, optimizer, schedule, scaled)
    return Step(parts, Clipper(ClipConfig(max_norm=0.1)))


class Witness:
    """Writes down, in order, the calls of methods of several objects."""

    def __init__(self, monkeypatch):
        self.calls = []
        self._monkeypatch = monkeypatch

    def watch(self, owner, name, called=None):
        original = getattr(owner, name)

        def follow(*arguments, **options):
            self.calls.append(called or name)
            return original(*arguments, **options)

        self._monkeypatch.setattr(owner, name, follow)


@pytest.mark.seeds("S1")
def test_calls_of_a_step_come_in_the_documented_order(monkeypatch):
    step, witness = _step(), Witness(monkeypatch)
    witness.watch(step.optimizer, "zero_grad")
    witness.watch(step.model, "forward")
    witness.watch(torch.Tensor, "backward")
    witness.watch(step.precision.scaler, "unscale_")
    witness.watch(Clipper, "__call__", "clip")
    witness.watch(step.precision.scaler, "step")
    witness.watch(step.precision.scaler, "update")
    witness.watch(step.schedule, "set_lr", "schedule")
    assert step(WINDOW, 1).taken
    assert witness.calls == [
        "zero_grad",
        *["forward", "backward"] * 2,
        "unscale_",
        "clip",
        "step",
        "update",
        "schedule",
    ]


@pytest.mark.seeds("S1")
def test_gradients_are_cleared_to_none_first():
    """A gradient left over from elsewhere has no part in the step."""
    clean, dirty = _step("fp32"), _step("fp32")
    for parameter in dirty.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    weight, seen = dirty.model.weight, []
    dirty.model.register_forward_pre_hook(lambda *_: seen.append(weight.grad))
    assert clean(WINDOW, 1).grad_norm == dirty(WINDOW, 1).grad_norm
    assert seen[0] is None, "with zeros, a weight that the loss does not use would decay"


@pytest.mark.seeds("S14")
@pytest.mark.parametrize("deferred", [False, True])
def test_outcome_keeps_no_graph(deferred):
    """Whoever keeps outcomes for a whole epoch keeps numbers, not the activations behind them."""
    step = _step("fp32")
    step._reads_at_once = not deferred
    outcomes = [step(WINDOW, number) for number in (1, 2, 3)]
    for outcome in outcomes:
        for value in outcome:
            assert not (isinstance(value, torch.Tensor) and value.requires_grad)
    gc.collect()
    assert all(part() is None for part in step.task.parts)


@pytest.mark.seeds("S14")
def test_logged_values_are_plain_floats(tmp_path, opened, configure, toy):
    trainer = opened(configure(layer_norms_every=1), tmp_path, toy())
    for report in trainer.events():
        values = [v for row in report.rows for v in row.metrics.values()]
        assert {type(value) for value in values} == {float}
