"""Train a `LightningModule` as a task (the extra `gradsweep[lightning]`).

    class Digits(LightningTask):
        def __init__(self, *, width: int = 64):
            self.width = width

        def lightning_module(self):
            return MyModule(width=self.width)

        def data_module(self):
            return MyDataModule()

The module's `training_step`, `validation_step`, `configure_optimizers` and `self.log` are used as
they are. The loop, the batch size, the precision, accumulation and clipping are the run's. What
cannot be mapped is refused by its name. A module in training gets a subclass of its own class, in
which `self.log`, `self.trainer` and its hooks lead to the task. Lightning itself is not imported:
it exists as `lightning.pytorch` and as `pytorch_lightning`, and a module of either fits.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from trainable.config import TrainConfig
from trainable.data import first_tensor
from trainable.errors import ConfigError, TaskError
from trainable.logged import Sums, add_value, is_reported_name
from trainable.parallel.rank_group import ranks_here
from trainable.task import Batch, Data, Task

_OPTIMIZERS: WeakKeyDictionary[LightningTask, torch.optim.Optimizer] = WeakKeyDictionary()
"""The run's optimizer of each task; an attribute of the task would be saved a second time."""
_REDUCTIONS: dict[object, str] = {
    "mean": "mean",
    "sum": "sum",
    torch.mean: "mean",
    torch.sum: "sum",
}


