"""The step of a sharded model: passes in lock-step, and norms over the parts of all ranks.

What must not live here: how a model is sharded (`sharding.py`), and the order of a step
(`step.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainable.config import ClipConfig
from trainable.errors import TaskError
from trainable.evaluation import evaluation_mode
from trainable.logged import muted
from trainable.object_state import ObjectState
from trainable.optim import Clipper
from trainable.parallel.rank_checks import check_trained_alike
from trainable.parallel.sharding import (
    Layout,
    is_sharded,
    local_part,
    sharded_parameters,
    sharded_units,
)
from trainable.ranks import Ranks
from trainable.seeding import seeded
from trainable.step import LeftOut, Step, StepParts
from trainable.streams import Source, StreamSource
from trainable.task import Batch

_CONSTANT = (
    "the loss of a micro-batch does not depend on the model, and under train.sharding: fsdp every "
    "rank computes each backward pass; compute it from the model's output, such as "
    "(output * 0).sum() where there are no targets"
)
_LOST = (
    "under train.sharding: fsdp a rank calls loss() once more on a batch that it has seen, where "
    "other ranks have more, and the change cannot be undone"
)
_UNFROZEN = (
    "loss() has changed which parameters of the model require a gradient, and under "
    "train.sharding: fsdp the ranks must agree on that before a pass; do so in on_epoch_start(), "
    "on_step_end() or on_epoch_end()"
)
_NO_BATCH = (
    "this rank has had no sample yet, and the window has fewer samples than the trial has "
    "workers; write train.loader.drop_last: true, or take fewer workers"
)


class UsedParameters:
    """Which sharded parameters have received a gradient on this rank in the present step.

    One that no rank has used is added as zeros. It has no gradient then, as on one rank: zeros
    would change its moments.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = sharded_parameters(model)
        self._unwatched = set(range(len(self._places)))
        self._used = [False] * len(self._places)
        self.is_counting = True
        for unit in sharded_units(model):
            # After torch's own hook, which gathers the unit's parameters.
            unit.register_forward_pre_hook(self._watch)

    def take(self, ranks: Ranks) -> None:
        """Remove the gradients of those that no rank has used since the last call."""
        # One letter for each: so one operation has those of 4,000 parameters.
        of_ranks = ranks.gather_plain("".join("01"[used] for used in self._used))
        self._used = [False] * len(self._places)
        used = {
            id(p) for (_, _, p), *own in zip(self._places, *of_ranks, strict=True) if "1" in own
        }
        for _, _, parameter in self._places:  # a tied one has several places
            if id(parameter) not in used:
                parameter.grad = None

    def _watch(self, *_: object) -> None:
        for number in list(self._unwatched):
            module, name, sharded = self._places[number]
            whole = module._parameters[name]
            # torch makes the whole parameter once, and frees its memory between the passes
            if whole is not None and whole is not sharded and whole.requires_grad:
                mark = partial(self._mark, number)
                whole.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
                self._unwatched.remove(number)

    def _mark(self, number: int, _: Tensor) -> None:
        self._used[number] |= self.is_counting


