"""Build optimizers by name with documented defaults; divide and clip gradients.

| name      | values of state for each parameter | lr   | other defaults                     |
|-----------|------------------------------------|------|------------------------------------|
| sgd       | 1; none without momentum           | 0.1  | momentum 0.9                       |
| adam      | 2                                  | 3e-4 | betas (0.9, 0.999), eps 1e-8       |
| adamw     | 2                                  | 3e-4 | same; weight_decay 0.01            |
| adafactor | a row and a column of each matrix  | 1e-3 | eps: torch's                       |
| lamb      | 2                                  | 1e-3 | betas (0.9, 0.999), eps 1e-6       |
| lion      | 1                                  | 3e-4 | betas (0.9, 0.99)                  |

`config.OPTIMIZER_DEFAULTS` fills in learning rate, momentum and weight decay (0 where the table
names none). With `null`, the optimizer's own betas and eps apply. The other optimizers of torch,
and a user's own class, have the defaults of their signatures. What must not live here: the order
of a step (see `step.py`), and which parameters decay (see `task.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainable.config import OPTIMIZER_DEFAULTS, ClipConfig, OptimizerConfig, TrainConfig, is_own
from trainable.errors import ConfigError, TaskError
from trainable.group_joining import hidden_group
from trainable.task import Task
from trainable.user_code.task_code import task_code
from trainable.user_code.task_import import import_own, listed, nearest

Scalar = float | Tensor

_EPS = 1e-6  # added to the norm against division by zero, as in torch's clip_grad_norm_
_FUSED_WHEN_SHARDED = ("adam", "adamw")
"""Those whose fused kernels take sharded parameters."""
_KERNELS = {"fused", "foreach", "differentiable"}
"""Arguments that choose the implementation."""


def normalize_groups(groups: object) -> list[dict[str, Any]]:
    """Return the parameter groups, each with a list of parameters."""
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, dict) and "params" in group for group in groups
    ):
        raise TaskError("param_groups() must return a list of dicts, each with 'params'")
    return [{**group, "params": _parameters(group["params"])} for group in groups]


def _parameters(found: object) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    # A set has another order in each process, and moments are restored by their order.
    if isinstance(found, (set, frozenset)) or not isinstance(found, Iterable):
        raise TaskError(
            f"param_groups() gives the parameters of a group as an object of type "
            f"{type(found).__name__}; they must be a list or another ordered collection, such as "
            "head.parameters()"
        )
    return [_parameter(item) for item in found]


def _parameter(item: object) -> Tensor:
    match item:
        case (Tensor() as parameter) | (str(), Tensor() as parameter):
            return parameter
    raise TaskError(
        f"param_groups() lists an object of type {type(item).__name__} among the parameters; list "
        "the parameters of modules, such as head.parameters()"
    )


def trained(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters of all groups that receive gradients."""
    return [p for group in groups for p in group["params"] if p.requires_grad]


def state_bytes(config: OptimizerConfig, parameters: Iterable[Tensor]) -> int:
    """Return the bytes of the optimizer's state, without its step counters."""
    return sum(_state_values(config, p) * p.element_size() for p in parameters)


def _state_values(config: OptimizerConfig, parameter: Tensor) -> int:
    count, matrix = parameter.numel(), parameter.shape[-2:]
    match config.name:
        case "sgd":
            return count if config.momentum else 0
        case "adafactor" if len(matrix) == 2:
            return count // matrix[0] + count // matrix[1]
        case "adafactor" | "lion" | "adagrad" | "muon" | "rmsprop":
            return count
        case _:
            return 2 * count


def check_groups(config: OptimizerConfig, groups: list[dict[str, Any]]) -> None:
    """Check that an optimizer can be built over these parameter groups, without building it."""
    parameters = [p for group in groups for p in group["params"]]
    if not trained(groups):
        raise TaskError(
            "the parameter groups hold no parameter to train; at least one must have requires_grad"
        )
    if len({id(p) for p in parameters}) < len(parameters):
        raise TaskError("param_groups() lists a parameter twice; list shared weights once")
    class_of(config)


