"""A run that is killed and an uninterrupted one: the task, the kill, and the comparison.

What must not live here: cases (`kill_cases.py`), or processes (`processes.py`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.chaos.kill_cases import Case
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.diagnostics import MEASURED
from trainable.loop import Trainer
from trainable.metrics_file import read_rows
from trainable.storage.local import LocalFiles
from trainable.task import Data, Task

EPOCHS, SAMPLES, BATCH = 4, 20, 6  # four windows an epoch, the last one of two samples
WARMUP = 5
_NEVER = 10**9


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples jittered by every random generator of the host."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        jitter = torch.rand(5) + numpy.random.rand() + random.random()
        return self._inputs[index] + 0.1 * jitter.float(), self._targets[index]


class Counting(nn.Module):
    """A buffer that moves with every forward pass of training, as a running mean does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.1)
        return inputs - 0.01 * self.mean


class Fragile(Task):
    """Trains, remembers what it was given, and calls `kill` at one of its forward passes.

    Args:
        augmented: A data set with augmentation; otherwise tensors, augmented in the loss.
        die_at: The training forward pass (from 1) in the middle of which `kill` is called.
        die_at_evaluation: The same for evaluations.
        kill: Never returns.
    """

    def __init__(
        self,
        *,
        augmented: bool,
        die_at: int = _NEVER,
        die_at_evaluation: int = _NEVER,
        kill: Callable[[], None],
    ) -> None:
        self._augmented = augmented
        self._left, self._left_of_evaluations = die_at, die_at_evaluation
        self._kill = kill
        self.seen: list[bytes] = []

    def state_dict(self) -> dict[str, Any]:
        return {}  # when to die and what was seen belong to this process, not to the run

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            Counting(), nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.3),
            nn.Linear(8, 3),
        )  # fmt: skip

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 5, generator=generator)
        targets = torch.randint(3, (SAMPLES,), generator=generator)
        targets[::7] = -100
        train = Augmented(inputs, targets) if self._augmented else (inputs, targets)
        return Data(train=train, val=(inputs, targets))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        inputs, targets = batch
        if model.training:
            if not self._augmented:
                jitter = torch.rand_like(inputs) + numpy.random.rand() + random.random()
                inputs = inputs + 0.1 * jitter
            self.seen.append(inputs.numpy().tobytes() + targets.numpy().tobytes())
        total, weight = super().loss(model, (inputs, targets))
        if model.training:
            self._left -= 1
            if self._left == 0:
                self._kill()
            # Some batches have so large a loss that fp16 overflows until the scale has come down:
            # steps are skipped before and after the kill. Which ones depends on the data alone.
            total = total * (300.0 if targets.clamp(min=0).sum() % 3 else 1.0)
        return total, weight

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        metrics = super().evaluate(model, batches)
        self._left_of_evaluations -= 1
        if self._left_of_evaluations == 0:
            self._kill()
        return metrics


