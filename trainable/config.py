"""The configuration of one training run: frozen, validated sections.

Each field has its docstring below it, and its checks are in its section. A key has the same name
in YAML, on the command line, in Python and as a tracked parameter. What must not live here:
anything about sweeps, or an import of torch (the command line validates specs without it).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base class of all sections: frozen, with strict types; unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def _plain_number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


Number = Annotated[float, PlainSerializer(_plain_number)]
"""A float that is serialised without '.0' when it is whole."""


class Interval(BaseModel):
    """An interval such as `1 epoch`, `1 report`, `100 steps` or `30 seconds`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int
    unit: Literal["epoch", "report", "step", "second"]

    def __str__(self) -> str:
        return f"{self.count} {self.unit}{'s' if self.count != 1 else ''}"


_INTERVAL = re.compile(r"\s*(\d+)\s*(epoch|report|step|second)s?\s*")


def _parse_interval(value: object) -> object:
    if isinstance(value, Interval):
        return value
    match = _INTERVAL.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) == 0:
        raise ValueError(
            "an interval is a positive count and a unit, such as '1 epoch', '100 steps' or '30 "
            "seconds'"
        )
    return Interval(count=int(match[1]), unit=match[2])


Every = Annotated[Interval, BeforeValidator(_parse_interval), PlainSerializer(str)]


def fraction_or_count(value: float | None) -> float | None:
    """Check a value that is a fraction of all steps in [0, 1), or a whole number of steps."""
    if value is not None and (value < 0 or (isinstance(value, float) and value >= 1)):
        raise ValueError(
            "it is a fraction of all steps in [0, 1), or a whole number of steps; write 0.1 for a "
            "tenth of the run or 100 for a hundred steps"
        )
    return value


def equal_to(value: object) -> Callable[[object], bool]:
    """Return an `exclude_if` that leaves a key out of a written configuration at this value."""
    return lambda found: found == value


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

    _warmup = field_validator("warmup")(fraction_or_count)

    @model_validator(mode="after")
    def _decay_is_fraction_or_count(self) -> ScheduleConfig:
        if self.decay <= 0 or (isinstance(self.decay, float) and self.decay >= 1):
            raise ValueError(
                f"decay is {self.decay}; it is a fraction of all steps in (0, 1), or a whole "
                "number of steps; write 0.2 for the last fifth of the run or 100 for its last "
                "hundred steps"
            )
        return self


SPLIT_SEED = "split_seed"
"""The argument with which a task says that it splits its samples by a seed of its own."""


class TaskConfig(BaseModel):
    """The task to train; every further key is an argument of its constructor."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    name: str = Field(min_length=1)
    """A built-in task's name, or `package.module:ClassName`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the task's constructor."""
        return dict(self.model_extra or {})


class ClipConfig(Section):
    """Gradient clipping, after unscaling and before the step."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Global L2 norm above which all gradients are scaled down together; null switches it off."""
    value: float | None = Field(default=None, gt=0)
    """Clamp each gradient element to [-value, value]; null switches it off."""


class EmaConfig(Section):
    """An exponential moving average of the weights, evaluated and exported instead of them."""

    decay: float | None = Field(default=None, gt=0, lt=1, examples=[0.999])
    """The average's share in its next value: average = decay * average + (1 - decay) * weights,
    after each step. Null switches it off. With it, `val/*` measures the average."""
    start: int | float = 0.0
    """When averaging starts: a fraction of all steps in [0, 1), or a whole number of steps. Before
    that, `val/*` measures the weights themselves."""

    _start = field_validator("start")(fraction_or_count)


class SwaConfig(Section):
    """Stochastic weight averaging: the mean of the weights, evaluated and exported instead."""

    start: int | float | None = None
    """When averaging starts: a fraction of all steps in [0, 1), or a whole number of steps; 0.75
    is common. Null switches it off. With it, `val/*` measures the average."""
    every: Every = Interval(count=1, unit="epoch")
    """How often the weights go into the mean, in epochs or steps."""

    _start = field_validator("start")(fraction_or_count)

    @field_validator("every")
    @classmethod
    def _every_is_epochs_or_steps(cls, every: Interval) -> Interval:
        if every.unit not in ("epoch", "step"):
            raise ValueError(
                f"'{every}' is no interval in epochs or steps, the same on every machine and for "
                "every trial; write such as '1 epoch' or '100 steps'"
            )
        return every


