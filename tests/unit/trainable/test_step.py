"""One step: its order, overflow, non-finite losses, ignored windows; nothing outlives it."""

# ruff: noqa: ARG002, ARG004  what stands in for something keeps its signature

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

from trainable.config import ClipConfig, OptimizerConfig, ScheduleConfig
from trainable.errors import NonFiniteGradient, NonFiniteLoss, TaskError
from trainable.optim import Clipper, build_optimizer
from trainable.precision import Precision
from trainable.ranks import ALONE, Ranks, WindowSums
from trainable.schedule import Schedule
from trainable.step import Step, StepParts
from trainable.task import Task, decay_groups

CPU = torch.device("cpu")


class Scripted(Task):
    """The loss is the model's output times a factor that the batch brings along."""

    def loss(self, model, batch):
        inputs, factor = batch
        return (model(inputs) * factor).sum(), len(inputs)


class ScalesItself(torch.autograd.Function):
    """Forward 0, backward infinite: a finite loss with a non-finite gradient."""

    @staticmethod
    def forward(ctx, value):
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx, upstream):
        return torch.full_like(upstream, math.inf)


class FiniteLossInfiniteGradient(Task):
    def loss(self, model, batch):
        return ScalesItself.apply(model(batch[0])).sum(), 1.0


def _step(task=None, *, precision="fp32", optimizer="adamw", max_norm=1.0, ranks=ALONE):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    built = build_optimizer(OptimizerConfig(name=optimizer, lr=0.1), decay_groups(model))
    schedule = Schedule(ScheduleConfig(name="linear"), peak=0.1, total_steps=10, steps_per_epoch=5)
    schedule.set_lr(built, 0)
    scaled = Precision(precision, CPU, initial_scale=4.0)
    parts = StepParts(task or Scripted(), model, built, schedule, scaled)
    return Step(parts, Clipper(ClipConfig(max_norm=max_norm)), ranks)


def _weights(step):
    return copy.deepcopy(step.model.state_dict())


def _equal(first, second):
    return all(torch.equal(first[key], second[key]) for key in first)


GOOD = (torch.ones(2, 3), 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_non_finite_loss_changes_no_parameter(value, precision):
    step = _step(precision=precision)
    step([GOOD], 1)
    before = _weights(step)
    with pytest.raises(NonFiniteLoss, match="at step 2") as caught:
        step([GOOD, (torch.ones(2, 3), value)], 2)
    assert caught.value.step == 2
    assert _equal(before, _weights(step))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_non_finite_gradient_changes_no_parameter(precision):
    step = _step(FiniteLossInfiniteGradient(), precision=precision)
    before = _weights(step)
    with pytest.raises(NonFiniteGradient, match="at step 7"):
        step([GOOD], 7)
    assert _equal(before, _weights(step))


@pytest.mark.seeds("S3")
def test_fp16_overflow_is_skipped_and_advances_nothing():
    step = _step(FiniteLossInfiniteGradient(), precision="fp16")
    before, lr = _weights(step), step.schedule.lr
    outcome = step([GOOD], 1)
    assert not outcome.taken
    assert _equal(before, _weights(step))
    assert step.schedule.lr == lr
    assert step.precision.scaler.get_scale() == 2.0
    assert not step.optimizer.state or all(s["step"] == 0 for s in step.optimizer.state.values())


@pytest.mark.seeds("S1")
def test_fp16_gradients_are_unscaled_before_measuring():
    plain, scaled = _step(), _step(precision="fp16")
    expected, found = plain([GOOD], 1), scaled([GOOD], 1)
    assert found.taken
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)


class WithoutSamples(Ranks):
    """A rank that has no sample in its first window; the gradients are those of the others."""

    def exchange(self, compute, parameters, decide, device=None):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return WindowSums(1.0, 1.0, 1), None


def test_fp16_rank_without_samples_takes_the_step():
    step = _step(precision="fp16", ranks=WithoutSamples())
    before = _weights(step)
    assert step([], 1).taken
    assert not _equal(before, _weights(step))


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_deferred_stop_freezes_parameters_at_the_bad_step(optimizer):
    """What an accelerator does: nobody reads the values, the fused kernel stops itself."""
    step = _step(optimizer=optimizer)
    step._reads_at_once = False
    first = step([GOOD], 1)
    assert isinstance(first.loss, torch.Tensor)
    before = _weights(step)
    bad = step([(torch.ones(2, 3), math.nan)], 2)
    later = step([GOOD], 3)
    assert _equal(before, _weights(step))
    assert not torch.isfinite(bad.loss)
    assert torch.isfinite(later.loss)


def test_deferred_values_equal_the_values_read_at_once():
    at_once, deferred = _step(max_norm=0.5), _step(max_norm=0.5)
    deferred._reads_at_once = False
    for number in (1, 2, 3):
        one, other = at_once([GOOD, GOOD], number), deferred([GOOD, GOOD], number)
        assert one.loss == pytest.approx(float(other.loss), rel=1e-6)
        assert one.grad_norm == pytest.approx(float(other.grad_norm), rel=1e-6)
        assert one.clipped == bool(other.clipped)
    for key, value in at_once.model.state_dict().items():
        torch.testing.assert_close(value, deferred.model.state_dict()[key])


