"""A run that is killed and an uninterrupted one: the task, the kill, and the comparison.

A run of several ranks is opened and trained on each of them. What must not live here: cases
(`kill_cases.py`), or processes (`processes.py`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.chaos.kill_cases import Case
from tests.chaos.sampled_data import sampled
from tests.optimizers import TwoOptimizers
from trainable.build import open_trainer
from trainable.check.compare_states import operations
from trainable.config import TrialConfig
from trainable.loop import Trainer
from trainable.ranks import ALONE, Ranks
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import read_rows
from trainable.task import Data, Task
from trainable.watch.diagnostics import MEASURED

EPOCHS, SAMPLES, BATCH = 4, 20, 6  # four windows an epoch, the last one of two samples
BUDGETS = {  # sixteen windows, and three reports or more
    "epochs": {"epochs": EPOCHS},
    "halves": {"epochs": EPOCHS, "report_every": 0.5},
    "steps": {"steps": 16, "report_every": 5, "val_batches": 2},
    "samples": {"samples": EPOCHS * SAMPLES, "report_every": 30},
}
WARMUP = 5
_NEVER = 10**9
_PLACES = {"warmup": (0, 3), "epoch": (2, 2), "edge": (2, 0)}
"""Epochs and windows of the next one that are trained where a run dies when it is asked whether it
was interrupted: after a step; with several ranks also within the next one, before its exchange."""


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
        data: `memory` for tensors, augmented in the loss; otherwise a data set with augmentation,
            and how its samples come.
        frozen: The first layer is not trained.
        die_at: The training forward pass (from 1) in the middle of which `kill` is called.
        kill: Called there; it does not return.
    """

    def __init__(
        self,
        *,
        data: str,
        frozen: bool = False,
        die_at: int = _NEVER,
        kill: Callable[[], None],
    ) -> None:
        self._augmented, self._data, self._frozen = data != "memory", data, frozen
        self._left, self._kill = die_at, kill
        self.seen: list[bytes] = []

    def state_dict(self) -> dict[str, Any]:
        return {}  # when to die and what was seen belong to this process, not to the run

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}

    def build_model(self) -> nn.Module:
        model = nn.Sequential(
            Counting(), nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.3),
            nn.Linear(8, 3),
        )  # fmt: skip
        model[1].requires_grad_(not self._frozen)
        return model

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 5, generator=generator)
        targets = torch.randint(3, (SAMPLES,), generator=generator)
        targets[::7] = -100
        train = Augmented(inputs, targets) if self._augmented else (inputs, targets)
        return sampled(self._data, train, (inputs, targets))

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

    def die_next(self) -> None:
        """Call `kill` in the next training forward pass."""
        self._left = 1


class Hooked(Fragile):
    """Changes its model in hooks, evaluates in its own way, and logs over steps and epochs."""

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
                parameter.clamp_(-1 - step % 7 / 7, 2)
        self.log("drawn", torch.rand(()).item())  # by each rank from a generator of its own
        self.log("last", step)

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        return super().evaluate(model, batches)  # on the first rank alone, as it is its own

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        total, weight = super().loss(model, batch)
        if model.training:
            self.log("mean", total / max(int(weight), 1), over="epoch", weight=weight)
            self.log("total", total, over="epoch", reduce="sum")
        return total, weight


class FragileOfTwo(TwoOptimizers, Fragile):
    """The same with two optimizers."""


class HookedOfTwo(TwoOptimizers, Hooked):
    """With hooks and two optimizers."""


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
    schedule |= {"name": "tests.optimizers:two_levels"} if case.schedule == "own" else {}
    optimizer = {
        "nesterov": {"name": "sgd", "momentum": 0.9, "nesterov": True, "lr": 1e-4},
        "amsgrad": {"name": "adam", "arguments": {"amsgrad": True}, "lr": 0.05},
        "schedule-free": {"name": "tests.optimizers:ScheduleFree", "lr": 1e-4},
        "two": {"lr": 1e-3},
    }.get(case.optimizer, {"name": case.optimizer, "lr": 0.05})
    averages: dict[str, dict[str, Any]] = {
        "off": {},
        "ema": {"ema": {"decay": 0.9, "start": 0.3}},
        "swa": {"swa": {"start": 2, "every": "3 steps"}},
    }
    return TrialConfig.model_validate(
        {
            "task": {"name": "fragile"},
            "metric": "val/loss",
            "mode": "min",
            "seed": 11,
            "budget": BUDGETS[case.budget],
            "checkpoint": {"every": case.every, "parameters": case.parameters},
            "train": {
                **averages[case.average],
                "batch_size": BATCH,
                "accumulation": case.accumulation,
                "precision": case.precision,
                "optimizer": optimizer,
                "schedule": schedule,
                "clip": clip,
                "loader": {"num_workers": 2 if case.data.endswith("processes") else 0},
                "layer_norms_every": 3,
            },
        }
    )