class LoaderConfig(Section):
    """The options of the data loader."""

    num_workers: int = Field(default=0, ge=0)
    """Loader processes; tensors in memory are indexed directly and need none."""
    pin_memory: bool | None = None
    """Page-locked host memory for asynchronous transfers; null: only with a GPU."""
    persistent_workers: bool = Field(default=False, exclude_if=equal_to(False))
    """Has no effect without loader processes, and is refused with them: they start anew in each
    epoch."""
    prefetch_factor: int = Field(default=2, ge=1)
    """Batches each loader process prepares ahead."""
    drop_last: bool = False
    """Leave out a last batch that is smaller than `batch_size`."""
    resume: Literal["auto", "exact", "skip"] = "auto"
    """How a stream continues in mid-epoch. `auto`: from its saved state, or by reading it again
    from the epoch's start where it has none. `exact` refuses a stream without a state. `skip`
    always reads again."""

    @model_validator(mode="after")
    def _processes_start_anew(self) -> LoaderConfig:
        if self.persistent_workers and self.num_workers:
            raise ValueError(
                f"persistent_workers is true, and there are {self.num_workers} loader processes; "
                "they start anew in each epoch, so that they have what a hook changed, and a "
                "resumed run has what they keep; remove persistent_workers, or write false"
            )
        return self


