"""Translate distributions in the forms of W&B, Ray Tune and Optuna into the form of a spec.

    {distribution: log_uniform_values, min: 1.0e-4, max: 0.1}     W&B
    tune.loguniform(1e-4, 1e-1), {grid_search: [1, 2]}             Ray Tune
    {type: float, low: 1.0e-4, high: 0.1, log: true}               Optuna, and its Hydra sweeper
    trial.suggest_float("lr", 1e-4, 0.1, log=True)

Texts are parsed, and never evaluated. What must not live here: whole files (`foreign_specs`), and
the rules of a distribution (`space_parser`).
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LONGEST = 10_000
"""Characters of a text that is parsed."""
_CALL = re.compile(r"[A-Za-z_][\w.]*\(.*\)", re.DOTALL)
_MAPPING_KEYS = {"distribution", "values", "value", "min", "max", "grid_search"}
_SIGMAS = 3
"""A normal distribution becomes a range of so many standard deviations to both sides."""


class Translated(NamedTuple):
    """A parameter of another tool in the form of a spec."""

    data: Any
    """The distribution, such as `{"uniform": [0, 1]}`; of a fixed parameter its value."""
    fixed: bool = False
    """Whether the parameter is not searched."""
    note: str | None = None
    """What the translation does not keep."""
    is_grid: bool = False
    """Whether the other tool tries every value."""


def translate_distribution(value: object) -> Translated | None:
    """Translate a distribution of another tool; None if it is none.

    Raises nothing: arguments that make no sense are kept, so that the checks of a spec report
    them.
    """
    try:
        if isinstance(value, str):
            return _of_text(value)
        if isinstance(value, Mapping):
            return _of_mapping(value)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        return None  # the arguments do not fit the name
    return None


def _of_mapping(value: Mapping[str, Any]) -> Translated | None:
    if "grid_search" in value:
        return Translated({"choice": list(value["grid_search"])}, is_grid=True)
    attributes = value.get("attributes")
    if isinstance(attributes, Mapping) and str(value.get("name")).endswith("Distribution"):
        return _of_call(str(value["name"]), [], dict(attributes))
    if len(value) == 1:
        ((name, arguments),) = value.items()
        if str(name).endswith("Distribution") and isinstance(arguments, Mapping):
            return _of_call(str(name), [], dict(arguments))
    if isinstance(kind := value.get("type"), str):
        name = f"suggest_{kind}" if kind in ("float", "int", "categorical") else kind
        found = _of_call(name, [], {key: one for key, one in value.items() if key != "type"})
        if found is not None:
            return found
    if _MAPPING_KEYS & set(value):
        return _of_wandb(value)
    return None


def _of_wandb(value: Mapping[str, Any]) -> Translated | None:
    kind = str(value.get("distribution") or _implied(value))
    if kind == "constant":
        return Translated(value["value"], fixed=True)
    if kind in ("categorical", "categorical_w_probabilities"):
        note = "probabilities: every option is as likely" if "probabilities" in value else None
        return Translated({"choice": list(value["values"])}, note=note)
    if "normal" in kind:
        return _of_normal(float(value.get("mu", 0)), float(value.get("sigma", 1)), kind)
    low, high = value["min"], value["max"]
    if kind.endswith(("log_uniform", "log_uniform_values")):
        if not kind.endswith("_values"):  # its ends are exponents
            low, high = (float(f"{math.exp(end):.6g}") for end in (low, high))
        note = "inv_log_uniform: loguniform is the nearest" if kind.startswith("inv_") else None
        return _logarithmic(low, high, value.get("q", 1) if kind.startswith("q_") else None, note)
    if kind == "q_uniform":
        return _stepped(low, high, value.get("q", 1))
    return Translated({"int" if kind == "int_uniform" else "uniform": [low, high]})


def _implied(value: Mapping[str, Any]) -> str:
    """Return the distribution that W&B assumes when none is named."""
    if "values" in value:
        return "categorical"
    if "value" in value:
        return "constant"
    whole = all(isinstance(value[end], int) for end in ("min", "max"))
    return "int_uniform" if whole else "uniform"


class Call(NamedTuple):
    """A call in Python's syntax, such as `tune.uniform(0, 1)`."""

    name: str
    """The function, without its module."""
    arguments: list[Any]
    named: dict[str, Any]


def parse_call(text: str) -> Call | None:
    """Parse a call whose arguments are literals, bare words or such calls; None if it is none."""
    if len(text) > _LONGEST or not _CALL.fullmatch(text.strip()):
        return None
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found if isinstance(found, Call) else None


def _value(tree: ast.expr) -> Any:
    """Return the value of a literal; of a bare word, as Hydra has it, the word."""
    if isinstance(tree, ast.Name):
        return tree.id
    if not isinstance(tree, ast.Call):
        return ast.literal_eval(tree)
    name = tree.func.attr if isinstance(tree.func, ast.Attribute) else ast.unparse(tree.func)
    named = {one.arg: _value(one.value) for one in tree.keywords if one.arg}
    return Call(name, [_value(one) for one in tree.args], named)


