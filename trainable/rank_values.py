"""What the ranks of a trial exchange besides gradients: logged values and evaluations.

After each of these calls all ranks have the same values. What must not live here: the exchange
itself (`rank_group.py`), and when a run evaluates or reports (`loop.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from trainable.averaging import Average
from trainable.default_evaluation import EvaluationSums, evaluation_sums
from trainable.evaluation import as_metrics, evaluated_model, run_evaluation
from trainable.precision import Precision
from trainable.rank_data import share_of
from trainable.ranks import Ranks
from trainable.sums import Sums, combined, fetched, means, means_of
from trainable.task import Batch, Task


def evaluates_in_parts(task: Task) -> bool:
    """Return whether the ranks evaluate a part each: the task has no `evaluate()` of its own."""
    return getattr(task.evaluate, "__func__", None) is Task.evaluate


def means_of_ranks(taken: Sequence[Sums], ranks: Ranks | None) -> list[dict[str, float]]:
    """Return the mean or the sum of each name over all ranks; every rank must call it.

    A name counts where it was logged. Device synchronisation: once for each device with values.

    Args:
        taken: The sums of this rank.
        ranks: The ranks of the trial; None returns nothing: the values of one rank mislead.
    """
    if ranks is None:
        return [{} for _ in taken]
    if ranks.size == 1:
        return means(taken)
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
    on_all: bool = False,
) -> dict[str, float]:
    """Return the metrics of a split, the same on all ranks; every rank must call it.

    The default evaluation adds up the sums of all ranks. A task's own `evaluate()` runs on the
    first rank, and the others wait for it.

    Args:
        task: The task.
        model: Its model, whose modes are restored afterwards.
        windows: The windows of this rank, on the device; those of one process where the task has
            an `evaluate()` of its own.
        split: The prefix of the metrics.
        precision: Autocast of the forward passes.
        seed: Seed of the evaluation; None: draw from the present generators.
        average: The average of the weights; evaluated in their place.
        ranks: The ranks of the trial.
        on_all: Call a task's own `evaluate()` on all ranks: each has a part of the model.

    Raises:
        TaskError: The task broke its contract.
    """
    if ranks.size > 1 and evaluates_in_parts(task):
        own_seed = None if seed is None else share_of(ranks).seed(seed)
        with evaluated_model(model, precision=precision, seed=own_seed, average=average):
            ranks.sync_buffers(model)
            found = _sums_of_ranks(task, model, windows, ranks).metrics()
        return as_metrics(found, task, precision.device, split)
    metrics: dict[str, float] | None = None
    with ranks.failing_together(without_end=True):
        if ranks.is_first or on_all:
            batches = (batch for window in windows for batch in window)
            result = run_evaluation(
                task, model, batches, precision=precision, seed=seed, average=average
            )
            metrics = as_metrics(result, task, precision.device, split)
    agreed: dict[str, float] = ranks.agree(metrics)
    return agreed


def _sums_of_ranks(
    task: Task, model: nn.Module, windows: Iterable[Iterable[Batch]], ranks: Ranks
) -> EvaluationSums:
    """Add up the sums of all ranks, which evaluate their parts of each window in step.

    So no rank waits for another one longer than for a window, and none continues after an error.
    """
    remaining, sums, at_end = iter(windows), EvaluationSums(), False
    while not at_end:
        with ranks.failing_together():
            window = next(remaining, None)
            at_end = window is None
            if window is not None:
                sums = evaluation_sums(task.loss, model, window, sums)
    with ranks.failing_together():
        own = [float(value) for value in sums]  # device synchronisation
    has_accuracy = float(isinstance(sums.counted, Tensor))
    loss, weight, correct, counted, predicted = ranks.sum([*own, has_accuracy])
    if not predicted:
        return EvaluationSums(loss, weight)
    # whole numbers, which one process divides as such
    return EvaluationSums(loss, weight, torch.tensor(int(correct)), torch.tensor(int(counted)))
