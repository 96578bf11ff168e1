"""Checkpoints of trained parameters only: what they have, and which base they accept."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.errors import CheckpointError, ConfigError
from trainable.export import export_weights, load_trained
from trainable.task import Data, Task

WIDTH = 400
BASE_BYTES = 2 * WIDTH * WIDTH * 4


class Adapter(nn.Module):
    """A frozen layer with a trained product of two small matrices beside it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


class Adapted(Task):
    """Adapters and BatchNorm on a base that is read from a file.

    Args:
        base: The file; None: the base is drawn.
        unfreeze_at: The training forward pass from which the first layer is trained.
    """

    def __init__(self, base: str | None = None, unfreeze_at: int = 10**9) -> None:
        self.base, self.unfreeze_at, self.passes = base, unfreeze_at, 0

    def build_model(self) -> nn.Module:
        model = nn.Sequential(Adapter(), nn.BatchNorm1d(WIDTH), nn.Tanh(), Adapter())
        model[0].norm = nn.BatchNorm1d(2).requires_grad_(False)  # never called
        model.register_buffer("table", torch.arange(WIDTH * WIDTH, dtype=torch.float32))
        if self.base is not None:
            weights = safetensors.torch.load_file(self.reads(self.base))
            model.load_state_dict(weights, strict=False)
        return model

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(40, WIDTH, generator=generator)
        targets = torch.randint(WIDTH, (40,), generator=generator)
        return Data(train=(inputs, targets), val=(inputs, targets))

    def loss(self, model, batch):
        if model.training:
            self.passes += 1
            if self.passes == self.unfreeze_at:
                model[0].base.requires_grad_(True)
        return super().loss(model, batch)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A file with pretrained weights of the frozen layers."""
    torch.manual_seed(5)
    path = tmp_path / "base.safetensors"
    safetensors.torch.save_file(
        {f"{at}.base.weight": torch.randn(WIDTH, WIDTH) for at in (0, 3)}, path
    )
    return str(path)


def _config(parameters: str = "trained", *, seed: int = 0, **train: object) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "task": {"name": "adapted"},
            "metric": "val/loss",
            "mode": "min",
            "seed": seed,
            "budget": {"epochs": 3},
            "checkpoint": {"every": "2 steps", "parameters": parameters},
            "train": {"batch_size": 8, **train},
        }
    )


def _run(opened, config, directory, task, **options):
    trainer = opened(config, directory, task, **options)
    list(trainer.events())
    return trainer


def _bytes(directory: Path) -> int:
    """Return the size of the largest checkpoint."""
    return max(path.stat().st_size for path in directory.glob("checkpoints/**/state.pt"))


def _equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_base_is_never_written(tmp_path, opened, base, optimizer):
    """The bytes are those of what is trained: its weights, moments and average."""
    train = {"optimizer": {"name": optimizer}, "ema": {"decay": 0.9}}
    trainer = _run(opened, _config(**train), tmp_path / "run", Adapted(base))
    trained = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    # Two moments, the average, the statistics of BatchNorm; generators take some 30 KB.
    assert trained < _bytes(tmp_path / "run") < 5 * trained + 50_000 < BASE_BYTES / 8
    _run(opened, _config("all", **train), tmp_path / "all", Adapted(base))
    assert _bytes(tmp_path / "all") > BASE_BYTES


@pytest.mark.parametrize("unfreeze_at", [10**9, 7])
def test_resumed_run_equals_uninterrupted_one(tmp_path, opened, base, unfreeze_at):
    whole = _run(opened, _config(), tmp_path / "whole", Adapted(base, unfreeze_at))
    asked = iter(range(1, 100))
    for stop in (4, 9):
        _run(
            opened,
            _config(),
            tmp_path / "cut",
            Adapted(base, unfreeze_at),
            should_stop=lambda stop=stop: next(asked) >= stop,
        )
    resumed = opened(_config(), tmp_path / "cut", Adapted(base, unfreeze_at))
    assert resumed.resumed_at > 4
    list(resumed.events())
    assert _equal(whole.model, resumed.model)
    saved = resumed.store.load(resumed.store.newest())
    assert ("0.base.weight" in saved["model"]) == (unfreeze_at == 7)
    assert set(saved["base"]["tensors"]) >= {"3.base.weight", "table"}
    assert "1.running_mean" in saved["model"]


def test_another_base_is_refused(tmp_path, opened, base):
    _run(opened, _config(), tmp_path / "run", Adapted(base), until=1)
    (tmp_path / "run/built.json").unlink()  # else the whole model is compared roughly first
    weights = safetensors.torch.load_file(base)
    weights["3.base.weight"][7, 7] += 1e-6
    safetensors.torch.save_file(weights, base)
    with pytest.raises(CheckpointError, match=r"another base .*: 3\.base\.weight; .*sha256"):
        opened(_config(), tmp_path / "run", Adapted(base))


def test_drawn_base_of_another_seed_is_refused(tmp_path, opened):
    donor = _run(opened, _config(), tmp_path / "donor", Adapted(), until=1)
    with pytest.raises(CheckpointError, match="drawn at random"):
        opened(_config(seed=1), tmp_path / "heir", Adapted(), restore=donor.store.newest().path)


def test_changed_frozen_weights_are_saved(tmp_path, opened, base):
    """Even if they are written through `.data`, which torch does not count."""

    class Moving(Adapted):
        def loss(self, model, batch):
            if model.training:
                model[0].base.weight.data.mul_(0.9)
            return super().loss(model, batch)

    trainer = _run(opened, _config(), tmp_path / "run", Moving(base), until=1)
    resumed = opened(_config(), tmp_path / "run", Moving(base))
    assert _equal(trainer.model, resumed.model)


@pytest.mark.parametrize(("before", "after"), [("all", "trained"), ("trained", "all")])
def test_parameters_may_change_when_resumed(tmp_path, opened, base, before, after):
    whole = _run(opened, _config(), tmp_path / "whole", Adapted(base))
    _run(opened, _config(before), tmp_path / "cut", Adapted(base), until=1)
    resumed = _run(opened, _config(after), tmp_path / "cut", Adapted(base))
    assert _equal(whole.model, resumed.model)
    assert ("base" in resumed.store.load(resumed.store.newest())) == (after == "trained")


def test_model_is_base_and_adapter(tmp_path, opened, base, monkeypatch):
    config = _config(ema={"decay": 0.5})
    trainer = _run(opened, config, tmp_path / "run", Adapted(base))
    newest = trainer.store.newest()
    monkeypatch.setattr("trainable.build.load_task", lambda *_: Adapted(base))
    monkeypatch.setattr("trainable.find_task.load_loop", lambda _: None)
    loaded = load_trained(config, newest.address)[0].model
    with trainer._step.average.in_model():
        assert _equal(loaded, trainer.model)
    file = tmp_path / "adapter.safetensors"
    exported = export_weights(newest.address, file)
    assert (exported.left_out, exported.averaged) == (8, 15)
    assert list(exported.files) == [base]
    assert file.stat().st_size < BASE_BYTES / 8
    fresh = Adapted(base).build_model()
    missing, unexpected = safetensors.torch.load_model(fresh, file, strict=False)
    frozen = {name for name in missing if not name.startswith("0.norm.")}
    assert (frozen, unexpected) == ({"0.base.weight", "3.base.weight", "table"}, [])
    assert _equal(fresh, loaded)
    Path(base).write_bytes(b"")
    safetensors.torch.save_file({}, base)
    with pytest.raises(CheckpointError, match="another base"):
        load_trained(config, newest.address)


def test_custom_loop_cannot_save_trained_parameters_only(tmp_path, monkeypatch):
    monkeypatch.setattr("trainable.build.load_loop", lambda _: print)
    with pytest.raises(ConfigError, match="is a custom loop"):
        open_trainer(_config(), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
