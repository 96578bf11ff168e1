"""Everything that exact resumption needs, as one `state_dict()`.

Model, what is trained beside it, optimizer, schedule, loss scale, counters, position in the data,
best value, and the random generators of torch (CPU and every CUDA device), NumPy and Python. Only
types that `torch.load(weights_only=True)` accepts. What must not live here: files (see
`checkpoint.py`).
"""

from __future__ import annotations

import io
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainable.base_run import describe
from trainable.errors import CheckpointError, TaskError
from trainable.object_state import ObjectState
from trainable.object_values import has_overlap
from trainable.precision import Precision
from trainable.schedule import Schedule
from trainable.task import Task
from trainable.task_state import TaskState, modules_state

FORMAT = 2
"""1 had neither what torch keeps outside a model's state dict nor what a task holds."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_OWN_OPTIONS = ("initial_lr", "lr_multiplier")
"""What a parameter group holds beside an optimizer's own options."""


@dataclass
class TrainProgress:
    """Where a run stands. Plain numbers, saved and restored as they are."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """Epochs completed."""
    window: int = 0
    """Windows of the current epoch consumed, skipped ones included."""
    batch_size: int = 0
    """Samples in each of them; 0 in states of earlier versions, which did not say."""
    samples: int = 0
    """Samples trained on."""
    skipped: int = 0
    """Windows whose fp16 gradients overflowed."""
    skipped_in_a_row: int = 0
    """Of these, the latest without a step between them."""
    clipped: int = 0
    """Steps whose gradient was clipped, since the last report."""
    reported_step: int = 0
    """Steps taken at the last report."""
    best: float | None = None
    """Best value of the metric so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last report."""
    evaluated: list[str] = field(default_factory=list)
    """Names of those that `evaluate()` gave; none in states of earlier versions."""


class TrainState:
    """The state of one run, gathered from the objects that hold it.

    Args:
        model: What is trained.
        optimizer: With its moments, and with what is trained outside the model, such as a loss's
            weights.
        schedule: With what is no function of the step.
        precision: With its loss scale.
        task: With what it holds.
        data: Its samples, whose tensors are no state.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        precision: Precision,
        task: Task | None = None,
        data: object = None,
    ) -> None:
        self.progress = TrainProgress()
        self._model = model
        self._optimizer = optimizer
        inside = {id(p) for p in model.parameters()}
        self._outside = nn.ParameterList(
            p for group in optimizer.param_groups for p in group["params"] if id(p) not in inside
        )
        self._schedule = schedule
        self._precision = precision
        self._task = task
        self._was_read_back = False
        trained = [*model.parameters(), *self._outside]
        self._modules = modules_state(model, trained, task, data)
        self._held = None if task is None else TaskState(task, model, trained, data)

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Tensors are the live ones: copy or write them before the next step.

        Raises:
            CheckpointError: The model's state could not be read back.
            TaskError: The task, or the model, holds something that has changed and cannot be
                restored.
        """
        outside = {"outside": self._outside.state_dict()} if self._outside else {}
        held = {} if self._task is None else self._task.state_dict()
        modules = self._modules.state_dict()
        if not self._was_read_back and not any(map(is_lazy, self._model.parameters())):
            self._was_read_back = True
            check_loading(self._model)
        check_state(held, "the state of the task")
        check_state(modules, "the state of the model's modules")
        return outside | {
            "format": FORMAT,
            "model": model_state(self._model),
            "modules": modules,
            "task": held,
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "scaler": self._precision.state_dict(),
            "progress": asdict(self.progress),
            "random": _capture_random(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put a state back, from any device onto the one in use.

        The optimizer's options stay what it was built with: a run may go on with the moments of
        another one and other hyperparameters.

        Random generators of CUDA devices are restored where there are as many; a run that moved to
        another kind of device continues with the same data order, but draws its dropout elsewhere.

        Raises:
            CheckpointError: Keys are missing or unknown, the format is another, or the model or
                optimizer differs.
        """
        if state.get("format", FORMAT) not in (1, FORMAT):
            raise CheckpointError(
                f"the state has format {state['format']}; this version reads {FORMAT} and 1; use "
                "the version that wrote it"
            )
        # Format 1 has neither; a run that inherits from one that has them may have them, too.
        optional: dict[str, Any] = {"modules": [], "task": {}} if state.get("format") == 1 else {}
        state = {**optional, **state}
        _check_keys("the state", state, self._expected_keys())
        progress = {"batch_size": 0, "evaluated": [], **state["progress"]}
        _check_keys("the progress", progress, set(asdict(TrainProgress())))
        self._modules.load_state_dict(state["modules"])  # before the buffers that it registers
        try:
            load_model_state(self._model, state["model"])
            self._outside.load_state_dict(state.get("outside", {}), strict=True)
            _load_optimizer(self._optimizer, state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as problem:
            raise CheckpointError(
                f"the checkpoint does not fit the model or the optimizer ({problem}); continue "
                "with the code, the version and the configuration that wrote it, or start a new "
                "run"
            ) from problem
        if self._task is not None and state["task"]:
            self._task.load_state_dict(state["task"])
        self._schedule.load_state_dict(state["schedule"])
        self._precision.load_state_dict(state["scaler"])
        self.progress = TrainProgress(**progress)
        _restore_random(state["random"])

    def _expected_keys(self) -> set[str]:
        expected = {"format", "model", "optimizer", "schedule", "scaler", "progress", "random"}
        expected |= {"modules", "task"}
        return expected | {"outside"} if self._outside else expected


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state, all of which can be read back.

    Raises:
        CheckpointError: It could not: `get_extra_state()` may return anything.
    """
    state = model.state_dict()
    extra = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    if extra and not _comes_back(extra):
        check_state(extra, "the model's state")
        raise CheckpointError(
            f"the model's state has {', '.join(extra)}, which torch does not read back without "
            "running code; let get_extra_state() return tensors and plain data"
        )
    return state


def _comes_back(state: dict[str, Any]) -> bool:
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # what is in it may raise anything
        return False
    return True


def check_read_back(model: nn.Module, fresh: nn.Module, modules: ObjectState) -> None:
    """Put a model's state into one that has just been built, as a resumed run would.

    Args:
        model: One that may have been trained.
        fresh: A new one, which is changed.
        modules: What has changed in `model` beside its state dict.

    Raises:
        TaskError: The new one does not take it.
    """
    state, changed = model_state(model), modules.state_dict()
    try:
        modules_state(fresh, fresh.parameters()).load_state_dict(changed)
        load_model_state(fresh, state)
    except (RuntimeError, ValueError, LookupError, AttributeError, CheckpointError) as problem:
        raise _unreadable(problem) from problem


def check_loading(model: nn.Module) -> None:
    """Let a model load its own state, which changes nothing: its first save must be of use.

    Whether a new one has the same parameters and buffers is known without building it.

    Raises:
        TaskError: It does not take it.
    """
    try:
        load_model_state(model, model_state(model))
    except (RuntimeError, ValueError, LookupError, AttributeError, TypeError) as problem:
        raise _unreadable(problem) from problem


def _unreadable(problem: Exception) -> TaskError:
    return TaskError(
        f"the model's state cannot be read back into a new model of build_model() ({problem}); a "
        "run saves it and is resumed from it; build in build_model() every parameter and buffer "
        "that the model will have, and let load_state_dict() take what state_dict() gives"
    )


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Load a model's state dict, also into buffers that are expanded views.

    Raises:
        RuntimeError: It does not fit.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_lazy(buffer) and has_overlap(buffer):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
    model.load_state_dict(state, strict=True)


def check_state(state: object, where: str = "state") -> None:
    """Refuse what `torch.load(weights_only=True)` would not give back.

    Raises:
        CheckpointError: An object in it is neither a tensor nor plain data.
    """
    if isinstance(state, Mapping) and type(state) in (dict, OrderedDict):
        for key, value in state.items():
            check_state(key, f"a key of {where}")
            check_state(value, f"{where}[{key!r}]")
    elif type(state) in (list, tuple):
        for index, value in enumerate(state):  # type: ignore[arg-type]
            check_state(value, f"{where}[{index}]")
    elif type(state) not in (*_PLAIN, Tensor, nn.Parameter, nn.Buffer):
        raise CheckpointError(
            f"{where} is {describe(state)}; a state holds tensors, numbers, strings, lists, "
            "tuples and dicts, so that it can be read back without running code; save "
            f"{_remedy(state)}"
        )


def _remedy(value: object) -> str:
    if hasattr(value, "state_dict"):
        return "its state_dict()"
    if type(value).__module__ == "numpy":
        return "torch.as_tensor() or .item() of it"
    return "plain data from which it can be made again"


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    options = [
        {key: group[key] for key in (*optimizer.defaults, *_OWN_OPTIONS) if key in group}
        for group in optimizer.param_groups
    ]
    # Moments are put back by their order, which is another one in groups of other parameters.
    saved, ours = (
        [len(group["params"]) for group in groups]
        for groups in (state["param_groups"], optimizer.param_groups)
    )
    if saved != ours:
        raise ValueError(f"its parameter groups hold {saved} parameters, those of the task {ours}")
    # On what device a step's count lies depends on the kernels that will read it.
    groups = [
        {**group, "fused": own["fused"]} if "fused" in own else group
        for group, own in zip(state["param_groups"], options, strict=True)
    ]
    made = {parameter: dict(moments) for parameter, moments in optimizer.state.items()}
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    for parameter, moments in made.items():  # which a state without them would throw away
        for key, value in moments.items():
            optimizer.state[parameter].setdefault(key, value)
    # Fused kernels walk memory without a look at shapes and strides, and a run may be resumed with
    # another `channels_last`.
    fused = optimizer.defaults.get("fused")
    for parameter, moments in optimizer.state.items():
        for key, value in moments.items():
            if key == "step" or not isinstance(value, Tensor):
                continue
            if fused and value.shape != parameter.shape:
                raise ValueError(
                    f"its {key} is of a parameter of shape {list(value.shape)}, in whose place "
                    f"the task has one of shape {list(parameter.shape)}"
                )
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                moments[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _check_keys(what: str, found: dict[str, Any], expected: set[str]) -> None:
    if set(found) != expected:
        missing, unknown = sorted(expected - set(found)), sorted(set(found) - expected)
        raise CheckpointError(
            f"{what} lacks the keys {missing} and has unknown keys {unknown}; use the version "
            "that wrote it"
        )


def _capture_random() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [
            str(kind),
            torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
    }


def _restore_random(state: dict[str, Any]) -> None:
    _check_keys("the random state", state, {"torch", "cuda", "numpy", "python"})
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state(
        (kind, keys.cpu().numpy().astype(numpy.uint32), position, has_gauss, cached)
    )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