def _of_text(text: str) -> Translated | None:
    call = parse_call(text)
    return None if call is None else _of_parsed(call)


def _of_parsed(call: Call) -> Translated | None:
    if call.name != "tag":
        return _of_call(call.name, call.arguments, call.named)
    *tags, inner = call.arguments  # Hydra: tag(log, interval(1, 10))
    found = _of_parsed(inner) if isinstance(inner, Call) else None
    if found is None or "log" not in tags:
        return found
    ((kind, (low, high, *_)),) = found.data.items()
    return _logarithmic(low, high, 1 if kind == "int" else None)


def _of_call(name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Translated | None:
    """Translate a call by the name of its function, in Ray Tune, Optuna or Hydra."""
    if name.startswith("suggest_") and arguments and isinstance(arguments[0], str):
        arguments = arguments[1:]  # the parameter's name
    named.pop("name", None)
    match name:
        case "choice" | "suggest_categorical" | "CategoricalDistribution" | "grid_search":
            options = named.get("choices", named.get("categories", named.get("values")))
            if options is None:
                listed = len(arguments) == 1 and isinstance(arguments[0], list | tuple)
                options = arguments[0] if listed else arguments
            return Translated({"choice": list(options)}, is_grid=name == "grid_search")
        case "randn" | "qrandn":
            mean, deviation, *_ = [*arguments, *named.values(), 0.0, 1.0]
            return _of_normal(float(mean), float(deviation), name)
    low, high, *rest = _ends(arguments, named)
    step = named.get("step", named.get("q", rest[0] if rest else None))
    match name:
        case "uniform" | "interval" | "suggest_uniform" | "UniformDistribution":
            return Translated({"uniform": [low, high]})
        case "loguniform" | "suggest_loguniform" | "LogUniformDistribution":
            return _logarithmic(low, high, None)
        case "quniform" | "suggest_discrete_uniform" | "DiscreteUniformDistribution":
            return _stepped(low, high, step)
        case "qloguniform":
            return _logarithmic(low, high, step)
        case "randint":  # Ray Tune leaves the end out
            return Translated({"int": [low, high - 1]})
        case "lograndint":
            return _logarithmic(low, high - 1, 1)
        case "qlograndint":
            return _logarithmic(low, high, step)
        case "suggest_float" | "FloatDistribution":
            if named.get("log"):
                return _logarithmic(low, high, None)
            step = named.get("step")
            return (
                Translated({"uniform": [low, high]})
                if step is None
                else _stepped(float(low), high, step)
            )
        case "qrandint" | "range" | "suggest_int" | "IntDistribution":
            return _logarithmic(low, high, 1) if named.get("log") else _stepped(low, high, step)
    return None


def _ends(arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return both ends of a range and further arguments, which may be named."""
    first = next((named[key] for key in ("low", "lower", "start", "min") if key in named), None)
    last = next((named[key] for key in ("high", "upper", "stop", "max") if key in named), None)
    return [*([] if first is None else [first]), *arguments[: 2 if first is None else 1],
            *([] if last is None else [last]), *arguments[2:]]  # fmt: skip


def _logarithmic(low: Any, high: Any, step: Any, note: str | None = None) -> Translated:
    """Return a logarithmic range; with a step, only whole numbers can have it."""
    whole = step is not None and all(isinstance(end, int) for end in (low, high))
    if step not in (None, 1):
        note = f"the step {step}: a logarithmic range has none; `powers` lists fixed values"
    return Translated({"logint" if whole else "loguniform": [low, high]}, note=note)


def _stepped(low: Any, high: Any, step: Any) -> Translated:
    """Return a range with a step; its end is moved to the last step."""
    whole = all(isinstance(one, int) for one in (low, high, step if step is not None else 1))
    if step in (None, 1) and whole:
        return Translated({"int": [low, high]})
    if whole:
        return Translated({"int": [low, high - (high - low) % step], "step": step})
    step = 1 if step is None else step
    count = math.floor((high - low) / step + 1e-9)
    end = float(f"{low + count * step:.12g}")
    return Translated({"quniform": [low, end, step]})


def _of_normal(mean: float, deviation: float, kind: str) -> Translated:
    """Return a range of three standard deviations to both sides."""
    note = f"{kind}: there is no normal distribution; the range is {_SIGMAS} deviations wide"
    low, high = mean - _SIGMAS * deviation, mean + _SIGMAS * deviation
    if "log" in kind:
        low, high = (float(f"{math.exp(end):.6g}") for end in (low, high))
        return Translated({"loguniform": [low, high]}, note=note)
    return Translated({"uniform": [low, high]}, note=note)


def is_searched(value: object) -> bool:
    """Return whether a value is a distribution of another tool that is not fixed."""
    found = translate_distribution(value)
    return found is not None and not found.fixed
