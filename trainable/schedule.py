"""The learning rate as a function of the step: linear warmup, then decay.

T is the number of all steps, W the number of warmup steps, and s the number of optimizer steps
already taken, so s = 0 is the first step. The peak learning rate is multiplied by

    warmup    (s + 1) / (W + 1)  for s < W; the peak is reached at s = W
    cosine    final + (1 - final) (1 + cos(pi p)) / 2  with p = (s - W) / (T - W)
    linear    1 - (1 - final) p
    constant  1
    step      gamma ** (epoch // step_epochs)  with epoch = s // steps_per_epoch
    plateau   gamma ** (drops so far), a drop after more than `patience` evaluations without
              improvement
    onecycle  cosine from 1/25 up to 1, then cosine down to `final` (1/250,000 when final is 0):
              shape and defaults of torch's OneCycleLR, with the warmup as its pct_start
    wsd       1 until s = T - D, then down to `final` over the last D steps: with
              q = (s - T + D) / D, final + (1 - final) times 1 - q, (1 + cos(pi q)) / 2 or
              1 - sqrt(q) (Hu et al., MiniCPM, 2024; Haegele et al., Scaling Laws and
              Compute-Optimal Training Beyond Fixed Training Durations, 2024)
    cosine_restarts  the cosine from 1 to `final`, `cycles` times; each cycle is `cycle_growth`
              times as long as the one before (Loshchilov & Hutter, SGDR, 2017)
    inverse_sqrt  sqrt((W + 1) / (s + 1)) (Vaswani et al., Attention Is All You Need, 2017)
    polynomial  final + (1 - final) (1 - p) ** power
    exponential  gamma ** ((s - W) / (steps_per_epoch step_epochs))
    package.module:function  function(s, T, config), with the section `train` as `config`

Cosine, linear and constant are torch's own, chained after a `LinearLR(start_factor=1 / (W + 1),
total_iters=W)`, as are polynomial and exponential (`PolynomialLR`, `ExponentialLR`). Step and
plateau do not follow the warmup but are multiplied by it. Step counts
its epochs from the first step of the run; plateau observes its metric only after the warmup.
Onecycle has its own warmup.

What must not live here: a step counter of its own, or an import of torch: a schedule can be
plotted without it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

from trainable.config import ScheduleConfig, TrainConfig, is_own
from trainable.errors import ConfigError
from trainable.user_code.task_import import import_own

if TYPE_CHECKING:
    import torch

_OF_ANY_LENGTH = ("constant", "inverse_sqrt", "plateau", "step", "exponential")
"""The schedules that do not depend on the length of the run."""
_ONECYCLE_START = 1 / 25  # OneCycleLR's div_factor
_ONECYCLE_END = _ONECYCLE_START / 1e4  # and its final_div_factor
_PLATEAU_THRESHOLD = 1e-4  # ReduceLROnPlateau's relative threshold


def warmup_steps(warmup: float, total_steps: int) -> int:
    """Return the number of warmup steps for a fraction in [0, 1) or a whole number of steps."""
    steps = warmup if isinstance(warmup, int) else round(warmup * total_steps)
    if steps >= total_steps and steps > 0:
        raise ConfigError(
            f"{steps} steps of {total_steps} steps in all; it must be shorter than the run; lower "
            "train.schedule.warmup or lengthen the budget",
            key="train.schedule.warmup",
        )
    return steps


def decay_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Return the number of steps in which `wsd` decays."""
    steps = config.decay
    if isinstance(steps, float):
        steps = max(1, round(steps * total_steps))
    warmup = warmup_steps(config.warmup, total_steps)
    if warmup + steps > total_steps:
        raise ConfigError(
            f"{steps} steps after a warmup of {warmup}, of {total_steps} steps in all; together "
            "they must fit into the run; lower train.schedule.decay or train.schedule.warmup",
            key="train.schedule.decay",
        )
    return steps


