"""RankShare: the part of each window that one rank of a trial trains or evaluates.

A window is the same whatever the number of ranks: the same samples in the same order. It is cut
into contiguous parts, which differ by one sample at most. The ready batches of a stream cannot be
cut; they are dealt to the ranks in turn. What must not live here: processes and their exchange
(`rank_group.py`), or which samples make up a window (`data.py`, `samplers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainable.errors import ConfigError
from trainable.ranks import Ranks
from trainable.seeding import derive_seed


@dataclass(frozen=True)
class RankShare:
    """One rank's share of the data; by default all of it.

    Attributes:
        rank: The rank, from 0.
        size: The number of ranks.
    """

    rank: int = 0
    size: int = 1

    def part(self, length: int) -> slice:
        """Return this rank's part of a window of so many samples; it may be empty.

        That of rank 0 is empty only if the window is: its BatchNorm statistics are those of all.
        """
        return slice(self._start(self.rank, length), self._start(self.rank + 1, length))

    def micro_size(self, whole: int) -> int:
        """Return the samples of a forward pass, where those of all ranks make up `whole`."""
        return -(-whole // self.size)

    def has(self, number: int) -> bool:
        """Return whether a ready batch is ours, by its number from the epoch's start."""
        return number % self.size == self.rank

    def seed(self, seed: int) -> int:
        """Return a seed of this rank's own; rank 0 has that of a trial of one process."""
        return derive_seed(seed, "rank", self.rank) if self.rank else seed

    def _start(self, rank: int, length: int) -> int:
        return -(-rank * length // self.size)


WHOLE = RankShare()
"""The share of a trial of one process: everything."""


def share_of(ranks: Ranks) -> RankShare:
    """Return a rank's share of the data."""
    return RankShare(ranks.rank, ranks.size)


def check_dealt(size: int, accumulation: int) -> None:
    """Refuse steps of fewer ready batches than ranks: some ranks would have nothing to train."""
    if accumulation < size:
        raise ConfigError(
            f"{accumulation}, and train gives batches, which are dealt to {size} ranks: a "
            "batch is one forward pass, and a step needs at least one for each rank; write "
            f"train.accumulation: {size}, with batches smaller by the same factor if the "
            "samples of a step are to stay as they are; or let train give samples",
            key="train.accumulation",
        )
