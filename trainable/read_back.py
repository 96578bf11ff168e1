"""Can the state of a run be read back? Asked before there is a run, with two samples a split.

What must not live here: how a state is made (`state.py`), or whether a task is sound otherwise
(`testing.py`).
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from trainable.build import Parts
from trainable.config import LoaderConfig
from trainable.data import WindowPlan, open_source, sample_count
from trainable.seeding import preserved_host_rng
from trainable.task_state import TaskState, modules_state
from trainable.train_state import check_read_back, model_state
from trainable.train_state import check_state as check_plain

_SAMPLES = 2


def check_state(parts: Parts) -> None:
    """Compute a loss in training and in evaluation, and put the state that this leaves into a new
    model.

    Buffers that are registered or resized in `forward`, and what a task makes at its first batch,
    are there then. Costs two passes of two samples, and a second model on the CPU.

    Args:
        parts: Of a run that nobody is going to train.

    Raises:
        TaskError: A resumed run would not have the state, or could not read it.
        CheckpointError: The state holds what cannot be read back without running code.
    """
    model_state(parts.model)
    trained = [p for group in parts.groups for p in group["params"]]
    modules = modules_state(parts.model, [*parts.model.parameters(), *trained], parts.task)
    held = TaskState(parts.task, parts.model, trained, parts.data)
    with preserved_host_rng():
        _try_losses(parts)
        check_plain(parts.task.state_dict(), "the state of the task")
        del held
        try:
            fresh: object = parts.task.build_model()
        # A user's code may raise anything, and nobody has promised that it can be called again.
        except Exception:
            fresh = None
        if not isinstance(fresh, nn.Module):
            modules.state_dict()
            return
        check_read_back(parts.model, fresh, modules)


def _try_losses(parts: Parts) -> None:
    """Compute the losses of a few samples where that goes: trials say in their words if not."""
    model = parts.model
    modes = [(module, module.training) for module in model.modules()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others wait for each other longer than two samples take
    try:
        for split, is_training in (("train", True), ("val", False)):
            if not is_training:
                model.eval()
            with torch.set_grad_enabled(is_training), parts.precision.autocast():
                parts.task.loss(model, _batch(parts, split))
    # A user's code may raise anything about two samples.
    except Exception:
        return
    finally:
        torch.set_num_threads(threads)
        for module, training in modes:
            module.training = training


def _batch(parts: Parts, split: str) -> object:
    """The first samples of a split, as a run's loader in the main process would give them."""
    data = parts.data
    samples = getattr(data, split)
    count = sample_count(samples)
    size = min(_SAMPLES, count)
    plan = WindowPlan(samples=count, batch_size=size, micro_batch_size=size, seed=0, shuffle=False)
    collate = data.collate if split == "train" else getattr(data, "collate_val", None)
    source = open_source(
        samples,
        plan,
        split=split,
        device=parts.precision.device,
        loader=LoaderConfig(num_workers=0),
        collate=collate or data.collate,
    )
    with contextlib.closing(source):
        return next(iter(next(iter(source.windows(0)))))