class Hooked(Fragile):
    """Changes its model in hooks, and logs a mean and a sum over each epoch."""

    def build_model(self) -> nn.Module:
        self.net = super().build_model()
        return self.net

    def on_epoch_start(self, epoch: int) -> None:
        dropout, first = self.net.get_submodule("4"), self.net.get_submodule("1")
        assert isinstance(dropout, nn.Dropout)
        dropout.p *= 0.7
        first.requires_grad_(epoch != 1)
        self.log("dropout", dropout.p)

    def on_step_end(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.clamp_(-1 - torch.rand(()).item(), 2)
        self.log("last", step)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        total, weight = super().loss(model, batch)
        if model.training:
            self.log("mean", total / max(int(weight), 1), over="epoch", weight=weight)
            self.log("total", total, over="epoch", reduce="sum")
        return total, weight


class FatalFiles(LocalFiles):
    """Calls `kill` in place of the rename number `die_at` that would commit a checkpoint: in the
    thread that writes, while training goes on. Nothing is committed after that.
    """

    def die(self, die_at: int, kill: Callable[[], None]) -> None:
        self._left, self._kill = die_at, kill

    def rename(self, source: Path, target: Path) -> None:
        self._left -= target.name.startswith("step-")  # else a generation that goes
        if self._left == 0:
            self._kill()
        super().rename(source, target)


def configure(case: Case) -> TrialConfig:
    """Return the configuration of a case."""
    clip = {
        "norm": {"max_norm": 0.3},
        "value": {"max_norm": None, "value": 0.02},
        "off": {"max_norm": None},
    }[case.clip]
    schedule: dict[str, Any] = {"name": case.schedule, "warmup": WARMUP}
    schedule |= {"step_epochs": 1} if case.schedule == "step" else {}
    schedule |= {"patience": 0, "gamma": 0.5} if case.schedule == "plateau" else {}
    nesterov = {"name": "sgd", "momentum": 0.9, "nesterov": True, "lr": 1e-4}
    return TrialConfig.model_validate(
        {
            "task": {"name": "fragile"},
            "metric": "val/loss",
            "mode": "min",
            "seed": 11,
            "budget": {"epochs": EPOCHS},
            "checkpoint": {"every": case.every},
            "train": {
                "batch_size": BATCH,
                "accumulation": case.accumulation,
                "precision": case.precision,
                "optimizer": nesterov
                if case.optimizer == "nesterov"
                else {"name": case.optimizer, "lr": 0.05},
                "schedule": schedule,
                "clip": clip,
                "loader": {"num_workers": 2 if case.data == "processes" else 0},
                "layer_norms_every": 3,
            },
        }
    )


def open_case(
    case: Case, directory: Path, kill: Callable[[], None] | None = None
) -> tuple[Trainer, Fragile]:
    """Open a run of a case; it dies where the case says when `kill` is given."""

    def die() -> None:
        assert kill is not None
        if trainer.store.pointer is None:
            trainer.store.wait()  # so that there is something to go on from
        kill()

    steps = 0
    where: dict[str, Any] = {}
    if kill is not None:
        per_epoch = -(-SAMPLES // (BATCH // case.accumulation))
        in_second_window = case.accumulation + min(2, case.accumulation)
        where = {
            "window": {"die_at": 2 * per_epoch + in_second_window},
            "evaluation": {"die_at_evaluation": 3},
        }.get(case.kill, {})
        # The question "were you interrupted?" is put after each step but an epoch's last, and
        # once more when the epoch is closed: four times an epoch here, fp16's skipped windows too.
        steps = {"warmup": 3, "epoch": 10, "edge": 8}.get(case.kill, 0)
    kind = Hooked if case.hooks == "hooks" else Fragile
    task = kind(augmented=case.data != "memory", kill=die if kill else _nothing, **where)
    asked = iter(range(1, _NEVER))

    def should_stop() -> bool:
        if next(asked) == steps:
            die()
        return False

    trainer = open_trainer(
        configure(case), directory, device="cpu", threads=1, task=task, should_stop=should_stop
    )
    assert isinstance(trainer, Trainer)
    if kill is not None and case.kill == "saving":
        files = FatalFiles.of(directory)
        files.open()
        files.die(2, kill)
        trainer.store._files = files
    return trainer, task


def train(case: Case, trainer: Trainer, kill: Callable[[], None] | None = None) -> None:
    """Train to the end, or to the kill that comes between two reports."""
    for report in trainer.events():
        if kill is not None and case.kill == "saved" and report.epoch == 2:
            trainer.store.wait()
            kill()


def ending(trainer: Trainer, task: Fragile, directory: Path) -> dict[str, Any]:
    """Return all that must be equal, as it is now: state, generators, curve, order of data."""
    return {
        "state": copy.deepcopy(without_measured(trainer.state.state_dict())),
        "curve": curve(directory),
        "seen": task.seen,
    }


def curve(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """Return step and metrics of each row on disk, without what was measured."""
    return [(row.step, without_measured(row.metrics)) for row in read_rows(directory)]


def without_measured(value: Any) -> Any:
    """Return the value without metrics that no two runs have alike."""
    if isinstance(value, dict):
        return {k: without_measured(v) for k, v in value.items() if k not in MEASURED}
    if isinstance(value, (list, tuple)):
        return [without_measured(v) for v in value]
    return value


def differences(first: Any, second: Any, where: str = "") -> list[str]:
    """Name every place in which two values are not the same bits."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same = first.dtype == second.dtype and first.shape == second.shape
        same = same and first.cpu().numpy().tobytes() == second.cpu().numpy().tobytes()
        return [] if same else [f"{where}: {first} is not {second}"]
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return [f"{where}: keys {sorted(map(str, first.keys() ^ second.keys()))} differ"]
        return [d for key in first for d in differences(first[key], second[key], f"{where}/{key}")]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        if len(first) != len(second):
            return [f"{where}: {len(first)} entries are not {len(second)}"]
        both = enumerate(zip(first, second, strict=True))
        return [d for i, (one, other) in both for d in differences(one, other, f"{where}/{i}")]
    same = first == second or (first != first and second != second)
    return [] if same else [f"{where}: {first!r} is not {second!r}"]


def _nothing() -> None:
    raise AssertionError("this run was not meant to die")
