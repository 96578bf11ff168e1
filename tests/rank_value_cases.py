"""What the ranks of a group do in `test_rank_values.py`; each returns plain data."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from tests.rank_training import train_as_rank
from trainable.config import LoaderConfig, TrainConfig
from trainable.data import SplitReading, WindowPlan, open_source
from trainable.group_joining import GroupPlace
from trainable.logged import collecting
from trainable.parallel.rank_checks import check_built_alike
from trainable.parallel.rank_group import RankGroup
from trainable.parallel.rank_values import evaluate, evaluates_in_parts, means_of_ranks
from trainable.precision import Precision
from trainable.ranks import ALONE, Ranks, share_of
from trainable.seeding import HostRngState
from trainable.streams import open_stream
from trainable.task import Data, Task

CPU = torch.device("cpu")


class Judged(Task):
    """A task of three classes, in float64, that counts its evaluations."""

    samples = 23

    def __init__(self) -> None:
        self.evaluated: list[int] = []

    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()

    def build_data(self) -> Data:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.samples, 4, generator=generator, dtype=torch.float64)
        targets = torch.randint(3, (self.samples,), generator=generator)
        targets[::5] = -100
        return Data((inputs, targets), (inputs, targets))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.evaluated.append(len(batch[0]))
        self.log("largest", batch[0].abs().sum(), reduce="sum")
        return super().loss(model, batch)


class Few(Judged):
    """Fewer samples than ranks."""

    samples = 2


class Ignored(Judged):
    """No target counts."""

    def build_data(self) -> Data:
        data = super().build_data()
        data.val[1].fill_(-100)  # type: ignore[index]
        return data


class Failing(Judged):
    """Fails on the rank that meets sample 9."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        ninth = self.build_data().val[0][9]  # type: ignore[index]
        if bool((batch[0] == ninth).all(1).any()):
            raise ValueError("bad sample 9")
        return super().loss(model, batch)


class Own(Judged):
    """Evaluates itself: the median, which is no sum."""

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        model.eval()
        inputs = torch.cat([batch[0] for batch in batches])
        self.evaluated.append(len(inputs))
        self.log("seen", len(inputs))
        return {"median": inputs.median(), "loss": 0.5}


class OwnFailing(Judged):
    """Its own evaluation fails."""

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        raise ValueError(f"no curve of {model} for {batches}")


class Reading(Task):
    """A float64 task whose samples come in one of several ways, and which logs.

    Args:
        kind: `loader`, `stream`, `batches` or `own`: its own evaluation.
    """

    def __init__(self, kind: str = "loader") -> None:
        self.kind = kind

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 3).double()

    def build_data(self) -> Data:
        inputs, targets = Judged().build_data().train  # type: ignore[misc]
        samples = TensorDataset(inputs, targets)
        if self.kind in ("stream", "batches"):
            stream = Rows(samples, 5 if self.kind == "batches" else 0)
            return Data(stream, stream, batched=self.kind == "batches")
        return Data(samples, samples)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total, weight = super().loss(model, batch)
        self.log("mean", batch[0].mean(), weight=len(batch[0]))
        self.log("seen", len(batch[0]), reduce="sum", over="step")
        if model.training:
            self.log("epoch/seen", len(batch[0]), reduce="sum", over="epoch")
        return total, weight

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        assert self.kind == "own"
        batches = list(batches)
        return {**Task.evaluate(self, model, batches), "batches": len(batches)}


class Parted(Reading):
    """The same with the default evaluation."""

    evaluate = Task.evaluate


class Asking(Reading):
    """Divides its data, and adds up its evaluation, wherever torch says that there are ranks."""

    def build_data(self) -> Data:
        samples: Any = super().build_data().val
        if self.kind == "asks in a stream":
            return Data(Divided(samples, 0), Divided(samples, 0))
        share = {"num_replicas": _asked()[1], "rank": _asked()[0]}
        val = DataLoader(samples, 4, sampler=DistributedSampler(samples, **share))
        return Data(samples, val, sampler=DistributedSampler(samples, **share))

    def evaluate(self, model: nn.Module, batches: Any) -> Any:
        batches = list(batches)
        seen = torch.tensor(sum(len(inputs) for inputs, _ in batches))
        if dist.is_initialized():
            dist.all_reduce(seen)
        return {**Task.evaluate(self, model, batches), "samples": seen}


def _asked() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Mined(Reading):
    """Trains a sample more often the larger its loss was: each rank knows its own part alone."""

    evaluate = Task.evaluate

    def build_data(self) -> Data:
        inputs, targets = Judged().build_data().train  # type: ignore[misc]
        self.losses = torch.ones(len(inputs))
        samples = TensorDataset(inputs, targets, torch.arange(len(inputs)))
        return Data(samples, samples, sampler=Weighed(self))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets, numbers = batch
        total, weight = super().loss(model, (inputs, targets))
        self.losses[numbers] = total.item()
        return total, weight


class Weighed:
    """Draws samples by the losses that a task has seen."""

    def __init__(self, task: Mined) -> None:
        self.task = task

    def __iter__(self) -> Any:
        return iter(torch.multinomial(self.task.losses, len(self.task.losses)).tolist())


