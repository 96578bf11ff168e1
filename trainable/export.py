"""Weights for others: the model of one checkpoint as a safetensors file.

    python -m trainable.export CHECKPOINT FILE

Runs as a program of its own where torch is not wanted in the caller's memory. What must not live
here: training state other than the model's.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainable.checkpoint import CheckpointStore
from trainable.errors import CheckpointError, StorageError
from trainable.lazy_imports import without_collection
from trainable.storage.locate import files_at

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainable.config import TrialConfig

AWAY = 3
"""The exit code when the storage cannot be read now; 1: there are no weights to be had."""
_PLAIN = (bool, int, float, str, type(None))


def export_weights(generation: Path | str, target: Path) -> list[str]:
    """Write a generation's model as safetensors, after its digest has been verified.

    A tensor that the model holds under several names is written once; the file's metadata maps
    each other name to it, as `safetensors.torch.save_model` does, so that
    `safetensors.torch.load_model` reads the file.

    Args:
        generation: A checkpoint's directory, such as `checkpoints/step-00000120`, or its prefix
            in an object store, `s3://...`.
        target: The file to write.

    Returns:
        What the task holds beside the model whose tensors training has changed, such as an
        average of its weights, by name: it is not in the file.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or a loop of one's own put no
            model into it.
    """
    import torch
    from safetensors.torch import save_file

    state = _load_state(str(generation))
    model = _model_of(state, str(generation))
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    names: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor):
            continue  # a module's extra state is no weight
        view = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and view in names:
            metadata[name] = names[view]
            continue
        names[view] = name
        storage = value.untyped_storage().data_ptr()
        # Views of one storage must not share memory in the file.
        tensors[name] = value.clone() if storage in storages else value.contiguous()
        storages.add(storage)
    save_file(tensors, target, metadata=metadata)
    mask = os.umask(0)
    os.umask(mask)
    target.chmod(0o666 & ~mask)  # safetensors lets its owner alone read it
    return _held_beside(state.get("task", {}))


def load_model(
    config: TrialConfig, generation: Path | str, *, pickled: bool = False
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a checkpoint's model, ready to predict on the CPU, and what it was evaluated on.

    Args:
        config: The run's configuration; its task builds the model.
        generation: A checkpoint's directory, or its prefix in an object store.
        pickled: It is to be a pickle, which may be called in any way, and not a graph.

    Returns:
        The model in evaluation mode, and the inputs of its `forward` for one batch.

    Raises:
        TrainingError: The checkpoint or the task cannot be used, the task is a loop of one's own,
            or the model does not take tensors.
    """
    import torch

    from trainable.build import build_parts
    from trainable.task import load_loop
    from trainable.task_state import modules_state
    from trainable.train_state import load_model_state

    if load_loop(config.task.name) is not None:
        raise CheckpointError(
            f"{config.task.name} is a loop of its own, which keeps to itself how its model is "
            "built; write the model as a Task, or export the weights and build it around them"
        )
    state = _load_state(str(generation))
    weights = _model_of(state, str(generation))
    plain = {"compile": False, "channels_last": False, "activation_checkpointing": False}
    train = config.train.model_copy(update=plain)  # none of them is part of the model
    parts = build_parts(config.model_copy(update={"train": train}), device=torch.device("cpu"))
    modules_state(parts.model, parts.model.parameters()).load_state_dict(state.get("modules", []))
    load_model_state(parts.model, weights)
    parts.model.eval()
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = parts.model.register_forward_pre_hook(
        lambda _, inputs, named: given.append((inputs, named)), with_kwargs=True
    )
    with torch.no_grad():
        window = next(iter(parts.val.windows(0)))
        parts.task.loss(parts.model, next(iter(window)))
    handle.remove()
    parts.train.close()
    parts.val.close()
    inputs, given_by_name = given[0] if given else ((), {})
    named = [] if pickled else _beside_defaults(parts.model, given_by_name)
    if not inputs or named or not all(isinstance(one, torch.Tensor) for one in inputs):
        kinds = ", ".join((*(type(one).__name__ for one in inputs), *named)) or "nothing"
        raise CheckpointError(
            f"the model's forward is given {kinds}; a model that others can load takes tensors, "
            "by position; wrap it in one that does"
        )
    if all(one.ndim and len(one) == 1 for one in inputs):
        # a graph that is traced with a single sample takes no other number of them
        inputs = tuple(torch.cat([one, one]) for one in inputs)
    return parts.model, tuple(one.clone() for one in inputs)


def _beside_defaults(model: nn.Module, given: Mapping[str, Any]) -> list[str]:
    """The names of what a graph would lack: what is a default is in it."""
    if not given:
        return []
    known = inspect.signature(model.forward).parameters
    defaults = {
        name: one.default for name, one in known.items() if isinstance(one.default, _PLAIN)
    }
    return [
        name
        for name, one in given.items()
        if not isinstance(one, _PLAIN) or name not in defaults or defaults[name] != one
    ]


def _load_state(generation: str) -> dict[str, Any]:
    return CheckpointStore(Path(), files=files_at(generation)).load(generation)


def _held_beside(task: Mapping[str, Any]) -> list[str]:
    """Name what a task's state has of tensors: by attribute, or as the task named it."""
    held = task.get("held", [])
    found = [str(path[0][1]) for path, _, payload in held if path and _has_tensors(payload)]
    found += [key for key, value in task.items() if key != "held" and _has_tensors(value)]
    return list(dict.fromkeys(found))


def _has_tensors(value: object) -> bool:
    import torch

    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _model_of(state: dict[str, Any], generation: str) -> dict[str, Any]:
    if "loop" not in state:
        model: dict[str, Any] = state["model"]
        return model
    yielded = state["loop"].get("model")
    if not isinstance(yielded, dict):
        raise CheckpointError(
            f"the state in {generation} has the keys {sorted(map(str, state['loop']))}; weights "
            "are exported from the key 'model'; yield {'model': model.state_dict(), ...}"
        )
    return yielded


if __name__ == "__main__":
    with without_collection():
        try:
            for name in export_weights(sys.argv[1], Path(sys.argv[2])):
                print(name)
        except CheckpointError as error:
            print(error, file=sys.stderr)
            sys.exit(AWAY if isinstance(error, StorageError) else 1)
