"""Sharded models (FSDP2): each rank has a part of every parameter, gradient and moment.

A parameter is whole only while the module that holds it computes. Gradients are added where they
are cut (reduce-scatter): a sum, because the step divides once by the window's weight. Each forward
and backward pass is a collective operation, so every rank takes part in each one: a rank without a
micro-batch computes one in evaluation mode, which counts nothing (`LockStep`).
What must not live here: how a step is taken (`step.py`), and the files of a sharded state
(`sharded_state.py`, `checkpoint.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from trainable.config import TrialConfig
from trainable.errors import CheckpointError, ConfigError, TaskError
from trainable.model import blocks_of
from trainable.parallel.rank_group import RankGroup
from trainable.ranks import Ranks
from trainable.store.shard_files import Shards
from trainable.store.sharded_state import SHARDS, cut, filled, joined, split
from trainable.task import Task

_KEY = "train.sharding"
_ELEMENTWISE = (
    "sgd",
    "adam",
    "adamw",
    "adadelta",
    "adagrad",
    "adamax",
    "asgd",
    "lion",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
)
"""Optimizers that compute each value of a parameter from its own gradient and moments."""
_INTERNAL = "__composable_api"
"""How the attributes begin that torch adds to a sharded module."""


def check_shardable(config: TrialConfig, task: Task, model: nn.Module, precision: str) -> None:
    """Refuse what cannot be sharded, before the first step."""
    train = config.train
    if config.workers == 1:
        raise ConfigError(
            "fsdp, and the trial has one worker, so there is nothing to cut; write workers: 2 or "
            "more in resources, or train.sharding: none",
            key=_KEY,
        )
    if train.batch_size < config.workers:
        raise ConfigError(
            f"{train.batch_size}, which is less than the {config.workers} workers among which "
            "each batch is divided; write a larger one, or take fewer workers",
            key="train.batch_size",
        )
    if train.optimizer.name not in _ELEMENTWISE:
        raise ConfigError(
            f"fsdp, and {train.optimizer.name} computes with whole parameters, of which a rank "
            f"has a part; take one of {', '.join(_ELEMENTWISE)}, or write train.sharding: none",
            key=_KEY,
        )
    for key, is_set in (
        ("the precision fp16: write bf16 or fp32", precision == "fp16"),
        ("train.compile: true", train.compile),
        ("train.sync_batch_norm: true", train.sync_batch_norm),
        ("train.channels_last: true", train.channels_last),
        ("checkpoint.parameters: trained", config.checkpoint.parameters == "trained"),
    ):
        if is_set:
            raise ConfigError(
                f"fsdp, which does not work with {key}; change one of the two", key=_KEY
            )
    name = type(task).__name__
    if type(task).build_optimizer is not Task.build_optimizer:
        raise TaskError(
            f"{name}.build_optimizer() may build an optimizer that computes with whole "
            "parameters, of which a rank has a part under train.sharding: fsdp; name the "
            "optimizer in train.optimizer, or write train.sharding: none"
        )
    for path, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise _unfit(path, "has sparse gradients, which cannot be cut", "sparse=False")
    for path, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise _unfit(path, "is lazy and has no shape yet", "a module with its sizes given")
        if parameter.ndim == 0:
            raise _unfit(path, "has no dimension to cut", "shape (1,)")
        if not parameter.is_contiguous():
            raise _unfit(path, "is not contiguous in memory", "contiguous()")


def _unfit(path: str, what: str, remedy: str) -> TaskError:
    return TaskError(
        f"{path} of the model {what} under train.sharding: fsdp; build it with {remedy}, or write "
        "train.sharding: none"
    )


def shard_model(
    model: nn.Module, task: Task, ranks: RankGroup, *, device: torch.device, precision: str
) -> None:
    """Cut a model's parameters among the ranks, in place."""
    if device.type == "cuda" and not ranks.collectives.direct:
        raise ConfigError(
            "fsdp, and two workers of the trial have the same GPU, so the parts of a model would "
            "lie beside each other; give each worker a GPU of its own, or write "
            "train.sharding: none",
            key=_KEY,
        )
    units = [*_units(model, task), model]
    check_units(units, model)
    ranks.copy_from_first([*model.parameters(), *model.buffers()])
    mesh = DeviceMesh.from_group(ranks.group_of_model(), device.type)
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in units:
        try:
            # The root, too, is cut again after each forward pass: an evaluation would leave it
            # whole, and the next step would compute with the weights from before.
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        except (ValueError, TypeError, RuntimeError, NotImplementedError) as problem:
            raise TaskError(
                f"torch cannot shard {_path(model, unit) or 'the model'} ({problem}); let "
                f"{type(task).__name__}.sharded_modules() name other modules, or write "
                "train.sharding: none"
            ) from problem
        sharded = cast("FSDPModule", unit)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    # A parameter that one rank uses and another does not is added with zeros.
    cast("FSDPModule", model).set_reduce_scatter_unused_params(True)


def _units(model: nn.Module, task: Task) -> list[nn.Module]:
    named = task.sharded_modules(model)
    if named is None:
        return [unit for unit in blocks_of(model) if any(True for _ in unit.parameters())]
    known = {id(module) for module in model.modules()}
    for module in named:
        if id(module) not in known or module is model:
            raise TaskError(
                f"{type(task).__name__}.sharded_modules() returned {type(module).__name__}, which "
                "is not a part of the model; return modules inside the model, each before those "
                "that contain it"
            )
    return list(named)


