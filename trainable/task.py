"""`Task` and `Data`, the classes that users write, and checks of what they give.

A task defines the model, the data and the loss. It returns a loss *sum* and its *weight*. So an
optimizer step divides once, and the mean is exact for short last windows and ignored targets.
What must not live here: finding a task by its name (`find_task.py`), how steps are taken, batches
are formed, or devices chosen.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from trainable.calls import DATA_CALLS, HOOKS, TASK_CALLS, call_problem
from trainable.config import TrainConfig
from trainable.errors import ConfigError, TaskError
from trainable.forms import split_problem
from trainable.logged import Over, Reduce
from trainable.losses import Weight, cross_entropy, evaluation_sums
from trainable.sample_kinds import is_stream, sampler_problems, stream_problems
from trainable.user_code.task_import import nearest

_STEPS: dict[int, tuple[weakref.ref[object], int]] = {}
"""By the task's id, the task and the steps of its run."""


class TotalSteps:
    """The attribute `total_steps` of tasks: the steps of the run, None before they are known.

    Not a property: a task that sets an attribute of this name itself has its own.
    """

    @overload
    def __get__(self, task: None, owner: type) -> TotalSteps: ...

    @overload
    def __get__(self, task: object, owner: type) -> int | None: ...

    def __get__(self, task: object | None, owner: type) -> TotalSteps | int | None:
        if task is None:
            return self
        known = _STEPS.get(id(task))
        return known[1] if known is not None and known[0]() is task else None


def set_total_steps(task: object, steps: int) -> None:
    """Let a task know how many steps its run takes."""
    key = id(task)
    _STEPS[key] = weakref.ref(task, lambda _: _STEPS.pop(key, None)), steps


Batch = Any
Samples = Dataset[Any] | tuple[Tensor, ...] | Iterable[Any]
TestSamples = Samples | Callable[[], Samples]
"""Test samples, or a function that returns them when they are needed."""

_NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm*, InstanceNorm*, SyncBatchNorm
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


@dataclass(frozen=True)
class Data:
    """The samples of a task.

    Each split is a map-style `Dataset`, or a tuple of tensors of equal length whose first
    dimension counts samples. Tensors are indexed directly, on the device if they fit there, and
    need no DataLoader. A split may also be a stream: an `IterableDataset`, or any iterable with
    `state_dict()` and `load_state_dict()`, such as torchdata's `StatefulDataLoader`.

    Attributes:
        train: Training samples.
        val: Validation samples.
        collate: Makes a batch of a list of samples; None: torch's default. Not called for
            tensors. Its random draws from Python, NumPy and torch are the same in any process.
        collate_val: The same for validation and test; None: `collate`. Give one if `collate`
            augments, such as by mixing, masking or cropping at random.
        sampler: Chooses the training samples of an epoch: an iterable of indices, such as
            `WeightedRandomSampler`. It is asked once an epoch, under the run's seed.
        batch_sampler: Chooses the samples of each step: an iterable of lists of indices. Then
            `train.batch_size` does not apply to training; `train.accumulation` splits each list.
        batched: Whether the items of a stream are batches, of which each is one forward pass.
            None: samples for an `IterableDataset`, batches for any other iterable.
        test: Samples that no trial uses, for `sweep audit --test`; or a function without arguments
            that returns them, which only that command calls. A stream is read to its end.
    """

    train: Samples
    val: Samples
    collate: Callable[[list[Any]], Batch] | None = None
    collate_val: Callable[[list[Any]], Batch] | None = None
    sampler: Iterable[int] | None = None
    batch_sampler: Iterable[Sequence[int]] | None = None
    batched: bool | None = None
    test: TestSamples | None = None

    def collate_of(self, split: str) -> Callable[[list[Any]], Batch] | None:
        """Return the collate function of `train`, `val` or `test`; None for torch's default."""
        return (split != "train" and self.collate_val) or self.collate


