"""A `LightningModule` as a task: it trains as in Lightning, and resumes to the same bits."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.chaos.killed_runs import differences, without_measured
from tests.optional_packages import needs, skip_without
from trainable import TrialConfig, load_task, open_trainer, read_rows
from trainable.checkpoint import CheckpointStore
from trainable.errors import ConfigError, TaskError
from trainable.watch.diagnostics import MEASURED

skip_without("lightning", "torchmetrics")

from lightning.pytorch import LightningDataModule, LightningModule, Trainer  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy  # noqa: E402

from trainable.adapters.lightning import LightningTask, check_module  # noqa: E402


class Net(LightningModule):
    """Two layers with dropout, a metric, hooks and a schedule."""

    def __init__(self, *, interval: str = "epoch", dropout: float = 0.0, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.interval = interval
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 2))
        self.train_accuracy, self.accuracy = MulticlassAccuracy(2), MulticlassAccuracy(2)
        self.called: list[str] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train/loss", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("hits", (logits.argmax(1) == y).sum(), on_epoch=True, reduce_fx="sum")
        self.log("index", float(batch_idx))
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch):
        x, y = batch
        logits = self.layers(x)
        self.accuracy.update(logits, y)
        self.log_dict({"val_loss": nn.functional.cross_entropy(logits, y)}, prog_bar=True)
        self.log("val/accuracy", self.accuracy)

    def on_train_start(self):
        self.called.append("start")

    def on_train_epoch_end(self):
        self.called.append(f"epoch {self.current_epoch} at step {self.global_step}")
        self.log("epochs", float(self.current_epoch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        if self.interval == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=12)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Points(LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):  # noqa: ARG002
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        points = TensorDataset(x, (x.sum(1) > 0).long())
        self.points, self.held_out = torch.utils.data.Subset(points, range(32)), points

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.held_out, batch_size=self.batch_size)


class PointsToTest(Points):
    def setup(self, stage):
        super().setup(stage)
        if stage == "test":  # as Lightning calls it, and only `sweep audit --test` needs it
            self.test = torch.utils.data.Subset(self.held_out, range(32, 40))

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


class NetTask(LightningTask):
    def __init__(self, module=Net, data=Points, **options) -> None:
        self.kind, self.data, self.options = module, data, options

    def lightning_module(self):
        return self.kind(**self.options)

    def data_module(self):
        return self.data()


def _config(**train) -> TrialConfig:
    train = {"batch_size": 8, "schedule": {"name": "constant"}, "clip": {"max_norm": None}} | train
    return TrialConfig.model_validate(
        {
            "task": {"name": "digits"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 3},
            "checkpoint": {"every": "1 steps"},
            "train": train,
        }
    )


class Crash(BaseException):
    """Stands for a kill."""


def _crash_at(step):
    asked = itertools.count(1)

    def should_stop():
        if next(asked) == step:
            raise Crash
        return False

    return should_stop


def _trained(task, directory, config, **options):
    """Train a run to its end; return its rows and the model."""
    with open_trainer(config, directory, device="cpu", task=task, **options) as trainer:
        list(trainer.events())
        model = trainer.model
    rows = [
        {key: value for key, value in row.metrics.items() if key not in MEASURED}
        for row in read_rows(directory)
    ]
    return rows, model


@pytest.mark.filterwarnings("ignore::Warning")  # Lightning's trainer has some
def test_trains_as_lightning_does(tmp_path):
    """The whole data set is one batch, so that both have the same order."""
    config = _config(batch_size=32)
    task = NetTask()
    with open_trainer(config, tmp_path, device="cpu", task=task) as trainer:
        theirs = Net()
        theirs.load_state_dict(trainer.model.state_dict())
        list(trainer.events())
        ours = trainer.model
    fitted = Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    fitted.fit(theirs, Points())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    row = read_rows(tmp_path)[-1].metrics
    expected = {name: float(value) for name, value in fitted.callback_metrics.items()}
    expected["val/loss"] = expected.pop("val_loss")
    same = ("val/loss", "val/accuracy", "train/loss", "train_accuracy", "epochs")
    for name in (*same, "both_epoch", "both_step", "hits_epoch"):
        assert row[name] == pytest.approx(expected[name], rel=1e-5), name
    assert row["lr-SGD"] == pytest.approx(0.1 * 0.5**2)
    assert ours.called == theirs.called


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_resumes_to_the_same_bits(tmp_path, interval):
    make = partial(NetTask, interval=interval, dropout=0.2)
    config = _config(accumulation=2, ema={"decay": 0.9})
    budget = type(config.budget)(steps=12, report_every=3)  # reports within epochs
    config = config.model_copy(update={"budget": budget})
    rows, model = _trained(make(), tmp_path / "whole", config)
    for step in (3, 4, 6):
        with pytest.raises(Crash):
            _trained(make(), tmp_path / "cut", config, should_stop=_crash_at(step))
    again, resumed = _trained(make(), tmp_path / "cut", config)
    assert again == rows
    # two micro-batches for each step: 0 and 1, 2 and 3, ...
    assert [row["index"] for row in rows] == [0.5, 2.5, 4.5, 6.5] * 3
    assert len({row["lr-SGD"] for row in rows}) == (12 if interval == "step" else 3)
    assert resumed.called == model.called
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    stores = [CheckpointStore(tmp_path / name) for name in ("whole", "cut")]
    states = [without_measured(store.load(store.generations()[-1])) for store in stores]
    assert differences(*states) == []


def test_new_learning_rate_scales_the_restored_schedule(tmp_path):
    rows, _ = _trained(NetTask(interval="step"), tmp_path / "one", _config())
    (donor,) = (tmp_path / "one" / "checkpoints").glob("*11")
    for lr in (0.1, 0.2):
        task = NetTask(interval="step", lr=lr)
        again, _ = _trained(task, tmp_path / f"{lr}", _config(), restore=donor)
        assert again[-1]["lr-SGD"] == pytest.approx(lr / 0.1 * rows[-1]["lr-SGD"], rel=1e-12)


@pytest.mark.usefixtures("even_clock")
def test_schedulers_of_a_module_are_no_signal(tmp_path):
    """The rate that they leave constant for many steps is not that of the spec."""

    def fall_once(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])]

    config = _config(optimizer={"lr": 0.1})
    config = config.model_copy(update={"budget": type(config.budget)(epochs=7)})
    task = NetTask(_with(Net, configure_optimizers=fall_once))
    with open_trainer(config, tmp_path, device="cpu", task=task) as trainer:
        *_, report = trainer.events()
    assert report.metrics["lr-SGD"] == pytest.approx(0.01)
    assert report.signals == []


def _with(base, **attributes):
    return type("Net", (base,), attributes)


def _training(call):
    def training_step(self, batch):
        call(self)
        return self.layers(batch[0]).sum()

    return {"training_step": training_step}


def _optimizers(make):
    return {"configure_optimizers": lambda self: make(torch.optim.SGD(self.parameters(), 0.1))}


REFUSED = {
    "on_train_batch_end": {"on_train_batch_end": lambda *_: None},
    "automatic_optimization": {"automatic_optimization": False},
    "validation_step": {"validation_step": LightningModule.validation_step},
    "self.optimizers": _training(lambda self: self.optimizers()),
    "self.trainer.strategy.broadcast": _training(
        lambda self: self.trainer.strategy.broadcast(self.lr)
    ),
    "self.trainer.num_nodes": _training(lambda self: self.trainer.num_nodes),
    "all_gather was given a group": _training(
        lambda self: self.all_gather(torch.zeros(()), group=object())
    ),
    "reduce_op='product'": _training(
        lambda self: self.trainer.strategy.reduce(torch.zeros(()), reduce_op="product")
    ),
    "sync_dist_group": _training(lambda self: self.log("x", 1.0, sync_dist_group=object())),
    "reduce_fx='max'": _training(lambda self: self.log("x", 1.0, reduce_fx="max")),
    "ReduceLROnPlateau": _optimizers(
        lambda one: ([one], [torch.optim.lr_scheduler.ReduceLROnPlateau(one)])
    ),
    "one optimizer": _optimizers(lambda one: [one, one]),
    "'monitor'": _optimizers(lambda one: {"optimizer": one, "monitor": "val_loss"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name_what_it_cannot_map(tmp_path, name):
    task = NetTask(_with(Net, **REFUSED[name]))
    with pytest.raises(TaskError) as refused:
        _trained(task, tmp_path, _config())
    assert name in str(refused.value)
    assert ";" in str(refused.value)  # and says what to write


LOADERS = {
    "shuffle=True": lambda data: DataLoader(data, batch_size=8),
    "batch_sampler": lambda data: DataLoader(
        data,
        batch_sampler=type("Own", (torch.utils.data.BatchSampler,), {})(range(32), 8, False),
    ),
    "WeightedRandomSampler": lambda data: DataLoader(
        data, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 32, 32)
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_refuses_by_name_a_loader_it_cannot_map(name):
    loader = {"train_dataloader": lambda self: LOADERS[name](self.points)}
    with pytest.raises(TaskError, match="train_dataloader") as refused:
        NetTask(data=_with(Points, **loader)).build_data()
    assert name in str(refused.value)


def test_refuses_hooks_of_a_data_module():
    data = _with(Points, on_after_batch_transfer=lambda _self, batch, _index: batch)
    with pytest.raises(TaskError, match="on_after_batch_transfer"):
        NetTask(data=data).build_data()


def test_refuses_two_schedules(tmp_path):
    with pytest.raises(ConfigError, match="configure_optimizers") as refused:
        _trained(NetTask(), tmp_path, _config(schedule={"name": "cosine"}))
    assert refused.value.key == "train.schedule"


def test_spec_has_the_optimizer_where_the_module_has_none(tmp_path):
    task = NetTask(_with(Net, configure_optimizers=LightningModule.configure_optimizers))
    config = _config(optimizer={"name": "sgd", "lr": 0.5}, schedule={"name": "cosine"})
    rows, _ = _trained(task, tmp_path, config)
    assert rows[0]["train/lr"] == 0.5
    assert not any(name.startswith("lr-") for name in rows[0])


def test_loaders_may_belong_to_the_module(tmp_path):
    own = {name: vars(Points)[name] for name in ("setup", "train_dataloader", "val_dataloader")}
    task = NetTask(_with(Net, batch_size=8, **own))
    task.data_module = lambda: LightningTask.data_module(task)
    assert _trained(task, tmp_path, _config())[0][-1]["val/loss"] > 0


def test_test_loader_gives_the_test_samples():
    """Set up for tests only when they are asked for."""
    assert NetTask().build_data().test is None
    data = NetTask(data=PointsToTest).build_data()
    (x, _), (expected, _) = data.test()[0], data.val[32]
    assert len(data.test()) == 8
    assert torch.equal(x, expected)

    class Padded(PointsToTest):
        def test_dataloader(self):
            return DataLoader(self.test, collate_fn=list)

    with pytest.raises(TaskError, match="another collate_fn"):
        NetTask(data=Padded).build_data().test()


@needs("pytorch_lightning")
def test_module_of_the_other_package_fits():
    import pytorch_lightning

    steps = {name: vars(Net)[name] for name in ("training_step", "validation_step")}
    check_module(type("Other", (pytorch_lightning.LightningModule,), steps)())


def test_batch_without_samples_names_the_method():
    with pytest.raises(TaskError, match="batch_size"):
        NetTask().batch_size({"text": "a"})
    assert NetTask().batch_size({"length": [3], "x": [torch.zeros(5, 2)]}) == 5
    assert NetTask().batch_size(SimpleNamespace(num_graphs=3, x=torch.zeros(12, 2))) == 3


def test_module_named_as_a_task_leads_to_the_adapter():
    with pytest.raises(ConfigError, match="LightningTask"):
        load_task(f"{LightningModule.__module__}:LightningModule", {})


def test_loss_counts_by_its_samples():
    task = NetTask()
    model = task.build_model()
    batch = torch.randn(5, 4), torch.randint(2, (5,))
    mean = nn.functional.cross_entropy(model.layers(batch[0]), batch[1])
    total, weight = task.loss(model, batch)
    assert weight == 5
    assert total.item() == pytest.approx(5 * mean.item())
    assert task.loss(_without_loss(task), batch) == (0, 0)


def _without_loss(task):
    model = task.build_model()
    model.training_step = lambda batch: None  # noqa: ARG005
    return model
