"""Runs of several ranks for the tests: the further ranks are child processes that import this."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainable.build import open_trainer
from trainable.checkpoint import CheckpointStore
from trainable.config import TrainConfig, TrialConfig
from trainable.errors import TrainingError
from trainable.group_joining import GroupPlace, listen
from trainable.loop import Trainer
from trainable.parallel.rank_group import RankGroup
from trainable.processes.local_ranks import LocalRanks
from trainable.processes.rank_run import follow
from trainable.store.metrics_file import Row, read_rows
from trainable.task import Batch, Data, Task

TIMEOUT = 60.0
"""For the small models below, on each rank while it trains: other tests have other ranks."""


class Odd(Task):
    """Float64; tied, unused and rarely used parameters; targets of which some are ignored.

    Args:
        samples: With 37 of them and a batch of 12, the last window has one sample.
        dropout: Of the hidden layer.
        batch_norm: Whether the model has BatchNorm, and so buffers.
        checkpoints: Whether a layer runs two backward passes of its own within that of the step,
            in a model whose parameters are all used.
        fails: Which rank fails how, in which call of `loss` or step: `1 oom 5`.
    """

    def __init__(
        self,
        samples: int = 37,
        dropout: float = 0.0,
        batch_norm: bool = False,
        checkpoints: bool = False,
        fails: str = "",
    ) -> None:
        self.samples, self.dropout, self.batch_norm = samples, dropout, batch_norm
        self.checkpoints = checkpoints
        self.fails = fails.split()
        self.calls = 0

    def build_model(self) -> nn.Module:
        self.net = _Net(self.dropout, self.batch_norm, self.checkpoints).double()
        return self.net

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(self.samples, 5, generator=generator).double()
        targets = torch.randint(3, (self.samples,), generator=generator)
        targets[::4] = -100
        return Data(train=(inputs, targets), val=(inputs[:13], targets[:13]))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
        self.calls += 1
        failure = self._failure(self.calls)
        if failure in _ERRORS:
            raise _ERRORS[failure]
        if failure == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch
        logits = model(inputs)
        counted = targets >= 0
        loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        return loss * (torch.nan if failure == "nan" else 1.0), counted.sum()

    def on_step_end(self, step: int) -> None:
        failure = self._failure(step)
        if failure == "hook":
            raise ValueError("bad hook")
        if failure == "drift":
            with torch.no_grad():
                self.net.last.bias.add_(1e-9)

    def _failure(self, number: int) -> str:
        here = self.fails and [str(rank_of_process), str(number)] == self.fails[::2]
        return self.fails[1] if here else ""


_ERRORS = {
    "oom": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB"),
    "value": ValueError("bad sample 17"),
}
rank_of_process = 0
"""The rank of this process, for tasks that fail on one rank."""


class Grouped(Odd):
    """Two optimizers; one has two groups, of different learning rates."""

    def build_optimizer(
        self, model: nn.Module, config: TrainConfig
    ) -> list[torch.optim.Optimizer]:
        lr, of_first = config.optimizer.lr, [*self.net.first.parameters()]
        rest = [p for p in model.parameters() if all(p is not other for other in of_first)]
        matrices, others = ([p for p in rest if (p.ndim == 2) is two] for two in (True, False))
        return [
            torch.optim.SGD(of_first, lr=lr, momentum=0.9),
            torch.optim.AdamW([{"params": matrices}, {"params": others, "lr": lr / 2}], lr=lr),
        ]


class LateHooks(Odd):
    """Hooks change gradients in each way; they are registered after the first step."""

    def on_step_end(self, step: int) -> None:
        if step > 1:
            return
        parameters = list(self.net.parameters())
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(_CHANGES[number % len(_CHANGES)])
        # the first one's gradient is made last, when those of others are sent
        bias = self.net.last.bias
        parameters[0].register_post_accumulate_grad_hook(lambda _: _scale(bias))


class Reduced(Odd):
    """Adds up the number of targets over the ranks within `loss`, as detection does."""

    def build_data(self) -> Data:
        data = super().build_data()
        inputs, targets = data.train  # type: ignore[misc]
        return Data(train=(inputs, targets), val=(inputs[:12], targets[:12]))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
        loss, weight = super().loss(model, batch)
        total = torch.as_tensor(weight).double()
        if dist.is_initialized():
            dist.all_reduce(total)
        self.log("total", total)
        return loss, weight


class Counting(Odd):
    """Counts the samples of an epoch on each rank, and adds them up at its end."""

    def on_epoch_start(self, epoch: int) -> None:
        del epoch
        self.seen = torch.zeros(())

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
        if model.training:
            self.seen += len(batch[1])
            self.log("logged", len(batch[1]), reduce="sum", over="epoch")
        return super().loss(model, batch)

    def on_epoch_end(self, epoch: int) -> None:
        del epoch
        if dist.is_initialized():
            dist.all_reduce(self.seen)
        self.log("seen", self.seen)


class Growing(Odd):
    """A buffer with a row for each sample that a rank has seen, or for each of its batches.

    Args:
        counts: What it counts: `samples` or `batches`, in `loss`; or epochs in a hook of `rank 1`.
        options: Of `Odd`.
    """

    def __init__(self, counts: str, **options: Any) -> None:
        super().__init__(**options)
        self.counts = counts

    def build_model(self) -> nn.Module:
        super().build_model()
        self.net.norm.register_buffer("rows", torch.zeros(0, 2))
        return self.net

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | float]:
        if model.training and self.counts in ("samples", "batches"):
            self._grow(len(batch[1]) if self.counts == "samples" else 1)
        return super().loss(model, batch)

    def on_epoch_end(self, epoch: int) -> None:
        del epoch
        if self.counts == f"rank {rank_of_process}":
            self._grow(1)

    def _grow(self, number: int) -> None:
        rows = self.net.norm.get_buffer("rows")
        self.net.norm.rows = torch.cat([rows, rows.new_ones(number, 2)])


def _scale(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _scale_data(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data.mul_(0.25)


def _replace(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


_CHANGES = (_scale_data, _scale, _replace)


class _Net(nn.Module):
    def __init__(self, dropout: float, batch_norm: bool, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.first = nn.Linear(5, 8)
        self.norm: nn.Module = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(5, 3)
        self.unused = None if checkpoints else nn.Parameter(torch.ones(4))
        self.rare = None if checkpoints else nn.Parameter(torch.ones(3))
        self.scale: Tensor
        self.register_buffer(
            "scale", torch.ones(1, dtype=torch.float64).expand(3), persistent=False
        )

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.first(inputs)
        if self.checkpoints:
            first = sum(
                checkpoint(self.first, (part * inputs).requires_grad_(), use_reentrant=True)
                for part in (0.5, 2.0)
            )
        hidden = self.drop(torch.tanh(self.norm(first)))
        out: Tensor = self.last(F.linear(hidden, self.first.weight.t())) * self.scale  # tied
        if self.rare is None:
            return out
        rare = inputs[:, 0] > 1.5
        return out + rare.to(out)[:, None] * self.rare if bool(rare.any()) else out


def config(workers: int = 1, task: Mapping[str, Any] | None = None, **train: Any) -> TrialConfig:
    """Return a run of 13 epochs with four windows each: 52 steps."""
    options = dict(train)
    return TrialConfig.model_validate(
        {
            "task": {"name": "tests.rank_training:Odd", **(task or {})},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": options.pop("epochs", 13)},
            "checkpoint": {"every": options.pop("every", "5 steps"), "keep": 2},
            "patience": options.pop("patience", None),
            "seed": 5,
            "workers": workers,
            "train": {
                "batch_size": 12,
                "accumulation": 2,
                "optimizer": {"name": "adamw", "lr": 0.05},
                **options,
            },
        }
    )


def train_as_rank(rank: int, place: Any, runs: Sequence[dict[str, Any]]) -> list[str]:
    """Follow one run after the other; return how each ended."""
    del place  # each run has its own
    global rank_of_process
    rank_of_process = rank
    torch.set_num_threads(1)
    ends = []
    for run in runs:
        if rank >= run["place"]["size"]:
            ends.append("")
            continue
        try:
            follow(
                TrialConfig.model_validate(run["config"]),
                Path(run["directory"]),
                GroupPlace(**run["place"]),
                rank,
                device="cpu",
                accept_workers=run["accept_workers"],
            )
            ends.append("")
        except TrainingError as error:
            ends.append(f"{error.kind}: {error}")
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


class Groups:
    """The first rank of several runs; the others are child processes that outlive each run.

    Args:
        runs: A configuration and a directory for each run.
    """

    def __init__(self, children: LocalRanks, runs: Sequence[tuple[TrialConfig, Path]]) -> None:
        self._children = children
        self._runs = list(runs)
        self._sockets = [listen() for _ in runs]
        self._places = [
            GroupPlace(*socket.getsockname(), config.workers, timeout=TIMEOUT)
            for socket, (config, _) in zip(self._sockets, runs, strict=True)
        ]

    def begin(
        self,
        *,
        accept_workers: Sequence[int] = (),
        function: str = f"{__name__}:train_as_rank",
        place: Mapping[str, Any] | None = None,
    ) -> None:
        """Let the children follow all runs, one after the other.

        Args:
            accept_workers: The runs that may have another number of ranks than before.
            function: What the children call instead, which calls `train_as_rank` itself.
            place: For that function.
        """
        self._accepted = set(accept_workers)
        self._children.begin(
            function,
            place or {},
            runs=[
                {
                    "config": config.model_dump(mode="json"),
                    "directory": str(directory),
                    "place": asdict(place),
                    "accept_workers": number in self._accepted,
                }
                for number, ((config, directory), place) in enumerate(
                    zip(self._runs, self._places, strict=True)
                )
            ],
        )

    @contextmanager
    def first(self, number: int, **options: Any) -> Iterator[Trainer]:
        """Open the trainer of the first rank of a run."""
        config, directory = self._runs[number]
        ranks = RankGroup.join(self._places[number], 0, listening=self._sockets[number])
        with ranks:
            opened = open_trainer(
                config,
                directory,
                device="cpu",
                ranks=ranks,
                accept_workers=number in self._accepted,
                **options,
            )
            assert isinstance(opened, Trainer)
            with opened:
                yield opened


def to_end(trainer: Trainer) -> None:
    """Train a run to its end."""
    for _ in trainer.events():
        pass


def parameters(trainer: Trainer) -> list[Tensor]:
    """Return copies of the parameters."""
    return [p.detach().clone() for p in trainer.model.parameters()]


def curve(directory: Path) -> list[Row]:
    """Return the rows of a run without what a clock measures."""
    return [
        row._replace(
            timestamp_ms=0,
            metrics={k: v for k, v in row.metrics.items() if not _measured(k)},
        )
        for row in read_rows(directory)
    ]


def _measured(name: str) -> bool:
    return name == "train/samples_per_second" or name.startswith("memory/")


class Runs(NamedTuple):
    """The directories of some runs, the errors of those that failed, and how others saw them."""

    root: Path
    errors: dict[str, Exception]
    others: dict[str, str]


def train_in_turn(root: Path, plan: Mapping[str, TrialConfig], *, cut: int) -> Runs:
    """Train runs one after the other, with one group of two processes.

    Args:
        root: Each run has a directory here by its name; `X resumed` goes on with that of `X cut`.
        plan: The runs.
        cut: The step at which the runs `cut` end.
    """
    torch.set_num_threads(1)
    places = {name: root / name.replace("resumed", "cut") for name in plan}
    errors: dict[str, Exception] = {}
    with LocalRanks(2) as children:
        groups = Groups(children, [(one, places[name]) for name, one in plan.items()])
        groups.begin()
        for number, name in enumerate(plan):
            try:
                with groups.first(number) as trainer:
                    if name.endswith("cut"):
                        trainer.stop_at = cut
                    to_end(trainer)
            except Exception as error:  # what a run ends with is compared by the test
                errors[name] = error
        (other,) = children.ends()
    assert other.error is None, errors
    return Runs(root, errors, dict(zip(plan, other.result, strict=True)))


def newest_state(directory: Path) -> dict[str, Any]:
    """Return the newest saved state of a run."""
    store = CheckpointStore(directory)
    newest = store.newest()
    assert newest is not None
    return store.load(newest)
