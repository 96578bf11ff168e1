"""The sections of the optimizer and of the learning rate's schedule.

What must not live here: building them (`optimizers.py`, `schedule.py`), or an import of torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trainable.config_base import Section


class _OptimizerDefaults(NamedTuple):
    """The default hyperparameters of one optimizer."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


OPTIMIZER_DEFAULTS = {
    "sgd": _OptimizerDefaults(lr=0.1, momentum=0.9),
    "adam": _OptimizerDefaults(lr=3e-4),
    "adamw": _OptimizerDefaults(lr=3e-4, weight_decay=0.01),
    "adafactor": _OptimizerDefaults(lr=1e-3),
    "lamb": _OptimizerDefaults(lr=1e-3),
    "lion": _OptimizerDefaults(lr=3e-4),
    # From here on torch's own defaults: a test compares them with its signatures.
    "adadelta": _OptimizerDefaults(lr=1.0),
    "adagrad": _OptimizerDefaults(lr=1e-2),
    "adamax": _OptimizerDefaults(lr=2e-3),
    "asgd": _OptimizerDefaults(lr=1e-2),
    "muon": _OptimizerDefaults(lr=1e-3, momentum=0.95, weight_decay=0.1),
    "nadam": _OptimizerDefaults(lr=2e-3),
    "radam": _OptimizerDefaults(lr=1e-3),
    "rmsprop": _OptimizerDefaults(lr=1e-2),
    "rprop": _OptimizerDefaults(lr=1e-2),
}
_UNKNOWN_DEFAULTS = _OptimizerDefaults(lr=1e-3)
"""Stand in for the options of a user's class that are not given; they are not passed to it."""
_OWN_NAME = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def is_own(name: str) -> bool:
    """Whether a name is that of a user's class or function, `package.module:Name`."""
    return ":" in name


def _known_or_own(*known: str, own: str) -> AfterValidator:
    """Accept these names, and `package.module:Name`."""

    def check(name: str) -> str:
        if name not in known and _OWN_NAME.fullmatch(name) is None:
            expected = ", ".join(f"'{one}'" for one in (*known, own))
            raise PydanticCustomError(
                "literal_error", "one of: {expected}", {"expected": expected}
            )
        return name

    return AfterValidator(check)


def _default_of(option: str) -> Callable[[dict[str, Any]], float]:
    """Return a default factory that looks up an option of the chosen optimizer."""
    return lambda given: float(
        getattr(OPTIMIZER_DEFAULTS.get(given["name"], _UNKNOWN_DEFAULTS), option)
    )


class _HasArguments(Section):
    """A section with `arguments`, which may be anything: its hash is that of the other fields."""

    def __hash__(self) -> int:
        return hash(tuple(value for key, value in self.__dict__.items() if key != "arguments"))