def test_one_element_losses_equal_scalars():
    class Kept(Scripted):
        def loss(self, model, batch):
            total, weight = super().loss(model, batch)
            return total.reshape(1), torch.tensor([weight])

    plain, kept = _step(), _step(Kept())
    plain._reads_at_once = kept._reads_at_once = False
    one, other = plain([GOOD], 1), kept([GOOD], 1)
    for name in ("loss", "grad_norm", "clipped", "weight"):
        assert torch.equal(getattr(one, name), getattr(other, name).to(getattr(one, name).dtype))
    assert _equal(_weights(plain), _weights(kept))


def test_optimizer_without_device_stop_syncs_and_raises():
    step = _step(optimizer="adafactor")
    step._reads_at_once = False
    before = _weights(step)
    with pytest.raises(NonFiniteLoss):
        step([(torch.ones(2, 3), math.nan)], 1)
    assert _equal(before, _weights(step))


def test_window_of_ignored_targets_has_loss_zero():
    class Ignored(Task):
        def loss(self, model, batch):
            return model(batch[0]).sum() * 0.0, torch.tensor(0)

    outcome = _step(Ignored())([GOOD], 1)
    assert (outcome.loss, outcome.grad_norm) == (0.0, 0.0)


class Sparse(Scripted):
    """A batch whose factor is 0 has no targets."""

    def loss(self, model, batch):
        return super().loss(model, batch) if batch[1] else (torch.zeros(()), 0)


EMPTY = (GOOD[0], 0.0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_micro_batch_without_targets_may_have_constant_loss(precision):
    alone, among = _step(Sparse(), precision=precision), _step(Sparse(), precision=precision)
    assert alone([GOOD], 1).loss == among([EMPTY, GOOD, EMPTY], 1).loss
    assert _equal(_weights(alone), _weights(among))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_window_without_targets_may_have_constant_loss(precision):
    ignored, constant = _step(precision=precision), _step(Sparse(), precision=precision)
    for number, window in enumerate([[EMPTY], [GOOD], [EMPTY, EMPTY]], 1):
        one, other = ignored(window, number), constant(window, number)
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
        assert _equal(_weights(ignored), _weights(constant))


def test_constant_loss_with_a_weight_is_refused():
    class Broken(Scripted):
        def loss(self, model, batch):
            part, weight = super().loss(model, batch)
            return (part, weight) if batch[1] else (part.detach(), weight)

    with pytest.raises(TaskError, match=r"no parameter received a gradient.*return the weight 0"):
        _step(Broken())([GOOD, EMPTY], 1)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_loss_without_the_model_names_the_remedy(precision, requires_grad):
    class Detached(Task):
        def loss(self, model, batch):
            return torch.ones((), requires_grad=requires_grad), 1.0

    with pytest.raises(TaskError, match="no parameter received a gradient"):
        _step(Detached(), precision=precision)([GOOD], 1)


def test_returned_learning_rate_is_the_applied_one():
    step = _step()
    assert [step([GOOD], n).lr for n in (1, 2, 3)] == pytest.approx([0.1, 0.09, 0.08])


class Teaching(Scripted):
    """Computes with other weights first, as for targets from an average of the weights."""

    def loss(self, model, batch):
        with torch.no_grad():
            kept = model.weight.clone()
            model.weight.zero_()
            model(batch[0])
            model.weight.copy_(kept)
        return super().loss(model, batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_weights_swapped_in_by_a_loss_are_used_once(precision):
    plain, teaching = (_step(task, precision=precision) for task in (Scripted(), Teaching()))
    assert teaching([GOOD], 1).loss == plain([GOOD], 1).loss
    assert _equal(_weights(teaching), _weights(plain))


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
    step, witness = _step(precision="fp16"), Witness(monkeypatch)
    witness.watch(step.optimizer, "zero_grad")
    witness.watch(step.model, "forward")
    witness.watch(torch.Tensor, "backward")
    witness.watch(step.precision.scaler, "unscale_")
    witness.watch(Clipper, "__call__", "clip")
    witness.watch(step.precision.scaler, "step")
    witness.watch(step.precision.scaler, "update")
    witness.watch(step.schedule, "set_lr", "schedule")
    assert step([GOOD, GOOD], 1).taken
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
    clean, dirty = _step(), _step()
    for parameter in dirty.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    weight, seen = dirty.model.weight, []
    dirty.model.register_forward_pre_hook(lambda *_: seen.append(weight.grad))
    assert clean([GOOD], 1).grad_norm == dirty([GOOD], 1).grad_norm
    assert seen[0] is None, "with zeros, a weight that the loss does not use would decay"


class Remembering(Scripted):
    """Keeps a weak reference to each loss."""

    def __init__(self):
        self.parts = []

    def loss(self, model, batch):
        part, weight = super().loss(model, batch)
        self.parts.append(weakref.ref(part))
        return part, weight


@pytest.mark.seeds("S14")
@pytest.mark.parametrize("deferred", [False, True])
def test_outcome_keeps_no_graph(deferred):
    """Whoever keeps outcomes for a whole epoch keeps numbers, not the activations behind them."""
    step = _step(Remembering())
    step._reads_at_once = not deferred
    outcomes = [step([GOOD, GOOD], number) for number in (1, 2, 3)]
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