class TrainConfig(Section):
    """The training loop."""

    batch_size: int = Field(default=64, ge=1)
    """Samples per optimizer step."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step; each holds batch_size / accumulation samples. The step
    equals that of the whole batch, except with BatchNorm, which normalizes over micro-batches: use
    GroupNorm or LayerNorm then."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast precision. `auto` is bf16 on a GPU that supports it, fp16 on an older one, and fp32
    on every CPU: even on CPUs with bf16, small models (up to an MLP of about 1,000 units) were
    measured to be slower in it. Try bf16 for larger ones."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip: ClipConfig = ClipConfig()
    ema: EmaConfig = EmaConfig()
    swa: SwaConfig = SwaConfig()
    loader: LoaderConfig = LoaderConfig()
    deterministic: bool = True
    """The same seed gives the same bits on the same hardware and versions."""
    layer_norms_every: int = Field(default=50, ge=0)
    """Log `grad_norm/<layer>` every this many steps; 0 switches it off. The step computes the
    norms in any case; the cost is one logged value per layer."""
    measure_device_time: bool = False
    """Report `train/device_seconds` beside `train/seconds`, and warn when the device mostly waits
    for data. Off by default, because it waits for the device at each step."""
    compile: bool = False
    """Compile the model's forward pass with torch.compile, once for each input shape (up to
    torch's limit of 8); the first steps are slow."""
    channels_last: bool = False
    """Lay out images as (N, H, W, C) in memory; convolutions on GPUs are often faster with it."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: less memory, more time."""
    sharding: Literal["none", "fsdp"] = Field(default="none", exclude_if=equal_to("none"))
    """Where the model of a trial of several workers lies. `none`: each has a whole copy. `fsdp`:
    each has a part of every parameter, gradient and moment (PyTorch's FSDP2), for models that are
    too large for one device; every pass through the model then gathers its blocks one by one."""
    sync_batch_norm: bool = Field(default=False, exclude_if=equal_to(False))
    """BatchNorm normalizes over the micro-batch of all ranks (`resources.workers`) instead of each
    rank's part of it. Needs GPUs, and steps in which all ranks have equal parts."""

    @model_validator(mode="after")
    def _micro_batches_are_whole(self) -> TrainConfig:
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size {self.batch_size} / accumulation {self.accumulation} = "
                f"{self.batch_size / self.accumulation:g} samples per micro-batch; it must be "
                "whole; "
                "choose a batch_size that is a multiple of accumulation"
            )
        return self

    @model_validator(mode="after")
    def _one_average(self) -> TrainConfig:
        if self.ema.decay is not None and self.swa.start is not None:
            raise ValueError(
                f"ema.decay is {self.ema.decay} and swa.start is {self.swa.start}; a run keeps "
                "one average of the weights; remove ema or swa"
            )
        return self

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass."""
        return self.batch_size // self.accumulation

    def in_one_process(self) -> TrainConfig:
        """Return it as a check trains: compiling takes minutes, and loader processes seconds."""
        loader = self.loader.model_copy(update={"num_workers": 0})
        return self.model_copy(update={"compile": False, "loader": loader})


Unit = Literal["epochs", "steps", "samples", "tokens"]
"""What a budget counts."""
_UNITS: tuple[Unit, ...] = ("epochs", "steps", "samples", "tokens")


class BudgetConfig(Section):
    """The length of a full training run, in one unit, and how often it is evaluated. Each
    evaluation is a report, by which trials are compared."""

    epochs: int | None = Field(default=10, ge=1, examples=[10], exclude_if=equal_to(None))
    """Passes over the training data; each ends with an evaluation and a report."""
    steps: int | None = Field(default=None, ge=1, examples=[20000], exclude_if=equal_to(None))
    """Optimizer steps, instead of epochs."""
    samples: int | None = Field(default=None, ge=1, examples=[1000000], exclude_if=equal_to(None))
    """Samples trained on, instead of epochs: the same for all trials if `batch_size` is searched.
    """
    tokens: int | None = Field(
        default=None, ge=1, examples=[1000000000], exclude_if=equal_to(None)
    )
    """Tokens trained on, instead of epochs: samples times `tokens_per_sample` of the task."""
    report_every: int | float | None = Field(
        default=None, gt=0, examples=[500], exclude_if=equal_to(None)
    )
    """An evaluation and a report after each so many steps, samples or tokens, and at the end. With
    `epochs` a part of an epoch, such as 0.25, or a number of epochs; null: 1."""
    val_batches: int | None = Field(default=None, ge=1, examples=[50], exclude_if=equal_to(None))
    """Evaluate on the first so many batches of the validation data, the same ones each time; null:
    on all. A batch has `train.batch_size` samples."""

    @model_validator(mode="before")
    @classmethod
    def _other_unit_replaces_epochs(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "epochs" in data:
            return data
        given = any(data.get(unit) is not None for unit in ("steps", "samples", "tokens"))
        return {**data, "epochs": None} if given else data

    @model_validator(mode="after")
    def _has_one_unit(self) -> BudgetConfig:
        given = [f"{unit}: {getattr(self, unit)}" for unit in _UNITS if getattr(self, unit)]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "no length is given"
            remedy = "remove all but one" if given else "write for example epochs: 10"
            raise ValueError(f"{found}; a budget has one of {', '.join(_UNITS)}; {remedy}")
        return self

    @model_validator(mode="after")
    def _reports_fit(self) -> BudgetConfig:
        every, unit = self.report_every, self.unit
        if every is None and unit != "epochs":
            raise ValueError(
                f"report_every is missing, and the budget is in {unit}; a report follows each "
                f"evaluation; write for example report_every: {max(1, self.total // 20)}"
            )
        if every is not None and unit != "epochs" and not float(every).is_integer():
            raise ValueError(
                f"report_every is {every:g} and the budget is in {unit}; it is a whole number of "
                f"{unit}; write for example report_every: {max(1, round(every))}"
            )
        if every is not None and every > self.total:
            raise ValueError(
                f"report_every is {every:g} and the budget has {self.total} {unit}; the first "
                f"report would come after its end; write report_every: {self.total}, or less"
            )
        return self

    @property
    def unit(self) -> Unit:
        """What the budget counts."""
        return next(unit for unit in _UNITS if getattr(self, unit) is not None)

    @property
    def total(self) -> int:
        """The length of a full run, in the budget's unit."""
        return int(getattr(self, self.unit))

    @property
    def interval(self) -> Fraction:
        """The length from one report to the next, in the budget's unit."""
        return Fraction(str(self.report_every or 1))

    @property
    def reports(self) -> int:
        """The number of reports of a full run; the last one is at its end."""
        return math.ceil(self.total / self.interval)

    @property
    def report_kind(self) -> tuple[Unit, Fraction, int | None]:
        """What a report is. Only reports of the same kind can be compared by their numbers."""
        return self.unit, self.interval, self.val_batches

    @property
    def report_word(self) -> Literal["epoch", "report"]:
        """What messages call a report, an epoch if each epoch ends with one; and the metric in
        the rows of reports that has their number."""
        return "epoch" if self.unit == "epochs" and self.interval == 1 else "report"


