"""Averaged weights: formulas, what is averaged, and what is measured, saved and loaded."""

from __future__ import annotations

import copy

import pytest
import safetensors.torch
import torch
from pydantic import ValidationError
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainable.averaging import Average, AveragingPlan, averaging_plan
from trainable.config import TrainConfig
from trainable.errors import ConfigError
from trainable.export import export_weights, load_trained
from trainable.warm_start import link_checkpoint_from_donor

EMA = AveragingPlan(start=0, every=1, decay=0.9)


def _plan(total=100, epoch=10, **train):
    return averaging_plan(
        TrainConfig.model_validate(train), total_steps=total, steps_per_epoch=epoch
    )


def _move(model, step):
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator)


def _averaged(average, model):
    with average.in_model():
        return copy.deepcopy(model)


def _same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("decay", [0.9, None])
def test_average_equals_torchs(decay, every):
    """Its EMA and its SWA, from the same step on."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    average = Average(model, [], AveragingPlan(start=4, every=every, decay=decay))
    function = None if decay is None else get_ema_multi_avg_fn(decay)
    theirs = AveragedModel(model, multi_avg_fn=function, use_buffers=True)
    for step in range(1, 20):
        _move(model, step)
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step)))
        average.update(step)
        if step > 4 and step % every == 0:
            theirs.update_parameters(model)
    found, expected = _averaged(average, model).state_dict(), theirs.module.state_dict()
    assert average.count == int(theirs.n_averaged) == len(range(5 + (-5) % every, 20, every))
    for name, value in expected.items():
        if name != "1.num_batches_tracked":
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_weights_are_restored_bit_for_bit():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    average = Average(model, [], EMA)
    before = None
    for step in (1, 2, 3):
        _move(model, step)
        average.update(step)
        before = copy.deepcopy(model)

    def fail():
        with average.in_model():
            assert not _same(model, before)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert _same(model, before)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_stay_tied_in_the_average():
    model = Tied()
    average = Average(model, [], EMA)
    for step in (1, 2):
        _move(model, step)
        average.update(step)
    assert list(average.state_dict()["values"]) == ["model.embedding.weight"]
    with average.in_model():
        assert model.head.weight is model.embedding.weight


def test_frozen_weights_are_averaged_once_trained():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    average = Average(model, [], EMA)
    _move(model, 1)
    average.update(1)
    assert not any(name.startswith("model.0.") for name in average.state_dict()["values"])
    model[0].requires_grad_(True)
    for step in (2, 3):
        _move(model, step)
        average.update(step)
    found = _averaged(average, model)
    assert not torch.equal(found[0].weight, model[0].weight)
    again = Average(model, [], EMA)
    again.load_state_dict(average.state_dict())
    assert _same(_averaged(again, model), found)


def test_average_of_half_precision_is_kept_in_fp32():
    """In bf16, a thousandth of a small difference would be lost."""
    model = nn.Linear(4, 3).to(torch.bfloat16)
    average = Average(model, [], EMA._replace(decay=0.999))
    average.update(1)
    with torch.no_grad():
        model.weight += 1.0
    exact = [value.clone() for value in average.state_dict()["values"].values()]
    for step in range(2, 102):
        average.update(step)
    for before, now in zip(exact, average.state_dict()["values"].values(), strict=True):
        assert now.dtype == torch.float32
        if before.ndim == 2:
            torch.testing.assert_close(
                now - before, torch.full((3, 4), 1 - 0.999**100), rtol=0.05, atol=0
            )
    assert _averaged(average, model).weight.dtype == torch.bfloat16


def test_infinite_buffers_do_not_become_nan():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    average = Average(model, [], EMA)
    for step in (1, 2):
        average.update(step)
    assert torch.equal(_averaged(average, model).mask, model.mask)


def test_lazy_layers_are_averaged():
    def train(model, average, steps):
        for step in steps:
            model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step)))
            _move(model, step)
            average.update(step)

    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    average = Average(model, [], EMA)
    train(model, average, (1, 2, 3))
    assert len(average.state_dict()["values"]) == 6
    again = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    resumed = Average(again, [], EMA)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(average.state_dict())
    train(model, average, (4, 5))
    train(again, resumed, (4, 5))
    assert _same(_averaged(average, model), _averaged(resumed, again))


def test_plan_has_starts_and_intervals():
    assert _plan() is None
    assert _plan(ema={"decay": 0.99, "start": 0.1}) == (10, 1, 0.99)
    assert _plan(ema={"decay": 0.99, "start": 7}) == (7, 1, 0.99)
    assert _plan(swa={"start": 0.75}) == (75, 10, None)
    assert _plan(swa={"start": 5, "every": "20 steps"}) == (5, 20, None)


@pytest.mark.parametrize(
    "train", [{"ema": {"decay": 0.9, "start": 100}}, {"swa": {"start": 95, "every": "3 epochs"}}]
)
def test_averaging_that_never_starts_is_refused(train):
    with pytest.raises(ConfigError, match=r"of 100 steps in all.* lower train\.\w+\.start"):
        _plan(**train)


@pytest.mark.parametrize(
    "train",
    [
        {"ema": {"decay": 1.0}},
        {"ema": {"decay": 0.9, "start": 1.5}},
        {"swa": {"start": -1}},
        {"swa": {"start": 1, "every": "30 seconds"}},
        {"swa": {"start": 1, "every": "1 report"}},
        {"ema": {"decay": 0.9}, "swa": {"start": 0.5}},
    ],
)
def test_bad_keys_of_averaging_are_refused(train):
    with pytest.raises(ValidationError):
        TrainConfig.model_validate(train)


class Normed:
    """Mixed into the toy task: with BatchNorm."""

    def build_model(self):
        return nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
        )


@pytest.fixture
def normed(toy):
    """The toy task's class, with BatchNorm in its model."""
    return type("NormedToy", (Normed, toy), {})


