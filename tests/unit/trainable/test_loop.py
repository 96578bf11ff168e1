"""The loop's reports, the best value, and its end after an error."""

# ruff: noqa: ARG001, ARG004, ARG005  what stands in for something keeps its signature

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
from collections import OrderedDict

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from trainable.build import build_parts
from trainable.errors import (
    ConfigError,
    NonFiniteGradient,
    NonFiniteLoss,
    NonFiniteMetric,
    OutOfMemory,
    TaskError,
)
from trainable.store.metrics_file import read_rows
from trainable.task import Data, Task
from trainable.watch.diagnostics import MEASURED, memory_in_use


def _task(toy, **methods):
    return type("Custom", (toy,), methods)()


def _scripted(values):
    """An evaluation that returns the given losses one after another."""
    queue = iter(values)
    return lambda self, model, batches: {"loss": next(queue)}


@pytest.mark.seeds("S6", "S7")
def test_reports_have_the_metrics_and_rows_of_their_epoch(tmp_path, opened, configure, toy):
    reports = list(opened(configure(layer_norms_every=2), tmp_path, toy()).events())
    assert [(r.step, r.epoch, r.finished) for r in reports] == [
        (4, 1, False),
        (8, 2, False),
        (12, 3, True),
    ]
    assert set(reports[0].metrics) == {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/clip_fraction",
        "train/samples_per_second",
        "memory/process_mb",
        "val/loss",
        "val/accuracy",
        "best/val/loss",
        "epoch",
        "grad_norm/0 Linear",
        "grad_norm/3 Linear",
    }
    assert all(r.rows[-1].metrics == r.metrics for r in reports)
    rows = [row for report in reports for row in report.rows]
    assert [row.step for row in rows] == list(range(1, 13))
    assert read_rows(tmp_path) == rows
    layers = [
        row.metrics["grad_norm/0 Linear"] ** 2 + row.metrics["grad_norm/3 Linear"] ** 2
        for row in rows[1::2]
    ]
    assert [math.sqrt(x) for x in layers] == pytest.approx(
        [row.metrics["train/grad_norm"] for row in rows[1::2]], rel=1e-5
    )


@pytest.mark.seeds("S6")
def test_clip_fraction_counts_since_the_previous_report(tmp_path, opened, configure, toy):
    trainer = opened(configure(clip={"max_norm": 0.2}), tmp_path, toy())
    for report in trainer.events():
        norms = [row.metrics["train/grad_norm"] for row in report.rows]
        assert report.metrics["train/clip_fraction"] == sum(n > 0.2 for n in norms) / len(norms)


def test_two_runs_differ_only_in_measured_metrics(tmp_path, opened, configure, toy):
    config = configure(measure_device_time=True, precision="fp16")
    one, other = (
        list(opened(config, tmp_path / name, toy()).events())[-1].metrics for name in "ab"
    )
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} <= MEASURED
    assert one.keys() & MEASURED == {one for one in MEASURED if "gpu" not in one}


def test_memory_is_that_of_this_process():
    """With pages of their own: an allocator may serve 50 MiB from what a test before it freed."""
    before = memory_in_use(torch.device("cpu"))
    pages = mmap.mmap(-1, 50 * 2**20)
    torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    after = memory_in_use(torch.device("cpu"))
    assert list(before) == ["memory/process_mb"]
    grown = after["memory/process_mb"] - before["memory/process_mb"]
    assert 45 < grown < 60, pages


@pytest.mark.seeds("S16")
@pytest.mark.parametrize(
    ("mode", "values", "best_epoch", "best"),
    [
        ("min", [3.0, 1.0, 1.0, 2.0], 2, 1.0),
        ("max", [3.0, 1.0, 5.0, 5.0], 3, 5.0),
        ("min", [math.nan, 2.0, math.nan, 3.0], 2, 2.0),
    ],
)
def test_best_is_kept_whatever_follows(
    tmp_path, opened, configure, toy, mode, values, best_epoch, best
):
    task = _task(toy, evaluate=_scripted(values))
    trainer = opened(configure(epochs=4, mode=mode, every="100 epochs"), tmp_path, task)
    reports = list(trainer.events())
    assert reports[-1].metrics["best/val/loss"] == best
    assert trainer.store.best().epoch == best_epoch
    assert trainer.state.progress.since_best == 4 - best_epoch
    assert trainer.store.newest().epoch == 4


