"""Sharded models (FSDP2): each rank has a part of every parameter, gradient and moment.

A parameter is whole only while the module that holds it computes. Gradients are added where they
are cut (reduce-scatter): a sum, because the step divides once by the window's weight. Each forward
and backward pass is a collective operation, so every rank takes part in each one: a rank without a
micro-batch computes one in evaluation mode, which counts nothing (`LockStep`).
What must not live here: how a step is taken (`step.py`), and the files of a sharded state
(`sharded_state.py`, `checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from trainable.config import TrialConfig
from trainable.errors import CheckpointError, ConfigError, TaskError
from trainable.model import blocks_of
from trainable.sharded_state import Parts, cut, filled
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


def check_shardable(config: TrialConfig, task: Task, model: nn.Module) -> None:
    """Refuse what cannot be sharded, before the first step.

    Raises:
        ConfigError: A key of the configuration excludes sharding.
        TaskError: The model or the task does.
    """
    train = config.train
    if train.optimizer.name not in _ELEMENTWISE:
        raise ConfigError(
            f"fsdp, and {train.optimizer.name} computes with whole parameters, of which a rank "
            f"has a part; take one of {', '.join(_ELEMENTWISE)}, or write train.sharding: none",
            key=_KEY,
        )
    for key, is_set in (
        ("train.precision: fp16", train.precision == "fp16"),
        ("train.compile: true", train.compile),
        ("train.channels_last: true", train.channels_last),
        ("checkpoint.parameters: trained", config.checkpoint.parameters == "trained"),
    ):
        if is_set:
            raise ConfigError(
                f"fsdp, which does not work with {key}; remove one of the two", key=_KEY
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
    model: nn.Module, task: Task, *, device: torch.device, precision: str
) -> list[nn.Module]:
    """Cut a model's parameters among the ranks, in place.

    Args:
        model: The whole model, on the CPU: each part is moved to the device when it is cut.
        task: Its `sharded_modules` may name the modules that are cut.
        device: This rank's device.
        precision: A resolved precision; in bf16 the parameters are gathered in bf16.

    Returns:
        The sharded modules, the model last.

    Raises:
        TaskError: torch cannot shard the model.
    """
    units = [*_units(model, task), model]
    _check_ties(units, model)
    mesh = DeviceMesh.from_group(cast("dist.ProcessGroup", dist.group.WORLD), device.type)
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
    model.to(device)  # buffers outside of every unit
    return units


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


def _check_ties(units: Sequence[nn.Module], model: nn.Module) -> None:
    """Refuse a parameter that two units have, one outside the other: each would cut it."""
    owner: dict[int, nn.Module] = {}
    for unit in units:
        for name, parameter in unit.named_parameters():
            first = owner.setdefault(id(parameter), unit)
            if first is not unit and not _is_within(first, unit, parameter):
                raise TaskError(
                    f"{_path(model, unit)}.{name} is tied to a parameter of "
                    f"{_path(model, first)}, and each of the two is cut on its own under "
                    "train.sharding: fsdp; let Task.sharded_modules() leave one of them out, or "
                    "write train.sharding: none"
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
    return next(name for name, one in model.named_modules() if one is module)


def internals(model: nn.Module) -> list[object]:
    """Return the objects that torch keeps on sharded modules: they are no state of the run."""
    return [
        part
        for module in model.modules()
        for name, value in vars(module).items()
        if name.startswith(_INTERNAL)
        for part in (value, *(value.values() if isinstance(value, dict) else ()))
    ]


def local(tensor: Tensor) -> Tensor | None:
    """Return this rank's part of a sharded tensor; None if the tensor is not sharded."""
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
    """How whole tensors and this rank's parts become the sharded tensors of a model.

    Args:
        model: The sharded model.
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, model: nn.Module, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        self._device = torch.device(self._mesh.device_type)

    def of_part(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the sharded tensor with this part and this whole shape."""
        whole = torch.empty(tuple(shape), device="meta")
        return DTensor.from_local(
            part.to(self._device),
            self._mesh,
            (Shard(0),),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return a whole tensor as a sharded one."""
        part = cut(whole, self._rank, self._size).contiguous()
        return self.of_part(part, whole.shape)

    def restored(self, state: dict[str, Any], parts: Parts) -> dict[str, Any]:
        """Return a state with sharded tensors in place of its notes."""
        return filled(
            state, lambda entry, number, shape: self.of_part(parts[entry][number], shape)
        )

    def like(self, value: object, target: object) -> Any:
        """Return a whole tensor as a sharded one if its target is sharded; else the value."""
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if is_whole and isinstance(target, DTensor) and value.shape == target.shape:  # type: ignore[attr-defined]
            return self.of_whole(cast("Tensor", value))
        return value
