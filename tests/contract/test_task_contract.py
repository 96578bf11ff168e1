"""`check_task` passes valid tasks and names contract violations."""

# ruff: noqa: ARG001, ARG005  what stands in for something keeps its signature

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from trainable.check.testing import check_task
from trainable.errors import TaskError
from trainable.find_task import load_task
from trainable.losses import cross_entropy
from trainable.task import Data, Task
from trainable.user_code.task_import import BUILT_IN


class Good(Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))

    def build_data(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(20, 3, generator=generator)
        samples = (inputs, (inputs[:, 0] > 0).long())
        return Data(train=samples, val=samples)


class AsDataset(Good):
    def build_data(self):
        inputs, targets = Good.build_data(self).train
        samples: Any = list(zip(inputs, targets, strict=True))
        return Data(train=samples, val=samples)


# fashion_mnist needs files: tests/unit/trainable/test_fashion_mnist.py writes some
@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - {"fashion_mnist"}))
def test_built_in_tasks_keep_the_contract(name):
    check_task(load_task(name, {}))


@pytest.mark.parametrize("kind", [Good, AsDataset])
def test_good_tasks_pass_and_leave_no_trace(kind):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check_task(kind())
    assert torch.equal(torch.rand(4), expected)


class _Unused(nn.Sequential):
    """Has a layer that its forward pass forgets."""

    def __init__(self):
        super().__init__(nn.Linear(3, 2))
        self.extra = nn.Linear(2, 2)

    def forward(self, inputs):
        return self[0](inputs)


class _Secretive(nn.Linear):
    """Keeps an object in its state that only its own code could read back."""

    def get_extra_state(self):
        return itertools.count()

    def set_extra_state(self, state):
        pass


class _Growing(nn.Linear):
    """Makes a buffer in its first forward pass, which a new model is given when it is resumed."""

    def forward(self, inputs):
        if not hasattr(self, "seen"):
            self.register_buffer("seen", inputs.mean(dim=0))
        return super().forward(inputs)


class _Sprouting(nn.Linear):
    """Makes a parameter in its first forward pass, which no optimizer has."""

    def forward(self, inputs):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(()))
        return super().forward(inputs) * self.scale


class _Jittered(list[tuple[torch.Tensor, torch.Tensor]]):
    """Augments from a generator of its own, which nobody seeds for a sample."""

    def __init__(self, samples):
        super().__init__(samples)
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(3, generator=self.generator), target


