"""Checks of a task on a few samples before a sweep: certain faults are refused, no others."""

# ruff: noqa: ARG001, ARG002, ARG005  what stands in for something keeps its signature

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import weight_norm
from torch.utils.data import Dataset, default_collate

from trainable.build import build_parts, build_step
from trainable.check.first_batches import FirstBatches
from trainable.check.task_checks import quick_check, uncalled_methods
from trainable.check.testing import check_task
from trainable.errors import TaskError
from trainable.losses import cross_entropy
from trainable.task import Data, Task


def _tensors(samples=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


class Plain(Task):
    def build_model(self):
        return nn.Linear(4, 2)

    def build_data(self):
        return Data(train=_tensors(), val=_tensors())


class Items(Dataset):
    """Samples of any form."""

    def __init__(self, form=lambda x, y: (x, y)):
        self.x, self.y = _tensors()
        self.form = form

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.form(self.x[index], self.y[index])


def _data(form=lambda x, y: (x, y), **options):
    return lambda self: Data(train=Items(form), val=Items(form), **options)


def _logits_in_a_dict(self):
    class Named(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    return Named(4, 2)


def _targets(change):
    def build_data(self):
        x, y = _tensors()
        return Data(train=(x, change(y)), val=(x, change(y)))

    return build_data


def _mean(self, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


def _returns(*values):
    return lambda self, model, batch: (model(batch[0]).sum(), *values)


CERTAIN = [
    ({"build_model": _logits_in_a_dict}, "returns a dict of 'logits'; .*takes a tensor of logits"),
    ({"build_data": _targets(lambda y: y.float())}, "float32 numbers .*regression define loss"),
    ({"build_data": _targets(lambda y: y[:, None])}, "do not fit .*squeeze the targets"),
    ({"build_data": _targets(lambda y: y + 1)}, "reach from 1 to 2 and the model gives 2 logits"),
    ({"build_model": lambda self: nn.Linear(4, 1)}, "one output for each target .*binary_cross"),
    ({"build_data": _data(lambda x, y: x)}, "one tensor of shape .4, 4., without targets"),
    ({"build_data": _data(lambda x, y: (x,))}, "1 part.s., without targets"),
    ({"build_data": _data(lambda x, y: {"x": x, "y": y})}, "a dict of 'x', 'y'; .*define loss"),
    ({"build_data": _data(lambda x, y: (x, y, y))}, "a batch has 3 part"),
    ({"loss": lambda self, model, batch: model(batch[0]).sum()}, "loss.. returned Tensor; return"),
    ({"loss": lambda self, model, batch: (0.5, 1)}, "returned float as its first part"),
    ({"loss": lambda self, model, batch: (model(batch[0]), 1)}, "Tensor of shape .4, 2."),
    ({"loss": _returns(1, 2)}, "loss.. returned 3 values; "),
    ({"loss": _returns(torch.ones(3))}, "Tensor of shape .3,. as its second part, the weight"),
    ({"loss": _returns(-1)}, "the weight -1; it must be the number of targets"),
    ({"loss": lambda self, model, batch: {"loss": model(batch[0]).sum()}}, "returned a dict; "),
    ({"loss": _mean}, "seems to return a mean: "),
]


@pytest.fixture
def checked(configure):
    """Check a variant of the plain task as it is before a sweep; return the cautions."""

    def check(**methods):
        task = type("Custom", (Plain,), methods)()
        parts = build_parts(configure(), device=torch.device("cpu"), task=task)
        cautions = quick_check(parts)
        first = FirstBatches(parts, configure(), build_step(parts, configure().train))
        first.compute()
        return cautions + first.cautions

    return check


@pytest.mark.parametrize(("methods", "message"), CERTAIN)
def test_failing_first_step_is_refused(methods, message, checked):
    with pytest.raises(TaskError, match=message):
        checked(**methods)


def _mean_of_one(self, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]), 1


def test_mean_with_weight_1_gets_a_warning(checked):
    (caution,) = checked(loss=_mean_of_one)
    assert "seems to return a mean" in caution
    assert "val/loss gives a short last batch the same weight" in caution
    with pytest.raises(TaskError, match="seems to return a mean"):
        check_task(type("Custom", (Plain,), {"loss": _mean_of_one})())


def test_mean_of_a_resumed_run_is_only_warned_of(configure):
    task = type("Custom", (Plain,), {"loss": _mean})()
    parts = build_parts(configure(), device=torch.device("cpu"), task=task)
    (caution,) = quick_check(parts, resumed=True)
    assert "the gradient is 4 times too small" in caution


def _contrastive(self, model, batch):
    outputs = model(batch[0])
    own = torch.arange(len(outputs))
    return F.cross_entropy(outputs @ outputs.T, own, reduction="sum"), len(outputs)


@pytest.mark.parametrize(
    ("methods", "workers", "warns"),
    [({"loss": _contrastive}, 2, True), ({"loss": _contrastive}, 1, False), ({}, 2, False)],
)
def test_loss_of_a_whole_batch_gets_a_warning_with_several_ranks(
    configure, methods, workers, warns
):
    task = type("Custom", (Plain,), methods)()
    parts = build_parts(configure(), device=torch.device("cpu"), task=task)
    cautions = quick_check(parts, workers=workers)
    assert [f"resources.workers is {workers}" in one for one in cautions] == [True] * warns


def _sum_of_one(self, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), 1


def test_sum_with_weight_1_gets_a_warning(checked):
    (caution,) = checked(loss=_sum_of_one)
    assert "return total, len(y)" in caution


def _broadcast(self, model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).sum(), len(batch[1])


def _squeezed(self, model, batch):
    return ((model(batch[0]).squeeze(1) - batch[1]) ** 2).sum(), len(batch[1])


def test_outputs_against_all_targets_get_a_warning(checked):
    one_output = {"build_model": lambda self: nn.Linear(4, 1)}
    targets = {"build_data": _targets(lambda y: y.float())}
    (caution,) = checked(loss=_broadcast, **one_output, **targets)
    assert "compares each output with every target" in caution.replace(
        "compare each", "compares each"
    )
    assert "model(x).squeeze(1)" in caution
    assert checked(loss=_squeezed, **one_output, **targets) == []


def test_error_about_types_names_the_conversion(checked):
    def build_data(self):
        x, y = _tensors()
        return Data(train=(x.double(), y), val=(x.double(), y))

    with pytest.raises(TaskError, match=r"inputs are torch.float64.*x = x.float"):
        checked(build_data=build_data)


def _fails(self, model, batch):
    raise ZeroDivisionError("out of cheese")


def test_error_in_loss_is_a_warning_with_its_place(checked):
    (caution,) = checked(loss=_fails)
    assert "raised ZeroDivisionError: out of cheese (at " in caution
    assert "test_task_checks.py:" in caution


def test_samples_without_targets_are_reported(checked):
    in_training, in_validation = checked(build_data=_targets(lambda y: torch.full_like(y, -100)))
    assert "have no targets that count" in in_training
    assert in_validation.startswith("the first validation batch: ")


def _mixed(samples):
    x, y = default_collate(samples)
    order = torch.randperm(len(x))
    return 0.7 * x + 0.3 * x[order], y


def test_random_collate_in_validation_gets_a_warning(checked):
    (caution,) = checked(build_data=_data(collate=_mixed))
    assert "collate draws random numbers" in caution
    assert "collate_val=" in caution
    with pytest.raises(TaskError, match="collate draws random numbers"):
        check_task(type("Custom", (Plain,), {"build_data": _data(collate=_mixed)})())
    assert checked(build_data=_data(collate=_mixed, collate_val=default_collate)) == []
    assert checked(build_data=_data(collate=_mixed, collate_val=_mixed)) == []


def _contrastive(self, model, batch):
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="sum"), len(z)


def _noisy(self, model, batch):
    return cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])