def steps_of_any_length(train: TrainConfig, total_steps: int) -> int:
    """Return how many steps of a run are those of every longer run, too.

    All of them where nothing depends on the length of the run, with `wsd` those before its decay,
    and none where the warmup, or the first step of an average, is a fraction of the run.
    """
    config, ema, swa = train.schedule, train.ema, train.swa
    starts = [config.warmup, ema.start if ema.decay is not None else 0, swa.start or 0]
    if any(isinstance(start, float) and start for start in starts):
        return 0
    if config.name == "wsd":
        return total_steps - decay_steps(config, total_steps)
    return total_steps if config.name in _OF_ANY_LENGTH else 0


def check_length(config: ScheduleConfig, total_steps: int) -> None:
    """Refuse a run that is too short for its warmup or decay."""
    warmup_steps(config.warmup, total_steps)
    if config.name == "wsd":
        decay_steps(config, total_steps)


class Schedule:
    """Write the learning rate of each step into the optimizer."""

    def __init__(
        self,
        config: ScheduleConfig,
        *,
        peak: float,
        total_steps: int,
        steps_per_epoch: int,
        mode: str = "min",
        train: TrainConfig | None = None,
    ) -> None:
        if config.name in ("step", "exponential") and not steps_per_epoch:
            raise ConfigError(
                f"{config.name}, which counts epochs, and train is a stream that does not tell "
                "its length; choose another schedule, such as cosine, or let the stream tell it "
                "by __len__()",
                key="train.schedule.name",
            )
        self._config = config
        self._peak = peak
        self._total = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._warmup = warmup_steps(config.warmup, total_steps)
        self._decay = decay_steps(config, total_steps) if config.name == "wsd" else 0
        self._own = _own_function(config, train) if is_own(config.name) else None
        self._sign = 1.0 if mode == "min" else -1.0
        self._plateau_best = math.inf
        self._plateau_bad = 0
        self._plateau_factor = 1.0
        self.written = self.factor(0)
        """The factor last written."""
        self.lr = peak * self.written
        """The learning rate last written, before the multipliers of parameter groups."""

    @property
    def name(self) -> str:
        """The name in the configuration."""
        return self._config.name

    @property
    def decay_start(self) -> int | None:
        """The step after which `wsd` decays; None for another schedule."""
        return self._total - self._decay if self.name == "wsd" else None

    @property
    def needs_length(self) -> bool:
        """Whether it depends on the number of steps of the run, or of an epoch."""
        return self._config.name not in ("constant", "inverse_sqrt", "plateau")

    def factor(self, step: int) -> float:
        """Return the factor on the peak for the next step, after `step` steps."""
        config = self._config
        if self._own is not None:
            return self._own(step, self._total)
        if config.name == "onecycle":
            return self._onecycle(step)
        ramp = min(1.0, (step + 1) / (self._warmup + 1))
        if config.name == "step":
            return ramp * config.gamma ** (step // self._steps_per_epoch // config.step_epochs)
        if config.name == "plateau":
            return ramp * self._plateau_factor
        if step < self._warmup or config.name == "constant":
            return ramp
        if config.name == "inverse_sqrt":
            return math.sqrt((self._warmup + 1) / (step + 1))
        if config.name == "exponential":
            epochs = (step - self._warmup) / self._steps_per_epoch
            return float(config.gamma ** (epochs / config.step_epochs))
        progress = min(1.0, (step - self._warmup) / (self._total - self._warmup))
        if config.name == "linear":
            return 1 - (1 - config.final) * progress
        if config.name == "cosine":
            return config.final + (1 - config.final) * (1 + math.cos(math.pi * progress)) / 2
        return config.final + (1 - config.final) * self._falling(step, progress)

    def _falling(self, step: int, progress: float) -> float:
        """Return the part of the way from the final rate to the peak, after the warmup."""
        config = self._config
        if config.name == "polynomial":
            return float((1 - progress) ** config.power)
        if config.name == "cosine_restarts":
            return _cosine(1.0, 0.0, _in_cycle(progress, config.cycles, config.cycle_growth))
        decayed = min(1.0, max(0.0, (step - self._total + self._decay) / self._decay))
        match config.decay_shape:
            case "linear":
                return 1 - decayed
            case "sqrt":
                return 1 - math.sqrt(decayed)
            case _:
                return _cosine(1.0, 0.0, decayed)

    def set_lr(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Write the learning rate of the next step, after `step` steps, into the optimizer."""
        factor = self.written = self.factor(step)
        self.lr = self._peak * factor
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def observe(self, value: float, step: int) -> None:
        """Observe the metric of an evaluation; used by `plateau` only, and after the warmup."""
        if self._config.name != "plateau" or step < self._warmup:
            return
        signed = self._sign * value
        # The threshold is relative to the magnitude: it works for negative values and mode max.
        if math.isfinite(signed) and (
            math.isinf(self._plateau_best)
            or signed < self._plateau_best - _PLATEAU_THRESHOLD * abs(self._plateau_best)
        ):
            self._plateau_best, self._plateau_bad = signed, 0
            return
        self._plateau_bad += 1
        if self._plateau_bad > self._config.patience:
            self._plateau_factor *= self._config.gamma
            self._plateau_bad = 0

    def state_dict(self) -> dict[str, float]:
        """Return the state of `plateau`; the rest is a function of the step."""
        return {
            "plateau_best": self._plateau_best,
            "plateau_bad": self._plateau_bad,
            "plateau_factor": self._plateau_factor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._plateau_best = state["plateau_best"]
        self._plateau_bad = state["plateau_bad"]
        self._plateau_factor = state["plateau_factor"]

    def _onecycle(self, step: int) -> float:
        warmup = self._config.warmup
        share = warmup if isinstance(warmup, float) else warmup / self._total
        peak_at = share * self._total - 1
        end = self._config.final or _ONECYCLE_END
        if step <= peak_at:
            return _cosine(_ONECYCLE_START, 1.0, step / peak_at if peak_at > 0 else 1.0)
        length = self._total - 1 - peak_at
        return _cosine(1.0, end, min(1.0, (step - peak_at) / length) if length > 0 else 1.0)


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def _in_cycle(progress: float, cycles: int, growth: float) -> float:
    """Return the position in the current cycle; the last one includes its end."""
    lengths = [growth**index for index in range(cycles)]
    left = progress * sum(lengths)
    for length in lengths[:-1]:
        # Rounding must not put a cycle's first step at the end of the one before.
        if left < length * (1 - 1e-12):
            return left / length
        left = max(0.0, left - length)
    return min(1.0, left / lengths[-1])


def _own_function(
    config: ScheduleConfig, train: TrainConfig | None
) -> Callable[[int, int], float]:
    """Return a user's schedule as a function of step and total."""
    name = config.name
    function = import_own(name, "train.schedule.name")
    try:
        if isinstance(function, type):
            raise TypeError("it is a class")
        inspect.signature(function).bind(0, 1, train)
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            f"{name!r} cannot be called with three arguments ({problem}); a schedule is a "
            "function (step, total, config) that returns the factor on the learning rate; name "
            "one",
            key="train.schedule.name",
        ) from problem

    def factor(step: int, total: int) -> float:
        try:
            found = function(step, total, train)
        # A user's code may raise anything.
        except Exception as problem:
            raise ConfigError(
                f"{name!r} raised {type(problem).__name__}: {problem} for step {step} of {total}; "
                "a schedule returns a factor for every step; correct it",
                key="train.schedule.name",
            ) from problem
        number = isinstance(found, Real) and not isinstance(found, bool)
        if not number or not math.isfinite(found) or found < 0:
            raise ConfigError(
                f"{name!r} returned {found!r} for step {step} of {total}; the factor on the "
                "learning rate is a finite number, 0 or more; return one for every step",
                key="train.schedule.name",
            )
        return float(found)

    return factor