def checkpoint_at_reports(data: Any) -> Any:
    """Return a configuration in which checkpoints follow reports, if it says nothing else.

    The default interval is an epoch. A budget in steps may end before the first epoch does.
    """
    if not isinstance(data, Mapping):
        return data
    budget, saving = data.get("budget"), data.get("checkpoint", {})
    if isinstance(budget, BudgetConfig):
        budget = budget.model_dump()
    if not isinstance(budget, Mapping) or not isinstance(saving, Mapping) or "every" in saving:
        return data
    units = (*_UNITS[1:], "report_every")
    if all(budget.get(key) is None for key in units):
        return data
    return {**data, "checkpoint": {**saving, "every": "1 report"}}


class CheckpointConfig(Section):
    """When to save checkpoints, and how many to keep."""

    every: Every = Interval(count=1, unit="epoch")
    """Interval between two checkpoints, in epochs, reports, steps or seconds; `1 report` unless
    each epoch ends with a report. The last step and each new best are saved in any case."""
    keep: int = Field(default=2, ge=2)
    """Newest checkpoints to keep besides the best; at least 2, in case the newest is damaged."""
    parameters: Literal["all", "trained"] = "all"
    """What of the model is saved. `trained`: only what is trained or has changed since the task
    built it; the rest is built again by the task and compared by digest. For adapters (LoRA) and
    frozen backbones, whose base is then never written."""


Mode = Literal["min", "max"]
"""Whether a lower (`min`) or a higher (`max`) value of a metric is better."""


class TrialConfig(Section):
    """The full configuration of one training run, without a search space."""

    task: TaskConfig
    metric: str | Annotated[tuple[str, ...], Field(strict=False)]
    """The metric that decides which checkpoint is the best, such as `val/loss`. Of several, the
    first decides, and the others are reported with it."""
    mode: Mode | Annotated[tuple[Mode, ...], Field(strict=False)]
    """Whether a lower (`min`) or a higher (`max`) value of the metric is better."""
    budget: BudgetConfig = BudgetConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    seed: int = 0
    """Seed of this run: model initialisation, data order, dropout, augmentation."""
    data_seed: int | None = None
    """Seed for building the task and its data, the same for all trials of a sweep; None: the
    run's seed."""
    patience: int | None = Field(default=None, ge=1, examples=[5], exclude_if=equal_to(None))
    """The run ends after so many reports without a new best; null: at the end of its budget."""
    workers: int = Field(default=1, ge=1, exclude_if=equal_to(1))
    """Processes, called ranks, that train the model together; each has its own device."""
    training_rules: Literal[3] = 3
    """The version of the training rules. A change of what a configuration trains needs a new one;
    runs of another one are refused."""

    _checkpoint_at_reports = model_validator(mode="before")(checkpoint_at_reports)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the user's own optimizer and schedule, if any."""
        return tuple(filter(is_own, (self.train.optimizer.name, self.train.schedule.name)))

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics, the one that decides first."""
        return (self.metric,) if isinstance(self.metric, str) else self.metric

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each metric."""
        return (self.mode,) if isinstance(self.mode, str) else self.mode
