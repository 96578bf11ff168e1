"""Checks of a task on a few samples before a sweep: certain faults are refused, no others.

What is said of batches, outputs and results of another form is in `test_forms.py`.
"""

# ruff: noqa: ARG001, ARG002, ARG005  what stands in for something keeps its signature

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import weight_norm
from torch.utils.data import Dataset, default_collate

from tests.unit.trainable.conftest import CPU, Toy, variant
from trainable.build import build_parts
from trainable.check.task_checks import quick_check, uncalled_methods
from trainable.check.testing import check_task
from trainable.errors import TaskError
from trainable.losses import cross_entropy
from trainable.task import Data, Task


class Items(Dataset):
    """Samples of any form."""

    def __init__(self, form):
        self.x, self.y = Toy().build_data().train
        self.form = form

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.form(self.x[index], self.y[index])


def _data(form=lambda x, y: (x, y), **options):
    return lambda self: Data(train=Items(form), val=Items(form), **options)


def _targets(change):
    def build_data(self):
        x, y = Toy.build_data(self).train
        return Data(train=(x, change(y)), val=(x, change(y)))

    return build_data


@pytest.fixture
def checked(configure):
    """Check a variant of the toy task as before a sweep; return the cautions."""

    def check(resumed=False, workers=1, **methods):
        parts = build_parts(configure(), device=CPU, task=variant(**methods))
        return quick_check(parts, resumed=resumed, workers=workers)

    return check


def _mean(self, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


def _mean_of_one(self, model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]), 1


def test_mean_is_refused_or_warned_of(checked):
    with pytest.raises(TaskError, match="seems to return a mean: "):
        checked(loss=_mean)
    (caution,) = checked(loss=_mean, resumed=True)
    assert "the gradient is 4 times too small" in caution
    (caution,) = checked(loss=_mean_of_one)
    assert "val/loss gives a short last batch the same weight" in caution
    with pytest.raises(TaskError, match="seems to return a mean"):
        check_task(variant(loss=_mean_of_one))


def _contrastive(self, model, batch):
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="sum"), len(z)


@pytest.mark.parametrize(
    ("methods", "workers", "warns"),
    [({"loss": _contrastive}, 2, True), ({"loss": _contrastive}, 1, False), ({}, 2, False)],
)
def test_loss_of_a_whole_batch_gets_a_warning_with_several_ranks(checked, methods, workers, warns):
    cautions = checked(workers=workers, **methods)
    assert [f"resources.workers is {workers}" in one for one in cautions] == [True] * warns


def test_sum_with_weight_1_gets_a_warning(checked):
    (caution,) = checked(loss=lambda self, model, batch: (Toy.loss(self, model, batch)[0], 1))
    assert "return total, len(y)" in caution


def test_outputs_against_all_targets_get_a_warning(checked):
    def loss(squeezes):
        def squared(self, model, batch):
            outputs = model(batch[0]).squeeze(1) if squeezes else model(batch[0])
            return ((outputs - batch[1]) ** 2).sum(), len(batch[1])

        return squared

    one_output = {
        "build_model": lambda self: nn.Linear(5, 1),
        "build_data": _targets(lambda y: y.float()),
    }
    (caution,) = checked(loss=loss(squeezes=False), **one_output)
    assert "with every target" in caution
    assert "model(x).squeeze(1)" in caution
    assert checked(loss=loss(squeezes=True), **one_output) == []


def test_samples_without_targets_are_reported(checked):
    (caution,) = checked(build_data=_targets(lambda y: torch.full_like(y, -100)))
    assert "have no targets that count" in caution


def _mixed(samples):
    x, y = default_collate(samples)
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y


def test_random_collate_in_validation_gets_a_warning(checked):
    (caution,) = checked(build_data=_data(collate=_mixed))
    assert "collate draws random numbers" in caution
    assert "collate_val=" in caution
    with pytest.raises(TaskError, match="collate draws random numbers"):
        check_task(variant(build_data=_data(collate=_mixed)))
    assert checked(build_data=_data(collate=_mixed, collate_val=_mixed)) == []


def _noisy(self, model, batch):
    return cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])


def _of_a_dict(self, model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


HONEST = {
    "contrastive": {"loss": _contrastive},
    "noisy": {"loss": _noisy},
    "dicts": {"loss": _of_a_dict, "build_data": _data(lambda x, y: {"x": x, "y": y})},
    "batch norm": {
        "build_model": lambda self: nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        )
    },
    "weight norm": {"build_model": lambda self: weight_norm(nn.Linear(5, 3))},
    "soft targets": {"build_data": _targets(lambda y: F.one_hot(y, 3) * 0.7 + 0.1)},
    "ignored targets": {"build_data": _targets(lambda y: torch.where(y == 0, -100, y))},
    "mixed in training": {"build_data": _data(collate=_mixed, collate_val=default_collate)},
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", HONEST)
def test_unusual_tasks_pass(name, checked):
    assert checked(**HONEST[name]) == []
    check_task(variant(**HONEST[name]))


class Misspelt(Toy):
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