class Task:
    """Base class of tasks. The keys below `task:` of a spec are its constructor's arguments.

    `build_model` and `build_data` are required. The default `loss` and `evaluate` fit
    classification: batches of `(inputs, targets)`, a model that maps inputs to raw logits of shape
    (N, C, ...), integer targets of shape (N, ...).

    Attributes:
        label_smoothing: Of the default loss; see `use_cross_entropy`.
        class_weights: Of the default loss, shape (C,); None weighs all classes alike.
        tokens_per_sample: Tokens of one training sample, for a budget in tokens.
        total_steps: Optimizer steps of the whole run; None until model and data are built.
    """

    label_smoothing: float = 0.0
    class_weights: Tensor | None = None
    tokens_per_sample: int | None = None
    total_steps = TotalSteps()

    def use_cross_entropy(
        self,
        *,
        classes: int,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        """Set the options of the default loss; call it in the task's constructor.

        Only training smooths labels, so that validation losses stay comparable between trials.
        Class weights apply to training and validation.

        Args:
            classes: The number of classes.
            label_smoothing: Share of the probability spread evenly over the classes, in [0, 1).
            class_weights: One factor for each class.

        Raises:
            ConfigError: An option is out of range.
        """
        if not 0 <= label_smoothing < 1:
            raise ConfigError(
                f"label_smoothing is {label_smoothing}; it must lie in [0, 1); write 0.1"
            )
        self.label_smoothing = label_smoothing
        if class_weights is None:
            return
        if len(class_weights) != classes or min(class_weights) < 0 or max(class_weights) == 0:
            raise ConfigError(
                f"class_weights is {list(class_weights)}; it must be {classes} numbers, one for "
                "each class, none below 0 and not all 0"
            )
        self.class_weights = torch.tensor(class_weights, dtype=torch.float32)

    def build_model(self) -> nn.Module:
        """Return a new model on the CPU. Called after the run's seed is set.

        Training leaves each module in the mode (training or evaluation) in which it is returned.

        A model that writes to trained parameters in its forward pass must do so from the first
        pass on: a save copies the other parameters while the next pass runs.
        """
        raise NotImplementedError(_undefined(self, "build_model"))

    def build_data(self) -> Data:
        """Return the samples.

        Constructor and `build_data` run under a seed that all trials of a sweep share: random
        draws, such as a split, are the same for each trial.
        """
        raise NotImplementedError(_undefined(self, "build_data"))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Weight]:
        """Return the summed loss of a batch (a scalar) and its weight (targets counted).

        The loss may be a constant tensor for a batch without targets, whose weight is 0.
        """
        inputs, targets = batch
        logits = model(inputs)
        if self.class_weights is not None and self.class_weights.device != logits.device:
            self.class_weights = self.class_weights.to(logits.device)  # once
        return cross_entropy(
            logits,
            targets,
            weight=self.class_weights,
            label_smoothing=self.label_smoothing if model.training else 0.0,
        )

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Mapping[str, float | Tensor]:
        """Return metrics over all batches; the loop adds the prefix `val/` to their names.

        The model is in evaluation mode and autograd is off. The default returns `loss`, the mean
        over all targets, and `accuracy` if the model's output is logits over classes.
        """
        return evaluation_sums(self.loss, model, batches).metrics()

    def on_epoch_start(self, epoch: int) -> None:
        """Called before the first step of an epoch, counted from 0; does nothing by default.

        A hook may change the model and the task: unfreeze layers, change dropout or momenta of
        norms. All that is saved, so a run that resumes within an epoch does not call it again. To
        reach the model, keep it on the task in `build_model`.
        """

    def on_step_end(self, step: int) -> None:
        """Called after each optimizer step, counted from 1; does nothing by default.

        Not called for a step that fp16 skips. What it logs belongs to the row of this step.
        """

    def on_epoch_end(self, epoch: int) -> None:
        """Called after the last step of an epoch and before its evaluation; does nothing."""

    def log(
        self,
        name: str,
        value: float | Tensor,
        *,
        over: Over = "step",
        reduce: Reduce = "mean",
        weight: float | Tensor | None = None,
    ) -> None:
        """Log a number in the row of the current step, of the epoch, or of the evaluation.

        The values of one step (one for each micro-batch), of an epoch or of an evaluation become
        their mean or sum; those of an evaluation are named `val/<name>`. A value on a device is
        fetched with the step's other values, so no step waits for it. The sums of an epoch are in
        each checkpoint. Outside of a run, nothing is recorded.

        Args:
            name: Such as `train/aux_loss`; not a name that the run itself reports.
            value: One number.
            over: Log a row for each `step`, or one value with the report of each `epoch`: of
                all steps since the report before. The hooks of an epoch always log for the epoch.
            reduce: `mean` or `sum`.
            weight: The value's weight in the mean, such as the number of targets in the batch.

        Raises:
            TaskError: The name, the value or an option cannot be recorded.
        """
        from trainable.logged import log_of

        if (log := log_of(self)) is not None:
            log.add(name, value, over=over, reduce=reduce, weight=weight)

    def log_file(self, path: str | Path, name: str | None = None) -> None:
        """Keep a copy of a file with the run; the tracking server receives it when the run ends.

        Args:
            path: The file.
            name: Its path among the run's artifacts; default its own name.
        """
        from trainable.logged import log_of

        if (log := log_of(self)) is not None:
            log.add_file(path, name)

    def log_figure(self, name: str, figure: Any) -> None:
        """Keep a Matplotlib figure with the run, as `log_file` does.

        Args:
            name: Its path among the run's artifacts; `.png` is appended where it has no suffix.
            figure: An object with a method `savefig`.
        """
        from trainable.logged import log_of

        if (log := log_of(self)) is not None:
            log.add_figure(name, figure)

    def fingerprint(self, data: Data) -> str | None:
        """Return a text that changes when the data change, or None where that is unknown.

        A sweep does not resume with other data. The default is a digest of the samples if both
        splits are tensors, and None otherwise. A task with a `Dataset` may return what identifies
        its data: a version, or a digest of file names and lengths.

        Args:
            data: The return value of `build_data`.
        """
        from trainable.user_code.fingerprint import tensor_digest

        if not isinstance(data.train, tuple) or not isinstance(data.val, tuple):
            return None
        return tensor_digest(*data.train, *data.val)

    def reads(self, path: str | os.PathLike[str]) -> Path:
        """Declare a file from which the task is built, such as weights; return its path.

        The sweep and each run record the file's digest and do not resume with other content. Call
        it in the constructor, in `build_model` or in `build_data`; it reads the file once.

        Raises:
            OSError: The file cannot be read.
        """
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.__dict__.setdefault("_files_read", {})[str(path)] = digest
        return Path(path)

    @property
    def files_read(self) -> Mapping[str, str]:
        """The sha256 of each file declared with `reads`, by path."""
        found: dict[str, str] = self.__dict__.get("_files_read", {})
        return found

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups.

        A group may have `lr_multiplier` (a factor on the learning rate at every step) besides any
        option of the optimizer. The default covers all parameters and puts tensors with fewer
        than two dimensions (biases, norms, layer scales) into a group without weight decay.
        """
        return decay_groups(model)

    def sharded_modules(self, model: nn.Module) -> Sequence[nn.Module] | None:
        """Return the modules whose parameters are gathered together under `train.sharding: fsdp`.

        Their parameters are whole only while the module's own `forward` computes; those of the
        rest of the model, while the model's does. List inner modules before those that contain
        them. The default returns None: the members of each `nn.ModuleList`, or of the
        `nn.Sequential` that the model is.
        """
        del model
        return None

    def build_optimizer(
        self, model: nn.Module, config: TrainConfig
    ) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None:
        """Return the optimizer of the model's parameters, or a list of optimizers.

        The default returns None: the optimizer is that of the spec, over `param_groups`. The
        schedule scales the learning rate of each group relative to its own. Build them from
        `config.optimizer.lr`, so that a search of `train.optimizer.lr` reaches them. Each trained
        parameter is in exactly one group.

        Args:
            model: The model, on its device.
            config: The section `train` of the trial.
        """
        del model, config
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the task's own state that a resumed run needs: tensors and plain data.

        Called at each save. An override says itself what matters of the task, and its attributes
        are then saved by it alone. Without one the run saves every attribute that has changed
        since it was built, as pickle would, and refuses a change that it could not restore.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called after `build_data` and `build_model`.

        Args:
            state: The saved state, with every tensor on the CPU.

        Raises:
            CheckpointError: The state does not fit this task.
        """
        del state