def _pairs(*pairs):
    """An evaluation that returns the given losses and speeds one after another."""
    queue = iter(pairs)
    return lambda self, model, batches: dict(zip(("loss", "speed"), next(queue), strict=True))


def test_secondary_metrics_are_those_of_the_best_report(tmp_path, opened, configure, toy):
    asked = itertools.count(1)
    config = configure(epochs=4, metric=("val/loss", "val/speed"), mode=("min", "max"))
    pairs = [(3.0, 10.0), (1.0, 20.0), (2.0, 90.0), (1.5, 80.0)]
    first = opened(
        config, tmp_path, _task(toy, evaluate=_pairs(*pairs)), should_stop=lambda: next(asked) > 8
    )
    reports = list(first.events())
    first.close()
    resumed = opened(config, tmp_path, _task(toy, evaluate=_pairs(*pairs[len(reports) :])))
    reports += resumed.events()
    shown = [(r.metrics["best/val/loss"], r.metrics["best/val/speed"]) for r in reports]
    assert shown == [(3.0, 10.0), (1.0, 20.0), (1.0, 20.0), (1.0, 20.0)]
    assert resumed.store.best().epoch == 2


@pytest.mark.parametrize("speed", [math.nan, math.inf])
def test_non_finite_secondary_metric_keeps_the_rows(tmp_path, opened, configure, toy, speed):
    config = configure(epochs=2, metric=("val/loss", "val/speed"), mode=("min", "max"))
    trainer = opened(config, tmp_path, _task(toy, evaluate=_pairs((1.0, 2.0), (0.5, speed))))
    with pytest.raises(NonFiniteMetric, match=rf"val/speed is {speed} in report 2"):
        list(trainer.events())
    trainer.close()
    assert [row.step for row in read_rows(tmp_path)] == list(range(1, 9))
    assert trainer.store.best().epoch == 1


def test_metric_that_was_never_finite_fails_the_run(tmp_path, opened, configure, toy):
    task = _task(toy, evaluate=_scripted([math.nan, math.inf, math.nan]))
    trainer = opened(configure(epochs=3), tmp_path, task)
    with pytest.raises(NonFiniteMetric, match="val/loss is nan in report 3"):
        list(trainer.events())
    trainer.close()
    assert [row.step for row in read_rows(tmp_path)] == list(range(1, 13))
    assert trainer.store.newest().epoch == 2


def test_unknown_metric_lists_reported_ones(tmp_path, opened, configure, toy):
    trainer = opened(configure(metric="val/los"), tmp_path, toy())
    with pytest.raises(
        ConfigError, match=r"'val/los' is not reported \(did you mean 'val/loss'\?\).*val/accuracy"
    ):
        list(trainer.events())


def test_missing_metric_keeps_earlier_rows(tmp_path, opened, configure, toy):
    queue = iter([{"loss": 1.0, "f1": 0.5}, {"loss": 0.9}])
    task = _task(toy, evaluate=lambda self, model, batches: next(queue))
    trainer = opened(configure(metric="val/f1", mode="max"), tmp_path, task)
    with pytest.raises(TaskError, match="returned val/f1 in report 1 and not in report 2"):
        list(trainer.events())
    assert [row.step for row in read_rows(tmp_path)] == list(range(1, 9))


@pytest.mark.seeds("S12")
def test_evaluation_restores_the_mode_of_each_module(tmp_path, opened, configure, toy):
    seen = []

    def evaluate(self, model, batches):
        seen.append((model.training, torch.is_grad_enabled()))
        return {"loss": 1.0}

    trainer = opened(configure(epochs=1), tmp_path, _task(toy, evaluate=evaluate))
    trainer.model[2].eval()  # someone froze one module
    list(trainer.events())
    assert seen == [(False, False)]
    assert [m.training for m in trainer.model] == [True, True, False, True]


