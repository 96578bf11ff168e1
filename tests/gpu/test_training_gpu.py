"""Training on a CUDA device: parity with fp32, overflow, stopping, resuming across devices.

Needs torch, NumPy, pydantic and pytest only. `GPU_TESTS_DEVICE=cpu` runs what a CPU can do of it,
which shows where there is no GPU that it is sound (`tests/unit/trainable/test_gpu_tests.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from typing import cast

import pytest
import torch
from torch import nn

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.errors import NonFiniteLoss, OutOfMemory
from trainable.loop import Trainer
from trainable.precision import resolve_precision
from trainable.step import Step
from trainable.store.metrics_file import read_rows
from trainable.task import Data, Task

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda:0")
ON_CUDA = torch.device(DEVICE).type == "cuda"
NEEDS_CUDA = pytest.mark.skipif(not ON_CUDA, reason="GPU_TESTS_DEVICE is no CUDA device")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        ON_CUDA and not torch.cuda.is_available(), reason="no CUDA device on this machine"
    ),
]


class Blobs(Task):
    """Three Gaussian blobs and a small network with dropout."""

    def __init__(self, *, dropout: float = 0.1, poison_step: int = 0) -> None:
        self.dropout, self.poison_step, self.calls = dropout, poison_step, 0

    def build_model(self):
        return nn.Sequential(
            nn.Linear(16, 64),
            nn.LayerNorm(64),
            nn.GELU(),
            nn.Dropout(self.dropout),
            nn.Linear(64, 3),
        )

    def build_data(self):
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(3, (600,), generator=generator)
        inputs = torch.randn(600, 16, generator=generator) + 1.5 * targets[:, None]
        return Data(train=(inputs[:500], targets[:500]), val=(inputs[500:], targets[500:]))

    def loss(self, model, batch):
        total, weight = super().loss(model, batch)
        self.calls += model.training
        if model.training:
            self.log("train/mean", total.detach() / weight, over="epoch", weight=weight)
        return (total * math.nan if self.calls == self.poison_step else total), weight


def _config(*, epochs=3, every="1 epoch", **train):
    return TrialConfig.model_validate(
        {
            "task": {"name": "blobs"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": epochs},
            "checkpoint": {"every": every},
            "train": {"batch_size": 50, "accumulation": 2, "optimizer": {"lr": 0.01}, **train},
        }
    )


def _train(config, directory, task=None, device=None):
    with open_trainer(config, directory, device=device or DEVICE, task=task or Blobs()) as trainer:
        return list(trainer.events()), trainer


@pytest.mark.seeds("S2")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_as_fp32_does(tmp_path, precision):
    if precision == "bf16" and resolve_precision("auto", torch.device(DEVICE)) == "fp16":
        pytest.skip("this GPU does not compute in bf16")
    full, _ = _train(_config(precision="fp32"), tmp_path / "full", Blobs(dropout=0.0))
    mixed, _ = _train(_config(precision=precision), tmp_path / "mixed", Blobs(dropout=0.0))
    assert mixed[-1].metrics["val/loss"] == pytest.approx(full[-1].metrics["val/loss"], abs=0.02)
    assert mixed[-1].metrics["val/accuracy"] == pytest.approx(
        full[-1].metrics["val/accuracy"], abs=0.03
    )


@pytest.mark.seeds("S3")
def test_fp16_overflow_skips_and_recovers(tmp_path):
    config = _config(precision="fp16")
    with open_trainer(config, tmp_path, device=DEVICE, task=Blobs()) as trainer:
        assert isinstance(trainer, Trainer)
        scaler = trainer.precision.scaler
        assert scaler is not None
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**24})
        reports = list(trainer.events())
    skipped = reports[-1].metrics["num_skipped_steps"]
    assert 0 < skipped < 20
    assert reports[-1].step == 30 - skipped
    assert math.isfinite(reports[-1].metrics["val/loss"])


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "adafactor"])
def test_non_finite_loss_changes_no_parameter(tmp_path, optimizer):
    """The loss of step 4 (micro-batch 7) is NaN; nobody looks before the end of the epoch."""
    config = _config(precision="fp32", optimizer={"name": optimizer, "lr": 0.01})
    seen = []
    with open_trainer(config, tmp_path / "clean", device=DEVICE, task=Blobs()) as clean:
        assert isinstance(clean, Trainer)
        inner = clean._step

        def follow(window, step, decide):
            outcome = inner(window, step, decide)
            if step == 3:
                seen.append([p.detach().clone() for p in clean.model.parameters()])
            return outcome

        clean._step = cast(Step, _Following(inner, follow))
        next(clean.events())
    poisoned = open_trainer(config, tmp_path / "bad", device=DEVICE, task=Blobs(poison_step=7))
    assert isinstance(poisoned, Trainer)
    with poisoned, pytest.raises(NonFiniteLoss, match="at step 4"):
        list(poisoned.events())
    for expected, found in zip(seen[0], poisoned.model.parameters(), strict=True):
        assert torch.equal(expected, found.detach())


class _Following:
    """Stands in for the step and lets a test look after each one."""

    def __init__(self, step, call):
        self._inner, self._call = step, call

    def __call__(self, window, step, decide):
        return self._call(window, step, decide)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_resume_is_exact_on_the_same_device(tmp_path):
    config = _config(every="4 steps", ema={"decay": 0.9, "start": 2})
    _, whole = _train(config, tmp_path / "whole")
    steps = iter(range(1, 100))
    first = open_trainer(
        config,
        tmp_path / "cut",
        device=DEVICE,
        task=Blobs(),
        should_stop=lambda: next(steps) > 12,
    )
    list(first.events())
    first.close()
    _, second = _train(config, tmp_path / "cut")
    states = [trainer.state.state_dict() for trainer in (whole, second)]
    assert states[0]["average"]["count"] == states[1]["average"]["count"] == 28
    for key in ("model", "average"):
        one, other = (state[key].get("values", state[key]) for state in states)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), key
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    means = [
        [row.metrics["train/mean"] for row in read_rows(tmp_path / name) if "epoch" in row.metrics]
        for name in ("whole", "cut")
    ]
    assert means[0] == means[1]
    assert len(means[0]) == 3


@pytest.mark.seeds("S18")
@pytest.mark.parametrize("direction", ["to the CPU", "from the CPU"])
def test_run_moves_to_another_kind_of_device(tmp_path, direction):
    first, second = (DEVICE, "cpu") if direction == "to the CPU" else ("cpu", DEVICE)
    config = _config(precision="fp32", clip={"max_norm": None})
    straight, _ = _train(config, tmp_path / "straight", Blobs(dropout=0.0), device=first)
    steps = iter(range(1, 100))
    begun = open_trainer(
        config,
        tmp_path / "moved",
        device=first,
        task=Blobs(dropout=0.0),
        should_stop=lambda: next(steps) > 12,
    )
    list(begun.events())
    begun.close()
    moved, trainer = _train(config, tmp_path / "moved", Blobs(dropout=0.0), device=second)
    assert trainer.model[0].weight.device.type == torch.device(second).type
    assert moved[-1].step == straight[-1].step == 30
    assert moved[-1].metrics["val/loss"] == pytest.approx(
        straight[-1].metrics["val/loss"], abs=1e-3
    )


@pytest.mark.seeds("S8")
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_optimizers_are_fused(tmp_path, optimizer):
    config = _config(optimizer={"name": optimizer, "lr": 0.01})
    with open_trainer(config, tmp_path, device=DEVICE, task=Blobs()) as trainer:
        assert isinstance(trainer, Trainer)
        assert all(group["fused"] for group in trainer._step.optimizer.param_groups)


@pytest.mark.seeds("S14")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_device_synchronisation_between_reports(tmp_path, precision):
    if precision == "bf16" and resolve_precision("auto", torch.device(DEVICE)) == "fp16":
        pytest.skip("this GPU does not compute in bf16")
    more = {"layer_norms_every": 2, "ema": {"decay": 0.9}}
    config = _config(precision=precision, epochs=2, every="100 epochs", **more)
    with open_trainer(config, tmp_path, device=DEVICE, task=Blobs()) as trainer:
        assert isinstance(trainer, Trainer)
        # The order of the samples goes to the device when the first window is made.
        windows = trainer._train.windows(0)
        trainer._take_step(next(windows))  # kernels and workspaces are made on first use
        with _synchronisation_is_an_error():
            for window in windows:
                trainer._take_step(window)
        assert trainer.state.progress.step == 10


@contextlib.contextmanager
def _synchronisation_is_an_error():
    if not ON_CUDA:
        yield  # only the driver knows what a synchronisation is
        return
    with warnings.catch_warnings():
        # torch says, when it is switched on, that this mode is a prototype.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@NEEDS_CUDA
def test_sync_debug_mode_sees_what_it_is_trusted_with():
    value = torch.ones(1, device=DEVICE)
    with (
        _synchronisation_is_an_error(),
        pytest.raises(RuntimeError, match="synchronizing CUDA operation"),
    ):
        value.item()


@NEEDS_CUDA
def test_tensor_memory_is_reported_and_capped(tmp_path):
    """A model that would take half of the device, in a process that may take a hundredth."""
    mebibytes = torch.cuda.get_device_properties(DEVICE).total_memory / 2**20

    class Large(Blobs):
        def build_model(self):
            return nn.Linear(16, int(mebibytes / 2 * 2**20 / 4 / 17), device=DEVICE)

    try:
        with pytest.raises(OutOfMemory, match="larger share of the device"):
            open_trainer(
                _config(), tmp_path / "large", device=DEVICE, memory_share=0.01, task=Large()
            )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    reports, _ = _train(_config(), tmp_path / "small")
    assert 0 < reports[-1].metrics["memory/gpu_mb"] < 100


@NEEDS_CUDA
def test_reported_memory_is_peak_since_previous_report(tmp_path):
    class Spiky(Blobs):
        def loss(self, model, batch):
            if model.training and self.calls == 0:
                torch.empty(200 * 2**20, dtype=torch.uint8, device=DEVICE)
            return super().loss(model, batch)

    reports, _ = _train(_config(), tmp_path, Spiky())
    found = [report.metrics["memory/gpu_mb"] for report in reports]
    assert found[0] > 200
    assert max(found[1:]) < 100


@NEEDS_CUDA
def test_first_report_excludes_memory_of_previous_trial(tmp_path):
    torch.empty(200 * 2**20, dtype=torch.uint8, device=DEVICE)
    reports, _ = _train(_config(), tmp_path)
    assert reports[0].metrics["memory/gpu_mb"] < 100
