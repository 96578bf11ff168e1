"""Export the model of one checkpoint as a safetensors file.

    python -m trainable.export CHECKPOINT FILE

runs in a process of its own, so that the caller need not load torch. What must not live here:
training state other than the model's.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from trainable.checkpoint import CheckpointStore
from trainable.errors import CheckpointError, StorageError
from trainable.failures import exit_with
from trainable.process_start import without_collection
from trainable.store.objects import files_at

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainable.build import Parts
    from trainable.config import TrialConfig

STORAGE_UNAVAILABLE = 3
"""The exit code when the storage cannot be read now; 1: the checkpoint has no usable weights."""
_PLAIN = (bool, int, float, str, type(None))


class Exported(NamedTuple):
    """What an exported file contains."""

    held: list[str]
    """The names of the task's own tensors that training has changed, such as an average of the
    weights that the task keeps itself: they are not in the file."""
    averaged: int = 0
    """How many times the weights went into the average that the file has; 0: the weights."""
    left_out: int = 0
    """Tensors of the base that the file lacks, because the checkpoint has only trained ones."""
    files: Mapping[str, str] = MappingProxyType({})
    """The sha256 of each file that the task declared, such as those of that base."""


class LoadedModel(NamedTuple):
    """A checkpoint's model, ready for prediction on the CPU."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    """Inputs of its `forward` for one batch."""
    contents: Exported
    """What an export of the same checkpoint contains; the model itself is always whole."""


def contents_of(state: Mapping[str, Any]) -> Exported:
    """Return what an export of a checkpoint's state contains."""
    base = state.get("base") or {"tensors": {}, "files": {}}
    count = (state.get("average") or {"count": 0})["count"]
    held = _task_tensors(state)
    return Exported(held, count, len(base["tensors"]), dict(base["files"]))


def export_weights(generation: Path | str, target: Path) -> Exported:
    """Verify a generation's digest and write its model as safetensors.

    A tensor with several names in the model is written once. The file's metadata maps the other
    names to it, as `safetensors.torch.save_model` does, so that `safetensors.torch.load_model`
    reads the file.

    If the run averaged its weights, the file has the average. If the checkpoint has only what was
    trained, so has the file: adapters without their base.
    """
    import torch
    from safetensors.torch import save_file

    from trainable.averaging import overlay_average

    state = _load_state(str(generation))
    model = _model_of(state, str(generation))
    if averages := state.get("average"):
        left_out = (state.get("base") or {"tensors": ()})["tensors"]
        missing = overlay_average(model, averages, left_out)
        if missing:
            raise CheckpointError(
                f"the model's state dict does not have {', '.join(missing)} under that name, so "
                "the average of the weights cannot be exported without the task's code; load it "
                "with Trial.load_model() in Python"
            )
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    names: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor):
            continue  # a module's extra state, not a weight
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
    target.chmod(0o666 & ~mask)  # safetensors makes it readable for its owner alone
    return contents_of(state)


def load_trained(config: TrialConfig, generation: Path | str) -> tuple[Parts, Exported]:
    """Build a run's model and data on the CPU, the model with a checkpoint's weights.

    If the run averaged its weights, the model has the average. What the checkpoint left out is as
    the task builds it. Returns also what an export of the checkpoint contains.
    """
    import torch

    from trainable.averaging import load_average
    from trainable.build import build_parts
    from trainable.find_task import load_loop
    from trainable.optim import builds_own, optimizer_of
    from trainable.train_state import completed, load_model_state

    if load_loop(config.task.name) is not None:
        raise CheckpointError(
            f"{config.task.name} is a custom loop, and only the loop can build its model; write "
            "the model as a Task, or export the weights and load them into a model of your own"
        )
    state = _load_state(str(generation))
    weights = _model_of(state, str(generation))
    plain = {
        "compile": False,
        "channels_last": False,
        "activation_checkpointing": False,
        "sharding": "none",
    }
    train = config.train.model_copy(update=plain)  # none of them is part of the model
    parts = build_parts(config.model_copy(update={"train": train}), device=torch.device("cpu"))
    if builds_own(parts.task):  # loss() may need what it makes
        # A user's method may raise anything, such as that it needs a GPU.
        with contextlib.suppress(Exception):
            optimizer_of(parts.task, parts.model, train, parts.groups)
    weights = completed(parts.model, weights, state.get("base"))
    _restore_objects(parts, state)
    load_model_state(parts.model, weights)
    if averages := state.get("average"):
        load_average(parts.model, averages)
    parts.model.eval()
    return parts, contents_of(state)


def _restore_objects(parts: Parts, state: dict[str, Any]) -> None:
    """Restore what a model has outside its state dict, and a task's attributes, if plain.

    The loss may need what its hooks have set. What needs a class of the user's stays as built: the
    checkpoint may be somebody else's, and reading it must run no code.
    """
    from trainable.object_state import run_objects
    from trainable.task import Task

    own = type(parts.task).state_dict is not Task.state_dict
    try:
        run_objects(parts.task, parts.model, data=parts.data, whole_task=not own).load_state_dict(
            state.get("objects", {}), trusted=False
        )
        parts.task.load_state_dict(state.get("task", {}))
    # It may refer to the optimizer, which is not built here; a user's method may raise anything.
    except Exception as problem:
        warnings.warn(
            f"what {type(parts.task).__name__} keeps beside its model could not be restored "
            f"({type(problem).__name__}: {problem}); the model has the checkpoint's weights, and "
            "the task is as its code builds it",
            stacklevel=2,
        )


def load_model(
    config: TrialConfig, generation: Path | str, *, pickled: bool = False
) -> LoadedModel:
    """Return a checkpoint's model, ready for prediction on the CPU, with example inputs."""
    import torch

    parts, contents = load_trained(config, generation)
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
    named = [] if pickled else _not_default(parts.model, given_by_name)
    if not inputs or named or not all(isinstance(one, torch.Tensor) for one in inputs):
        kinds = ", ".join((*(type(one).__name__ for one in inputs), *named)) or "nothing"
        raise CheckpointError(
            f"the model's forward is given {kinds}; a registered model must take tensors by "
            "position; wrap it in a module that does"
        )
    if all(one.ndim and len(one) == 1 for one in inputs):
        # a graph traced with one sample would accept only one sample
        inputs = tuple(torch.cat([one, one]) for one in inputs)
    return LoadedModel(parts.model, tuple(one.clone() for one in inputs), contents)


def _not_default(model: nn.Module, given: Mapping[str, Any]) -> list[str]:
    """Return the keyword arguments that differ from their defaults: a graph would drop them."""
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


def _task_tensors(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors in a task's state: attributes, or keys that it chose."""
    chosen = [key for key, value in state.get("task", {}).items() if _has_tensors(value)]
    return list(dict.fromkeys([*state.get("objects", {}).get("names", ()), *chosen]))


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
            found = export_weights(sys.argv[1], Path(sys.argv[2]))
            print(json.dumps({**found._asdict(), "files": dict(found.files)}))
        except CheckpointError as error:
            exit_with(error, STORAGE_UNAVAILABLE if isinstance(error, StorageError) else 1)