def test_training_can_use_what_evaluation_caches(tmp_path, opened, configure, toy):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(1, 3)
            self.table = torch.zeros(0)

        def forward(self, inputs):
            length = inputs.shape[1]
            if length > len(self.table):
                self.table = torch.arange(length).float().cos()
            weighed = inputs * self.last.weight[0] * self.table[:length]
            return self.last(weighed.mean(1, keepdim=True))

    class Longer(toy):
        def build_model(self):
            return Positions()

        def build_data(self):
            train = super().build_data().train
            return Data(train=train, val=(torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))

    trainer = opened(configure(), tmp_path, Longer())
    assert len(list(trainer.events())) == 3


@pytest.mark.seeds("S12")
def test_validation_is_weighted_by_targets(tmp_path, opened, configure, toy):
    trainer = opened(configure(epochs=1), tmp_path, toy())  # 43 samples in batches of 12
    (report,) = trainer.events()
    inputs, targets = toy().build_data().val
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(inputs)
    assert report.metrics["val/loss"] == pytest.approx(
        nn.functional.cross_entropy(logits, targets).item()
    )
    assert report.metrics["val/accuracy"] == pytest.approx(
        (logits.argmax(1) == targets).double().mean().item()
    )


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("error", [NonFiniteLoss, KeyError])
def test_failing_step_keeps_earlier_rows(tmp_path, opened, configure, toy, at_once, error):
    def loss(self, model, batch):
        total, weight = toy.loss(self, model, batch)
        self.calls = getattr(self, "calls", 0) + model.training
        if self.calls == 7 and error is KeyError:
            raise KeyError("token")
        return (total * math.nan if self.calls == 7 else total), weight

    trainer = opened(configure(), tmp_path, _task(toy, loss=loss))
    trainer._step._reads_at_once = at_once
    with pytest.raises(error) as caught:
        list(trainer.events())
    assert error is KeyError or caught.value.step == 7
    trainer.close()
    assert [row.step for row in read_rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert trainer.store.newest().step == 4


def test_error_is_kept_when_the_device_is_lost(tmp_path, opened, configure, toy, monkeypatch):
    def loss(self, model, batch):
        raise KeyError("token")

    def lost(pending):
        raise RuntimeError("an illegal memory access was encountered")

    trainer = opened(configure(), tmp_path, _task(toy, loss=loss))
    monkeypatch.setattr("trainable.loop.fetch_values", lost)
    with pytest.raises(KeyError, match="token"):
        list(trainer.events())


@pytest.mark.seeds("S2")
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_forced_precision_holds_in_training_and_evaluation(
    tmp_path, opened, configure, toy, precision, dtype
):
    seen = set()

    def loss(self, model, batch):
        seen.add((model.training, model(batch[0]).dtype))
        return toy.loss(self, model, batch)

    trainer = opened(configure(epochs=1, precision=precision), tmp_path, _task(toy, loss=loss))
    list(trainer.events())
    assert seen == {(True, dtype), (False, dtype)}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_swapped_in_for_evaluation_are_used(tmp_path, opened, configure, toy, precision):
    def evaluate(self, model, batches):
        batches = list(batches)
        found = toy.evaluate(self, model, batches)
        for parameter in model.parameters():
            parameter.zero_()
        return found | {"loss_of_zeros": toy.evaluate(self, model, batches)["loss"]}

    task = _task(toy, evaluate=evaluate)
    (report,) = opened(configure(epochs=1, precision=precision), tmp_path, task).events()
    assert report.metrics["val/loss_of_zeros"] == pytest.approx(math.log(3))


def test_fp16_that_never_recovers_ends(tmp_path, opened, configure, toy):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, upstream):
            return upstream * math.inf

    def loss(self, model, batch):
        total, weight = toy.loss(self, model, batch)
        return Broken.apply(total), weight

    trainer = opened(configure(epochs=20, precision="fp16"), tmp_path, _task(toy, loss=loss))
    with pytest.raises(NonFiniteGradient, match="at step 1 "):
        list(trainer.events())
    assert trainer.state.progress.skipped == 40