class _Augmented(list[tuple[torch.Tensor, torch.Tensor]]):
    """Augments from the global generators, as it should."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(3), target


def _samples(wrapped):
    def build_data(self):
        samples = wrapped(AsDataset.build_data(self).train)
        return Data(train=samples, val=samples)

    return build_data


def _one_hot(dtype):
    def build_data(self):
        inputs, targets = Good.build_data(self).train
        samples = (inputs, nn.functional.one_hot(targets, 2).to(dtype))
        return Data(train=samples, val=samples)

    return build_data


def _random_split(self):
    inputs, targets = Good.build_data(self).train
    order = torch.randperm(20)
    return Data(train=(inputs[order], targets[order]), val=(inputs, targets))


def _with_softmax(self):
    return nn.Sequential(nn.Linear(3, 2), nn.Softmax(dim=1))


def _own_cross_entropy(self, model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def _log_of_probabilities(self, model, batch):
    chosen = model(batch[0]).log().gather(1, batch[1][:, None])
    return -chosen.sum(), len(chosen)


@pytest.mark.parametrize(
    "override",
    [
        {"build_data": _samples(_Augmented)},
        {"build_data": _samples(_Jittered)},  # it is saved
        {"build_model": _with_softmax, "loss": _log_of_probabilities},
        {"evaluate": lambda self, m, b: {"loss": numpy.float32(1), "f1": torch.ones(1)}},
        {"param_groups": lambda self, m: [{"params": p} for p in m.parameters()]},
        {"build_model": lambda self: _Growing(3, 2)},
    ],
    ids=[
        "augmentation from the global generators",
        "augmentation from a generator of its own",
        "probabilities that the loss asks for",
        "numbers in arrays and tensors",
        "groups of one tensor",
        "a buffer that is made in forward, and restored",
    ],
)
def test_valid_but_unusual_tasks_pass(override):
    check_task(type("Unusual", (Good,), override)())


def _mean_loss(self, model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1]), 1.0


def _wrong_weight(self, model, batch):
    return cross_entropy(model(batch[0]), batch[1])[0], 1.0


def _detached(self, model, batch):
    return cross_entropy(model(batch[0]).detach(), batch[1])


def _not_finite(self, model, batch):
    total, weight = cross_entropy(model(batch[0]), batch[1])
    return total / 0, weight


def _no_parameter(self, model, batch):
    return torch.ones((), requires_grad=True) * len(batch[0]), len(batch[0])


_SHARED = nn.Linear(3, 2)
_SEEDS = itertools.count()


def _unseeded(self):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, float(next(_SEEDS)))
    return model


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"build_data": lambda self: (1, 2)}, "must return trainable.Data"),
        ({"build_model": lambda self: "net"}, "return a torch.nn.Module"),
        ({"build_model": lambda self: _SHARED}, "the same model twice"),
        ({"build_model": _unseeded}, "other weights under the same seed"),
        ({"param_groups": lambda self, model: None}, "must return a list of dicts"),
        (
            {"param_groups": lambda self, model: [{"params": [model[0].weight]}]},
            "leaves out 0.bias, 2.weight, 2.bias",
        ),
        (
            {"param_groups": lambda self, m: [{"params": [*m.parameters(), m[0].bias]}]},
            "lists a parameter twice",
        ),
        ({"loss": lambda self, model, batch: 3.0}, "return the sum of the losses"),
        ({"loss": _mean_loss}, "seems to return a mean"),
        ({"loss": _wrong_weight}, "the number of targets as the weight"),
        ({"loss": _detached}, "without detach"),
        ({"loss": _not_finite}, "loss and its gradient must be finite"),
        ({"loss": _no_parameter}, "no parameter received a gradient"),
        (
            {"build_model": lambda self: _Unused()},
            "gives extra.weight, extra.bias no gradient, so they would never be trained",
        ),
        ({"build_data": _one_hot(torch.long)}, "one-hot, of shape .4, 2.; the default loss takes"),
        ({"build_data": _one_hot(torch.float)}, "one-hot, of shape .8, 2.; give class indices"),
        ({"build_model": _with_softmax}, "return raw logits, without softmax"),
        ({"build_model": _with_softmax, "loss": _own_cross_entropy}, "return raw logits"),
        ({"build_model": lambda self: nn.Linear(4, 2)}, "raised RuntimeError: .*mat1"),
        ({"build_data": _random_split}, "another train split each time; fix its seed"),
        (
            {"build_model": lambda self: _Secretive(3, 2)},
            "'_extra_state'. is an object of type itertools.count; a state holds tensors",
        ),
        ({"build_model": lambda self: _Sprouting(3, 2)}, "a parameter that was registered after"),
        ({"evaluate": lambda self, model, batches: 0.5}, "return a dict of metrics"),
        ({"evaluate": lambda self, m, b: {"val/loss": 1.0}}, "use a plain name"),
        ({"evaluate": lambda self, m, b: {"loss": torch.ones(2)}}, "a metric is one number"),
    ],
)
def test_contract_violations_are_named(override, message):
    with pytest.raises(TaskError, match=message):
        check_task(type("Broken", (Good,), override)())


def test_all_contract_violations_are_reported_together():
    class Broken(Good):
        loss = _mean_loss

        def param_groups(self, model):
            return [{"params": [model[0].weight]}]

    with pytest.raises(TaskError, match=r"(?s)leaves out.*return a mean"):
        check_task(Broken())