class LightningTask(Task):
    """A task whose model is a `LightningModule`, unchanged.

    `lightning_module` is required; `data_module` may be left out where the module has the loaders
    itself. Each call of `training_step` is a micro-batch: its loss, a mean, counts by the number
    of samples (`batch_size`). `batch_idx` counts the micro-batches of an epoch.

    Attributes:
        epoch: The current epoch, counted from 0.
        step: Optimizer steps taken.
    """

    epoch: int = 0
    step: int = 0
    _module: Any
    _size: int = 0  # of the current batch
    _batch: int = 0  # of the epoch
    _sums: Sums  # of the current evaluation
    _validating: bool = False
    _at_epoch_end: bool = False
    _metrics: Mapping[str, str] = {}  # of torchmetrics: the logged name and the module's
    _rates: torch.optim.Optimizer | None = None  # the schedulers' own
    _schedulers: Sequence[LRScheduler] = ()
    _intervals: Sequence[tuple[str, int]] = ()

    def lightning_module(self) -> Any:
        """Return a new `LightningModule`."""
        raise NotImplementedError(f"{type(self).__name__} must define lightning_module()")

    def data_module(self) -> Any:
        """Return a new `LightningDataModule`; the default is a module with loaders of its own."""
        return self.lightning_module()

    def batch_size(self, batch: Batch) -> int:
        """Return the number of samples of a batch; the default is that of its first tensor.

        A batch of PyG counts its graphs.
        """
        if isinstance(graphs := getattr(batch, "num_graphs", None), int):
            return graphs
        found = first_tensor(batch)
        if found is None or found.ndim == 0:
            raise TaskError(
                f"a batch of type {type(batch).__name__} holds no tensor whose first dimension "
                f"counts samples; define batch_size(self, batch) in {type(self).__name__}"
            )
        return len(found)

    def build_data(self) -> Data:
        """Return the data sets and collate functions of the loaders."""
        tell_rank()
        source = self.data_module()
        check_data_module(source)
        source.prepare_data()
        source.setup("fit")
        train, val = (
            _loader(source, name, shuffled=name == "train_dataloader")
            for name in ("train_dataloader", "val_dataloader")
        )
        return Data(
            train=train.dataset,
            val=val.dataset,
            collate=_collate(train),
            collate_val=_collate(val) or (_collate(train) and default_collate),
            test=partial(_test_samples, source, val)
            if overrides(source, "test_dataloader")
            else None,
        )

    def build_model(self) -> nn.Module:
        """Return the module, whose calls of Lightning lead to this task."""
        tell_rank()
        module: nn.Module = self.lightning_module()
        check_module(module)
        bind(module, self)
        module.prepare_data()  # type: ignore[operator]
        module.configure_model()  # type: ignore[operator]
        module.setup("fit")  # type: ignore[operator]
        self._module = module
        self._sums = {}
        self._metrics = {}
        self.epoch = self.step = self._batch = self._size = 0
        # else they would be saved in the order in which they were first set
        self._validating = self._at_epoch_end = False
        return module

    def build_optimizer(
        self, model: nn.Module, config: TrainConfig
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer of `configure_optimizers`; without that method the spec's is used.

        Its schedulers step as in Lightning; the schedule of the spec must then be constant.
        """
        if not overrides(model, "configure_optimizers"):
            return None
        optimizer, entries = configured(model)
        reset_rates(optimizer)
        self._rates, self._schedulers, self._intervals = None, [], []
        if entries:
            schedule = config.schedule
            if schedule.name != "constant" or schedule.warmup:
                raise ConfigError(
                    f"{schedule.name!r}, and configure_optimizers() returns a scheduler, too; "
                    "both would scale the learning rate; write train.schedule: {name: constant} "
                    "without a warmup, or remove the scheduler",
                    key="train.schedule",
                )
            # once more: a scheduler writes into the optimizer for which it was made
            made = schedulers_apart(*configured(model))
            self._rates, self._schedulers, self._intervals = made
            self._base_rates = base_rates(made[0])
        _OPTIMIZERS[self] = optimizer
        return optimizer

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the schedules keep the learning rates with which they were built."""
        super().load_state_dict(state)
        if self._rates is not None:
            scale_rates(self._rates, self._schedulers, self._base_rates)
        self._copy_rates()

    def _copy_rates(self) -> None:
        if self._rates is not None:
            copy_rates(self._rates, _OPTIMIZERS[self])

    def _step_schedulers(self, interval: str, count: int) -> None:
        for scheduler, (when, frequency) in zip(self._schedulers, self._intervals, strict=True):
            if when == interval and count % frequency == 0:
                scheduler.step()
        self._copy_rates()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Return the loss of `training_step` times the number of samples, and that number."""
        module: Any = model
        tell_rank()
        if (optimizer := _OPTIMIZERS.get(self)) is not None:
            self.log(f"lr-{type(optimizer).__name__}", optimizer.param_groups[0]["lr"])
        index, self._batch = self._batch, self._batch + 1
        batch = module.on_after_batch_transfer(batch, 0)
        size = self._size = self.batch_size(batch)
        if module.on_train_batch_start(batch, index) == -1:
            raise TaskError(
                "on_train_batch_start() returned -1, which would end the epoch; an epoch of a "
                "run has all its batches; return None"
            )
        output = module.training_step(*step_arguments(module.training_step, batch, index))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:  # no step for this batch
            return next(model.parameters()).new_zeros(()), 0
        if not isinstance(loss, Tensor):
            raise TaskError(
                f"training_step() returned an object of type {type(output).__name__}; it must "
                "return the loss, a dict with the key 'loss', or None"
            )
        return loss * size, size

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float | Tensor]:
        """Return what the module logs in validation; `val_loss` and `val/loss` become `loss`."""
        module: Any = model
        tell_rank()
        self._validating, self._sums, kept = True, {}, self._metrics
        self._metrics = {}
        try:
            module.on_validation_start()
            module.on_validation_epoch_start()
            for index, batch in enumerate(batches):
                moved = module.on_after_batch_transfer(batch, 0)
                self._size = self.batch_size(moved)
                module.on_validation_batch_start(moved, index)
                output = module.validation_step(
                    *step_arguments(module.validation_step, moved, index)
                )
                module.on_validation_batch_end(output, moved, index)
            module.on_validation_epoch_end()
            found = self._computed(module) | _averages(self._sums)
            module.on_validation_end()
        finally:
            self._validating, self._sums, self._metrics = False, {}, kept
        if not found:
            raise TaskError(
                f"{type(module).__name__} logs nothing in validation; log the metric of the "
                "sweep, such as self.log('val_loss', loss)"
            )
        return {short: found[name] for name, short in merged_names(found).items()}

    def on_epoch_start(self, epoch: int) -> None:
        """Call the module's hooks at the start of training and of an epoch."""
        self.epoch, self._batch, self._size = epoch, 0, 0
        tell_rank()
        self._copy_rates()
        if epoch == 0:
            self._module.on_fit_start()
            self._module.on_train_start()
        self._module.on_train_epoch_start()

    def on_step_end(self, step: int) -> None:
        """Count the step, and let the schedulers of steps step."""
        self.step = step
        self._step_schedulers("step", step)

    def on_epoch_end(self, _epoch: int) -> None:
        """Log metrics of torchmetrics for the epoch, reset them, and call the module's hook."""
        self._at_epoch_end = True
        tell_rank()
        self._module.on_train_epoch_end()
        for name, value in self._computed(self._module).items():
            self.log(name, value, over="epoch")
        self._metrics = {}
        self._at_epoch_end = False
        self._step_schedulers("epoch", self.epoch + 1)

    def log_value(self, module: Any, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """Log what the module gives to `self.log`, as Lightning would, or raise a `TaskError`."""
        at_end = self._at_epoch_end or self._validating
        on_epoch = options.get("on_epoch")
        on_epoch = at_end if on_epoch is None else bool(on_epoch)
        on_step = options.get("on_step")
        on_step = not at_end if on_step is None else bool(on_step) and not at_end
        reduction = options.get("reduce_fx", "mean")
        if reduction not in _REDUCTIONS:
            raise TaskError(
                f"self.log({name!r}) was given reduce_fx={reduction!r}; it must be 'mean' or "
                "'sum'; for another reduction log a metric of torchmetrics, such as MaxMetric"
            )
        if options.get("sync_dist_group") is not None:
            raise TaskError(
                f"self.log({name!r}) was given sync_dist_group; a value counts for all processes "
                "of the trial; leave it out"
            )
        if isinstance(value, nn.Module):
            self._log_metric(module, name, value, on_step=on_step, on_epoch=on_epoch)
            return
        if options.get("rank_zero_only") and not ranks_here().is_first:
            return
        size = options.get("batch_size") or self._size
        self._log_number(
            name, value, size, _REDUCTIONS[reduction], on_step=on_step, on_epoch=on_epoch
        )

    def _log_number(
        self, name: str, value: Any, size: int, reduce: Any, *, on_step: bool, on_epoch: bool
    ) -> None:
        if self._validating:
            number = torch.as_tensor(value).detach().reshape(()).double()
            add_value(self._sums, name, number, size if reduce == "mean" else None, reduce)
            return
        if is_reported_name(name):
            return  # the run reports it, such as train/loss
        both = on_step and on_epoch
        weight = size or None if reduce == "mean" and not self._at_epoch_end else None
        if on_step:
            self.log(f"{name}_step" if both else name, value, reduce=reduce, weight=weight)
        if on_epoch:
            self.log(
                f"{name}_epoch" if both else name,
                value,
                over="epoch",
                reduce=reduce,
                weight=weight,
            )

    def _log_metric(
        self, module: nn.Module, name: str, metric: nn.Module, *, on_step: bool, on_epoch: bool
    ) -> None:
        """Log the value of a step; note the metric, which is computed at the end of the epoch."""
        if on_step:
            value = getattr(metric, "_forward_cache", None)
            if value is not None:
                weight = None if self._at_epoch_end else self._size or None
                self.log(f"{name}_step" if on_epoch else name, value, weight=weight)
        path = next((path for path, one in module.named_modules() if one is metric), None)
        if path is None:
            raise TaskError(
                f"self.log({name!r}) was given a metric that is no part of the module; keep it as "
                f"an attribute of the module, such as self.{name.replace('/', '_')}"
            )
        self._metrics = {
            **self._metrics,
            (f"{name}_epoch" if on_step and on_epoch else name): path,
        }

    def _computed(self, module: Any) -> dict[str, Tensor]:
        """Return the metrics of torchmetrics that were logged for an epoch, and reset them."""
        # Each is computed over all processes, so each of these computes all of them, in one order.
        logged: dict[str, str] = {}
        for own in ranks_here().gather_plain(dict(self._metrics)):
            logged |= own
        metrics = {name: module.get_submodule(path) for name, path in logged.items()}
        values = {name: metric.compute() for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()
        return values

    def trainer_value(self, name: str) -> Any:
        """Return an attribute of `self.trainer`; a `TaskError` if the run has nothing like it."""
        values: dict[str, Any] = {
            "current_epoch": self.epoch,
            "global_step": self.step,
            "training": not self._validating,
            "validating": self._validating,
            "sanity_checking": False,
            "is_global_zero": ranks_here().is_first,
            "global_rank": ranks_here().rank,
            "local_rank": 0,  # each process sees one device
            "world_size": ranks_here().size,
            "strategy": STRATEGY,
            "progress_bar_callback": None,  # for self.print
            "logger": None,
            "loggers": [],
        }
        if name not in values:
            raise TaskError(
                f"the module reads self.trainer.{name}, which a run does not have; it has "
                f"{', '.join(values)}; give the value to the module's constructor"
            )
        return values[name]


def _averages(sums: Sums) -> dict[str, Any]:
    return {
        name: total if weights is None else total / weights
        for name, (total, weights) in sums.items()
    }


def _loader(source: Any, name: str, *, shuffled: bool) -> DataLoader[Any]:
    """Return a loader; refuse one whose order or batches a run would not reproduce."""
    if not overrides(source, name):
        raise TaskError(f"{type(source).__name__} has no {name}(); define it, or data_module()")
    loader = getattr(source, name)()
    problem = ""
    if not isinstance(loader, DataLoader):
        problem = f"an object of type {type(loader).__name__}; return one torch DataLoader"
    elif type(loader.batch_sampler) is not BatchSampler:
        problem = "a loader with its own batch_sampler; give batch_size instead"
    elif loader.worker_init_fn is not None:
        problem = "a loader with worker_init_fn; do that in the data set"
    elif type(loader.sampler) is SequentialSampler and shuffled:
        problem = "a loader without shuffle=True; a run trains in a new order in each epoch"
    elif type(loader.sampler) not in (SequentialSampler, RandomSampler) or getattr(
        loader.sampler, "replacement", False
    ):
        problem = f"a loader with the sampler {type(loader.sampler).__name__}; give shuffle=True"
    if problem:
        raise TaskError(f"{type(source).__name__}.{name}() returned {problem}")
    assert isinstance(loader, DataLoader)
    return loader


def _test_samples(source: Any, val: DataLoader[Any]) -> Any:
    """Return the data set of `test_dataloader`, for `sweep audit --test` alone."""
    source.setup("test")
    test = _loader(source, "test_dataloader", shuffled=False)
    if _collate(test) != _collate(val):
        raise TaskError(
            f"{type(source).__name__}.test_dataloader() has another collate_fn than "
            "val_dataloader(); a test makes batches as an evaluation does; give both the same"
        )
    return test.dataset


def _collate(loader: DataLoader[Any]) -> Callable[[list[Any]], Batch] | None:
    return None if loader.collate_fn is default_collate else loader.collate_fn


# -- What a module reaches of its trainer ---------------------------------------------------------

OWN_LOOP = 'write your own loop (see the guide "Your own loop")'
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