def _trained(opened, config, directory, task, **options):
    trainer = opened(config, directory, task, **options)
    reports = list(trainer.events())
    return trainer, reports


def _loss(model, task):
    data = task.build_data()
    with torch.no_grad():
        loss, weight = task.loss(model.eval(), data.val)
    return float(loss / weight)


@pytest.mark.parametrize(
    "train", [{"ema": {"decay": 0.7, "start": 5}}, {"swa": {"start": 0.3, "every": "2 steps"}}]
)
def test_report_measures_what_is_exported_and_loaded(
    tmp_path, opened, configure, normed, monkeypatch, train
):
    trainer, reports = _trained(opened, configure(**train), tmp_path / "run", normed())
    counts = [report.metrics["num_averaged_weights"] for report in reports]
    assert counts == ([0, 3, 7] if "ema" in train else [0, 2, 4])
    best = trainer.store.best()
    measured = {report.step: report.metrics["val/loss"] for report in reports}[best.step]
    monkeypatch.setattr("trainable.build.load_task", lambda *_: normed())
    monkeypatch.setattr("trainable.find_task.load_loop", lambda _: None)
    loaded = load_trained(configure(**train), best.address)[0].model
    assert _loss(loaded, normed()) == pytest.approx(measured, rel=1e-6)
    exported = export_weights(best.address, tmp_path / "w.safetensors")
    steps = [report.step for report in reports]
    assert (exported.averaged, exported.held) == (counts[steps.index(best.step)], [])
    fresh = normed().build_model()
    safetensors.torch.load_model(fresh, tmp_path / "w.safetensors")
    assert _same(fresh, loaded)
    # The training itself goes on with its own weights, and they have another loss.
    assert _loss(trainer.model, normed()) != pytest.approx(measured, rel=1e-3)


def test_averaging_does_not_change_the_training(tmp_path, opened, configure, normed):
    plain, _ = _trained(opened, configure(), tmp_path / "plain", normed())
    ema = {"decay": 0.7}
    averaged, _ = _trained(opened, configure(ema=ema), tmp_path / "averaged", normed())
    assert _same(plain.model, averaged.model)


def test_averaging_can_begin_and_end_when_resumed(tmp_path, opened, configure, normed):
    _trained(opened, configure(), tmp_path, normed(), until=1)
    ema = {"decay": 0.7}
    _, (report,) = _trained(opened, configure(ema=ema), tmp_path, normed(), until=2)
    assert report.metrics["num_averaged_weights"] == 4
    trainer, (report,) = _trained(opened, configure(), tmp_path, normed())
    assert "num_averaged_weights" not in report.metrics
    assert _loss(trainer.model, normed()) == pytest.approx(report.metrics["val/loss"], rel=1e-6)


def test_average_of_another_run_is_taken_over(tmp_path, opened, configure, normed):
    """As a trial of PBT does, with a decay of its own."""
    config = configure(ema={"decay": 0.7})
    donor, _ = _trained(opened, config, tmp_path / "donor", normed(), until=1)
    _trained(opened, configure(seed=1), tmp_path / "heir", normed(), until=1)
    link_checkpoint_from_donor(donor.store.newest(), tmp_path / "heir")
    changed = configure(seed=1, ema={"decay": 0.5})
    again = opened(changed, tmp_path / "heir", normed())
    assert again._step.average.count == 4
    with again._step.average.in_model(), donor._step.average.in_model():
        assert _same(again.model, donor.model)


def test_averaging_keeps_parameters_outside_the_model(tmp_path, opened, configure, toy):
    class Weighing(toy):
        def __init__(self):
            super().__init__()
            self.balance = nn.Parameter(torch.zeros(()))
            self.evaluated = None

        def state_dict(self):
            return {}

        def param_groups(self, model):
            return [*super().param_groups(model), {"params": [self.balance]}]

        def loss(self, model, batch):
            loss, weight = super().loss(model, batch)
            return loss * torch.exp(-self.balance) + weight * self.balance, weight

        def evaluate(self, model, batches):
            self.evaluated = float(self.balance)
            return super().evaluate(model, batches)

    task = Weighing()
    _trained(opened, configure(ema={"decay": 0.9}), tmp_path, task)
    assert 0 != task.evaluated != task.balance.item()
