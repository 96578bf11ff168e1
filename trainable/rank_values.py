"""What the ranks of a trial exchange besides gradients: logged values and evaluations.

After each of these calls all ranks have the same values. What must not live here: the exchange
itself (`rank_group.py`), and when a run evaluates or reports (`loop.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from trainable import rank_waits
from trainable.averaging import Average
from trainable.evaluation import as_metrics, evaluated_model, run_evaluation
from trainable.group_joining import hidden_group
from trainable.logged import Sums, combined, fetched, means_of
from trainable.losses import EvaluationSums, evaluation_sums
from trainable.object_state import ObjectState
from trainable.precision import Precision
from trainable.rank_sync import ChangesOfFirst
from trainable.ranks import Ranks, share_of
from trainable.step import LeftOut
from trainable.task import Batch, Task


def evaluates_in_parts(task: Task) -> bool:
    """Return whether the ranks evaluate a part each: the task has no `evaluate()` of its own."""
    return getattr(task.evaluate, "__func__", None) is Task.evaluate


def means_of_ranks(taken: Sequence[Sums], ranks: Ranks | None) -> list[dict[str, float]]:
    """Return the mean or the sum of each name over all ranks; every rank must call it.

    A name counts where it was logged. Device synchronisation: once for each device with values.
    """
    if ranks is None or not taken:
        return [{} for _ in taken]
    of_ranks = ranks.gather_plain(fetched(taken))
    return means_of(combined(sums) for sums in zip(*of_ranks, strict=True))


def evaluate(
    task: Task,
    model: nn.Module,
    windows: Iterable[Iterable[Batch]],
    *,
    split: str,
    precision: Precision,
    seed: int | None,
    average: Average | None,
    ranks: Ranks,
    take_logged: Callable[[], Sums],
    on_all: bool = False,
    objects: Sequence[ObjectState | LeftOut] = (),
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics of a split, and those that it logs; every rank must call it.

    They are the same on all ranks.

    The default evaluation adds up the sums of all ranks. A task's own `evaluate()` runs on the
    first rank, and the others wait for it, and receive what it has changed.
    """
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