class Rows(IterableDataset[Any]):
    """The samples of a data set, or batches of them, from a position that can be restored."""

    def __init__(self, samples: Any, batch: int) -> None:
        self.samples, self.batch, self.at = samples, batch, 0

    def __len__(self) -> int:
        return -(-len(self.samples) // (self.batch or 1))

    def __iter__(self) -> Any:
        while self.at < len(self.samples):
            first, self.at = self.at, self.at + (self.batch or 1)
            yield self.samples[first : self.at] if self.batch else self.samples[first]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Divided(Rows):
    """Samples of which a process reads what torch says is its share."""

    def __len__(self) -> int:
        return super().__len__() // _asked()[1]

    def __iter__(self) -> Any:
        rank, size = _asked()
        return (one for place, one in enumerate(super().__iter__()) if place % size == rank)


class Items(IterableDataset[Any]):
    """A stream; `every` and `first` divide it, as a stream may do itself."""

    def __init__(self, every: int = 1, first: int = 0, most: int = 24) -> None:
        self.every, self.first, self.most = every, first, most

    def __iter__(self) -> Any:
        return (torch.tensor(float(one)) for one in range(self.first, self.most, self.every))


def evaluated(task: Judged, ranks: Ranks) -> dict[str, Any]:
    """Evaluate as a run does; return metrics, logged values and what this rank evaluated."""
    model = task.build_model()
    if not ranks.is_first:
        with torch.no_grad():
            model[1].running_mean[0] += 1.0  # type: ignore[index, operator]
    val = task.build_data().val
    shared = evaluates_in_parts(task)
    source = open_source(
        TensorDataset(*val) if isinstance(task, Few) else val,  # type: ignore[arg-type, misc]
        WindowPlan(task.samples, 8, 8, shuffle=False),
        SplitReading("val", CPU, share=share_of(ranks if shared else ALONE)),
    )
    before = HostRngState()
    step = SimpleNamespace(task=task, model=model, ranks=ranks, is_sharded=False)
    step.precision, step.average = Precision("fp32", CPU), None
    with collecting(task) as log:
        log.prefix = "val/"
        metrics, logged = evaluate(
            step,  # type: ignore[arg-type]
            source.windows(0),
            split="val",
            seed=7,
            take_logged=log.take,
        )
    assert not before.has_changed()
    assert model.training
    return {"metrics": metrics, "logged": logged, "evaluated": task.evaluated}


def logged(ranks: Ranks) -> list[dict[str, float]]:
    """Log in three steps; some names on some ranks only."""
    task, taken = Judged(), []
    with collecting(task) as log:
        for step in range(3):
            task.log("loss", torch.tensor(float(ranks.rank + step)), weight=ranks.rank + 1)
            task.log("count", 2, reduce="sum")
            if ranks.rank == 1:
                task.log("rare", 5.0)
                task.log("rare", 6.0)
            if ranks.rank == step:
                task.log("own", float(step), weight=0)
            taken.append(log.take())
    return means_of_ranks(taken, ranks)


def streamed(stream: Items, ranks: Ranks, workers: int = 0) -> list[list[float]]:
    """Read the training windows of a stream."""
    source = open_stream(
        Data(stream, stream),
        TrainConfig(batch_size=6, loader=LoaderConfig(num_workers=workers)),
        SplitReading("train", CPU, LoaderConfig(num_workers=workers), share=share_of(ranks)),
        seed=1,
        ranks=ranks,
    )
    try:
        return [
            [one for batch in window for one in batch.tolist()] for window in source.windows(0)
        ]
    finally:
        source.close()


def said(call: Callable[[], object]) -> list[str]:
    """Return the class and the message of what a call raises."""
    try:
        return ["none", str(call())]
    except Exception as error:
        return [type(error).__name__, str(error)]


def run_all(ranks: Ranks) -> dict[str, Any]:
    """Run every case, in the same order on each rank."""
    rank = ranks.rank
    found: dict[str, Any] = {
        kind.__name__: evaluated(kind(), ranks) for kind in (Judged, Few, Own)
    }
    found["logged"] = logged(ranks)
    found["stream"] = streamed(Items(), ranks)
    found["stream in processes"] = streamed(Items(), ranks, workers=1)
    for kind in (Ignored, Failing, OwnFailing):
        found[kind.__name__] = said(lambda kind=kind: evaluated(kind(), ranks))  # type: ignore[misc]
    if ranks.size > 1:
        found["divided"] = said(lambda: streamed(Items(ranks.size, rank), ranks))
        found["divided in processes"] = said(lambda: streamed(Items(3, rank), ranks, workers=1))
        found["shorter"] = said(lambda: streamed(Items(most=24 - 6 * (rank == 2)), ranks))
        built = {"train: its length": 9 + (rank == 1), "model": [0.1]}
        found["built"] = said(lambda: check_built_alike(ranks.gather_plain(built)))
        found["long"] = [len(text) for text in ranks.gather_plain("ä" * 4000 * rank)]
        found["at last"] = ranks.gather_plain(1)
    return found


def run_rank(rank: int, place: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Run every case as a rank above 0, and follow some runs."""
    torch.set_num_threads(1)
    with RankGroup.join(GroupPlace(**place), rank) as ranks:
        found = run_all(ranks)
    return found | {"ends": train_as_rank(rank, {}, runs)}
