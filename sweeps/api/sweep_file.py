"""A sweep file from Python: the keys of `Sweep(...)`, and Python objects as their values.

What must not live here: the rules of the keys (`spec`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from sweeps.errors import UserError
from sweeps.formatting import quoted
from sweeps.spec.space import Distribution
from sweeps.spec.yaml_scalars import write_flow, write_key


class SweepKeys(TypedDict, total=False):
    """The keys of a sweep file besides `space`; a section is a mapping, or has a short form."""

    version: int
    name: str
    task: str | type | Mapping[str, Any]
    metric: str | Sequence[str]
    mode: Literal["min", "max"] | Sequence[Literal["min", "max"]]
    select: Literal["checkpoint", "final"]
    trials: int
    seed: int
    concurrency: int | None
    budget: Mapping[str, Any]
    search: str | Mapping[str, Any]
    constraints: Mapping[str, Mapping[str, float]]
    repeats: int | Mapping[str, Any]
    early_stopping: str | Mapping[str, Any]
    stop: Mapping[str, Any]
    resources: Mapping[str, Any]
    train: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    tracking: Mapping[str, Any]
    storage: Mapping[str, Any]
    failures: Mapping[str, Any]
    notify: Mapping[str, Any]
    training_rules: int


def sweep_file(keys: Mapping[str, Any]) -> str:
    """Return a sweep file with these keys."""
    return "".join(f"{write_key(k)}: {write_flow(_plain(v))}\n" for k, v in keys.items())


def override_texts(overrides: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the texts KEY=VALUE of overrides."""
    return tuple(f"{key}={write_flow(_plain(value))}" for key, value in (overrides or {}).items())


def _plain(value: Any) -> Any:
    """Return a value as plain data; an imported class or function stands for its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    if not hasattr(value, "__qualname__"):
        raise UserError(
            f"{quoted(repr(value))} is a {type(value).__name__}, which a sweep file cannot hold; "
            "values are numbers, texts, lists, mappings and None; write it as one of them"
        )
    module, name = value.__module__, value.__qualname__
    if module == "__main__" or "<locals>" in name or name not in vars(sys.modules[module]):
        raise UserError(
            f"{name} is defined in {'this notebook or script' if module == '__main__' else module}"
            ", and the processes of the trials could not import it; a task stands at the top of a "
            "module; in a notebook, begin its cell with %%writefile my_task.py, and write "
            f"task='my_task:{name.rpartition('.')[2]}'"
        )
    return f"{module}:{name}"


def short_form(value: Any) -> Any:
    """Return what a space has for a parameter: the short form of a distribution.

    A `range` is the whole numbers in it, a list or tuple is a choice, and a distribution of Optuna
    is the one that draws alike. Any other value is returned as it is.
    """
    if isinstance(value, Distribution):
        return value.to_data()
    if isinstance(value, range) and len(value) > 1 and value.step > 0:
        whole = {"int": [value[0], value[-1]]}
        return whole if value.step == 1 else {**whole, "step": value.step}
    if isinstance(value, list | tuple | range):
        return {"choice": list(value)}
    return value if isinstance(value, Mapping) else _of_optuna(value)


def _of_optuna(value: Any) -> Any:
    """Return the short form of a distribution of Optuna; another value as it is."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(value, CategoricalDistribution):
        return {"choice": list(value.choices)}
    if isinstance(value, IntDistribution):
        if value.log:
            return {"logint": [value.low, value.high]}
        stepped = {} if value.step == 1 else {"step": value.step}
        return {"int": [value.low, value.high], **stepped}
    if isinstance(value, FloatDistribution):
        if value.step is not None:
            return {"quniform": [value.low, value.high, value.step]}
        return {"loguniform" if value.log else "uniform": [value.low, value.high]}
    return value