@pytest.mark.seeds("S3")
def test_fp16_skips_are_counted(tmp_path, opened, configure, toy):
    trainer = opened(configure(epochs=2, precision="fp16"), tmp_path, toy())
    trainer.precision.scaler.load_state_dict(
        trainer.precision.scaler.state_dict() | {"scale": 2.0**20}
    )
    reports = list(trainer.events())
    skipped = reports[-1].metrics["num_skipped_steps"]
    assert 0 < skipped < 8
    assert reports[-1].step == 8 - skipped
    assert trainer.state.progress.skipped_in_a_row == 0
    assert [row.step for row in read_rows(tmp_path)][-1] == reports[-1].step


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [
        (
            torch.OutOfMemoryError("tried to allocate 20 GiB"),
            OutOfMemory,
            r"the device cpu.*train.accumulation",
        ),
        (
            RuntimeError("put_ does not have a deterministic implementation, but ..."),
            ConfigError,
            r"train\.deterministic: false",
        ),
    ],
)
def test_known_error_of_torch_names_the_remedy(
    tmp_path, opened, configure, toy, raised, error, said
):
    def loss(self, model, batch):
        raise raised

    with pytest.raises(error, match=said):
        list(opened(configure(), tmp_path, _task(toy, loss=loss)).events())


def test_batch_norm_of_one_sample_names_the_remedy(tmp_path, opened, configure, toy):
    class Normed(toy):  # 43 samples: the seventh and last batch of 7 has one
        def build_model(self):
            return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    with pytest.raises(ConfigError, match=r"a single sample.*drop_last: true"):
        list(opened(configure(batch_size=7), tmp_path / "left", Normed()).events())
    whole = configure(batch_size=7, loader={"drop_last": True})
    assert len(list(opened(whole, tmp_path / "whole", Normed()).events())) == 3


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor"])
def test_sparse_gradients_name_the_remedy(tmp_path, opened, configure, toy, optimizer):
    class Looked(toy):
        def build_model(self):
            return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))

        def build_data(self):
            samples = (torch.randint(9, (43, 2)), torch.randint(3, (43,)))
            return Data(train=samples, val=samples)

    config = configure(optimizer={"name": optimizer})
    with pytest.raises(TaskError, match=r"sparse gradients.*without sparse=True"):
        list(opened(config, tmp_path, Looked()).events())


def test_metrics_are_numbers_of_any_kind_and_shape(tmp_path, opened, configure, toy):
    found = {
        "loss": torch.tensor([0.5]),
        "f1": torch.tensor(0.25, dtype=torch.float16),
        "hits": torch.tensor(3),
        "load_history": numpy.float32(0.75),
        "auc": numpy.array([[1.0]]),
    }
    task = _task(toy, evaluate=lambda self, model, batches: found)
    report = list(opened(configure(), tmp_path, task).events())[-1]
    values = {name: report.metrics[f"val/{name}"] for name in found}
    assert values == {"loss": 0.5, "f1": 0.25, "hits": 3.0, "load_history": 0.75, "auc": 1.0}


@pytest.mark.parametrize("value", [None, "high", torch.ones(2), torch.tensor(1j), [0.5]], ids=str)
def test_metric_that_is_not_one_number_is_named(tmp_path, opened, configure, toy, value):
    found = {"loss": torch.tensor(0.5), "f1": value}
    task = _task(toy, evaluate=lambda self, model, batches: found)
    with pytest.raises(TaskError, match=r"returned 'f1' as .*; a metric is one number"):
        list(opened(configure(), tmp_path, task).events())


@pytest.mark.seeds("S5")
def test_batch_norm_with_accumulation_warns(tmp_path, opened, configure, toy):
    def build_model(self):
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    task = _task(toy, build_model=build_model)
    with pytest.warns(UserWarning, match="micro-batches of 3 samples.*GroupNorm"):
        opened(configure(accumulation=4), tmp_path, task)
    opened(configure(), tmp_path / "alone", task)


