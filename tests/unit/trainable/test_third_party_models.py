"""Unchanged third-party models train, resume and export."""

from __future__ import annotations

import warnings

import pytest
import safetensors.torch
import torch
from torch import nn
from torchvision.models import resnet18

from trainable.build import open_trainer
from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.errors import CheckpointError
from trainable.export import export_weights, load_model
from trainable.losses import cross_entropy
from trainable.task import Data, Task

SYMBOLS, CONTEXT, WIDTH = 11, 6, 16
SMALL_STATE = {"optimizer": {"name": "sgd", "lr": 0.05}}


class Pictures(Task):
    """A torchvision model, called and nothing else."""

    def build_model(self):
        return resnet18(num_classes=3)

    def build_data(self):
        generator = torch.Generator().manual_seed(0)
        inputs, targets = torch.randn(6, 3, 32, 32, generator=generator), torch.arange(6) % 3
        return Data(train=(inputs.repeat(6, 1, 1, 1), targets.repeat(6)), val=(inputs, targets))


class Encoder(nn.Module):
    """As found in many repositories: an embedding tied to the head, positions in a buffer, a
    parameter of its own, dropout, a norm over the batch, and a dict as its output.
    """

    def __init__(self):
        super().__init__()
        self.tok_emb = nn.Embedding(SYMBOLS, WIDTH)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.register_buffer("pos", torch.randn(CONTEXT + 1, WIDTH))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        self.head.weight = self.tok_emb.weight

    def forward(self, ids):
        x = torch.cat([self.cls.expand(len(ids), -1, -1), self.tok_emb(ids)], dim=1) + self.pos
        x = self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return {"logits": self.head(x[:, 1:] + x[:, :-1]), "pooled": x[:, 0]}


class Tokens(Task):
    """The loss picks what it needs from what the model returns."""

    def build_model(self):
        return Encoder()

    def build_data(self):
        ids = torch.randint(SYMBOLS, (30, CONTEXT), generator=torch.Generator().manual_seed(0))
        samples = (ids, ids.roll(1, dims=1))
        return Data(train=samples, val=samples)

    def loss(self, model, batch):
        ids, targets = batch
        return cross_entropy(model(ids)["logits"].flatten(0, 1), targets.flatten())


def _train(configure, opened, directory, task, **options):
    trainer = opened(configure(every="100 epochs", **options), directory, task)
    return trainer, list(trainer.events())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_torchvision_model_trains_and_warns_of_batch_norm(
    configure, opened, tmp_path, accumulation
):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer, reports = _train(
            configure,
            opened,
            tmp_path,
            Pictures(),
            epochs=1,
            batch_size=6,
            accumulation=accumulation,
            **SMALL_STATE,
        )
    sentences = [str(warning.message) for warning in told]
    if accumulation == 2:
        assert len(sentences) == 1
        assert "the model has BatchNorm (module 'bn1' and " in sentences[0]
        assert "micro-batches of 3 samples, not over the batch of 6" in sentences[0]
        return
    assert sentences == []
    losses = [row.metrics["train/loss"] for report in reports for row in report.rows]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert trainer.model.bn1.num_batches_tracked == len(losses) == 6


def test_tied_weights_are_trained_once_and_stay_tied(configure, opened, tmp_path):
    trainer, reports = _train(
        configure, opened, tmp_path, Tokens(), epochs=20, optimizer={"lr": 0.01}
    )
    model = trainer.model
    assert model.head.weight is model.tok_emb.weight
    groups = Tokens().param_groups(model)
    listed = [id(p) for group in groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == sum(1 for _ in model.parameters())
    assert listed.count(id(model.tok_emb.weight)) == 1
    losses = [report.metrics["val/loss"] for report in reports]
    assert losses[-1] < 0.8 * losses[0]


def test_tied_weights_resume_bit_exactly(configure, resumes_exactly):
    _, rest = resumes_exactly(configure(epochs=2, every="1 step"), Tokens, 3)
    assert rest.resumed_at == 2
    assert rest.model.head.weight is rest.model.tok_emb.weight


class Lazy(Task):
    """The model's first layer learns from the first batch how many inputs it has."""

    def build_model(self):
        return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 3))

    def build_data(self):
        inputs = torch.randn(36, 5, generator=torch.Generator().manual_seed(0))
        samples = (inputs, inputs[:, :3].argmax(dim=1))
        return Data(train=samples, val=samples)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_lazy_layer_resumes_bit_exactly(configure, resumes_exactly, name, precision):
    config = configure(every="1 step", optimizer={"name": name}, precision=precision)
    _, rest = resumes_exactly(config, Lazy, 3)
    assert rest.resumed_at == 2
    assert rest.model[0].weight.shape == (4, 5)


