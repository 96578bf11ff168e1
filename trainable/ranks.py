"""The ranks of a trial: the processes that train one model together, in lock-step.

`Ranks` is a trial of one process, in which every method returns what it is given; `RankGroup`
(`parallel/rank_group.py`) is one of several. Rank 0, the first rank, alone reports, saves and
decides. Every rank calls the same methods in the same order; each such call is a collective
operation. What must not live here: how a step is taken (`step.py`), how ranks exchange
(`parallel`), and how the processes start (`processes`, `adapters/ray_ranks.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from trainable.errors import ConfigError
from trainable.seeding import derive_seed

Scalar = float | Tensor
ALIKE_REMEDY = (
    "each rank reads all samples, and Gradsweep gives it its part of each batch; let nothing in "
    "the data depend on the rank or the process: no split_by_node, split_dataset_by_node or "
    "DistributedSampler, no order of a set or a directory"
)


class WindowSums(NamedTuple):
    """What the micro-batches of a window add up to, besides their gradients."""

    loss: Scalar
    weight: Scalar
    passes: int


class Decisions(NamedTuple):
    """What the first rank decides about the end of a step."""

    stops: bool = False
    saves: bool = False
    is_observed: bool = False


@dataclass
class Message:
    """What a rank tells the others at the end of a context; see `Ranks.together`.

    `own` is plain data as JSON has it; `of_ranks` is filled after the context.
    """

    own: Any = None
    of_ranks: list[Any] = field(default_factory=list)


class Ranks:
    """The ranks of a trial of one process."""

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reports, saves and decides."""
        return self.rank == 0

    def exchange(
        self,
        compute: Callable[[], WindowSums],
        parameters: Sequence[Tensor],
        decide: Callable[[], Decisions],
        device: torch.device | None = None,
    ) -> tuple[WindowSums, Decisions | None]:
        """Compute this rank's part of a window; return the sums, and leave the summed gradients.

        Beside them what the first rank decides; None for one process. Every rank calls `decide`
        once it has computed: it may raise, such as the error of a write.
        """
        del parameters, decide, device
        return compute(), None

    def gather_plain(
        self, value: Any, error: BaseException | None = None, *, seconds: float | None = None
    ) -> list[Any]:
        """Return the value of each rank, or raise on every rank if one of them has an error.

        A rank with an error raises that one. The others raise an error of the same kind, with the
        rank's number, its message and its traceback. All that ranks say to each other, but for
        tensors and states, is such a message. So a rank that fails need not know which message the
        others wait for.
        """
        del seconds
        if error is not None:
            raise error
        return [value]

    @contextlib.contextmanager
    def together(self, *, seconds: float | None = None) -> Iterator[Message]:
        """Gather the values of all ranks at the end of the context.

        What one rank raises within it is raised on all, as by `gather_plain`.
        """
        message = Message()
        yield message
        message.of_ranks = self.gather_plain(message.own, seconds=seconds)

    def agree(self, value: Any) -> Any:
        """Return the first rank's value: plain data as JSON has it."""
        return self.gather_plain(value if self.is_first else None)[0]

    def broadcast(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the first rank's state, with its tensors on the CPU; None if it has none."""
        return state

    def gather(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the states of all ranks on the first rank, and None on the others."""
        return [state]

    def gather_tensor(self, tensor: Tensor, *, with_gradient: bool = False) -> Tensor:
        """Return the tensor of each rank, along a new first dimension; of one process as it is.

        For the code of a task, in `loss` and hooks; see `ranks_here` (`parallel/rank_group.py`).
        """
        del with_gradient
        return tensor

    def expect_unequal_passes(self, remedy: str) -> None:
        """Let `gather_tensor` fail in a step: ranks may make different numbers of passes."""

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks; the same bits on every rank."""

    def name_parameters(self, model: nn.Module) -> None:
        """Call parameters in errors as this model does."""

    def leave_on_failure(self) -> None:
        """Let a rank that fails leave at once, and not tell the others at the next exchange.

        They may be in an operation inside a sharded model, where they cannot be told.
        """

    def beside(self) -> Ranks:
        """Return the same ranks in a second group, for another thread of each."""
        return self

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's values into tensors that each rank has in the same order."""

    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the first rank's buffers, those of the state dict, into the other ranks' model."""

    def next_report(self, *, go_on: bool = True) -> bool:
        """Wait until the first rank says whether the run continues, without a limit."""
        return go_on

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group. The collective operations of the others raise from now on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)


ALONE = Ranks()
"""The ranks of a trial of one process."""


class FirstRank(Ranks):
    """The first rank without the others, to check and time its part of a step in one process."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather_plain(
        self, value: Any, error: BaseException | None = None, *, seconds: float | None = None
    ) -> list[Any]:
        """Return the value of each rank."""
        return super().gather_plain(value, error, seconds=seconds) * self.size


@dataclass(frozen=True)
class RankShare:
    """One rank's share of the data; by default all of it."""

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
