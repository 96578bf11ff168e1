"""SampledPlan: windows whose samples a sampler of the task chooses.

The sampler is asked when an epoch begins, under a seed of the run and the epoch, and gives the
order of the whole epoch. It is also asked when the run is built, for the length of an epoch.
The order of the current epoch is part of a checkpoint. So a run that resumes in the middle of an
epoch trains the same samples, even if the sampler would now choose others.
What must not live here: fetching samples (`data.py`), or checking samplers (`splits.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from trainable.errors import ConfigError, TaskError
from trainable.seeding import (
    derive_seed,
    preserved_host_rng,
    seed_generators_of,
    seed_host,
)
from trainable.task_code import data_code

_MOST_PER_SAMPLE = 100
"""A sampler that gives so many times the number of samples is taken to be endless."""


class SampledPlan:
    """The assignment of samples to windows by a sampler or a batch sampler."""

    def __init__(
        self,
        sampler: Any,
        *,
        in_batches: bool,
        num_indices: int,
        batch_size: int,
        accumulation: int,
        seed: int,
        drop_last: bool = False,
    ) -> None:
        self.seed = seed
        # A change of `train.batch_size` does not move the position in lists.
        self.batch_size = 1 if in_batches else batch_size
        self._size, self._drop_last = batch_size, drop_last
        self._sampler, self.in_batches = sampler, in_batches
        self.num_built = self._num_indices = num_indices
        self._accumulation = accumulation
        self._epoch = 0
        self._order, self._sizes = self._draw(0)
        self._check_windows()
        self.windows = self.num_windows(0)
        self.samples = sum(self._window_sizes())

    def begin(self, epoch: int, num_samples: int) -> None:
        """Ask the sampler for an epoch, as it is now, of a data set that has so many samples."""
        self._num_indices = num_samples
        self._epoch = -1
        self._go_to(epoch)

    def resume(self, epoch: int, num_samples: int) -> None:
        """Resume within an epoch, whose order was restored."""
        self._num_indices = num_samples
        self._go_to(epoch)

    def num_windows(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""
        self._go_to(epoch)
        return len(self._window_sizes())

    def size(self, window: int) -> int:
        """Samples of a window of the current epoch."""
        return self._window_sizes()[window]

    def micro_size(self, size: int) -> int:
        """Samples of one forward pass, in a window of `size` samples."""
        whole = size if self.in_batches else self._size
        return -(-whole // self._accumulation)

    def indices(self, epoch: int, start: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the indices of the samples of each window from `start` on, on a device."""
        self._go_to(epoch)
        sizes = self._window_sizes()
        order = self._order.to(device)
        first = sum(sizes[:start])
        for size in sizes[start:]:
            yield order[first : first + size]
            first += size

    def digest(self, epoch: int) -> str:
        """Return what tells the order of an epoch, and its windows, from another one."""
        self._go_to(epoch)
        order = hashlib.sha256(self._order.numpy().data)
        order.update(repr(self._window_sizes()).encode())
        return order.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the current epoch."""
        return {
            "seed": self.seed,
            "epoch": self._epoch,
            "order": self._order,
            "sizes": self._sizes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the order of an epoch; that of another run is drawn anew, by this run's seed."""
        if state["seed"] != self.seed:
            return
        self._epoch, self._order = state["epoch"], state["order"]
        self._sizes = state["sizes"]

    def _go_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._order, self._sizes = self._draw(epoch)
            self._epoch = epoch
            self._check_windows()  # a run would begin one empty epoch after the other

    def _check_windows(self) -> None:
        if not self._window_sizes():
            raise ConfigError(
                f"{self._size} and the sampler chooses {len(self._order)} samples; with drop_last "
                "no step remains; lower it or set train.loader.drop_last: false",
                key="train.batch_size",
            )

    def _window_sizes(self) -> list[int]:
        if self._sizes is not None:
            return self._sizes
        whole, rest = divmod(len(self._order), self._size)
        return [self._size] * whole + ([rest] if rest and not self._drop_last else [])

    def _draw(self, epoch: int) -> tuple[Tensor, list[int] | None]:
        """Ask the sampler for an epoch; return its indices, and the sizes of its lists."""
        seed = derive_seed(self.seed, "sampler", epoch)
        with preserved_host_rng(), data_code("the sampler"):
            seed_host(seed)
            seed_generators_of(self._sampler, seed)
            for one in (self._sampler, getattr(self._sampler, "sampler", None)):
                if callable(getattr(one, "set_epoch", None)):
                    one.set_epoch(epoch)  # type: ignore[union-attr]
            most = _MOST_PER_SAMPLE * self._num_indices
            found = list(islice(iter(self._sampler), most + 1))
        where = f"the sampler, asked for epoch {epoch + 1},"
        if not found or len(found) > most:
            raise TaskError(
                f"{where} gave {'more than ' if found else ''}{most if found else 0} items; it "
                "gives those of one epoch and ends; let its __iter__() do so"
            )
        sizes = None
        try:
            if self.in_batches:
                sizes = [len(batch) for batch in found]
                found = [index for batch in found for index in batch]
            order = torch.tensor([int(index) for index in found])
        except (TypeError, ValueError) as problem:
            what = "lists of indices" if self.in_batches else "indices"
            raise TaskError(
                f"{where} gave what cannot be used ({problem}); a "
                f"{'batch ' if self.in_batches else ''}sampler gives {what}; correct it, or give "
                f"it as {'sampler' if self.in_batches else 'batch_sampler'}="
            ) from problem
        if sizes is not None and 0 in sizes:
            raise TaskError(f"{where} gave an empty list; each list is one step; leave it out")
        if int(order.min()) < 0 or int(order.max()) >= self._num_indices:
            raise TaskError(
                f"{where} gave indices from {int(order.min())} to {int(order.max())}, and train "
                f"has {self._num_indices} samples; an index is at least 0 and below that; "
                "correct the sampler"
            )
        return order, sizes


def check_sampler(plan: SampledPlan) -> None:
    """Refuse a sampler that chooses other samples when it is asked again for the same epoch."""
    first = plan._draw(1)
    plan._draw(2)
    again = plan._draw(1)
    if not torch.equal(first[0], again[0]) or first[1] != again[1]:
        raise TaskError(
            f"{type(plan._sampler).__name__} chooses other samples when it is asked again for the "
            "same epoch under the same seed; a resumed run asks a new sampler; draw from the "
            "global generators of Python, NumPy or torch, or from a generator in an attribute, "
            "and count epochs in set_epoch(epoch)"
        )
