"""Run the generator of a custom loop from yield to yield, on all ranks of a trial in step.

Every rank yields as often as the first one. The first rank says when the loop continues. Entry
`per_rank` of a yielded state is kept for each rank; the rest is that of the first rank.
What must not live here: what a report is (`custom_loop.py`), and the loop's own process group
(`loop_group.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

from trainable import rank_waits
from trainable.errors import ConfigError, TaskError, TrainingError
from trainable.loop_group import LoopGroup
from trainable.rank_group import RankGroup
from trainable.ranks import Ranks
from trainable.step import translate_torch_errors
from trainable.task_code import task_code
from trainable.train_state import check_state

EXHAUSTED = object()
"""Marks the end of the generator; not None, which a loop may yield by mistake."""
PER_RANK = "per_rank"
"""The entry of a state that each rank has its own of."""


class LoopSteps:
    """A custom loop's generator on one rank."""

    def __init__(
        self,
        generator: Generator[Any, None, None],
        ranks: Ranks,
        name: str,
        device: torch.device,
    ) -> None:
        self._generator, self._ranks, self._name, self._device = generator, ranks, name, device
        self._num_yields = 0  # since this process began
        self._others_wait = ranks.is_first and ranks.size > 1
        self.of_ranks: list[dict[str, Any] | None] = []
        """On the first rank: what each further one keeps with the state yielded last."""
        self._group = LoopGroup(ranks) if isinstance(ranks, RankGroup) else None
        self._met = False  # whether the loop has had a process group at a yield

    def next(self) -> object:
        """Run the loop to its next yield on every rank; return what it yields on this one."""
        if self._group is None:
            return self._run()
        self._tell(go_on=True)
        try:
            yielded = self._run()
            own = _own_part(yielded)
        except Exception as error:
            self._group.fail(error)
        places = self._ranks.gather_plain(
            [yielded is EXHAUSTED, own is not None], seconds=rank_waits.WITHOUT_END
        )
        self._check_place([is_over for is_over, _ in places])
        self.of_ranks = []
        if any(has_own for _, has_own in places):
            states = self._ranks.gather({} if own is None else {PER_RANK: own})
            self.of_ranks = [state.get(PER_RANK) for state in (states or [])[1:]]
        return yielded

    def close(self) -> None:
        """Have all ranks close their generators, which run their `finally` blocks."""
        with contextlib.ExitStack() as stack:
            if self._group is not None:
                stack.callback(self._group.close)
            stack.callback(self._generator.close)
            with contextlib.suppress(TrainingError):  # the group has ended
                self._tell(go_on=False)

    @property
    def trains_apart(self) -> bool:
        """Whether there are several ranks, and at no yield the loop had a process group."""
        return self._group is not None and not self._met

    def _run(self) -> object:
        with translate_torch_errors(self._device), task_code():
            yielded = next(self._generator, EXHAUSTED)
        self._met = self._met or (self._group is not None and self._group.is_used)
        return yielded

    def _tell(self, *, go_on: bool) -> None:
        """Tell the other ranks, which wait at a yield, whether the loop continues."""
        if self._others_wait:
            self._others_wait = False
            self._ranks.next_report(go_on=go_on)

    def _check_place(self, ended: list[bool]) -> None:
        """Refuse a loop that yields more or less often on a rank than on the first one."""
        other = [rank for rank, over in enumerate(ended) if over != ended[0]]
        if other:
            here, there = "has ended", "has yielded again"
            if ended[0]:
                here, there = there, here
            raise TaskError(
                f"{self._name} {here} on rank {other[0]} after {self._num_yields} reports, and "
                f"{there} on rank 0; each rank yields as often as rank 0, which alone reports; "
                "write a yield on every rank, such as `yield {}`"
            )
        self._num_yields += 1
        self._others_wait = self._ranks.is_first and not ended[0]


def _own_part(yielded: object) -> dict[str, Any] | None:
    """Return what this rank keeps of a state."""
    state = yielded[1] if isinstance(yielded, tuple) and len(yielded) == 2 else None
    own = state.get(PER_RANK) if isinstance(state, dict) else None
    if own is None:
        return None
    if not isinstance(own, dict):
        raise TaskError(
            f"the state has an entry {PER_RANK!r} of type {type(own).__name__}; it must be a "
            "dict of what this rank alone has, such as {'generator': generator.get_state()}"
        )
    check_state(own)
    return own


def saved_state(state: dict[str, Any], steps: LoopSteps, ranks: Ranks) -> dict[str, Any]:
    """Return the parts of a checkpoint that hold a loop's state."""
    if ranks.size == 1:
        return {"loop": state}
    of_ranks = steps.of_ranks or [None] * (ranks.size - 1)
    return {"loop": state, "ranks": of_ranks}


def restored_state(
    saved: dict[str, Any], ranks: Ranks, *, accept_workers: bool = False
) -> dict[str, Any]:
    """Return the state from which a rank resumes: the first rank's, with its own part.

    A rank that yielded no such part, or that the run did not have before, gets none.
    """
    state: dict[str, Any] = saved["loop"]
    of_ranks = saved.get("ranks", [])
    before = len(of_ranks) + 1
    if before != ranks.size and not accept_workers:
        raise ConfigError(
            f"{ranks.size}, and the checkpoint is of a run on {before}; what each rank has kept "
            f"for itself is of as many ranks; write workers: {before}, or accept the change",
            key="resources.workers",
        )
    if ranks.is_first:
        return state
    own = of_ranks[ranks.rank - 1] if len(of_ranks) >= ranks.rank else None
    shared = {name: part for name, part in state.items() if name != PER_RANK}
    return shared if own is None else shared | {PER_RANK: own}
