"""What the ranks of a trial exchange besides gradients: logged values and evaluations.

After each of these calls all ranks have the same values. What must not live here: the exchange
itself (`rank_group.py`), and when a run evaluates or reports (`loop.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainable import rank_waits
from trainable.errors import CheckpointError, TaskError
from trainable.evaluation import as_metrics, evaluated_model, run_evaluation
from trainable.group_joining import hidden_group
from trainable.logged import Sums, combined, fetched, means_of
from trainable.losses import EvaluationSums, evaluation_sums
from trainable.object_state import ObjectState
from trainable.ranks import Ranks, share_of
from trainable.step import LeftOut, Step
from trainable.task import Batch, Task
from trainable.train_state import capture_random, check_state, restore_random


def evaluates_in_parts(task: Task) -> bool:
    """Return whether the ranks evaluate a part each: the task has no `evaluate()` of its own."""
    return getattr(task.evaluate, "__func__", None) is Task.evaluate


def means_of_ranks(taken: Sequence[Sums], ranks: Ranks | None) -> list[dict[str, float]]:
    """Return the mean or the sum of each name over all ranks; every rank must call it."""
    if ranks is None or not taken:
        return [{} for _ in taken]
    of_ranks = ranks.gather_plain(fetched(taken))
    return means_of(combined(sums) for sums in zip(*of_ranks, strict=True))


def evaluate(
    step: Step,
    windows: Iterable[Iterable[Batch]],
    *,
    split: str,
    seed: int | None,
    take_logged: Callable[[], Sums],
    objects: Sequence[ObjectState | LeftOut] = (),
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of a split, and those that it logs, alike on all ranks; all must call it.

    The default evaluation adds up the sums of all ranks. A task's own `evaluate()` runs on the
    first rank, and the others wait for it, and receive what it has changed.
    """
    task, model, ranks, on_all = step.task, step.model, step.ranks, step.is_sharded
    precision, average = step.precision, step.average
    if ranks.size > 1 and evaluates_in_parts(task):
        own_seed = None if seed is None else share_of(ranks).seed(seed)
        with evaluated_model(model, precision=precision, seed=own_seed, average=average):
            ranks.sync_buffers(model)
            with ranks.together() as message:
                sums = _own_sums(task, model, windows, ranks)
                message.own = [sums, fetched([take_logged()])]
        found = _sums_of_ranks([sums for sums, *_ in message.of_ranks]).metrics()
        metrics = as_metrics(found, task, precision.device, split)
        counted = message.of_ranks
    else:
        # The others wait for the first rank. It comes last, and waits as in a step.
        seconds = None if ranks.is_first else rank_waits.WITHOUT_END
        with ranks.together(seconds=seconds) as message:
            changes = ChangesOfFirst(() if on_all else objects, ranks)
            own: dict[str, float] | None = None
            if ranks.is_first or on_all:
                batches = (batch for window in windows for batch in window)
                with hidden_group():
                    result = run_evaluation(
                        task, model, batches, precision=precision, seed=seed, average=average
                    )
                own = as_metrics(result, task, precision.device, split)
            message.own = [own, fetched([take_logged()]), changes.find()]
        counted = message.of_ranks[:1]  # the others have logged nothing, or the same
        ((metrics, _, has_changes),) = counted
        if has_changes:
            changes.send()
    (logged,) = means_of([combined([sums for _, (sums,), *_ in counted])])
    return metrics, logged


def _own_sums(
    task: Task, model: nn.Module, windows: Iterable[Iterable[Batch]], ranks: Ranks
) -> list[float]:
    """Return the sums of this rank's part of each window, and whether there are predictions.

    So no rank waits for another one longer than for a window, and none continues after an error.
    """
    sums = EvaluationSums()
    for number, window in enumerate(windows):
        if number:
            ranks.gather_plain(None)
        sums = evaluation_sums(task.loss, model, window, sums)
    own = [float(value) for value in sums]  # device synchronisation
    return [*own, float(isinstance(sums.counted, Tensor))]


def _sums_of_ranks(of_ranks: Sequence[Sequence[float]]) -> EvaluationSums:
    loss, weight, correct, counted, predicted = map(sum, zip(*of_ranks, strict=True))
    if not predicted:
        return EvaluationSums(loss, weight)
    # whole numbers, which one process divides as such
    return EvaluationSums(loss, weight, torch.tensor(int(correct)), torch.tensor(int(counted)))