def build_optimizer(
    config: OptimizerConfig, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build the optimizer, with fused or foreach kernels where the device has them."""
    check_groups(config, groups)
    optimizer = _construct(config, groups, [p for group in groups for p in group["params"]])
    if (why := unusable(optimizer)) is not None:
        raise ConfigError(f"{config.name!r}: {why}", key="train.optimizer.name")
    set_base_rates(optimizer.param_groups, config.lr)
    return optimizer


def set_base_rates(groups: Iterable[dict[str, Any]], peak: float) -> None:
    """Make each group's own learning rate, times its `lr_multiplier`, what the schedule scales."""
    for group in groups:
        multiplier, own = group.get("lr_multiplier", 1.0), group["lr"] / peak
        group["lr"] = group["initial_lr"] = group["lr"] * multiplier
        group["lr_multiplier"] = multiplier * own


def _construct(
    config: OptimizerConfig, groups: list[dict[str, Any]], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    kind = class_of(config)
    if is_own(config.name):
        given = {**config.model_dump(exclude={"name", "arguments"}), **config.arguments}
        return _made(kind, config, groups, checked_options(config, kind, given))
    arguments = checked_options(config, kind, config.arguments)
    options = torch_options(config, kind)
    # Fused kernels exist for CPU and CUDA. They honour `found_inf`, with which `step.py` stops an
    # update on the device without a synchronisation. Elsewhere None, not False: with None, torch
    # uses foreach kernels where the device has them.
    on_known = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    fused = (on_known and not any(map(_has_gaps, parameters))) or None
    if config.name not in _FUSED_WHEN_SHARDED and any(map(_is_sharded, parameters)):
        fused = None
    if arguments.keys() & _KERNELS:
        fused = None
    match config.name:
        case "sgd":
            options["nesterov"] = config.nesterov
            # When fp16 overflows on the first step, torch's fused kernel uses uninitialised memory
            # as momentum. Start from zero instead: the first real step then sets it to the
            # gradient, as torch does. With dampening it would not; lazy parameters have no shape.
            damped = any(g.get("dampening") for g in (arguments, *groups))
            if any(map(is_lazy, parameters)) or damped:
                fused = None
            sgd = _made(kind, config, groups, {**options, "fused": fused, **arguments})
            if fused:
                _make_momentum(sgd, parameters)
                if not all(p.requires_grad for p in parameters):  # they may be unfrozen later
                    sgd.register_step_pre_hook(
                        lambda *_: _make_momentum(
                            sgd, [p for p in parameters if p.grad is not None]
                        )
                    )
            return sgd
        case "adam" | "adamw":
            options["fused"] = fused
        case "adafactor" if config.eps is not None:
            options["eps"] = None, config.eps
        case "lamb":
            # Without it the package divides the step, not the moment, by 1 - beta1 ** t. The trust
            # ratio has already normalised the update: the first step would be 10 lr.
            options["adam_debias"] = True
    return _made(kind, config, groups, {**options, **arguments})


def _made(
    kind: Any, config: OptimizerConfig, groups: list[dict[str, Any]], given: dict[str, Any]
) -> torch.optim.Optimizer:
    """Call an optimizer's class."""
    try:
        optimizer: torch.optim.Optimizer = kind(groups, **given)
    # A user's class may raise anything.
    except Exception as problem:
        matrices = "only supports 2D" in str(problem)
        remedy = (
            "give it the matrices, and another optimizer the rest, in Task.build_optimizer(), as "
            'the guide "Optimizers and schedules" shows'
            if matrices
            else "correct the options in train.optimizer and its arguments"
        )
        raise ConfigError(
            f"{config.name!r} could not be built with {given} ({type(problem).__name__}: "
            f"{problem}); an optimizer is built over Task.param_groups(); {remedy}",
            key="train.optimizer.name",
        ) from problem
    return optimizer


def _make_momentum(sgd: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Give each trained parameter without momentum a momentum of zero."""
    keeping = {id(p) for group in sgd.param_groups if group["momentum"] for p in group["params"]}
    for p in parameters:
        if p.requires_grad and id(p) in keeping and not sgd.state[p]:
            sgd.state[p]["momentum_buffer"] = torch.zeros_like(p, requires_grad=False)


def _is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "device_mesh")  # a DTensor, whose import takes a second


def _has_gaps(parameter: Tensor) -> bool:
    """Return whether a parameter's memory has gaps, as a view of some channels does.

    Fused kernels ignore strides. Gradients and moments have their parameter's layout, but no gaps.
    """
    if is_lazy(parameter):  # created later, without gaps
        return False
    return torch.empty_like(parameter, device="meta").stride() != parameter.stride()


def applied_lr(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate that the next step uses, before multipliers, as it is written."""
    return _rate(optimizer, "lr")


def scheduled_lr(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Return the learning rate that the schedule wants, before group multipliers.

    The rate that it multiplies is read from the optimizer: a task may have changed it, as the
    schedulers of a `LightningModule` do.
    """
    return _rate(optimizer, "initial_lr") * factor


def _rate(optimizer: torch.optim.Optimizer, key: str) -> float:
    group = max(optimizer.param_groups, key=_multiplier)
    return float(group[key] / (_multiplier(group) or 1.0))


def _multiplier(group: dict[str, Any]) -> float:
    return float(group.get("lr_multiplier", 1.0))


class Clipper:
    """Divide gradients by the window's weight and clip them, in one pass."""

    def __init__(self, config: ClipConfig) -> None:
        self._max_norm = config.max_norm
        self._value = config.value

    def __call__(
        self, gradients: list[Tensor], weight: Scalar
    ) -> tuple[Scalar, bool | Tensor, Tensor]:
        """Turn summed gradients into clipped mean gradients, in place."""
        norms = self._norms(gradients)
        total = torch.linalg.vector_norm(norms)
        on_host = not isinstance(weight, Tensor)
        norm: Scalar = total.item() / weight if on_host else total / weight
        coefficient: Scalar = 1.0 / weight
        clipped: bool | Tensor = False if isinstance(norm, float) else norm > torch.inf
        if self._max_norm is not None:
            coefficient = coefficient * _at_most_one(self._max_norm / (norm + _EPS))
            clipped = norm > self._max_norm
        torch._foreach_mul_(gradients, coefficient)
        if self._value is not None:
            largest = self._largest(gradients)
            beyond = largest.item() > self._value if on_host else largest > self._value
            clipped = clipped | beyond
            torch._foreach_clamp_min_(gradients, -self._value)
            torch._foreach_clamp_max_(gradients, self._value)
        return norm, clipped, norms

    def _norms(self, gradients: list[Tensor]) -> Tensor:
        """Return the L2 norm of each gradient."""
        return torch.stack(_each_norm(gradients))

    def _largest(self, gradients: list[Tensor]) -> Tensor:
        """Return the largest absolute value in all gradients."""
        return torch.stack(torch._foreach_norm(gradients, torch.inf)).amax()


def _each_norm(gradients: list[Tensor]) -> list[Tensor]:
    norms: list[Tensor] = list(torch._foreach_norm(gradients))
    kinds = {(norm.dtype, norm.device) for norm in norms}
    if len(kinds) == 1:
        return norms
    # a model of mixed types or devices
    return [norm.to(norms[0].device, torch.float32) for norm in norms]


def _at_most_one(value: Scalar) -> Scalar:
    return value.clamp(max=1.0) if isinstance(value, Tensor) else min(1.0, value)


_PACKAGE = "pytorch_optimizer"
_FROM_PACKAGE = {"lamb": "Lamb", "lion": "Lion"}
_NAME = "train.optimizer.name"
_OF_TORCH = (
    *("param_groups", "state", "defaults"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
"""What the constructor of torch.optim.Optimizer sets and a run uses."""
_ANY_NUMBER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
OWN_LOOP = 'write a loop of your own, as the guide "Your own loop" shows'
"""The remedy for an optimizer that a step cannot use."""


def class_of(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer."""
    name = config.name
    if name in _FROM_PACKAGE:
        if importlib.util.find_spec(_PACKAGE) is None:
            raise ConfigError(
                f"{name!r} is not part of torch; it needs an extra; pip install "
                "'gradsweep[optimizers]'",
                key=_NAME,
            )
        return getattr(importlib.import_module(_PACKAGE), _FROM_PACKAGE[name])  # type: ignore[no-any-return]
    found = import_own(name, _NAME) if is_own(name) else _of_torch(name)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise ConfigError(
            f"{name!r} is {_described(found)}; an optimizer is a class that derives from "
            "torch.optim.Optimizer; name one, or build it in Task.build_optimizer(model, config)",
            key=_NAME,
        )
    if (why := closure_problem(found)) is not None:
        raise ConfigError(f"{name!r}: {why}", key=_NAME)
    return found


def _of_torch(name: str) -> Any:
    by_name = {key.lower(): value for key, value in vars(torch.optim).items() if key[0].isupper()}
    if name not in by_name:
        raise ConfigError(
            f"{name!r} is not in torch {torch.__version__}; a newer torch has it; upgrade torch, "
            f"or write one of {', '.join(key for key in OPTIMIZER_DEFAULTS if key in by_name)}",
            key=_NAME,
        )
    return by_name[name]


def _described(found: object) -> str:
    kind = found.__name__ if isinstance(found, type) else type(found).__name__
    return f"the class {kind}" if isinstance(found, type) else f"an object of type {kind}"


def closure_problem(kind: type[torch.optim.Optimizer]) -> str | None:
    """Return why a step cannot call a class' `step`, which needs arguments; None if it can."""
    _, *further = inspect.signature(kind.step).parameters.values()
    needed = [p.name for p in further if p.default is p.empty and p.kind not in _ANY_NUMBER]
    if not needed:
        return None
    if needed != ["closure"]:
        return (
            f"{kind.__name__}.step() needs {', '.join(needed)}; a step is one call without "
            f"arguments, after the gradients are computed and clipped; give them defaults, or "
            f"{OWN_LOOP}"
        )
    return (
        f"{kind.__name__}.step() needs a closure, which computes the loss again; a step here "
        f"computes it once, from all micro-batches; take another optimizer, or {OWN_LOOP}"
    )


def unusable(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why a run cannot use an optimizer, such as a wrapper of another; None if it can."""
    kind = type(optimizer)
    name = kind.__name__
    lacking = ", ".join(key for key in _OF_TORCH if not hasattr(optimizer, key))
    if lacking or not getattr(kind.step, "hooked", False):
        found = f"{name} lacks {lacking}" if lacking else f"{name}.step() calls no hooks"
        is_property = isinstance(getattr(kind, "param_groups", None), property)
        own = "remove the property param_groups, and " if is_property else ""
        return (
            f"{found}: its __init__() never called that of torch.optim.Optimizer, whose parts a "
            "run uses to save, schedule and order its steps; "
            f"{own}write `super().__init__(base.param_groups, base.defaults)` at the beginning of "
            f"{name}.__init__(), where `base` is the optimizer that it wraps, and then "
            "`self.param_groups, self.state = base.param_groups, base.state`, which a "
            "load_state_dict() of its own repeats after `base.load_state_dict(state)`, or "
            f"{OWN_LOOP}"
        )
    try:
        inspect.signature(optimizer.zero_grad).bind(set_to_none=True)
    except TypeError as problem:
        return (
            f"{name}.zero_grad() cannot be called with set_to_none=True ({problem}); each step "
            f"begins with that call; write `def zero_grad(self, set_to_none=True):` in {name}"
        )
    if (why := closure_problem(kind)) is not None:
        return why
    for group in optimizer.param_groups:
        if not isinstance(rate := group.get("lr"), float | int | torch.Tensor):
            return (
                f"{name} has a parameter group whose lr is {rate!r}; the schedule scales the "
                "learning rate of each group; build it with lr=config.optimizer.lr, and switch "
                "off a schedule of its own"
            )
    return None


def torch_options(config: OptimizerConfig, kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the options of the configuration that an optimizer of torch takes."""
    known = inspect.signature(kind).parameters
    given = config.model_dump(include={"lr", "weight_decay", "momentum", "betas", "eps"})
    return {key: value for key, value in given.items() if key in known and value is not None}


def checked_options(
    config: OptimizerConfig, kind: type[torch.optim.Optimizer], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Check options by the names and default values in a class's signature; return them."""
    known = inspect.signature(kind).parameters
    named = [p.name for p in known.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = named[1:]  # the first one takes the parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if is_own(config.name) and "lr" not in config.model_fields_set:
        default = known["lr"].default if "lr" in known else inspect.Parameter.empty
        own = "" if default is inspect.Parameter.empty else f" (the class has {default!r})"
        raise ConfigError(
            f"{config.name!r} is built without lr{own}; the schedule scales the learning rate of "
            f"the spec; add lr to train.optimizer, or search train.optimizer.lr",
            key="train.optimizer",
        )
    checked = {}
    for key, value in options.items():
        place = f"train.optimizer.{'arguments.' if key in config.arguments else ''}{key}"
        if key not in names and not takes_any:
            raise ConfigError(
                f"{config.name!r} takes no argument {key!r}{nearest(key, names)}; it takes: "
                f"{', '.join(names)}; correct or remove it",
                key=place,
            )
        checked[key] = _checked(value, known.get(key), place)
    return checked


def _checked(value: Any, parameter: inspect.Parameter | None, place: str) -> Any:
    default = parameter.default if parameter is not None else None
    if default is inspect.Parameter.empty or default is None or value is None:
        return value
    if isinstance(default, bool):
        fits, rule = isinstance(value, bool), "true or false"
    elif isinstance(default, int | float):
        fits, rule = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(default)
        rule = f"a list of {len(default)} values"
        value = tuple(value) if fits else value
    elif isinstance(default, str):
        fits, rule = isinstance(value, str), "text"
    else:
        return value
    if fits:
        return value
    raise ConfigError(
        f"{value!r} has the wrong type; the default is {default!r}, so it takes {rule}; correct "
        "it, or leave it out",
        key=place,
    )


class CombinedOptimizer:
    """Several optimizers that step one after the other; it stands in for a single one.

    A step of mixed precision is taken by all or by none, because the gradient scaler sees one
    optimizer. A non-finite gradient is found before any of them steps.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in their order."""
        return [group for one in self.optimizers for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        for one in self.optimizers:
            one.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Let each optimizer take its step."""
        for one in self.optimizers:
            one.step()

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Call a hook before the first optimizer's step."""
        return self.optimizers[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        """Call a hook after the last optimizer's step."""
        return self.optimizers[-1].register_step_post_hook(hook)


def builds_own(task: Task) -> bool:
    """Whether a task has a `build_optimizer` of its own."""
    return type(task).build_optimizer is not Task.build_optimizer


def members(optimizer: torch.optim.Optimizer | CombinedOptimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a combined one has, or the single one."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def optimizer_of(
    task: Task, model: nn.Module, config: TrainConfig, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build the optimizer of a run: the task's own, or else that of the configuration."""
    with hidden_group(), task_code():
        built = task.build_optimizer(model, config)
    if built is None:
        optimizer = build_optimizer(config.optimizer, groups)
    else:
        optimizer = combine(built, model, config.optimizer.lr)
    for one in _modal(optimizer):
        one.train()  # which its step needs
    return optimizer


def combine(built: object, model: nn.Module, peak: float) -> torch.optim.Optimizer:
    """Return the optimizers of `Task.build_optimizer` as one, whose rates the schedule scales."""
    found = [built] if isinstance(built, torch.optim.Optimizer) else built
    if not isinstance(found, list | tuple) or not found:
        raise TaskError(
            f"build_optimizer() returned {_described(built)}; it must return a "
            "torch.optim.Optimizer or a list of them"
        )
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise TaskError(
                f"build_optimizer() returned a list with {_described(one)}; it must hold "
                "torch.optim.Optimizer objects only"
            )
        if (why := unusable(one)) is not None:
            raise TaskError(f"build_optimizer(): {why}")
    groups = [group for one in found for group in one.param_groups]
    _check_parameters([p for group in groups for p in group["params"]], model)
    set_base_rates(groups, peak)
    if len(found) == 1:
        return cast("torch.optim.Optimizer", found[0])
    return cast("torch.optim.Optimizer", CombinedOptimizer(found))


def _check_parameters(given: list[Tensor], model: nn.Module) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    counts: dict[int, int] = {}
    for p in given:
        counts[id(p)] = counts.get(id(p), 0) + 1
    twice = [names.get(key, "one outside the model") for key, n in counts.items() if n > 1]
    if twice:
        raise TaskError(
            f"build_optimizer() gives {listed(twice)} to two optimizers; each parameter is "
            "trained by one; list it once"
        )
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in counts
    ]
    if missing:
        raise TaskError(
            f"build_optimizer() gives {listed(missing)} to no optimizer, and requires_grad is "
            "set; a parameter that receives gradients is trained; add it to an optimizer, or "
            "freeze it in build_model() with requires_grad_(False)"
        )


def _modal(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the optimizers that evaluate other weights than they train, as schedule-free ones."""
    return [
        one
        for one in members(optimizer)
        if all(callable(getattr(one, name, None)) for name in ("train", "eval"))
    ]


def modal_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters whose evaluated weights differ from the trained ones."""
    return [p for one in _modal(optimizer) for group in one.param_groups for p in group["params"]]


@contextmanager
def evaluated_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the model the weights to evaluate, then the trained ones again, to the same bits.

    An optimizer that has modes computes one kind of weights from the other, which rounds. So the
    trained ones are kept meanwhile: an evaluation or a save must not change a training.
    """
    kept = [(p, p.detach().clone()) for p in modal_parameters(optimizer)]
    modal = _modal(optimizer)
    for one in modal:
        one.eval()
    try:
        yield
    finally:
        for one in modal:
            one.train()
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)


_OWN_OPTIONS = ("initial_lr", "lr_multiplier")
"""Options that this project adds to an optimizer's parameter groups."""
_CHANGED = "gradsweep_changed"
"""The key of a saved group with the names of the options that the optimizer has changed."""


class OptimizerState:
    """The state of a run's optimizer, or of its optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._built = [_options(one) for one in members(optimizer)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its tensors are not copies."""
        states = [
            _with_changes(one, built)
            for one, built in zip(members(self._optimizer), self._built, strict=True)
        ]
        return {"optimizers": states} if self._is_combined else states[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        if ("optimizers" in state) != self._is_combined:
            raise ValueError("one of them has several optimizers, the other a single one")
        states = state["optimizers"] if self._is_combined else [state]
        optimizers = members(self._optimizer)
        if len(states) != len(optimizers):
            raise ValueError(f"it has {len(states)} optimizers, the task {len(optimizers)}")
        for one, saved in zip(optimizers, states, strict=True):
            _load(one, saved)

    @property
    def _is_combined(self) -> bool:
        return isinstance(self._optimizer, CombinedOptimizer)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _with_changes(optimizer: torch.optim.Optimizer, built: list[dict[str, Any]]) -> dict[str, Any]:
    state = optimizer.state_dict()
    if len(state.get("param_groups", ())) != len(built):  # a class with a form of its own
        return state
    groups = []
    for group, before in zip(state["param_groups"], built, strict=True):
        changed = [
            key
            for key, value in group.items()
            if key not in ("lr", "params", *_OWN_OPTIONS)
            and not (key in before and _same(value, before[key]))
        ]
        groups.append({**group, _CHANGED: changed} if changed else group)
    return {**state, "param_groups": groups}


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False  # it may have changed in place
    return type(one) is type(other) and bool(one == other)


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    if "param_groups" not in state:  # a class with a form of its own
        rates = [
            {key: group[key] for key in ("lr", *_OWN_OPTIONS) if key in group}
            for group in optimizer.param_groups
        ]
        optimizer.load_state_dict(state)
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            group.update(own)
        return
    saved_groups = state["param_groups"]
    # torch restores moments by the order of parameters, which other groups would change.
    saved, ours = (
        [len(group["params"]) for group in groups]
        for groups in (saved_groups, optimizer.param_groups)
    )
    if saved != ours:
        raise ValueError(f"its parameter groups hold {saved} parameters, those of the task {ours}")
    options = [
        {
            key: group[key]
            for key in (*optimizer.defaults, *_OWN_OPTIONS)
            if key in group and key not in before.get(_CHANGED, ())
        }
        for group, before in zip(optimizer.param_groups, saved_groups, strict=True)
    ]
    # `fused` decides on which device torch puts the step count: keep the value of this run.
    groups = [
        {key: value for key, value in group.items() if key != _CHANGED}
        | ({"fused": own["fused"]} if "fused" in own else {})
        for group, own in zip(saved_groups, options, strict=True)
    ]
    made = {parameter: dict(moments) for parameter, moments in optimizer.state.items()}
    optimizer.load_state_dict({**state, "param_groups": groups})
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
    for parameter, moments in made.items():  # loading drops moments that the state lacks
        for key, value in moments.items():
            optimizer.state[parameter].setdefault(key, value)
    _match_layouts(optimizer)


def _match_layouts(optimizer: torch.optim.Optimizer) -> None:
    # Fused kernels ignore shapes and strides, and a resumed run may change `channels_last`.
    fused = optimizer.defaults.get("fused")
    for parameter, moments in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(moments, dict):
            continue
        for key, value in moments.items():
            if key == "step" or not isinstance(value, Tensor):
                continue
            if fused and value.shape != parameter.shape:
                raise ValueError(
                    f"its {key} belongs to a parameter of shape {list(value.shape)}, but the "
                    f"task's parameter has shape {list(parameter.shape)}"
                )
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                moments[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