def _of_a_dict(self, model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


HONEST = [
    {},
    {"loss": _contrastive},
    {"loss": _noisy},
    {"loss": _of_a_dict, "build_data": _data(lambda x, y: {"x": x, "y": y})},
    {
        "build_model": lambda self: nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        )
    },
    {"build_model": lambda self: weight_norm(nn.Linear(4, 2))},
    {"build_data": _targets(lambda y: F.one_hot(y, 2) * 0.8 + 0.1)},
    {"build_data": _targets(lambda y: torch.where(y == 0, -100, y))},
]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("methods", HONEST)
def test_unusual_tasks_pass(methods, checked):
    assert checked(**methods) == []


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    "methods",
    [
        {"build_model": lambda self: weight_norm(nn.Linear(4, 2))},
        {"build_data": _data(collate=_mixed, collate_val=default_collate)},
        {"loss": _noisy},
        {"loss": _contrastive},
    ],
)
def test_full_check_passes_unusual_tasks(methods):
    check_task(type("Custom", (Plain,), methods)())


class Misspelt(Plain):
    def evalute(self, model, batches):
        return {"loss": 0.0}

    def training_step(self, batch, batch_idx):
        return 0.0

    def build_features(self):
        return None

    def losses(self):
        return self.losse()

    def losse(self):
        return self.losses()


def test_uncalled_methods_are_named():
    first, second = uncalled_methods(Misspelt())
    assert first.startswith("Misspelt.evalute() is called by nothing")
    assert "name it evaluate()" in first
    assert "name it loss(self, model, batch)" in second
    with pytest.raises(TaskError, match=r"evalute\(\) is called by nothing"):
        check_task(Misspelt())


def test_missing_method_names_the_similar_one():
    class Missing(Task):
        def biuld_data(self):
            return None

    with pytest.raises(NotImplementedError, match=r"must define build_data\(\).*'biuld_data'"):
        Missing().build_data()
