"""The function that a sweep calls: its arguments, its form, and the reports that it makes.

What must not live here: when it is called (`light`).
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from sweeps.errors import UserError
from sweeps.formatting import listed, quoted
from sweeps.spec.spec import SweepSpec
from trainable.user_code.task_import import SCRIPT

Report = float | Mapping[str, float]
"""A number, the sweep's metric; or several metrics by their names."""
Objective = Callable[..., Report | Iterator[Report]]
"""A function of the searched values: it returns a report, or yields one after each epoch."""

KEYS = {"version", "name", "task", "metric", "mode", "select", "trials", "seed", "budget"} | {
    "space", "search", "constraints", "early_stopping", "stop", "tracking", "training_rules",
}  # fmt: skip
"""The keys of a sweep file that have an effect on a function in this process."""
ARGUMENT = "task."
"""Begins the keys of the function's arguments in the sweep's space."""


RULE = "a report is a number, or a dict of numbers by metric; return or yield such as 0.5"


class ReportRefused(UserError):
    """What the function returned or yielded is no report; its trial stays unfinished."""


def light_keys(
    objective: Objective | None, space: Mapping[str, Any], keys: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of the sweep file of a function, or of a caller who asks for trials."""
    name = getattr(objective, "__name__", "").replace("<lambda>", "")
    if "task" in keys:
        raise UserError(
            "both a function and `task` are given; a sweep trains one of them; leave one out"
        )
    ignored = [key for key in keys if key in SweepSpec.model_fields and key not in KEYS]
    if ignored:
        raise UserError(
            f"{listed(ignored)} has no effect on a function that runs in this process; leave it "
            'out, or write a task in a module: see the guide "Your own loop"'
        )
    for key in space:
        if not str(key).removeprefix(ARGUMENT).isidentifier():
            raise UserError(
                f"space has {quoted(str(key))}, which is no name of an argument; without `task` "
                "the space has the arguments of a function; write such as lr, or add `task`"
            )
    space = {f"{ARGUMENT}{str(key).removeprefix(ARGUMENT)}": one for key, one in space.items()}
    if objective is not None:
        _check_arguments(objective, name or "the function", space)
    _check_form(objective, name or "the function", keys)
    known: dict[str, Any] = {"name": name} if name else {}
    known |= {"task": f"{SCRIPT}:{name or 'ask'}", "metric": "value", "budget": {"epochs": 1}}
    return {**known, **keys, "space": space}


def _check_arguments(objective: Objective, name: str, space: Mapping[str, Any]) -> None:
    """Check that a function takes the values of a space, and has all the others."""
    try:
        taken = inspect.signature(objective).parameters.values()
    except ValueError:  # a builtin without a signature
        return
    searched = {key.removeprefix(ARGUMENT): one for key, one in space.items()}
    named = [one for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    names = [one.name for one in named]
    takes = f"{name} takes {listed(names) or 'no argument'}"
    takes_any = any(one.kind == one.VAR_KEYWORD for one in taken)
    if unknown := [key for key in searched if key not in names and not takes_any]:
        raise UserError(
            f"space has {listed(unknown)}, and {takes}; each key of the space is an argument; "
            "rename one, or remove the key"
        )
    for one in named:
        if one.default is not one.empty:
            continue
        if one.name not in searched:
            raise UserError(
                f"{takes}, and space has no {one.name}; an argument is searched, or has a "
                f"default; add {one.name} to the space, or write {one.name}=VALUE"
            )
        given = searched[one.name]
        if isinstance(given, Mapping) and "when" in given:
            raise UserError(
                f"{one.name} exists in some trials only (when), and {name} needs it in each; "
                f"give it a default, such as {one.name}=None"
            )
    if wrong := [one.name for one in taken if one.kind == one.POSITIONAL_ONLY]:
        raise UserError(f"{takes}, and {wrong[0]} only by its position; values come by name")


def yields(objective: object) -> bool:
    """Return whether a function yields its reports."""
    called = objective if inspect.isroutine(objective) else vars(type(objective)).get("__call__")
    return any(map(inspect.isgeneratorfunction, (objective, called)))


def _check_form(objective: Objective | None, name: str, keys: Mapping[str, Any]) -> None:
    """Check that a function returns or yields, and that the keys fit to that."""
    if inspect.iscoroutinefunction(objective) or inspect.isasyncgenfunction(objective):
        raise UserError(f"{name} is asynchronous; write it without async and await")
    if yields(objective):
        if "budget" not in keys:
            raise UserError(
                f"{name} yields reports, and no budget says how many are a whole training; write "
                "such as budget={'epochs': 10}"
            )
        return
    for key in ("budget", "early_stopping"):
        if key in keys:
            gives = "a trial of ask() and tell()" if objective is None else f"{name} returns, and"
            raise UserError(
                f"{gives} has one result, so that {key} has no effect; leave it out, or give a "
                "function that yields a report after each epoch"
            )


class FunctionRaised(Exception):
    """The function raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def reports_of(objective: Objective, params: Mapping[str, Any]) -> Generator[object, None, None]:
    """Yield what a function yields, or the one report that it returns."""
    try:
        if yields(objective):
            yield from objective(**params)  # type: ignore[misc]
        else:
            yield objective(**params)
    except Exception as error:
        # Without the frame of this function: a reader looks for the line of their own.
        trace = error.__traceback__
        raise FunctionRaised(error.with_traceback(trace and trace.tb_next)) from error


def defaults_of(objective: Objective | None) -> dict[str, Any]:
    """Return the plain defaults of a function's arguments; none if it has no signature."""
    try:
        taken = inspect.signature(objective).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no function, or a builtin
        return {}
    plain = (one for one in taken if isinstance(one.default, str | int | float | None))
    return {one.name: one.default for one in plain}


def digest_of(name: str, objective: Objective | None) -> dict[str, str]:
    """Return the digest of a function's source by its name; none if there is no source."""
    try:
        source = inspect.getsource(objective)  # type: ignore[arg-type]  # tried
    except (TypeError, OSError):
        return {}
    return {name: hashlib.sha256(source.encode()).hexdigest()}


def numbers_of(name: str, given: object, metrics: Sequence[str]) -> dict[str, float]:
    """Return a report as numbers by metric; a single number is the sweep's only metric."""
    if not isinstance(given, Mapping):
        if len(metrics) > 1:
            raise ReportRefused(
                f"{name} gave {_described(given)}, and the sweep has the metrics "
                f"{listed(metrics)}; write a dict with each of them"
            )
        given = {metrics[0]: given}
    values = {str(metric): _number(name, str(metric), value) for metric, value in given.items()}
    if lacking := [metric for metric in metrics if metric not in values]:
        raise ReportRefused(
            f"{name} gave {listed(list(values)) or 'nothing'} without {lacking[0]}, which the "
            f"sweep compares; report {lacking[0]}, or write another metric"
        )
    return values


def _number(name: str, metric: str, value: object) -> float:
    """Return a value as a number; a tensor or an array may hold it."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)  # type: ignore[arg-type]  # tried
    except (TypeError, ValueError, OverflowError):
        raise ReportRefused(f"{name} gave {_described(value)} as {metric}; {RULE}") from None


def _described(value: object) -> str:
    return "None" if value is None else f"{quoted(repr(value)[:40])} ({type(value).__name__})"
