"""Check before a run starts that its checkpoints could be read back, with two samples per split.

What must not live here: how a state is made (`train_state.py`), or other checks of a task
(`testing.py`).
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.utils.data import default_collate

from trainable.batches import move
from trainable.build import Parts
from trainable.config import LoaderConfig
from trainable.data import WindowPlan, open_source, sample_count
from trainable.object_state import run_objects
from trainable.samplers import SampledPlan, check_sampler
from trainable.seeding import preserved_host_rng
from trainable.splits import gives_batches, is_stream
from trainable.stream_checks import check_stream
from trainable.streams import StreamSource, first_items
from trainable.task import Task
from trainable.train_state import check_read_back, check_state, model_state

_SAMPLES = 2


def check_resumable(parts: Parts) -> None:
    """Compute one loss in training and one in evaluation, and load the state into a new model.

    The losses and the hooks come first because `forward` may register or resize buffers, and a
    task may create attributes at its first batch. Costs two passes of two samples and a second
    model on the CPU.

    Args:
        parts: The parts of a run that will not be trained.

    Raises:
        TaskError: A resumed run would lack a part of the state, or could not read it.
        CheckpointError: The state has objects that cannot be read back without running code.
    """
    if isinstance(parts.train, StreamSource):
        check_stream(parts.train)
    elif isinstance(parts.train.plan, SampledPlan):
        check_sampler(parts.train.plan)
    model_state(parts.model)
    trained = [p for group in parts.groups for p in group["params"]]
    modules = run_objects(parts.task, parts.model, trained=trained, whole_task=False)
    own = type(parts.task).state_dict is not Task.state_dict
    whole = run_objects(
        parts.task, parts.model, trained=trained, data=parts.data, whole_task=not own
    )
    with preserved_host_rng():
        _try_losses(parts)
        check_state(parts.task.state_dict(), "the state of the task")
        whole.state_dict()
        attributes = dict(vars(parts.task))
        try:
            fresh: object = parts.task.build_model()
        # A user's code may raise anything, and need not support a second call.
        except Exception:
            fresh = None
        finally:  # a task may keep its model, which is still the first one
            vars(parts.task).clear()
            vars(parts.task).update(attributes)
        if not isinstance(fresh, nn.Module):
            modules.state_dict()
            return
        check_read_back(parts.task, parts.model, fresh, modules.state_dict())


def _try_losses(parts: Parts) -> None:
    """Compute the losses of a few samples and call the hooks; ignore errors."""
    model = parts.model
    modes = [(module, module.training) for module in model.modules()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # synchronising threads takes longer than two samples
    try:
        for split, is_training in (("train", True), ("val", False)):
            if not is_training:
                model.eval()
            else:
                parts.task.on_epoch_start(0)
            with torch.set_grad_enabled(is_training), parts.precision.autocast():
                parts.task.loss(model, _batch(parts, split))
            if is_training:
                parts.task.on_step_end(1)
                parts.task.on_epoch_end(0)
    # A user's code may raise anything for two samples.
    except Exception:
        return
    finally:
        torch.set_num_threads(threads)
        for module, training in modes:
            module.training = training


def _batch(parts: Parts, split: str) -> object:
    """Return the first samples of a split, as a run's loader in the main process gives them."""
    data = parts.data
    samples = getattr(data, split)
    if is_stream(samples):
        items = first_items(samples, _SAMPLES)
        collates = not gives_batches(samples, data)
        batch = (data.collate_of(split) or default_collate)(items) if collates else items[0]
        return move(batch, parts.precision.device)
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
