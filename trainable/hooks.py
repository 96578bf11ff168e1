"""Call the hooks of a task around its epochs and steps, and check what they did.

    on_epoch_start(epoch)    before the first step of an epoch
    on_step_end(step)        after each optimizer step
    on_epoch_end(epoch)      after the last step of an epoch, before its evaluation

Epochs count from 0 and steps from 1. A hook that is not overridden costs nothing. On several ranks
each hook draws the same random numbers on every rank: those of the first one in the hooks of an
epoch, and those of a seed of the step in `on_step_end`, for which no rank waits. What must not
live here: when a run calls them (`loop.py`), and what is saved of their changes
(`object_state.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from trainable.calls import HOOKS
from trainable.errors import TaskError
from trainable.logged import Log
from trainable.optim import members
from trainable.parallel.rank_values import random_of_first
from trainable.ranks import ALONE, Ranks
from trainable.seeding import derive_seed, seeded
from trainable.task import Task, is_overridden
from trainable.user_code.task_code import task_code


class Hooks:
    """Calls the hooks that a task overrides."""

    def __init__(
        self,
        task: Task,
        log: Log,
        model: nn.Module,
        trained: Collection[Tensor],
        ranks: Ranks = ALONE,
        seed: int = 0,
    ) -> None:
        self._task, self._log, self._model = task, log, model
        self._ranks, self._seed = ranks, seed
        self._device = next((p.device for p in trained), torch.device("cpu"))
        self._defined = {name for name in HOOKS if is_overridden(task, name)}
        self._known = {id(parameter) for parameter in trained} if self._defined else set()
        # left out by param_groups() on purpose
        self._known |= {id(parameter) for _, parameter in self._untrained()}
        self._running: list[str] = []

    def epoch_start(self, epoch: int) -> None:
        """Call `on_epoch_start`."""
        self._call_for_epoch("on_epoch_start", epoch)

    def step_end(self, step: int) -> None:
        """Call `on_step_end`."""
        if "on_step_end" in self._defined:
            alone = self._ranks.size == 1
            seed = None if alone else derive_seed(self._seed, "on_step_end", step)
            self._call("on_step_end", step, seeded(seed))

    def epoch_end(self, epoch: int) -> None:
        """Call `on_epoch_end`."""
        self._call_for_epoch("on_epoch_end", epoch)

    def forbid_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a hook that calls `step()` of a run's optimizer fail."""
        if not self._defined:
            return
        running = self._running  # not `self`: the cycle would keep the model in memory

        def refuse(*_: object) -> None:
            if running:
                raise TaskError(
                    f"{running[-1]}() calls step() of the run's optimizer; the run takes each "
                    "step itself, and counts, clips and schedules it; remove the call, or write "
                    'your own loop (see the guide "Your own loop")'
                )

        for one in members(optimizer):
            one.register_step_pre_hook(refuse)

    def _call_for_epoch(self, name: str, epoch: int) -> None:
        self._log.in_epoch_hook = True
        try:
            if name in self._defined:
                self._call(name, epoch, random_of_first(self._ranks, self._device))
        finally:
            self._log.in_epoch_hook = False
        if self._defined:
            self._check_parameters()

    def _call(self, name: str, number: int, drawing: AbstractContextManager[None]) -> None:
        self._running.append(name)
        try:
            with drawing, task_code():
                getattr(self._task, name)(number)
        finally:
            self._running.pop()

    def _check_parameters(self) -> None:
        for name, parameter in self._untrained():
            if id(parameter) not in self._known:
                raise TaskError(
                    f"{name!r} requires a gradient since a hook was called, and no optimizer "
                    "updates it: it is in no group of param_groups(); make all modules in "
                    "build_model(), and list frozen parameters in param_groups() too, as the "
                    "default does"
                )

    def _untrained(self) -> list[tuple[str, Tensor]]:
        """Return the parameters that require a gradient and that no optimizer updates."""
        if not self._defined:
            return []
        return [
            (name, parameter)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._known
        ]