class OptimizerConfig(_HasArguments):
    """The optimizer. An option that is left out or `null` has the chosen optimizer's default."""

    name: Annotated[str, _known_or_own(*OPTIMIZER_DEFAULTS, own="package.module:Class")] = "adamw"
    """The algorithm: sgd, adam, adamw, adafactor, adadelta, adagrad, adamax, asgd, muon, nadam,
    radam, rmsprop or rprop of torch; lamb or lion, which need the extra `gradsweep[optimizers]`;
    or `package.module:Class` for a class of yours that derives from `torch.optim.Optimizer`."""
    lr: float = Field(default_factory=_default_of("lr"), gt=0, examples=[0.001])
    """The peak learning rate. Your own class needs it here, or in the space."""
    weight_decay: float = Field(default_factory=_default_of("weight_decay"), ge=0, examples=[0.01])
    """Weight decay. Tensors with fewer than two dimensions (biases, norms, layer scales) never
    decay."""
    betas: Annotated[tuple[float, float], Field(strict=False)] | None = None
    """Decay rates of the moment estimates (Adam family, LAMB, Lion)."""
    momentum: float = Field(default_factory=_default_of("momentum"), ge=0, lt=1, examples=[0.9])
    """Momentum of `sgd`, `rmsprop` and `muon`."""
    nesterov: bool = False
    """Nesterov momentum for `sgd`; needs `momentum` above 0."""
    eps: float | None = Field(default=None, gt=0)
    """The constant added to the denominator, against division by zero."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimizer's class, such as `{amsgrad: true}`. Each can be searched,
    as `train.optimizer.arguments.amsgrad`."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> OptimizerConfig:
        if self.nesterov and self.momentum == 0 and not is_own(self.name):
            raise ValueError("nesterov needs momentum above 0; set momentum: 0.9")
        return self

    @model_validator(mode="after")
    def _rate_and_parameters_are_not_arguments(self) -> OptimizerConfig:
        if "lr" in self.arguments:
            raise ValueError(
                "arguments has lr; the schedule scales train.optimizer.lr, which has a key of its "
                "own; write lr beside arguments"
            )
        if "params" in self.arguments:
            raise ValueError(
                "arguments has params; the parameters come from Task.param_groups(); remove it"
            )
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_a_class_decides(
        self, write: SerializerFunctionWrapHandler
    ) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        if not is_own(self.name):
            return data
        kept = {"name", "arguments", *self.model_fields_set}
        return {key: value for key, value in data.items() if key in kept}


SCHEDULES = (
    "cosine",
    "linear",
    "onecycle",
    "step",
    "constant",
    "plateau",
    "wsd",
    "cosine_restarts",
    "inverse_sqrt",
    "polynomial",
    "exponential",
)


class ScheduleConfig(_HasArguments):
    """The learning rate as a function of the step."""

    name: Annotated[str, _known_or_own(*SCHEDULES, own="package.module:function")] = "cosine"
    """The decay that follows the warmup: cosine, linear, onecycle, step, constant, plateau, wsd,
    cosine_restarts, inverse_sqrt, polynomial or exponential; or `package.module:function` for a
    function of yours, `(step, total, config) -> factor`, which makes the warmup, too."""
    warmup: int | float = 0.0
    """Linear warmup: a fraction of all steps in [0, 1), or a whole number of steps."""
    final: float = Field(default=0.0, ge=0, le=1)
    """The learning rate at the end, as a fraction of the peak (cosine, cosine_restarts, linear,
    onecycle, polynomial, wsd)."""
    step_epochs: int = Field(default=30, ge=1)
    """`step`: epochs between two drops. `exponential`: epochs in which the rate falls by
    `gamma`."""
    gamma: float = Field(default=0.1, gt=0, lt=1)
    """`step` and `plateau`: the factor of one drop. `exponential`: the factor of `step_epochs`
    epochs."""
    patience: int = Field(default=10, ge=0)
    """`plateau`: evaluations without improvement before a drop."""
    decay: int | float = 0.2
    """`wsd`: the last part of the run, in which the rate falls: a fraction of all steps in (0, 1),
    or a whole number of steps."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """`wsd`: how the rate falls; `sqrt` is 1 - sqrt(part of the decay)."""
    cycles: int = Field(default=4, ge=1)
    """`cosine_restarts`: how often the rate falls from the peak."""
    cycle_growth: float = Field(default=1.0, ge=1)
    """`cosine_restarts`: the length of a cycle, as a multiple of the one before it."""
    power: float = Field(default=1.0, gt=0)
    """`polynomial`: the exponent."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What your own function reads as `config.schedule.arguments`. Each can be searched, as
    `train.schedule.arguments.NAME`."""

    @model_validator(mode="after")
    def _warmup_is_fraction_or_count(self) -> ScheduleConfig:
        if self.warmup < 0 or (isinstance(self.warmup, float) and self.warmup >= 1):
            raise ValueError(
                f"warmup is {self.warmup}; it is a fraction of all steps in [0, 1), or a whole "
                "number of steps; "
                "write 0.1 for a tenth of the run or 100 for a hundred steps"
            )
        return self

    @model_validator(mode="after")
    def _decay_is_fraction_or_count(self) -> ScheduleConfig:
        if self.decay <= 0 or (isinstance(self.decay, float) and self.decay >= 1):
            raise ValueError(
                f"decay is {self.decay}; it is a fraction of all steps in (0, 1), or a whole "
                "number of steps; write 0.2 for the last fifth of the run or 100 for its last "
                "hundred steps"
            )
        return self
