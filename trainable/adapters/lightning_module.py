"""What a `LightningModule` reaches of its trainer: `self.log`, `self.trainer`, its hooks.

A module in training gets a subclass of its own class, in which these lead to a task. Lightning
itself is not imported: it exists as `lightning.pytorch` and as `pytorch_lightning`, and a module
of either fits. What must not live here: the task itself (`lightning.py`).
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainable.errors import TaskError
from trainable.parallel.rank_group import ranks_here

if TYPE_CHECKING:
    from trainable.adapters.lightning import LightningTask

OWN_LOOP = "write your own loop (docs/guides/own-loop.md)"
_ON_STEP_END = "define on_step_end(self, step) in the task"
_SPEC = "remove it, and write {} in the spec"

_NOT_CALLED = {
    "backward": OWN_LOOP,
    "configure_callbacks": "remove it; write what they do into the task's hooks",
    "configure_gradient_clipping": _SPEC.format("train.clip"),
    "configure_sharded_model": "define configure_model",
    "lr_scheduler_step": _SPEC.format("train.schedule"),
    "on_after_backward": OWN_LOOP,
    "on_before_backward": OWN_LOOP,
    "on_before_batch_transfer": "define on_after_batch_transfer, or a collate_fn",
    "on_before_optimizer_step": OWN_LOOP,
    "on_before_zero_grad": _ON_STEP_END,
    "on_fit_end": "remove it; a run may be continued after its end",
    "on_load_checkpoint": "keep what it restores in attributes, which a checkpoint has",
    "on_save_checkpoint": "keep what it saves in attributes, which a checkpoint has",
    "on_train_batch_end": _ON_STEP_END,
    "on_train_end": "remove it; a run may be continued after its end",
    "on_validation_model_eval": "remove it; the run switches the modes",
    "on_validation_model_train": "remove it; the run switches the modes",
    "on_validation_model_zero_grad": "remove it; the run clears gradients before each step",
    "optimizer_step": OWN_LOOP,
    "optimizer_zero_grad": "remove it; the run clears gradients before each step",
    "transfer_batch_to_device": "give the batch a method to(device)",
}
"""Methods that a trainer of Lightning calls and a task does not, and what to do instead."""
_OF_DATA = (
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "state_dict",
    "load_state_dict",
    "on_exception",
)


_PACKAGES = ("lightning.pytorch.", "pytorch_lightning.")


class _TrainerView:
    """Stands for `self.trainer`: has a few of its attributes, and refuses the others by name."""

    def __init__(self, owner: LightningTask) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        return self._owner.trainer_value(name)


class _StrategyView:
    """Stands for `self.trainer.strategy`: what `self.all_gather` and modules call of it.

    With one process, and where one computes alone, it returns what it is given, as Lightning does.
    """

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        _check_group("all_gather", group)
        return ranks_here().gather_tensor(tensor, with_gradient=sync_grads)

    def barrier(self, *_: Any, **__: Any) -> None:
        ranks_here().gather_tensor(torch.zeros(()))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        _check_group("reduce", group)
        if not isinstance(reduce_op, str) or reduce_op.lower() not in _REDUCED:
            raise TaskError(
                f"self.trainer.strategy.reduce was given reduce_op={reduce_op!r}; it must be "
                f"{', '.join(map(repr, _REDUCED))}; for another one take self.all_gather"
            )
        if isinstance(tensor, Tensor) and (ranks := ranks_here()).size > 1:
            with torch.no_grad():
                tensor.copy_(_REDUCED[reduce_op.lower()](ranks.gather_tensor(tensor)))
        return tensor  # changed in place

    def __getattr__(self, name: str) -> Any:
        raise TaskError(
            f"the module reads self.trainer.strategy.{name}, which a run does not have; it has "
            "all_gather, barrier and reduce; take these, or torch.distributed in training_step "
            "and the hooks of an epoch"
        )


STRATEGY = _StrategyView()
_REDUCED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.sum(0) / len(values),
    "avg": lambda values: values.sum(0) / len(values),
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


def _check_group(method: str, group: Any) -> None:
    size = getattr(group, "size", int)()  # of a process outside of the group, a number
    if group is not None and size != ranks_here().size:
        raise TaskError(
            f"{method} was given a group; a run has that of all processes of the trial; leave it "
            "out, or call torch.distributed yourself"
        )


def tell_rank() -> None:
    """Let `rank_zero_only` of Lightning act on the rank that the code to come has.

    Without a trainer it would take a number from variables of the environment, such as Slurm's.
    """
    utilities = sys.modules.get("lightning_utilities.core.rank_zero")
    if utilities is not None:
        utilities.rank_zero_only.rank = ranks_here().rank


class _Bound:
    """Comes before a module's own class: what the module calls of Lightning leads to its task."""

    _owner: weakref.ReferenceType[Any]

    def log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        theirs = base_of(self, "LightningModule").log
        given = inspect.signature(theirs).bind(self, name, value, *arguments, **options)
        self._owner_now().log_value(self, name, value, given.arguments)

    def log_dict(self, dictionary: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        theirs = base_of(self, "LightningModule").log_dict
        given = inspect.signature(theirs).bind(self, dictionary, *arguments, **options)
        for name, value in dictionary.items():
            self._owner_now().log_value(self, name, value, given.arguments)

    @property
    def trainer(self) -> Any:
        return _TrainerView(self._owner_now())

    @property
    def current_epoch(self) -> int:
        return self._owner_now().epoch

    @property
    def global_step(self) -> int:
        return self._owner_now().step

    @property
    def global_rank(self) -> int:
        return ranks_here().rank

    def optimizers(self, *_: Any, **__: Any) -> Any:
        raise TaskError(_uncallable("self.optimizers()"))

    def lr_schedulers(self) -> Any:
        raise TaskError(_uncallable("self.lr_schedulers()"))

    def manual_backward(self, *_: Any, **__: Any) -> None:
        raise TaskError(_uncallable("self.manual_backward()"))

    def _owner_now(self) -> LightningTask:
        owner: LightningTask | None = self._owner()
        assert owner is not None  # it outlives its model
        return owner


def _uncallable(what: str) -> str:
    return (
        f"the module calls {what}; the run takes each step itself, and counts, clips and "
        f"schedules it; remove the call, or {OWN_LOOP}"
    )


def bind(module: Any, owner: LightningTask) -> None:
    """Let what a module calls of Lightning lead to a task. Its class keeps its name."""
    kind = type(module)
    own = {"_owner": weakref.ref(owner), "__module__": kind.__module__, "__doc__": kind.__doc__}
    module.__class__ = type(kind.__name__, (_Bound, kind), own)


def check_module(module: Any) -> None:
    """Refuse what is no module that a task can train, and name the part that it cannot."""
    name = type(module).__name__
    if base_of(module, "LightningModule") is None:
        raise TaskError(
            f"lightning_module() returned an object of type {name}; return a LightningModule of "
            "lightning.pytorch or of pytorch_lightning"
        )
    for needed in ("training_step", "validation_step"):
        if not overrides(module, needed):
            raise TaskError(
                f"{name} has no {needed}(); a task needs training and validation; define it"
            )
    if not module.automatic_optimization:
        raise TaskError(
            f"{name} sets automatic_optimization = False; the run takes each step itself; remove "
            f"it, or {OWN_LOOP}"
        )
    _check_overridden(module, _NOT_CALLED)


def check_data_module(source: object) -> None:
    """Refuse methods of a data module that a task does not call."""
    if base_of(source, "LightningDataModule") is not None:
        remedy = (
            "move what it does into the data sets, or into the module's on_after_batch_transfer"
        )
        _check_overridden(source, dict.fromkeys(_OF_DATA, remedy))


def base_of(thing: object, name: str) -> Any:
    """Return the class of Lightning with this name from which an object derives, or None."""
    for kind in type(thing).__mro__:
        if kind.__name__ == name and kind.__module__.startswith(_PACKAGES):
            return kind
    return None


def overrides(thing: object, name: str) -> bool:
    """Whether an object defines a method in place of one of Lightning."""
    found = getattr(type(thing), name, None)
    origin = getattr(found, "__module__", None) or ""
    return found is not None and not origin.startswith(_PACKAGES)


def _check_overridden(thing: object, names: Mapping[str, str]) -> None:
    for name, remedy in names.items():
        if overrides(thing, name):
            raise TaskError(
                f"{type(thing).__name__} defines {name}(), which a task does not call; {remedy}"
            )


def step_arguments(step: Any, batch: Any, index: int) -> list[Any]:
    """Return the arguments of `training_step` or `validation_step`: the batch, and its index."""
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise TaskError(
            f"{step.__name__}() takes dataloader_iter; a run fetches the batches; take (batch, "
            "batch_idx)"
        )
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    return [batch, index] if len(parameters) > 1 or takes_any else [batch]


def merged_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name that validation logs without `val` before it: `val_loss` is `loss`."""
    merged: dict[str, str] = {}
    for name in names:
        short = next(
            (name[len(start) :] for start in ("val/", "val_", "valid_") if name.startswith(start)),
            name,
        )
        if short in merged.values():
            raise TaskError(
                f"validation logs {name!r} and another name that also becomes 'val/{short}'; "
                "choose another name for one of them"
            )
        merged[name] = short
    return merged


_CYCLED = ("betas", "momentum")
"""What schedulers change besides the learning rate."""
Entry = tuple[LRScheduler, str, int]
"""A scheduler, its interval (`step` or `epoch`) and its frequency."""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_KEYS = {"scheduler", "interval", "frequency", "name", "strict"}


def configured(module: Any) -> tuple[torch.optim.Optimizer, list[Entry]]:
    """Return a new optimizer of the module, and its schedulers."""
    found = module.configure_optimizers()
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    if isinstance(found, Mapping):
        optimizers, schedulers = [found["optimizer"]], [found.get("lr_scheduler")]
        _check_keys(found, {"optimizer", "lr_scheduler"})
    elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
        optimizers, schedulers = found[0], found[1] if isinstance(found[1], list) else [found[1]]
    else:
        optimizers, schedulers = found if isinstance(found, list | tuple) else [found], []
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        kinds = ", ".join(type(one).__name__ for one in optimizers) or "nothing"
        raise TaskError(
            f"configure_optimizers() returned {kinds}; a module without manual optimization has "
            f"one optimizer; return one, or {OWN_LOOP}"
        )
    return optimizers[0], [_scheduler(one) for one in schedulers if one is not None]


def _scheduler(given: Any) -> Entry:
    options = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = options["scheduler"]
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TaskError(
            "configure_optimizers() returned ReduceLROnPlateau, which waits for a metric; remove "
            "it, and write train.schedule: {name: plateau} in the spec"
        )
    _check_keys(options, _KEYS)
    if not isinstance(scheduler, LRScheduler):
        raise TaskError(
            f"configure_optimizers() returned the scheduler {type(scheduler).__name__}, which is "
            "no torch.optim.lr_scheduler.LRScheduler; derive it from that class"
        )
    return scheduler, options.get("interval", "epoch"), options.get("frequency", 1)


def _check_keys(given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(given.keys() - known):
        raise TaskError(
            f"configure_optimizers() returned a dict with {unknown[0]!r}, which a run does not "
            f"use; it uses {', '.join(sorted(known))}; remove it"
        )


def schedulers_apart(
    optimizer: torch.optim.Optimizer, entries: list[Entry]
) -> tuple[torch.optim.Optimizer, list[LRScheduler], list[tuple[str, int]]]:
    """Return an optimizer without the model's parameters, its schedulers, and when they step."""
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(torch.zeros(()))]
    optimizer.step()  # changes nothing without gradients; a scheduler wants one before its own
    return optimizer, [one[0] for one in entries], [one[1:] for one in entries]


def reset_rates(optimizer: torch.optim.Optimizer) -> None:
    """Undo what the schedulers wrote when they were made."""
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])


def copy_rates(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give the run's optimizer the learning rates that the schedulers wrote."""
    for theirs, ours in zip(source.param_groups, target.param_groups, strict=True):
        ours["lr"] = ours["initial_lr"] = theirs["lr"]
        for key in _CYCLED:
            if key in theirs:
                ours[key] = theirs[key]


def base_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each group from which the schedulers started."""
    return [group["initial_lr"] for group in optimizer.param_groups]


def scale_rates(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler], bases: Sequence[float]
) -> None:
    """Scale restored schedules to other base rates, as a trial of PBT that copied one has."""
    for index, (group, base) in enumerate(zip(optimizer.param_groups, bases, strict=True)):
        factor = base / (group["initial_lr"] or 1.0)
        if base == group["initial_lr"]:
            continue
        for key in group.keys() & set(_RATES):
            group[key] *= factor
        for scheduler in schedulers:
            scheduler.base_lrs[index] *= factor