def open_case(
    case: Case,
    directory: Path,
    kill: Callable[[], None] | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Trainer, Fragile]:
    """Open a run of a case on one of its ranks.

    Args:
        case: What is trained.
        directory: The run's.
        kill: Kills the case's victim; called on one of the ranks where the case says, if at all.
        ranks: This rank.
    """
    kills = kill is not None and ranks.rank == case.killer
    kind = {
        (False, False): Fragile,
        (True, False): Hooked,
        (False, True): FragileOfTwo,
        (True, True): HookedOfTwo,
    }[case.hooks == "hooks", case.optimizer == "two"]

    def die() -> None:
        assert kill is not None
        if ranks.is_first and trainer.store.pointer is None:
            trainer.store.wait()  # so that there is something to go on from
        kill()

    task = kind(
        data=case.data,
        frozen=case.parameters == "trained",
        kill=die if kills else _nothing,
        die_at=_pass_to_die_in(case) if kills else _NEVER,
    )
    place = _PLACES.get(case.kill) if kills else None

    def is_reached() -> bool:
        assert isinstance(trainer, Trainer)
        progress = trainer.state.progress
        if (progress.epoch, progress.window) == place:
            die()
        return False

    trainer = open_trainer(
        configure(case),
        directory,
        device="cpu",
        threads=1,
        task=task,
        should_stop=is_reached,
        ranks=ranks,
    )
    assert isinstance(trainer, Trainer)
    if not ranks.is_first:  # asked whether a save is due where the first one is: must it stop?
        trainer.store.is_due = lambda **_: is_reached()  # type: ignore[method-assign]
    elif kill is not None and case.killer != 0:
        _wait_for_first_save(trainer)
    if kills and kill is not None:
        _die_in_evaluation_or_save(case, trainer, directory, die, kill)
        _die_in_window(case, trainer, task)
    return trainer, task


def _pass_to_die_in(case: Case) -> int:
    """Return the training forward pass in which a run of one rank dies."""
    if case.kill != "window" or case.workers > 1:
        return _NEVER
    per_epoch = -(-SAMPLES // (BATCH // case.accumulation))
    return 2 * per_epoch + case.accumulation + min(2, case.accumulation)


def _die_in_window(case: Case, trainer: Trainer, task: Fragile) -> None:
    """Die in the third epoch's second window, if there are several ranks.

    How many forward passes each makes until then depends on how the windows are cut.
    """
    if case.kill != "window" or case.workers == 1:
        return
    sync_buffers, progress = trainer._ranks.sync_buffers, trainer.state.progress

    def begin_window(model: nn.Module) -> None:
        if (progress.epoch, progress.window) == (2, 1):
            task.die_next()
        sync_buffers(model)

    trainer._ranks.sync_buffers = begin_window  # type: ignore[method-assign]


def _die_in_evaluation_or_save(
    case: Case,
    trainer: Trainer,
    directory: Path,
    die: Callable[[], None],
    kill: Callable[[], None],
) -> None:
    if case.kill == "evaluation":
        windows, evaluations = trainer._val.windows, iter(range(1, _NEVER))

        def fatal_windows(epoch: int, start: int = 0) -> Iterator[Any]:
            third = next(evaluations) == 3
            for number, window in enumerate(windows(epoch, start)):
                if third and number == 1:
                    die()
                yield window

        trainer._val.windows = fatal_windows  # type: ignore[method-assign]
    if case.kill == "saving":
        files = FatalFiles.of(directory)
        files.open()
        files.die(2, kill)  # in the thread that saves, which must not wait for itself
        trainer.store._files = files


def _wait_for_first_save(trainer: Trainer) -> None:
    """Have the first save in place before another rank dies: there must be one to go on from."""
    save, store = trainer.store.save, trainer.store

    def save_and_wait(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        if store.pointer is None:
            store.wait()

    store.save = save_and_wait  # type: ignore[method-assign]


def train(
    case: Case, trainer: Trainer, kill: Callable[[], None] | None = None, rank: int = 0
) -> None:
    """Train to the end, or to the kill that comes between two reports."""
    for report in trainer.events():
        if kill and (case.kill, case.killer) == ("saved", rank) and report.epoch == 2:
            trainer.store.wait()
            kill()


def ending(trainer: Trainer, task: Fragile, directory: Path) -> dict[str, Any]:
    """Return all that must be equal, as it is now: state, generators, curve, order of data.

    Every rank calls this; the first one's state has what differs on the others.
    """
    return {
        "state": copy.deepcopy(without_measured(trainer.state.state_dict())),
        "parameters": {n: p.detach().clone() for n, p in trainer.model.named_parameters()},
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
    if isinstance(first, bytes) and isinstance(second, bytes) and where.endswith("objects/pickle"):
        first, second = list(operations(first)), list(operations(second))
    same = first == second or (first != first and second != second)
    return [] if same else [f"{where}: {first!r} is not {second!r}"]


def _nothing() -> None:
    raise AssertionError("this run was not meant to die")
