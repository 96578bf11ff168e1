"""Averaged weights: an exponential moving average (EMA) or the mean of the weights (SWA).

The average is evaluated, exported and registered instead of the weights that are trained. It has
the parameters that require gradients, those that the optimizer trains outside the model included;
one that is unfrozen later, from its first step on. Frozen parameters are their own average. Tied
parameters are averaged once.

The formulas and the order (after the optimizer's step and the task's `on_step_end`; the first
update copies) are those of `torch.optim.swa_utils`. Nothing here waits for the device. What must
not live here: when a run evaluates (`loop.py`), and what of a run is saved (`train_state.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from trainable.config import TrainConfig
from trainable.errors import ConfigError

_HALF = (torch.float16, torch.bfloat16)


class AveragingPlan(NamedTuple):
    """When the weights go into the average, and with which weight."""

    start: int
    """Optimizer steps before the first one that is averaged."""
    every: int
    """Steps between two updates."""
    decay: float | None
    """The decay of an EMA; None: the mean of the weights."""


def averaging_plan(
    config: TrainConfig, *, total_steps: int, steps_per_epoch: int
) -> AveragingPlan | None:
    """Return when a run averages its weights; None without averaging."""
    if config.ema.decay is not None:
        key, start, every, decay = "train.ema.start", config.ema.start, 1, config.ema.decay
    elif config.swa.start is not None:
        interval = config.swa.every
        if interval.unit == "epoch" and not steps_per_epoch:
            raise ConfigError(
                f"'{interval}', and train is a stream that does not tell its length; write an "
                "interval in steps, such as '100 steps', or let the stream tell it by __len__()",
                key="train.swa.every",
            )
        every = interval.count * (steps_per_epoch if interval.unit == "epoch" else 1)
        key, start, decay = "train.swa.start", config.swa.start, None
    else:
        return None
    steps = start if isinstance(start, int) else round(start * total_steps)
    if total_steps // every * every <= steps:
        raise ConfigError(
            f"{steps} steps of {total_steps} steps in all, and the weights go into the average "
            f"every {every}: the run would end before the first time; lower {key} or lengthen "
            "the budget",
            key=key,
        )
    return AveragingPlan(steps, every, decay)


class Average:
    """The average of a run's weights."""

    def __init__(self, model: nn.Module, outside: Iterable[Tensor], plan: AveragingPlan) -> None:
        self._plan = plan
        self.count = 0
        """How many times the weights went into the average; 0: there is none yet."""
        self._values: dict[str, Tensor] = {}
        self._sources: dict[str, Tensor] = {}
        self._pairs: list[tuple[list[Tensor], list[Tensor]]] = []
        statistics = dict(_running_statistics(model))
        parameters: dict[str, Tensor] = {
            f"model.{name}": p for name, p in model.named_parameters()
        }
        parameters |= {f"outside.{index}": p for index, p in enumerate(outside)}
        self._frozen = {name: p for name, p in parameters.items() if _can_average(p)}
        self._add({name: b for name, b in statistics.items() if not is_lazy(b)})
        self._statistics = {name: b for name, b in statistics.items() if is_lazy(b)}
        self._add_trained()

    def update(self, step: int) -> None:
        """Let the present weights go into the average, if this step is one of the plan."""
        start, every, decay = self._plan
        # An average that has begun continues, also if its start was moved since.
        if step % every or (step <= start and not self.count):
            return
        self.count += 1
        weight = 1.0 / self.count if decay is None or self.count == 1 else 1.0 - decay
        with torch.no_grad():
            if self._frozen or self._statistics:
                self._add_trained()
            for averages, sources in self._present():
                if self.count == 1:
                    torch._foreach_copy_(averages, sources)
                elif averages[0].dtype == sources[0].dtype:
                    torch._foreach_lerp_(averages, sources, weight)
                else:
                    wide = [source.to(averages[0].dtype) for source in sources]
                    torch._foreach_lerp_(averages, wide, weight)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Have the average in place of the weights, and restore the weights at the end.

        Values are copied and not tensors exchanged, which takes memory for a copy of the weights:
        compiled code, tied parameters, cuDNN's recurrent layers and the task refer to the tensors.
        """
        if not self.count:
            yield
            return
        with torch.no_grad():
            kept = [[source.clone() for source in sources] for _, sources in self._present()]
            for averages, sources in self._present():
                torch._foreach_copy_(sources, averages)
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, sources), before in zip(self._present(), kept, strict=True):
                    torch._foreach_copy_(sources, before)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and, after the first one, the averages by name."""
        return {"count": self.count, "values": dict(self._values) if self.count else {}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after the model is restored."""
        unknown = state["values"].keys() - self._values.keys()
        waiting = self._frozen | self._statistics
        self._add({name: waiting[name] for name in state["values"] if name in unknown})
        self._frozen = {k: p for k, p in self._frozen.items() if k not in self._values}
        self._statistics = {k: b for k, b in self._statistics.items() if k not in self._values}
        self.count = state["count"]
        for name, average in self._values.items():
            value = state["values"].get(name, self._sources[name])
            if value.shape != average.shape:
                raise ValueError(
                    f"its average of {name} has shape {list(value.shape)}, the task's parameter "
                    f"{list(average.shape)}"
                )
            average.copy_(value)

    def _add_trained(self) -> None:
        """Begin to average parameters that are trained and were not before."""
        ready = self._statistics | {k: p for k, p in self._frozen.items() if p.requires_grad}
        ready = {name: one for name, one in ready.items() if not is_lazy(one)}
        if ready:
            self._add(ready)
            self._frozen = {k: p for k, p in self._frozen.items() if k not in ready}
            self._statistics = {k: b for k, b in self._statistics.items() if k not in ready}

    def _present(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return averages and weights, each sharded tensor as this rank's part of it."""
        return [(_local(averages), _local(sources)) for averages, sources in self._pairs]

    def _add(self, sources: Mapping[str, Tensor]) -> None:
        for name, source in sources.items():
            # The average of half-precision weights is in fp32: `1 - decay` is lost in bf16.
            kept_in = torch.float32 if source.dtype in _HALF else source.dtype
            self._sources[name] = source
            self._values[name] = source.detach().to(kept_in, copy=True)
        kinds: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        for name, source in self._sources.items():
            averages, group = kinds.setdefault((source.device, source.dtype), ([], []))
            averages.append(self._values[name])
            group.append(source)
        self._pairs = list(kinds.values())


def overlay_average(
    model: Mapping[str, Any], average: Mapping[str, Any], left_out: Collection[str] = ()
) -> list[str]:
    """Write a saved average into a saved model's state dict; return the names that it lacks.

    Tied tensors share memory there, so each is written once. `left_out` are the entries that the
    checkpoint leaves out, because they never changed.
    """
    missing = []
    for name, value in average["values"].items():
        where, _, key = name.partition(".")
        if where != "model":
            continue
        if key in model:
            model[key].copy_(value)
        elif key not in left_out:
            missing.append(key)
    return missing


def load_average(model: nn.Module, average: Mapping[str, Any]) -> None:
    """Write a saved average into a model that has the weights of the same checkpoint."""
    tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in model.named_parameters()}
    tensors |= dict(_running_statistics(model))
    with torch.no_grad():
        for name, value in average["values"].items():
            if name.startswith("model."):
                tensors[name].copy_(value)


# BatchNorm's statistics are averaged with the weights, as `AveragedModel(use_buffers=True)` of
# `torch.optim.swa_utils` does; its documentation names this as one of two ways, the other being a
# further pass over the training data (`update_bn`). Every other buffer is the model's own: an
# average of a mask with -inf would be NaN.
def _running_statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            for name in ("running_mean", "running_var"):
                found = getattr(module, name, None)
                if isinstance(found, Tensor):
                    yield ".".join(("model", *filter(None, (path, name)))), found


def _local(tensors: list[Tensor]) -> list[Tensor]:
    # Not every function on lists of tensors takes a DTensor, whose import takes a second.
    return [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors]


def _can_average(parameter: Tensor) -> bool:
    return is_lazy(parameter) or parameter.is_floating_point() or parameter.is_complex()
