"""LAMB and Lion of the extra package: the update, the defaults, and resume."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from trainable.config import OptimizerConfig
from trainable.optim import build_optimizer, state_bytes
from trainable.task import decay_groups

if os.environ.get("CI") != "true":  # there its absence is a failure
    pytest.importorskip(
        "pytorch_optimizer", reason="needs the extra: pip install 'gradsweep[optimizers]'"
    )


def _two_steps(name, gradients, **options):
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 0.0]))
    groups = [{"params": [weight], "weight_decay": 0.1}]
    optimizer = build_optimizer(OptimizerConfig(name=name, lr=0.01, **options), groups)
    values = []
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
        values.append(weight.detach().clone())
    return values


@pytest.mark.seeds("S8")
def test_lion_uses_the_sign_of_the_interpolated_momentum():
    """w <- w (1 - lr wd) - lr sign(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g (Chen et al.)."""
    first, second = torch.tensor([3.0, -0.1, 0.0, 2.0]), torch.tensor([-0.2, 0.5, 1.0, -4.0])
    one, two = _two_steps("lion", [first, second])
    start = torch.tensor([1.0, -2.0, 0.5, 0.0])
    expected = start * (1 - 0.01 * 0.1) - 0.01 * first.sign()
    assert torch.allclose(one, expected, atol=1e-7)
    momentum = (1 - 0.99) * first
    expected = expected * (1 - 0.01 * 0.1) - 0.01 * (0.9 * momentum + 0.1 * second).sign()
    assert torch.allclose(two, expected, atol=1e-7)


@pytest.mark.seeds("S8")
def test_lamb_scales_adam_updates_by_the_weight_norm():
    """r = m / (sqrt(v) + eps);  w <- w - lr |w| / |r| r, with decoupled decay (You et al., v3)."""
    gradient = torch.tensor([3.0, -0.1, 0.7, 2.0])
    (one,) = _two_steps("lamb", [gradient])
    weight = torch.tensor([1.0, -2.0, 0.5, 0.0]) * (1 - 0.01 * 0.1)
    ratio = (0.1 * gradient) / ((0.001 * gradient.square()).sqrt() + 1e-6)
    expected = weight - 0.01 * weight.norm() / ratio.norm() * ratio
    assert torch.allclose(one, expected, atol=1e-5)


@pytest.mark.seeds("S8")
@pytest.mark.parametrize(
    ("name", "lr", "betas", "eps"),
    [("lion", 3e-4, (0.9, 0.99), None), ("lamb", 1e-3, (0.9, 0.999), 1e-6)],
)
def test_defaults_are_the_documented_ones(name, lr, betas, eps):
    optimizer = build_optimizer(OptimizerConfig(name=name), decay_groups(nn.Linear(3, 2)))
    for group in optimizer.param_groups:
        assert (group["lr"], group["weight_decay"]) == (lr, 0)
        assert tuple(group["betas"]) == betas
        assert group.get("eps") == eps
    chosen = OptimizerConfig(name=name, betas=(0.8, 0.95))
    assert tuple(build_optimizer(chosen, decay_groups(nn.Linear(3, 2))).defaults["betas"]) == (
        0.8,
        0.95,
    )


@pytest.mark.seeds("S27")
@pytest.mark.parametrize("name", ["lion", "lamb"])
def test_estimated_bytes_equal_state_bytes(name):
    model = nn.Linear(100, 100, bias=False)
    config = OptimizerConfig(name=name)
    optimizer = build_optimizer(config, decay_groups(model))
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    moments = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim  # scalars count for nothing
    ]
    size = sum(value.numel() * value.element_size() for value in moments)
    assert size == state_bytes(config, model.parameters())


@pytest.mark.parametrize("name", ["lion", "lamb"])
def test_run_resumes_exactly(resumes_exactly, configure, toy, name):
    config = configure(every="2 steps", optimizer={"name": name, "lr": 1e-3})
    whole, resumed = resumes_exactly(config, toy, 7)
    assert resumed.resumed_at == 6
    assert whole.state.progress.metrics["val/loss"] < 1.2