_LOST = "evaluate() runs on the first rank alone, and the others cannot be given the change"

_BUILT = "what a task keeps must be the same on each rank, and this cannot be sent to the others"
_BUILT_REMEDY = (
    "draw only from the generators of Python, NumPy and torch, and let nothing depend on the "
    "order of a directory, on time, process or rank; or write resources.workers: 1"
)


def build_alike(
    objects: Sequence[ObjectState], digests: Sequence[Sequence[str]], ranks: Ranks
) -> None:
    """Give the other ranks what the first one has built; every rank calls this.

    Costs nothing where all have built the same. Else they compare digests of each value, and the
    first rank sends the values that differ. What may be a rank's own stays: a path of a temporary
    file, a directory, the number of a device.
    """
    if all(other == digests[0] for other in digests):
        return
    with ranks.together() as message:
        message.own = [one.compared() for one in objects]
    found = list(zip(*message.of_ranks, strict=True))
    names = [_differing(of_ranks) for of_ranks in found]
    common = [set.intersection(*map(set, of_ranks)) for of_ranks in found]
    if not any(names):
        return
    entries: list[Any] = []
    with ranks.together():
        if ranks.is_first:
            entries = [
                one.chosen(its, all_have, lost=_BUILT, remedy=_BUILT_REMEDY)
                for one, its, all_have in zip(objects, names, common, strict=True)
            ]
            check_state(entries, "what the first rank has built")
    sent = ranks.broadcast({"entries": entries})
    assert sent is not None
    with ranks.together():
        for one, of_first, its in zip(objects, sent["entries"], names, strict=True):
            if not its:
                continue
            try:
                one.take({} if ranks.is_first else of_first, its)
            except CheckpointError as problem:
                raise TaskError(f"{_BUILT} ({problem}); {_BUILT_REMEDY}") from problem


def _differing(of_ranks: Sequence[dict[str, list[str]]]) -> set[str]:
    """Return what is on some ranks alone, or another value there."""
    first, *others = of_ranks
    return {
        name
        for other in others
        for name in first.keys() | other.keys()
        if name not in first
        or name not in other
        or all(one != its for one, its in zip(first[name], other[name], strict=True))
    }


class ChangesOfFirst:
    """What the first rank changes below some objects from now on, for the other ranks.

    Costs a pass over the objects here and in `find`, as a save does, and a message only where
    something has changed.
    """

    def __init__(self, objects: Sequence[ObjectState | LeftOut], ranks: Ranks) -> None:
        self._objects, self._ranks = objects, ranks
        watched = objects if ranks.is_first and ranks.size > 1 else ()
        self._watched = [one.from_now(lost=_LOST) for one in watched]
        self._found: list[Any] = []

    def find(self) -> bool:
        """Return whether anything has changed on this rank, which is the first one."""
        self._found = [one.state_dict() for one in self._watched]
        check_state(self._found, "what evaluate() has changed")
        return any(self._found)

    def send(self) -> None:
        """Give the other ranks what has changed; every rank calls this."""
        changes = self._ranks.broadcast({"changes": self._found} if self._found else None)
        with self._ranks.together():
            if not self._ranks.is_first:
                assert changes is not None
                _restore(self._objects, changes["changes"])


def _restore(objects: Sequence[ObjectState | LeftOut], changes: Sequence[Any]) -> None:
    try:
        for one, entries in zip(objects, changes, strict=True):
            one.load_state_dict(entries)
    except CheckpointError as problem:
        raise TaskError(
            f"{_LOST} ({problem}); make in the constructor or in build_model() what evaluate() "
            "changes, or write resources.workers: 1"
        ) from problem


@contextlib.contextmanager
def random_of_first(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Draw as the first rank does; the others restore their own. Every rank must call it."""
    if ranks.size == 1:
        yield
        return
    own = _drawing(device)
    first = ranks.broadcast(own)
    if ranks.is_first:
        yield
        return
    assert first is not None
    _draw_on(device, first)
    try:
        yield
    finally:
        _draw_on(device, own)


def _drawing(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of the host and of a device; no synchronisation."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"host": capture_random(devices=False), "device": on_device}


def _draw_on(device: torch.device, state: dict[str, Any]) -> None:
    restore_random(state["host"])
    if state["device"] is not None:
        torch.cuda.set_rng_state(state["device"], device)