class LockStep:
    """Let each rank compute as many passes as the rank with the most micro-batches.

    A rank without a further one computes a pass on a batch that it has seen, in evaluation mode
    and with the factor 0. No gradient, buffer, random generator or logged value changes, and what
    `loss` changes of the task and the model is restored.
    """

    def __init__(
        self,
        parts: StepParts,
        ranks: Ranks,
        val: Source,
        used: UsedParameters,
        objects: Callable[[], Sequence[ObjectState]],
    ) -> None:
        self._used, self._objects = used, objects
        self._task, self._model, self._precision = parts.task, parts.model, parts.precision
        self._names = {id(p): name for name, p in parts.model.named_parameters()}
        self._parameters = list(parts.model.parameters())
        self._ranks = ranks
        self._val = val
        self._seen: Any = None
        self._trained = ""

    def __call__(self, batches: Iterable[Batch], *, backward: bool) -> Iterator[Batch]:
        """Yield this rank's batches; compute further passes while other ranks have batches."""
        remaining = iter(batches)
        self._trained = self._marks_of_trained()
        while True:
            found, error = [], None
            try:
                found = [next(remaining)]
            except StopIteration:
                pass
            except Exception as problem:  # of a data set
                error = problem
            of_ranks = self._ranks.gather_plain([len(found), self._trained], error)
            check_trained_alike(self._parameters, self._names, [marks for _, marks in of_ranks])
            if not any(count for count, _ in of_ranks):
                return
            if not found:
                self._pass(backward)
                continue
            if self._seen is None:
                self._seen = found[0]
            yield found[0]

    def check_trained(self) -> None:
        """Refuse a loss that freezes or unfreezes: the other ranks cannot be asked in a pass."""
        if self._marks_of_trained() != self._trained:
            raise TaskError(_UNFROZEN)

    def _marks_of_trained(self) -> str:
        """Return a letter of each parameter, for `check_trained_alike`."""
        return "".join("Nn"[p.requires_grad] for p in self._parameters)

    def _pass(self, backward: bool) -> None:
        if self._seen is None:
            self._seen = _first_batch(self._val)
        if self._seen is None:
            raise TaskError(_NO_BATCH)
        with contextlib.ExitStack() as passing:
            for one in self._objects():  # first: not the modes of evaluation
                passing.enter_context(one.kept(lost=_LOST))
            passing.enter_context(evaluation_mode(self._model))
            passing.enter_context(seeded(0))  # restores the generators
            passing.enter_context(muted(self._task))
            passing.enter_context(torch.set_grad_enabled(backward))
            with self._precision.autocast():
                loss, _ = self._task.loss(self._model, self._seen)
            if backward:
                self.check_trained()
                self._used.is_counting = False
                (loss * 0).backward()  # type: ignore[no-untyped-call]
                self._used.is_counting = True


def _first_batch(source: Source) -> Any:
    """Return the first batch of samples that have an index; None if there is none."""
    if isinstance(source, StreamSource):  # which the ranks read together
        return None
    return next((batch for window in source.windows(0) for batch in window), None)


class ShardedStep(Step):
    """Take the optimizer steps of a sharded model; see `Step`.

    The backward passes themselves add the gradients of sharded parameters, so the exchange adds
    those of other parameters only: such as a loss's own.
    """

    def __init__(self, parts: StepParts, clip: ClipConfig, ranks: Ranks, val: Source) -> None:
        given = [p for group in parts.optimizer.param_groups for p in group["params"]]
        super().__init__(parts, ShardedClipper(clip, given, ranks), ranks)
        self.layout = Layout(self.model, self.optimizer, self.ranks)
        self.exchanged = [p for p in self.parameters if not is_sharded(p)]
        self.left_out = LeftOut([p for p in self.left_out.parameters if not is_sharded(p)])
        self._used = UsedParameters(self.model)
        self._lock_step = LockStep(parts, ranks, val, self._used, lambda: self.objects)

    def passes(self, window: Iterable[Batch], *, backward: bool = False) -> Iterable[Batch]:
        """Return the micro-batches of a window, with which every rank stays in step."""
        return self._lock_step(window, backward=backward)

    def _backward(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise TaskError(_CONSTANT)
        self._lock_step.check_trained()
        super()._backward(loss)

    def _gradients(self) -> list[Tensor]:
        self._used.take(self.ranks)
        super()._gradients()
        return [local_part(p.grad) for p in self.parameters if p.grad is not None]


class ShardedClipper(Clipper):
    """Divide and clip gradients of which this rank has parts, by norms of the whole gradients."""

    def __init__(self, config: ClipConfig, parameters: list[Tensor], ranks: Ranks) -> None:
        super().__init__(config)
        self._parameters, self._ranks = parameters, ranks

    def _norms(self, gradients: list[Tensor]) -> Tensor:
        norms = super()._norms(gradients)
        squares = norms.double().square()
        if not self._ranks.is_first:  # count once what every rank has whole
            whole = [p for p in self._parameters if p.grad is not None]
            squares *= torch.tensor([is_sharded(p) for p in whole], device=squares.device)
        self._ranks.add_up(squares)
        return squares.sqrt().to(norms.dtype)

    def _largest(self, gradients: list[Tensor]) -> Tensor:
        there = [gradient for gradient in gradients if gradient.numel()]
        own = super()._largest(there) if there else gradients[0].new_zeros(())
        of_ranks = own.new_zeros(self._ranks.size)
        of_ranks[self._ranks.rank] = own
        self._ranks.add_up(of_ranks)
        return of_ranks.amax()
