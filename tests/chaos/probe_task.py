"""A task that reports its position and pauses there on request.

A sandbox copies this file beside its spec, so that workers import it as a user's own module. What
is trained is the same with and without a test that looks: the test speaks through the directory
that the environment variable `CHAOS_PROBE` names, never through the configuration. Each pass of a
kind appends a byte to the file of that kind, so a file's size counts the passes of all trials and
attempts; a file `hold-backward-17` keeps the first process that reaches pass 17 until it is killed
or let go, and a file `do-fork-forward-12` has the first one do what `DEEDS` has under that name.
The ranks of a trial count their passes also each for itself: `backward.1` are those of rank 1.
What must not live here: who is killed, and what must be true afterwards.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from trainable import Data, Task
from trainable.store.local import LocalFiles
from trainable.watch import heartbeat

VARIABLE = "CHAOS_PROBE"
KINDS = ("forward", "backward", "validation", "snapshot", "shard")
"""`shard`: a rank has written its shard of a checkpoint, which is not yet committed."""
RESET = "reset"
"""A further place, once the deed `watch_reset` was done: after the last report of a trial."""
_PATIENCE_SECONDS = 180.0
_REMEMBERED = 20
_INSPECTS = getattr(sys.modules["__main__"].__spec__, "name", "") == "trainable.check.inspect_task"
"""Whether this process computes the first batches before a sweep, whose passes are no trial's."""


class Probe(Task):
    """A small network with dropout, on data jittered by every random generator of the host.

    Args:
        width: Units of the hidden layer.
    """

    def __init__(self, *, width: int = 16) -> None:
        self._width = width

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, self._width), nn.LayerNorm(self._width), nn.GELU(), nn.Dropout(0.2),
            nn.Linear(self._width, 3),
        )  # fmt: skip

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(160, 8, generator=generator)
        targets = (inputs @ torch.randn(8, 3, generator=generator)).argmax(1)
        return Data(train=(inputs[:120], targets[:120]), val=(inputs[120:], targets[120:]))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        inputs, targets = batch
        if not model.training:
            return super().loss(model, batch)
        reach("forward")
        jitter = torch.rand_like(inputs) + numpy.random.rand() + random.random()
        total, weight = super().loss(model, (inputs + 0.05 * jitter, targets))
        total.register_hook(_reach_backward)
        return total, weight

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        return super().evaluate(model, _watched(batches))


class Ranked(Probe):
    """The same network, evaluated by all ranks, which also tell when they are saved."""

    evaluate = Task.evaluate

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        if not model.training:
            reach("validation")
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        reach("snapshot")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


PASSES = {"all": 0, "first": 0.0}


@functools.lru_cache
def first_loss() -> float:
    """Return the loss of the first pass."""
    return PASSES["first"]


class Counting(Probe):
    """The same network, whose loss depends on a global, a cache and an attribute of its class."""

    num_passes = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        total, weight = super().loss(model, batch)
        if model.training:
            PASSES["all"] += 1
            PASSES["first"] = PASSES["first"] or float(total.detach())
            Counting.num_passes += 1
            self.log("passes/global", PASSES["all"])
            self.log("passes/class", Counting.num_passes)
            self.log("passes/cache", first_loss())
            total = total * min(1.0, PASSES["all"] / 20) + total * Counting.num_passes / 100
            total = total / first_loss()
        return total, weight


class Remembering(nn.Module):
    """Registers a buffer in training, and makes it longer with each of the first passes."""

    seen: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            mean = inputs.detach().mean(0, keepdim=True)
            if not hasattr(self, "seen"):
                self.register_buffer("seen", mean)
            elif len(self.seen) < _REMEMBERED:
                self.seen = torch.cat([self.seen, mean])
        return inputs - 0.1 * self.seen.mean(0) if hasattr(self, "seen") else inputs


class Growing(Probe):
    """The same network behind buffers that are not there when it is built."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(Remembering(), super().build_model())


def reach(kind: str) -> None:
    """Count a pass, wait as long as the test asks for, and stay where it wants one held."""
    directory = os.environ.get(VARIABLE)
    if directory is None or _INSPECTS:
        return
    place, rank = Path(directory), _rank()
    if rank is not None and "." not in kind:
        _tell_process(place / f"rank-{rank}")
        reach(f"{kind}.{rank}")
    handle = os.open(place / kind, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, b".")
        count = os.fstat(handle).st_size
    finally:
        os.close(handle)
    for entry in os.listdir(place):
        if entry.startswith("pace-"):
            time.sleep(float(entry.removeprefix("pace-")))
        word, _, rest = entry.partition("-")
        if word == "do":
            deed, wanted, number = rest.split("-")
            if wanted == kind and count >= int(number):
                _do(deed, place / entry)
        wanted, _, number = rest.partition("-")
        if word == "hold" and wanted == kind and count >= int(number):
            _stay(place / entry, place / f"held-{rest}-{os.getpid()}")


def _tell_process(path: Path) -> None:
    """Write, and whole, which process a rank is.

    No variable says whether it is written: a task's variables are restored in the next process.
    """
    process = str(os.getpid())
    if not path.exists() or path.read_text() != process:
        written = path.with_name(f"process-{process}")
        written.write_text(process)
        written.rename(path)


class _Process:
    """What is known of this process."""

    rank: int | None = None


def _rank() -> int | None:
    """The number of this rank; None where a trial has one process.

    The task's own `evaluate` finds no group, so that the last one that was seen counts there.
    """
    if torch.distributed.is_initialized():
        _Process.rank = torch.distributed.get_rank()
    return _Process.rank


def _stay(asked: Path, held: Path) -> None:
    try:
        asked.rename(held)
    except FileNotFoundError:
        return  # another process was first
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while held.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"held at {held.name} for longer than {_PATIENCE_SECONDS:.0f} s")
        time.sleep(0.005)


def _do(deed: str, asked: Path) -> None:
    try:
        asked.rename(asked.with_name(f"done-{asked.name}"))
    except FileNotFoundError:
        return  # another process was first
    DEEDS[deed]()


def _leave_directory() -> None:
    """Stay in a directory that is removed."""
    directory = tempfile.mkdtemp()
    os.chdir(directory)
    shutil.rmtree(directory)


def _fork() -> None:
    """Leave a child that has copies of all that this process has open."""
    fork = multiprocessing.get_context("fork")
    fork.Process(target=time.sleep, args=(600,), daemon=True).start()


def _watch_reset() -> None:
    """Say when this process has made its last report, and ends."""
    unwatch = heartbeat.unwatch

    def reached() -> None:
        reach(RESET)
        unwatch()

    heartbeat.unwatch = reached


DEEDS: dict[str, Callable[[], None]] = {
    "leave_directory": _leave_directory,
    "fork": _fork,
    "watch_reset": _watch_reset,
}


def _reach_backward(gradient: Tensor) -> Tensor:
    reach("backward")
    return gradient


def _watched(batches: Any) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if number == 1:  # neither before the first batch nor after the last
            reach("validation")
        yield batch


def _watch_shards() -> None:
    """Count the shards that this process has written."""
    add_shard = LocalFiles.add_shard

    def reached(*arguments: Any) -> None:
        add_shard(*arguments)
        reach("shard")

    LocalFiles.add_shard = reached  # type: ignore[assignment, method-assign]


_watch_shards()
