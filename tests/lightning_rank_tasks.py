"""Lightning modules that ask for the other ranks; the ranks of a trial import them by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC, BinaryPrecision

from tests import rank_training
from trainable.adapters.lightning import LightningTask

NUM_SAMPLES = 32


class Net(LightningModule):
    """In float64; metrics of samples that no mean of parts is equal to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.precision, self.ranking = BinaryPrecision(), BinaryAUROC()
        self.val_ranking = BinaryAUROC()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        del batch_idx
        x, y = batch
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, y)
        score = logits.softmax(1)[:, 1].detach()
        self.precision.update(score, y)
        self.ranking.update(score, y)
        self.log("precision", self.precision, on_step=False, on_epoch=True)
        self.log("ranking", self.ranking, on_step=False, on_epoch=True)
        hits = (logits.argmax(1) == y).sum()
        self.log("hits", hits, on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        del batch_idx
        x, y = batch
        logits = self.layers(x)
        self.val_ranking.update(logits.softmax(1)[:, 1], y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_ranking", self.val_ranking)
        self.log("val/processes", float(self.trainer.world_size))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5 * self.trainer.world_size)


class Points(LightningDataModule):
    """Samples in windows of 8 or, with an odd number, a last one of which a rank has none."""

    num_samples = NUM_SAMPLES

    def setup(self, stage: str) -> None:
        del stage
        x = torch.randn(self.num_samples + 9, 4, generator=torch.Generator().manual_seed(0))
        x = x.double()
        self.points = TensorDataset(x, (x.sum(1) + torch.sin(9 * x[:, 0]) > 0).long())

    def train_dataloader(self) -> DataLoader[Any]:
        part = torch.utils.data.Subset(self.points, range(self.num_samples))
        return DataLoader(part, batch_size=8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.points, batch_size=8)


class Odd(Points):
    num_samples = NUM_SAMPLES + 1


class Uneven(Points):
    num_samples = NUM_SAMPLES + 3


class Hooked(Net):
    """Gathers in the hooks of an epoch, and says there which rank it is."""

    def on_train_epoch_start(self) -> None:
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += len(batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        ranks = self.all_gather({"seen": self.seen, "rank": [self.global_rank]})
        self.log("seen", ranks["seen"].sum())
        self.log("ranks", ranks["rank"][0].sum())
        mean = self.trainer.strategy.reduce(torch.tensor(float(self.seen)))
        self.log("seen_mean", mean)
        self.log("processes", float(self.trainer.world_size))
        self.trainer.strategy.barrier()
        self.log("local", float(self.local_rank + self.trainer.local_rank), reduce_fx="sum")
        self.print("seen by rank", self.global_rank)
        self.log("first", float(self.trainer.is_global_zero), reduce_fx="sum")
        self.log("own_first", float(self.trainer.global_rank), rank_zero_only=True)
        if self.trainer.is_global_zero:
            self.log("of_first", 3.0)
        _note(self)
        self.log("noted", float(getattr(self, "noted", 0)), reduce_fx="sum")


@rank_zero_only
def _note(module: Any) -> None:
    module.noted = 1


class Contrastive(Net):
    """Each sample is compared with all samples of the batch, of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx)
        x, y = batch
        found = self.all_gather({"code": self.layers(x), "kind": y}, sync_grads=True)
        if self.trainer.world_size > 1:  # as Lightning adds a dimension only then
            found = {name: value.flatten(0, 1) for name, value in found.items()}
        code = nn.functional.normalize(found["code"], dim=1)
        alike = found["kind"][:, None] == found["kind"]
        loss = (code @ code.t() - alike.double()).square().mean()
        self.log("contrast", loss)
        return loss


class CallsWhere(Net):
    """Calls something on rank 1 alone, in a step or a hook after the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch and rank_training.rank_of_process:
            raise ValueError("bad sample 17")
        self.all_gather(loss)
        return loss


class Skewed(Net):
    """Logs a metric on the first rank alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        del batch_idx
        x, y = batch
        logits = self.layers(x)
        self.precision.update(logits.softmax(1)[:, 1].detach(), y)
        if self.trainer.is_global_zero:
            self.log("precision", self.precision, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)


MODULES: Mapping[str, type[Net]] = {
    one.__name__: one for one in (Net, Hooked, Contrastive, CallsWhere, Skewed)
}
DATA: Mapping[str, type[Points]] = {one.__name__: one for one in (Points, Odd, Uneven)}


class Ranked(LightningTask):
    def __init__(self, module: str, data: str = "Points") -> None:
        self.module, self.data = module, data

    def lightning_module(self) -> LightningModule:
        return MODULES[self.module]()

    def data_module(self) -> LightningDataModule:
        return DATA[self.data]()
