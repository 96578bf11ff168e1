"""What each rank of a trial holds and trains: its samples, its memory, and what sharding saves.

What must not live here: how many CPUs and GPUs a trial has (`resources`), and dividing samples or
parameters (`trainable`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sweeps.engine.task_check import TaskFacts
from sweeps.formatting import format_bytes
from trainable.config import TrialConfig


@dataclass(frozen=True)
class RankSizes:
    """The sizes of one rank of a trial.

    With ranks that hold the whole model, each one has all weights, gradients and optimizer state,
    and a copy of the gradients for the exchange. With `train.sharding: fsdp` each has its part of
    the three; the block in use comes on top, gathered whole. Parameters are cut between rows, so
    the parts of the first rank are the largest: `ceil(rows / workers)` rows of each.

    Attributes:
        workers: How many ranks a trial has; where that is searched, the most.
        sharded: Whether the ranks divide parameters, gradients and optimizer state.
        batch_size: Samples of a step, over all ranks.
        micro_batch_size: The most samples that a rank takes through the model at once.
        weight_bytes: The weights of the whole model that are trained.
        shard_bytes: The first rank's part of them, if they are divided.
        optimizer_bytes: The optimizer's state for all of them; None: unknown.
        fewest_workers: The fewest ranks of a trial; None: all trials have as many.
    """

    workers: int
    sharded: bool
    batch_size: int
    micro_batch_size: int
    weight_bytes: int
    shard_bytes: int
    optimizer_bytes: int | None
    fewest_workers: int | None = None

    @classmethod
    def of(
        cls, config: TrialConfig, facts: TaskFacts, *, fewest: int | None = None
    ) -> RankSizes | None:
        """Return the sizes of a trial; None if it is one process, or a loop of the user's own.

        Args:
            config: The trial; where the number of ranks is searched, one with the most.
            facts: What its first batches showed.
            fewest: The fewest ranks of a trial; None: all have as many.
        """
        if config.workers == 1 or facts.own_loop:
            return None
        return cls(
            workers=config.workers,
            sharded=config.train.sharding != "none",
            batch_size=config.train.batch_size,
            micro_batch_size=-(-config.train.micro_batch_size // config.workers),
            weight_bytes=facts.weight_bytes,
            shard_bytes=facts.shard_bytes,
            optimizer_bytes=facts.optimizer_bytes,
            fewest_workers=fewest,
        )

    @property
    def whole_bytes(self) -> int:
        """Weights, gradients and optimizer state of the whole model."""
        return 2 * self.weight_bytes + (self.optimizer_bytes or 0)

    @property
    def part_bytes(self) -> int:
        """The same of the first rank, if they are divided: moments are cut as the weights are."""
        return -(-self.whole_bytes * self.shard_bytes // self.weight_bytes)

    @property
    def exchange_bytes(self) -> int:
        """The copy of the gradients that ranks add up; none where they are divided."""
        return 0 if self.sharded else self.weight_bytes

    @property
    def rank_bytes(self) -> int:
        """What one rank holds besides activations."""
        return (self.part_bytes if self.sharded else self.whole_bytes) + self.exchange_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes for JSON."""
        return asdict(self) | {"rank_bytes": self.rank_bytes, "part_bytes": self.part_bytes}

    def sentences(self) -> list[str]:
        """Return the sizes in sentences."""
        least, rest = divmod(self.batch_size, self.workers)
        share = f"{least} or {least + 1}" if rest else f"{least}"
        known = "" if self.optimizer_bytes is not None else ", the optimizer's state left out"
        each = f"{format_bytes(self.rank_bytes)} of weights, gradients and optimizer state each"
        whole = " with the whole model" if self.sharded else ""
        if self.sharded:
            saved = format_bytes(self.whole_bytes - self.part_bytes)
            each = f"{each}, of {format_bytes(self.whole_bytes)}: sharding saves {saved}{known}"
        else:
            saved = format_bytes(self.rank_bytes - self.part_bytes)
            exchange = f"{format_bytes(self.exchange_bytes)} of it to exchange gradients"
            each = f"{each}, {exchange}{known}; train.sharding: fsdp would save {saved}"
        number, takes = f"{self.workers}", "each takes"
        if self.fewest_workers is not None:
            number = f"{self.fewest_workers} to {self.workers}"
            takes = f"of {self.workers}, each takes"
        return [
            f"{number} for each trial; {takes} {share} of the {self.batch_size} samples "
            f"of a step, at most {self.micro_batch_size} at a time",
            each,
            f"time and memory were measured in one process{whole}, without an exchange",
        ]
