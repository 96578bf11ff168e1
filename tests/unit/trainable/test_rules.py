"""What is decayed, what all trials share, and what evaluation may not change."""

from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, random_split

from trainable.build import build_parts, open_trainer
from trainable.config import OptimizerConfig, TrialConfig
from trainable.find_task import load_task
from trainable.optim import build_optimizer
from trainable.seeding import set_seed
from trainable.task import Data, Task, decay_groups

CPU = torch.device("cpu")


class RMSNorm(nn.Module):
    """As in Llama and T5: no class of torch's, a scale named `weight`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))


class Block(nn.Module):
    """As in ConvNeXt: a depthwise convolution, a norm, and scales of layers in two layouts."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 1, groups=dim)  # weight (4, 1, 1, 1)
        self.norm = RMSNorm(dim)
        self.gamma = nn.Parameter(torch.full((dim,), 1e-6))
        self.layer_scale = nn.Parameter(torch.full((dim, 1, 1), 1e-6))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.embedding = nn.Embedding(7, dim)
        self.position = nn.Parameter(torch.zeros(1, 5, dim))
        self.head = nn.Linear(1, dim)  # weight (4, 1)


def _undecayed(model: nn.Module) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    (group,) = [g for g in decay_groups(model) if g.get("weight_decay") == 0.0]
    return {names[id(p)] for p in group["params"]}


def test_tensors_below_two_dimensions_do_not_decay() -> None:
    block = Block()
    assert _undecayed(block) == {
        "conv.bias", "norm.weight", "gamma", "layer_scale", "temperature", "head.bias"
    }  # fmt: skip
    listed = [p for group in decay_groups(block) for p in group["params"]]
    assert len(listed) == len(list(block.parameters()))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adafactor"])
def test_frozen_parameters_train_once_unfrozen(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    config = OptimizerConfig(name=name, lr=0.1, weight_decay=0.1)  # type: ignore[arg-type]
    optimizer = build_optimizer(config, decay_groups(model))
    before = model[0].weight.clone()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()

    step()
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state  # a frozen backbone takes no memory for moments
    model[0].requires_grad_(True)
    step()
    assert not torch.equal(model[0].weight, before)
    assert model[0].weight in optimizer.state


class Drawing(Task):
    """Draws a split in each place where a user may, and whatever else there is to draw."""

    def __init__(self) -> None:
        self.order = torch.randperm(40)
        self.more = (random.random(), numpy.random.rand())
        self.drawn: list[float] = []

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))

    def build_data(self) -> Data:
        g = torch.Generator().manual_seed(0)
        x, y = torch.randn(40, 3, generator=g), torch.randint(2, (40,), generator=g)
        x[:, 2] = torch.arange(40)
        train, val = random_split(TensorDataset(x[self.order], y[self.order]), [0.8, 0.2])
        return Data(train=train, val=Noisy(val))

    def evaluate(self, model, batches):  # type: ignore[no-untyped-def]
        batches = list(batches)
        self.drawn.append(float(sum(b[0].sum() for b in batches)) + float(torch.rand(())))
        return {"loss": self.loss(model, batches[0])[0], "drawn": self.drawn[-1]}


class Noisy(Dataset):  # type: ignore[type-arg]
    """Samples that draw, also where they are validated on."""

    def __init__(self, inner) -> None:  # type: ignore[no-untyped-def]
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
        x, y = self.inner[index]
        return x + torch.rand(()) + random.random() + numpy.random.rand(), y


def _config(seed: int, **more: object) -> TrialConfig:
    given = {
        "task": {"name": f"{__name__}:Drawing"},
        "metric": "val/loss",
        "mode": "min",
        "budget": {"epochs": 2},
        "train": {"batch_size": 8},
        "seed": seed,
        "data_seed": 5,
    }
    return TrialConfig.model_validate({**given, **more})


def _drawn(tmp_path: Path, config: TrialConfig) -> list[float]:
    with open_trainer(config, tmp_path, device="cpu") as trainer:
        return [report.metrics["val/drawn"] for report in trainer.events()]


def test_all_trials_share_validation_samples_and_draws(tmp_path: Path) -> None:
    first, second = (_drawn(tmp_path / str(seed), _config(seed)) for seed in (1, 2))
    assert first == second
    other = _drawn(tmp_path / "other", _config(1, data_seed=6))
    assert other != first


def test_weights_and_order_depend_on_the_trial() -> None:
    first, second = (build_parts(_config(seed), device=CPU) for seed in (1, 2))
    assert not torch.equal(*(next(parts.model.parameters()) for parts in (first, second)))
    assert not torch.equal(first.train.plan.order(0), second.train.plan.order(0))
    assert first.task.more == second.task.more  # type: ignore[attr-defined]


def test_random_draws_in_evaluation_do_not_affect_training(tmp_path: Path) -> None:
    trained = []
    for more in (0, 3):
        set_seed(0)
        task = load_task(f"{__name__}:Drawing", {})
        evaluate = task.evaluate
        task.evaluate = lambda model, batches, more=more, evaluate=evaluate: (  # type: ignore
            torch.rand(more), evaluate(model, batches)
        )[1]  # fmt: skip
        with open_trainer(_config(1), tmp_path / str(more), device="cpu", task=task) as trainer:
            list(trainer.events())
            trained.append(next(trainer.model.parameters()).detach().clone())
    assert torch.equal(*trained)
