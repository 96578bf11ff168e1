"""Model settings keep the result, and evaluation sees every output."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from trainable.build import open_trainer
from trainable.config import TrainConfig, TrialConfig
from trainable.errors import ConfigError
from trainable.find_task import load_task
from trainable.model import prepare_model
from trainable.task import Data, Task

LM = {"context": 8, "layers": 3, "heads": 2, "width": 8, "text_bytes": 4_000, "dropout": 0.2}


class Pictures(Task):
    def build_model(self):
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 2)
        )

    def build_data(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(24, 3, 5, 5, generator=generator)
        samples = (images, (images.mean((1, 2, 3)) > 0).long())
        return Data(train=samples, val=samples)


def _train(directory, task, **options):
    config = TrialConfig.model_validate(
        {
            "task": {"name": "given"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 2},
            "train": {"batch_size": 8} | options,
        }
    )
    with open_trainer(config, directory, device="cpu", task=task) as trainer:
        return list(trainer.events())[-1].metrics, trainer.state.state_dict()["model"]


def _same(one, other):
    (first, weights), (second, others) = one, other
    assert first.keys() == second.keys()
    assert list(weights) == list(others)
    for key in weights:
        torch.testing.assert_close(weights[key], others[key], rtol=1e-4, atol=1e-5)
    assert first["val/accuracy"] == second["val/accuracy"]


@pytest.mark.seeds("S21")
def test_channels_last_changes_only_the_layout(tmp_path):
    seen = []

    class Watched(Pictures):
        def build_model(self):
            model = super().build_model()
            model[0].register_forward_hook(
                lambda _, inputs, __: seen.append(
                    inputs[0].is_contiguous(memory_format=torch.channels_last)
                )
            )
            return model

    expected = _train(tmp_path / "plain", Pictures())
    found = _train(tmp_path / "last", Watched(), channels_last=True)
    _same(expected, found)
    assert seen
    assert all(seen)
    assert found[1]["0.weight"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("first", [False, True])
def test_moments_follow_their_parameters_layout(tmp_path, configure, opened, optimizer, first):
    """Fused kernels take each moment from where its parameter's value would lie in memory."""

    def train(directory, channels_last, until=None):
        config = configure(optimizer={"name": optimizer, "lr": 0.01}, channels_last=channels_last)
        trainer = opened(config, directory, Pictures(), until=until)
        list(trainer.events())
        return trainer.state.state_dict()

    train(tmp_path / "changed", first, until=1)
    changed = train(tmp_path / "changed", not first)
    whole = train(tmp_path / "whole", first)
    torch.testing.assert_close(changed["model"], whole["model"])
    torch.testing.assert_close(changed["optimizer"]["state"], whole["optimizer"]["state"])


@pytest.mark.seeds("S21")
def test_activation_checkpointing_recomputes_with_same_dropout(tmp_path):
    task = load_task("char_lm", LM)
    expected = _train(tmp_path / "plain", task)
    _same(expected, _train(tmp_path / "again", task, activation_checkpointing=True))

    model = prepare_model(task.build_model(), TrainConfig(activation_checkpointing=True))
    calls = []
    for block in model.blocks:
        block.attention_in.register_forward_hook(lambda *_: calls.append(1))
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert len(calls) == 2 * LM["layers"]


def test_activation_checkpointing_of_a_sequential(tmp_path):
    expected = _train(tmp_path / "plain", Pictures())
    _same(expected, _train(tmp_path / "again", Pictures(), activation_checkpointing=True))


class Remembering(Pictures):
    """Its forward pass updates buffers: statistics, and what a spectral norm starts from."""

    def __init__(self, momentum):
        self.momentum = momentum

    def build_model(self):
        first, *others = super().build_model()
        norm = nn.BatchNorm2d(4, momentum=self.momentum)
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(first), norm, *others)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_activation_checkpointing_updates_buffers_once(tmp_path, momentum):
    metrics, expected = _train(tmp_path / "plain", Remembering(momentum))
    again, found = _train(tmp_path / "again", Remembering(momentum), activation_checkpointing=True)
    assert expected["1.num_batches_tracked"] == 6
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    assert again["val/loss"] == metrics["val/loss"]


def test_block_called_twice_is_recomputed_per_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))])

        def forward(self, inputs):
            return self.blocks[0](self.blocks[0](inputs).tanh())

    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        model = prepare_model(Twice(), TrainConfig(activation_checkpointing=again))
        loss = model(torch.randn(3, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append(model.blocks[0].parametrizations.weight.original.grad)
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_block_with_lazy_buffers_is_recomputed():
    block = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    model = nn.Sequential(block)
    prepare_model(model, TrainConfig(activation_checkpointing=True))
    for _ in range(2):
        model(torch.randn(3, 2, 8, 8)).sum().backward()
    assert block[0].weight.grad.abs().sum() > 0


def test_compiled_checkpointing_updates_buffers_once(monkeypatch):
    """Through all of the compiler but its code generator."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    prepare_model(model, TrainConfig(activation_checkpointing=True, compile=True))
    model(torch.randn(5, 3)).sum().backward()
    assert model[1].num_batches_tracked == 1


@pytest.mark.seeds("S21")
def test_compiled_forward_keeps_names_hooks_and_results(tmp_path, monkeypatch):
    """Traced by the real compiler; what it emits is run as it is, which needs no C++ compiler."""
    compile_with = torch.compile
    used = []

    def traced(forward, **options):
        used.append(forward)
        return compile_with(forward, backend="eager", **options)

    expected = _train(tmp_path / "plain", Pictures())
    monkeypatch.setattr(torch, "compile", traced)
    _same(expected, _train(tmp_path / "compiled", Pictures(), compile=True))
    assert len(used) == 1


def test_compilation_ignores_earlier_batch_sizes(tmp_path, monkeypatch):
    """Code for any size rounds differently, and a run that resumes meets the sizes in another
    order.
    """
    sizes = []

    def noted(graph, inputs):
        sizes.extend(size for value in inputs for size in getattr(value, "shape", [value]))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=noted))
    _train(tmp_path, Pictures(), compile=True, batch_size=9)  # 24 samples: the last batch has 6
    assert {type(size) for size in sizes} == {int}
    assert {9, 6} <= set(sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels_last": True}, "no two-dimensional convolution; remove it"),
        ({"activation_checkpointing": True}, "neither has a ModuleList nor is it a Sequential"),
    ],
)
def test_settings_without_effect_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        prepare_model(nn.Linear(2, 2), TrainConfig(**options))


@pytest.mark.seeds("S23")
@pytest.mark.usefixtures("even_clock")
def test_time_on_the_device_is_measured_on_request(tmp_path, opened, configure, toy):
    """A step takes a second by this clock, and an epoch one for each look in it."""
    trainer = opened(configure(measure_device_time=True), tmp_path, toy())
    reports = list(trainer.events())
    assert [report.metrics["train/device_seconds"] for report in reports] == [4.0, 4.0, 4.0]
    assert [report.metrics["train/seconds"] for report in reports] == [9.0, 9.0, 9.0]
    plain = list(opened(configure(), tmp_path / "plain", toy()).events())
    assert "train/device_seconds" not in plain[-1].metrics
    assert plain[-1].metrics["val/loss"] == reports[-1].metrics["val/loss"]