Task.state_dict.saves_attributes = True  # type: ignore[attr-defined]  # see `reachable.kind_of`


def _undefined(task: Task, name: str) -> str:
    own = [key for key in dir(task) if not key.startswith("_") and not hasattr(Task, key)]
    return f"{type(task).__name__} must define {name}(){nearest(name, own)}"


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split all parameters into one group with weight decay and one without.

    Tensors with fewer than two dimensions do not decay: biases, and the scales of norms and of
    layers, whatever their class. Neither do scales of shape (C, 1, 1), which broadcast over
    images. All others decay, including embeddings. Frozen parameters are in their group, too: they
    train once they are unfrozen. A parameter shared between modules appears once, and does not
    decay if any of its uses excludes it.
    """
    undecayed: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_bias = name == "bias" or name.endswith("_bias") or name.startswith("bias_")
            is_vector = _is_vector(module, parameter)
            if isinstance(module, _NORMS) or is_bias or is_vector:
                undecayed.add(id(parameter))
    # parameters() yields a shared parameter once; integer parameters are never trained.
    parameters = [
        p for p in model.parameters() if p.requires_grad or p.is_floating_point() or p.is_complex()
    ]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) not in undecayed]},
        {"params": [p for p in parameters if id(p) in undecayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _is_vector(module: nn.Module, parameter: nn.Parameter) -> bool:
    if is_lazy(parameter):  # the first batch defines its shape
        return False
    if parameter.ndim < 2:
        return True
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    return parameter.ndim > 2 and not is_convolution and set(parameter.shape[1:]) == {1}


def describe_kind(value: object) -> str:
    """Return of which class an object is, or that it is a class."""
    if isinstance(value, type):
        is_lightning = any(kind.__name__ == "LightningModule" for kind in value.__mro__)
        hint = ' (LightningTask makes a task of it: see the guide "Lightning")' * is_lightning
        return f"the class {value.__name__}, which does not derive from Task{hint}"
    return f"an object of type {type(value).__name__}"


def is_overridden(task: Task, name: str) -> bool:
    """Whether a task has a method of its own in place of one of `Task`."""
    return name in vars(task) or getattr(type(task), name) is not getattr(Task, name)


def check_calls(task: Task) -> None:
    """Refuse a task with a method that cannot be called as a run calls it."""
    for name, given in TASK_CALLS.items():
        if not is_overridden(task, name):
            continue
        if (problem := call_problem(getattr(task, name), given)) is None:
            continue
        kept = "; for the model, keep it on the task in build_model(), such as `self.net = net`"
        raise TaskError(
            f"{type(task).__name__}.{name}() {problem}; a run calls {name}({', '.join(given)}); "
            f"define it as `def {name}({', '.join(('self', *given))}):`"
            f"{kept if name in HOOKS else ''}"
        )


def check_data(data: object, task: Task) -> Data:
    """Check the return value of `build_data`, and return it."""
    where = f"{type(task).__name__}.build_data()"
    if not isinstance(data, Data):
        raise TaskError(
            f"{where} returned {describe_kind(data)}; it must return trainable.Data(train=..., "
            "val=...)"
        )
    for split, samples in (("train", data.train), ("val", data.val), ("test", data.test)):
        if split != "test" or (samples is not None and not is_loader(samples)):
            check_split(samples, split, where, data.collate_of(split))
    for name, collate in (("collate", data.collate), ("collate_val", data.collate_val)):
        if collate is not None and not callable(collate):
            raise TaskError(
                f"{where}: {name} is {describe_kind(collate)}; it must be a function that takes a "
                "list of samples and returns a batch; give one, or None"
            )
    for name, given in DATA_CALLS.items():
        function = getattr(data, name)
        is_called = function is not None and (name != "test" or is_loader(function))
        if is_called and (problem := call_problem(function, given)) is not None:
            form = f"{name}({', '.join(given)})"
            raise TaskError(f"{where}: {name} {problem}; a run calls {form}; give such a function")
    for problem in sampler_problems(data):
        raise TaskError(f"{where}: {problem}")
    return data


def is_loader(samples: object) -> bool:
    """Return whether test samples are given as a function that loads them."""
    return callable(samples) and not hasattr(type(samples), "__getitem__")


def check_split(
    samples: object, split: str, where: str, collate: Callable[[list[Any]], Batch] | None
) -> None:
    """Check the samples of a split; messages begin with `where`, which names what gave them."""
    if (slip := split_problem(samples, collate)) is not None:
        raise TaskError(f"{where}: {split} {slip}")
    for problem in _split_problems(samples):
        raise TaskError(f"{where}: {split} {problem}")


def _split_problems(samples: object) -> Iterator[str]:
    if isinstance(samples, tuple):
        if not samples or not all(isinstance(t, Tensor) and t.ndim > 0 for t in samples):
            yield (
                "is a tuple that does not hold tensors only; give tensors whose first dimension "
                "counts samples"
            )
        elif len(lengths := {len(t) for t in samples}) > 1:
            yield (
                f"holds tensors of lengths {sorted(lengths)}; they must be of equal length, with "
                "one entry for each sample"
            )
        elif lengths == {0}:
            yield "has no samples; give at least one"
    elif isinstance(samples, type):
        name = samples.__name__
        yield f"is the class {name}; a split is an object with samples; give {name}(...)"
    elif is_stream(samples):
        yield from stream_problems(samples)
    elif not all(hasattr(type(samples), name) for name in ("__getitem__", "__len__")):
        yield (
            f"is {describe_kind(samples)}; give a Dataset with __len__ and __getitem__, a tuple "
            "of tensors, or a stream: an IterableDataset, or an iterable with state_dict() and "
            "load_state_dict()"
        )
    elif len(samples) == 0:  # type: ignore[arg-type]
        yield "has no samples; give at least one"
