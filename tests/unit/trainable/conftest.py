"""Small tasks and configurations for tests of one run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.resumption import Crash, crash_at, curve, equal, to_end
from trainable import build
from trainable.check import rehearsal
from trainable.config import TrialConfig
from trainable.loop import Trainer
from trainable.store.snapshot import snapshot
from trainable.task import Data, Task

CPU = torch.device("cpu")


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with random augmentation from every generator of the host."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, 5, generator=generator)
        self.targets = torch.randint(3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import random

        import numpy

        jitter = torch.rand(5) + numpy.random.rand() + random.random()
        return self.inputs[index] + 0.1 * jitter.float(), self.targets[index]


class Toy(Task):
    """Three classes, five inputs, dropout; as tensors or as a data set with augmentation."""

    def __init__(
        self, *, samples: int = 43, augmented: bool = False, double: bool = False
    ) -> None:
        self.samples, self.augmented = samples, augmented
        self.dtype = torch.float64 if double else torch.float32
        self.dropout = 0.0 if double else 0.2

    def build_model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(5, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3)
        )
        return model.to(self.dtype)

    def build_data(self) -> Data:
        noisy = Noisy(self.samples)
        tensors = (noisy.inputs.to(self.dtype), noisy.targets)
        return Data(train=noisy if self.augmented else tensors, val=tensors)


class Waves(Task):
    """Two classes, four inputs, and a linear model."""

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def build_data(self) -> Data:
        x = torch.arange(96.0).view(24, 4).sin()
        samples = x, (x.sum(1) > 0).long()
        return Data(train=samples, val=samples)


def variant(module: str = "trainable.task", **methods: Any) -> Toy:
    """Return the toy task with other methods, from a module without the names of the test's."""
    kind: type[Toy] = type("Custom", (Toy,), {"__module__": module, **methods})
    return kind()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread, and determinism left as it was found."""
    torch.set_num_threads(1)
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def toy() -> type[Toy]:
    """The toy task's class."""
    return Toy


@pytest.fixture
def configure() -> Callable[..., TrialConfig]:
    """Make a configuration; further keywords are options of `train`."""

    def make(
        *,
        epochs: int = 3,
        budget: dict[str, Any] | None = None,
        patience: int | None = None,
        every: str = "1 epoch",
        keep: int = 2,
        metric: str = "val/loss",
        mode: str = "min",
        seed: int = 0,
        **train: Any,
    ) -> TrialConfig:
        return TrialConfig.model_validate(
            {
                "task": {"name": "toy"},
                "metric": metric,
                "mode": mode,
                "seed": seed,
                "budget": {"epochs": epochs} if budget is None else budget,
                "patience": patience,
                "checkpoint": {"every": every, "keep": keep},
                "train": {"batch_size": 12, **train},
            }
        )

    return make


@pytest.fixture
def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers measure with a clock of their own: each look at it is a second later.

    What else runs on this machine then does not change what a test sees of their speed.
    """
    clock = functools.partial(next, itertools.count(0.0))
    monkeypatch.setattr(build, "Trainer", functools.partial(Trainer, clock=clock))


@pytest.fixture
def opened() -> Iterator[Callable[..., Trainer]]:
    """Open trainers that are closed when the test ends."""
    trainers: list[Trainer] = []

    def start(config: TrialConfig, directory: Path, task: Task, **options: Any) -> Trainer:
        trainers.append(build.open_trainer(config, directory, device="cpu", task=task, **options))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def resumes_exactly(
    tmp_path: Path, opened: Callable[..., Trainer]
) -> Callable[..., tuple[Trainer, Trainer]]:
    """Train a task in one piece, and once with each of some kills; all end alike, bit for bit.

    A kill is the number of the call of `should_stop` at which it comes. Returns the run in one
    piece and the one that was resumed last.
    """

    def check(
        config: TrialConfig,
        make: Callable[[], Task],
        *kills: int,
        undisturbed: TrialConfig | None = None,
    ) -> tuple[Trainer, Trainer]:
        whole = resumed = opened(undisturbed or config, tmp_path / "whole", make())
        to_end(whole)
        expected = snapshot(whole.state.state_dict())
        whole.close()
        for kill in kills:
            directory = tmp_path / f"killed-{kill}"
            killed = opened(config, directory, make(), should_stop=crash_at(kill))
            with pytest.raises(Crash):
                to_end(killed)
            if config.train.loader.num_workers:
                killed.close()
            torch.manual_seed(99)  # whatever happened in between must not matter
            resumed = opened(config, directory, make())
            assert resumed.resumed_at <= kill
            to_end(resumed)
            assert equal(expected, resumed.state.state_dict()), kill
            resumed.close()
            assert curve(tmp_path / "whole") == curve(directory), kill
        return whole, resumed

    return check


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearse on a loaded machine, too: a run is not rehearsed where that takes too long."""
    monkeypatch.setattr(rehearsal, "SECONDS", 10 * rehearsal.SECONDS)
