"""Validators of single values of the section `search`: sampler, points, constraints, sweep names.

What must not live here: checks against the space (`search_checks`), and Optuna, because commands
that only read a sweep load its spec.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from sweeps.errors import Issue, UserError
from sweeps.formatting import shown
from sweeps.spec.constraints import parse_constraint
from sweeps.spec.error_messages import nearest

SAMPLERS = ("tpe", "gp", "cmaes", "nsgaii", "random", "qmc", "grid")
"""Samplers that can be chosen by name."""
AUTO = "auto"
"""Stands for a sampler or a stopping rule that is taken when a sweep is created."""
LEARN_NOTHING = ("random", "qmc", "grid")
"""Samplers that ignore the results of earlier trials."""
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_sampler(value: object) -> object:
    """Return a sampler's name, or `module:Class`."""
    if isinstance(value, str) and (value in (*SAMPLERS, AUTO) or _CLASS.fullmatch(value)):
        return value
    valid = f"valid: {', '.join((*SAMPLERS, AUTO))}, or module:Class of an Optuna sampler"
    meant = nearest(value, (*SAMPLERS, AUTO)) if isinstance(value, str) else None
    fix = f"did you mean '{meant}'?" if meant else "write one of them"
    raise UserError(f"{_text(value)} is not known here; {valid}; {fix}")


def check_points(value: object) -> object:
    """Return a list of points, each a mapping of keys to values, or `defaults`."""
    if value == "defaults":
        return value
    rule = "`try_first` is a list of points, each a mapping of keys of the space to values"
    example = "write [{train.optimizer.lr: 0.01}]"

    def faults(index: int, point: object) -> Iterator[Issue]:
        if not isinstance(point, dict) or not point:
            text = "an empty mapping" if point == {} else _text(point)
            yield Issue((index,), f"{text} is not a point; {rule}; {example}")

    return _each(value, faults, f"{rule}; {example}")


def check_constraints(value: object) -> object:
    """Return a list of texts that are constraints."""

    def faults(index: int, text: object) -> Iterator[Issue]:
        if not isinstance(text, str):
            yield Issue((index,), f"{_text(text)} is not a constraint; {rule}")
            return
        try:
            parse_constraint(text)
        except UserError as error:
            yield from (Issue((index, *f.path), f.message) for f in error.faults)

    rule = "`constraints` is a list of comparisons, each a text; write ['task.low < task.high']"
    return _each(value, faults, rule)


def sweep_names(value: object, check: Callable[[str], str]) -> object:
    """Return one name or several as a list of valid names."""

    def faults(index: int, name: object) -> Iterator[Issue]:
        if not isinstance(name, str):
            yield Issue((index,), f"{_text(name)} is not a name; {rule}")
        elif names.index(name) < index:
            yield Issue((index,), f"{shown(name)} is listed twice; list each sweep once")
        else:
            try:
                check(name)
            except UserError as error:
                yield from (Issue((index,), fault.message) for fault in error.faults)

    rule = "`warm_start` names earlier sweeps below the same root; write [first, second]"
    names: Any = [value] if isinstance(value, str) else value
    return _each(names, faults, rule)


def _each(
    value: object, faults: Callable[[int, object], Iterator[Issue]], rule: str
) -> list[object]:
    if not isinstance(value, list):
        raise UserError(f"{_text(value)} is not a list; {rule}")
    if found := [fault for index, item in enumerate(value) for fault in faults(index, item)]:
        raise UserError(found)
    return value


def _text(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else shown(value)