def test_model_in_eval_mode_warns_and_stays(tmp_path, opened, configure, toy):
    class Pretrained(toy):
        def build_model(self):
            return super().build_model().eval()

    with pytest.warns(UserWarning, match=r"in evaluation mode.*return model.train\(\)"):
        trainer = opened(configure(), tmp_path, Pretrained())
    assert not any(module.training for module in trainer.model.modules())


@pytest.mark.parametrize(
    ("frozen", "single", "warns"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
def test_trained_part_in_eval_mode_warns(
    tmp_path, opened, configure, toy, recwarn, frozen, single, warns
):
    """A ready-made backbone below one's own head; a frozen one and single modules are meant."""

    class Headed(toy):
        def build_model(self):
            backbone = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
            (backbone[1] if single else backbone).eval()
            backbone.requires_grad_(not frozen)
            return nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(4, 3)))

    opened(configure(), tmp_path, Headed())
    told = [str(one.message) for one in recwarn if "in evaluation mode" in str(one.message)]
    assert [text.startswith("build_model() returned `backbone`") for text in told] == [
        True
    ] * warns


def test_collate_that_is_never_called_warns(tmp_path, opened, configure, toy):
    class Mixing(toy):
        def build_data(self):
            return dataclasses.replace(super().build_data(), collate=default_collate)

    with pytest.warns(UserWarning, match="collate is never called for train"):
        opened(configure(), tmp_path / "tensors", Mixing())
    opened(configure(), tmp_path / "samples", Mixing(augmented=True))


class Drawing(Task):
    """What is trained outside the model is drawn when the task is made."""

    def __init__(self):
        self.drawn = torch.rand(3)

    def build_model(self):
        return nn.Linear(2, 2)

    def build_data(self):
        samples = torch.ones(12, 2), torch.zeros(12, dtype=torch.long)
        return Data(train=samples, val=samples)


def test_constructor_of_a_task_uses_the_runs_seed(configure):
    def drawn(seed):
        config = configure(seed=seed)
        task = config.task.model_copy(update={"name": f"{__name__}:Drawing"})
        config = config.model_copy(update={"task": task})
        return build_parts(config, device=torch.device("cpu")).task.drawn.tolist()

    assert drawn(0) == drawn(0) != drawn(1)


def test_initial_weights_are_independent_of_the_data(tmp_path, opened, configure, toy):
    def build_data(self):
        torch.rand(17)
        return toy.build_data(self)

    one = opened(configure(), tmp_path / "a", toy())
    other = opened(configure(), tmp_path / "b", _task(toy, build_data=build_data))
    assert torch.equal(one.model[0].weight, other.model[0].weight)


def test_metric_missing_after_a_resume_fails_the_run(tmp_path, opened, configure, toy):
    queue = iter([{"loss": 1.0, "accuracy": 0.5}, {"loss": 0.9}])
    task = _task(toy, evaluate=lambda self, model, batches: next(queue))
    first = opened(configure(), tmp_path, task)
    next(first.events())
    first.close()
    with pytest.raises(TaskError, match="returned val/accuracy in report 1 and not in report 2"):
        list(opened(configure(), tmp_path, task).events())


def test_validation_has_its_own_collate(tmp_path, opened, configure, toy):
    marks = {"trained": set(), "evaluated": set()}

    def marked(value):
        def collate(samples):
            inputs, targets = default_collate(samples)
            return torch.full_like(inputs, value), targets

        return collate

    class Marked(toy):
        def build_data(self):
            train = super().build_data().train
            return Data(train, train, collate=marked(1.0), collate_val=marked(2.0))

        def loss(self, model, batch):
            marks["trained" if model.training else "evaluated"].update(batch[0].unique().tolist())
            return super().loss(model, batch)

    list(opened(configure(epochs=1), tmp_path, Marked(augmented=True)).events())
    assert marks == {"trained": {1.0}, "evaluated": {2.0}}


def test_validation_without_targets_is_reported(tmp_path, opened, configure, toy):
    def build_data(self):
        inputs, targets = toy().build_data().train
        return Data(train=(inputs, targets), val=(inputs, torch.full_like(targets, -100)))

    with pytest.raises(TaskError, match="the validation batches have no targets that count"):
        list(opened(configure(), tmp_path, _task(toy, build_data=build_data)).events())