def check_units(units: Sequence[nn.Module], model: nn.Module) -> None:
    """Refuse modules whose parameters cannot be cut on their own; the model is the last."""
    _check_ties(units, model)
    _check_types(units, model)


def _check_ties(units: Sequence[nn.Module], model: nn.Module) -> None:
    """Refuse a parameter that two units have, one outside the other: each would cut it."""
    owner: dict[int, nn.Module] = {}
    for unit in units:
        for name, parameter in unit.named_parameters():
            first = owner.setdefault(id(parameter), unit)
            if first is not unit and not _is_within(first, unit, parameter):
                path = f"{_path(model, unit)}.{name}".lstrip(".")
                raise TaskError(
                    f"{path} is tied to a parameter of {_path(model, first)}, and each of the two "
                    "is cut on its own under train.sharding: fsdp; let Task.sharded_modules() "
                    "leave one of them out, or write train.sharding: none"
                )


def _check_types(units: Sequence[nn.Module], model: nn.Module) -> None:
    """Refuse parameters of several types in one unit, which torch gathers in one tensor."""
    known: set[int] = set()
    for unit in units:
        own = [p for p in unit.parameters() if id(p) not in known]
        known.update(map(id, own))
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in own})
        if len(kinds) > 1:
            raise TaskError(
                f"{_path(model, unit) or 'the model'} has parameters of {' and '.join(kinds)}, "
                "and those of a module are gathered together under train.sharding: fsdp; let "
                "Task.sharded_modules() name the parts of each type, or write "
                "train.sharding: none"
            )


def _is_within(inner: nn.Module, outer: nn.Module, parameter: Tensor) -> bool:
    """Whether the outer module has a parameter through the inner one alone."""
    inside = {id(module) for module in inner.modules()}
    return not any(
        part is parameter
        for module in outer.modules()
        if id(module) not in inside
        for part in module._parameters.values()
    )


def _path(model: nn.Module, module: nn.Module) -> str:
    return next(str(name) for name, one in model.named_modules() if one is module)


def sharded_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sharded_parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return each sharded parameter, with the module that has it and its name there."""
    return [
        (module, name, cast("nn.Parameter", parameter))
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]


def _part(tensor: Tensor) -> Tensor | None:
    if not isinstance(tensor, DTensor):
        return None
    if tuple(tensor.placements) != (Shard(0),):
        raise CheckpointError(
            f"a tensor of the state is laid out as {tensor.placements} and not cut along its "
            "first dimension, so it cannot be saved; write train.sharding: none"
        )
    return tensor.to_local()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, in the same memory; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded."""
    return isinstance(tensor, DTensor)


class Layout:
    """How whole tensors and this rank's parts become the sharded tensors of a run, and back."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._trained: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        self._mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        self._device = torch.device(self._mesh.device_type)

    def internals(self) -> list[object]:
        """Return the objects that torch keeps on sharded modules: they are no state of the run."""
        return [
            part
            for module in self._model.modules()
            for name, value in vars(module).items()
            if name.startswith(_INTERNAL)
            for part in (value, *(value.values() if isinstance(value, dict) else ()))
        ]

    def taken_apart(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with notes in place of its sharded tensors, and this rank's parts."""
        weights = copy.copy(state["model"])
        first: dict[int, str] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            same = first.setdefault(id(parameter), name)
            if same != name and {same, name} <= weights.keys():
                weights[name] = weights[same]  # tied: one part for both, on every rank
        noted, parts = split({**state, "model": weights}, _part)
        return {**noted, SHARDS: parts}

    def put_together(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state `taken_apart` as a whole on the first rank; every rank must call this."""
        shards = self._ranks.gather(state[SHARDS])
        return state if shards is None else joined(state, shards)

    def restored(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a saved state with sharded tensors.

        That of as many ranks is read from this rank's own shard. That of another number, a whole
        one, and what a run has inherited from another run are cut anew.
        """
        if SHARDS in state:
            shards = Shards(state)
            if len(shards) == self._ranks.size:
                own = shards[self._ranks.rank]
                state = filled(state, lambda entry, n, shape: self._of_part(own[entry][n], shape))
            else:
                state = joined(state, shards.all())
        state = dict(state)
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        state["model"] = self._cut(state["model"], parameters)
        if "state" in state["optimizer"]:
            moments = {
                index: {key: self._like(value, self._trained[index]) for key, value in of.items()}
                for index, of in state["optimizer"]["state"].items()
            }
            state["optimizer"] = {**state["optimizer"], "state": moments}
        if average := state.get("average"):
            named = {f"model.{name}": p for name, p in parameters.items()}
            state["average"] = {**average, "values": self._cut(average["values"], named)}
        return state

    def _cut(self, values: dict[str, Any], targets: Mapping[str, Tensor]) -> dict[str, Any]:
        cut = copy.copy(values)  # keeps the versions that a module's state dict carries
        for key, value in values.items():
            cut[key] = self._like(value, targets.get(key))
        return cut

    def _like(self, value: Any, target: Tensor | None) -> Any:
        """Return a whole tensor as a sharded one if its target is sharded."""
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if not is_whole or not isinstance(target, DTensor) or value.shape != target.shape:
            return value
        part = cut(value, self._ranks.rank, self._ranks.size).contiguous()
        return self._of_part(part, value.shape)

    def _of_part(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        whole = torch.empty(tuple(shape), device="meta")
        return DTensor.from_local(
            part.to(self._device),
            self._mesh,
            (Shard(0),),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