@pytest.mark.parametrize("task", [Tokens(), Pictures()], ids=["tied", "torchvision"])
def test_exported_weights_load_into_the_original_model(configure, opened, tmp_path, task):
    trainer, _ = _train(configure, opened, tmp_path, task, epochs=1, **SMALL_STATE)
    trainer.close()
    export_weights(CheckpointStore(tmp_path).newest().path, tmp_path / "model.safetensors")
    fresh = task.build_model()
    safetensors.torch.load_model(fresh, tmp_path / "model.safetensors")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tied = {"head.weight", "tok_emb.weight"}
    assert len(tied & stored.keys()) == (1 if isinstance(task, Tokens) else 0)
    inputs = task.build_data().val[0][:4]
    with torch.no_grad():
        ours, theirs = trainer.model.eval()(inputs), fresh.eval()(inputs)
    if isinstance(task, Tokens):
        ours, theirs = ours["logits"], theirs["logits"]
    assert torch.equal(ours, theirs)


class Scaled(nn.Linear):
    def forward(self, inputs, scale=1.0):
        return super().forward(inputs) * scale


class Single(Task):
    """One sample to evaluate; the model is given a scale by its name."""

    def __init__(self, *, scale=1.0):
        self.scale = scale

    def build_model(self):
        return Scaled(3, 2)

    def build_data(self):
        inputs = torch.eye(3)
        return Data(train=(inputs, torch.tensor([0, 1, 0])), val=(inputs[:1], torch.tensor([0])))

    def loss(self, model, batch):
        inputs, targets = batch
        return cross_entropy(model(inputs, scale=self.scale), targets)


class Remembering(nn.Linear):
    table = None

    def forward(self, inputs, scale=1.0):
        if self.table is None:
            self.table = torch.arange(2.0).cos()
        return super().forward(inputs) * self.table * scale


class Tabled(Single):
    """The model keeps what it made in its first forward pass."""

    def build_model(self):
        return Remembering(3, 2)


def _single(directory, task=Single, **arguments):
    """Its configuration, and its checkpoint."""
    name = {"name": f"{__name__}:{task.__name__}", **arguments}
    config = TrialConfig.model_validate(
        {"task": name, "metric": "val/loss", "mode": "min", "budget": {"epochs": 1}}
    )
    with open_trainer(config, directory, device="cpu") as trainer:
        list(trainer.events())
    return config, CheckpointStore(directory).newest().path


@pytest.mark.parametrize("task", [Single, Tabled])
def test_graph_from_one_sample_takes_any_batch_size(tmp_path, task):
    model, inputs, _ = load_model(*_single(tmp_path, task))
    samples = ({0: torch.export.Dim.AUTO},)
    graph = torch.export.export(model, inputs, dynamic_shapes=samples).module()
    for count in (1, 3):
        rows = torch.randn(count, 3)
        torch.testing.assert_close(graph(rows), model(rows))


def test_keyword_inputs_are_part_of_the_graph(tmp_path):
    with pytest.raises(CheckpointError, match=r"forward is given Tensor, scale; .*by position"):
        load_model(*_single(tmp_path, scale=-3.0))


def test_pickled_model_accepts_keyword_inputs(tmp_path):
    model, (inputs,), _ = load_model(*_single(tmp_path, scale=-3.0), pickled=True)
    assert model(inputs, scale=2.0).shape == (2, 2)
