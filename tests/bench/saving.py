"""P4: how much slower a run trains that saves a checkpoint every second.

A run is measured against itself. It saves once in a second: half a second that begins with a
checkpoint, which is written by its end, then half a second without. What the first half takes
longer than the mean of those before and after it is what the second has lost. Two runs next to
each other differ by several percent on a machine that others share, which is more than what is to
be seen here; between two neighbours such a drift cancels. What must not live here: how a
checkpoint is written, or what a step costs (`steps.py`).
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.bench.device import DEVICE, wait_for_device
from tests.bench.table import Goal, Result, paired
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.data import WindowPlan
from trainable.find_task import load_task
from trainable.loop import Trainer
from trainable.task import Data, Task

_GOAL = Goal("ratio", 1.01)
_WIDTH = 2048
_SAVES_OF_A_REPEAT = 24
_NEVER = 10**9


class Large(Task):
    """Wide layers on few samples: a training that lives on the memory's bandwidth, which writing
    200 MB needs, too.

    Args:
        layers: AdamW's state of each takes 50 MB: two moments beside four million parameters.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(self._layers)]
        return nn.Sequential(*layers, nn.Linear(_WIDTH, 10))

    def build_data(self) -> Data:
        inputs, targets = torch.randn(160, _WIDTH), torch.randint(10, (160,))
        return Data(train=(inputs, targets), val=(inputs[:16], targets[:16]))


class Transformer(Task):
    """As much state as `Large`, and more to compute for each byte of it: a usual training.

    Args:
        layers: Of 512 features, 8 heads, and 2,048 features in between; 38 MB of state each.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def build_model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        return nn.Sequential(
            nn.Embedding(1000, 512),
            nn.TransformerEncoder(layer, self._layers, enable_nested_tensor=False),
            nn.Flatten(),
            nn.Linear(64 * 512, 10),
        )

    def build_data(self) -> Data:
        inputs, targets = torch.randint(1000, (8, 64)), torch.randint(10, (8,))
        return Data(train=(inputs, targets), val=(inputs[:4], targets[:4]))


class Vgg(Task):
    """VGG-16 (Simonyan and Zisserman, 2015, configuration D, with batch norm) on pictures of 32 x
    32, and a head that fills the state up to 190 MB: convolutions compute most for each byte.
    """

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        channels = 3
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
                layers += [nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        head = [nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)]
        return nn.Sequential(*layers, nn.Flatten(), *head)

    def build_data(self) -> Data:
        inputs, targets = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
        return Data(train=(inputs, targets), val=(inputs[:4], targets[:4]))


class _Unrated(Task):
    """The same task with a metric that never gets better: only the interval saves."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def build_model(self) -> nn.Module:
        return self._task.build_model()

    def build_data(self) -> Data:
        return self._task.build_data()

    def evaluate(self, model: nn.Module, batches: Any) -> dict[str, float]:  # noqa: ARG002
        return {"loss": 1.0}


def checkpoints(repeats: int) -> list[Result]:
    """Seconds that a second's steps take with a checkpoint, and without."""
    saves = _SAVES_OF_A_REPEAT * repeats
    return [
        _compare("digits CNN", lambda: load_task("digits", {"model": "cnn"}), 64, saves),
        _compare("VGG-16 of 190 MB", Vgg, 8, saves),
        _compare("transformer of 200 MB", lambda: Transformer(5), 4, saves),
        _compare("wide layers of 200 MB", lambda: Large(4), 32, saves),
    ]


def _compare(what: str, make: Callable[[], Task], batch_size: int, saves: int) -> Result:
    data = make().build_data().train
    assert isinstance(data, tuple)
    epoch = WindowPlan(len(data[0]), batch_size, batch_size).windows
    seconds = min(_stretches(make(), batch_size, steps=epoch, every=_NEVER, count=4))
    stretch = epoch * max(1, round(0.5 / seconds))
    taken = _stretches(make(), batch_size, steps=stretch, every=2 * stretch, count=2 * saves + 3)
    after_first = taken[1:]  # which takes its memory for the first time
    without = after_first[0::2]
    neighbours = [(before + after) / 2 for before, after in itertools.pairwise(without)]
    row = f"P4 {what}, a checkpoint each second / none"
    saving = zip(after_first[1:-1:2], neighbours, strict=True)
    ours = [with_one + without_one for with_one, without_one in saving]
    return paired(row, ours, [2 * half for half in neighbours], "s", _GOAL)


def _stretches(task: Task, batch_size: int, *, steps: int, every: int, count: int) -> list[float]:
    """Train, and return the seconds of each stretch of `steps` after the first checkpoint.

    A checkpoint begins every `every` steps; what is not written at the end of its stretch is
    waited for there.
    """
    stamps: list[float] = []

    def should_stop() -> bool:  # asked after each step, and before its checkpoint
        assert isinstance(trainer, Trainer)
        step = trainer.state.progress.step
        if step % steps == 0 and (stamps or step % every == 0 or every == _NEVER):
            wait_for_device()
            trainer.store.wait()
            stamps.append(time.perf_counter())
        return len(stamps) > count

    config = TrialConfig.model_validate(
        {
            "task": {"name": "given"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": _NEVER},
            "checkpoint": {"every": f"{every} steps"},
            "train": {"batch_size": batch_size, "precision": "fp32"},
        }
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        open_trainer(
            config,
            Path(directory),
            device=str(DEVICE),
            threads=1,
            task=_Unrated(task),
            should_stop=should_stop,
        ) as trainer,
    ):
        for _ in trainer.events():
            pass
    return [after - before for before, after in itertools.pairwise(stamps)]
