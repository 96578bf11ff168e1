"""Parse the short form of a distribution, such as `{loguniform: [1e-4, 0.1]}`.

A condition beside it means that the parameter exists only with certain values of others:

    {uniform: [0.8, 0.99], when: {train.optimizer.name: sgd}}
    {int: [1, 8], when: {task.kind: [conv, mixed]}}
    {int: [16, 256], step: 16}

A prior (`priors`) may stand beside it, too. What must not live here: the distributions (`space`),
and whether a condition names other parameters of the space (`search_checks`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from sweeps.errors import Issue, UserError
from sweeps.formatting import described, shown
from sweeps.spec.error_messages import nearest
from sweeps.spec.priors import PRIOR, PRIOR_WIDTH, parse_prior
from sweeps.spec.space import (
    KINDS,
    STEP,
    WHEN,
    Choice,
    Distribution,
    Int,
    LogInt,
    LogUniform,
    Powers,
    QUniform,
    Scalar,
    as_option,
    is_number,
)
from sweeps.spec.yaml_scalars import write_flow

_FORMS = ", ".join(KINDS)
_MOST_POWERS = 1_000
_MOST_STEPS = 10**28
"""The precision of Decimal."""


def parse_distribution(data: object) -> Distribution:
    """Parse the short form of a distribution."""
    if isinstance(data, Distribution):
        # Created in Python: check it by the same rules.
        data = data.to_data()
    if not isinstance(data, dict):
        raise UserError(
            f"{described(data)} is not a distribution; a space holds one distribution per key; "
            "write {choice: [...]} or {uniform: [low, high]}, or move a fixed value out of `space`"
        )
    if WHEN in data:
        return replace(
            parse_distribution({key: inner for key, inner in data.items() if key != WHEN}),
            when=_parse_conditions(data[WHEN]),
        )
    if given := {key: one for key, one in data.items() if key in (PRIOR, PRIOR_WIDTH)}:
        return _parse_with_prior(given, {k: v for k, v in data.items() if k not in given})
    if STEP in data and len(data) == 2:
        return _parse_stepped(data)
    if len(data) != 1:
        beside = (STEP, PRIOR, PRIOR_WIDTH, WHEN)
        unknown = [key for key in map(str, data) if key not in (*KINDS, *beside)]
        if len(unknown) == len(data) - 1:
            meant = nearest(unknown[0], beside)
            fix = f"; did you mean '{meant}'?" if meant else ""
            valid = ", ".join(beside)
            text = f"unknown key '{unknown[0]}' beside a distribution; valid: {valid}{fix}"
            raise UserError([Issue((unknown[0],), text, True)])
        raise UserError(
            f"there are {sum(key in KINDS for key in data)} distributions; a parameter has "
            f"exactly one; write one of: {_FORMS}"
        )
    ((name, arguments),) = data.items()
    kind = KINDS.get(str(name))
    if kind is None:
        meant = nearest(str(name), KINDS)
        fix = f"; did you mean '{meant}'?" if meant else ""
        raise UserError(
            [Issue((str(name),), f"unknown distribution '{name}'; valid: {_FORMS}{fix}", True)]
        )
    size = {"[low, high]": 2, "[low, high, step]": 3, "[low, high, factor]": 3}.get(kind.form)
    if kind is Int and isinstance(arguments, list) and len(arguments) == 3:
        return _parse_stepped({kind.name: arguments[:2], STEP: arguments[2]})
    if not isinstance(arguments, list) or (size is not None and len(arguments) != size):
        raise _refuse(kind, _wrong_shape(kind, arguments))
    if kind is Powers:
        return _parse_powers(arguments)
    if kind is Choice:
        return _parse_choice(arguments)
    return _parse_range(kind, arguments)


def _parse_with_prior(given: Mapping[str, Any], rest: Mapping[str, Any]) -> Distribution:
    if not rest:
        raise UserError(
            f"there is no distribution beside {' and '.join(given)}; a prior is about a parameter "
            f"that is searched; write one of: {_FORMS}"
        )
    distribution = parse_distribution(dict(rest))
    return replace(distribution, prior=parse_prior(given, distribution))


def _parse_stepped(data: Mapping[str, Any]) -> Distribution:
    (name,) = data.keys() - {STEP}
    if name != Int.name:
        kind = KINDS.get(str(name))
        if kind in (LogInt, LogUniform):
            fix = f"write {Powers.name}: [low, high, factor], such as powers: [16, 256, 2]"
        elif kind is Choice:
            fix = "leave the step out"
        else:
            fix = f"write {QUniform.name}: [low, high, step]"
        raise UserError(
            [Issue((STEP,), f"{name} takes no step; only int has one beside it; {fix}", True)]
        )
    step = data[STEP]
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        message = f"{described(step)} is not a step of whole numbers; a step is a whole number "
        raise UserError([Issue((STEP,), message + "from 1 on; write 16, or use quniform")])
    whole = parse_distribution({name: data[name]})
    assert isinstance(whole, Int)
    left = (whole.high - whole.low) % step
    if left:
        fit = whole.high - left
        fix = f"write [{whole.low}, {fit}], step: {step}"
        if fit == whole.low:
            fix = f"write a step of {whole.high - whole.low} or less"
        raise _refuse(
            Int,
            f"high - low = {whole.high - whole.low} is not a whole number of steps of {step}; "
            f"high must be on a step; {fix}",
        )
    return Int(whole.low, whole.high, step)


def _parse_powers(arguments: Sequence[Any]) -> Distribution:
    for index, value in enumerate(arguments):
        word, least = (("low", 0), ("high", 0), ("factor", 1))[index]
        if not is_number(value):
            message = f"{described(value)} is not a number; {word} is one; write one, such as 2"
            raise _refuse(Powers, message, index)
        if not math.isfinite(value) or value <= least:
            message = f"{word} is {write_flow(value)}; it is above {least}; write 2"
            raise _refuse(Powers, message, index)
    whole = all(isinstance(value, int) for value in arguments)
    low, high, factor = (Decimal(str(value)) for value in arguments)
    found = [low]
    while found[-1] < high and len(found) <= _MOST_POWERS:
        found.append(found[-1] * factor)
    if len(found) > _MOST_POWERS:
        raise _refuse(
            Powers,
            f"there are more than {_MOST_POWERS} powers of {factor} from {low} to {high}; all of "
            "them are stored; write a larger factor, or use loguniform",
        )
    values = [int(value) if whole else float(value) for value in found]
    if found[-1] != high or len(found) < 2:
        last = values[-2] if len(found) > 2 else values[0] * arguments[2]
        raise _refuse(
            Powers,
            f"{arguments[1]} is not {arguments[0]} times a power of {arguments[2]}; high is one; "
            f"write [{arguments[0]}, {last}, {arguments[2]}]",
        )
    return Powers(tuple(values))


def _parse_conditions(data: object) -> tuple[tuple[str, tuple[Scalar, ...]], ...]:
    example = "write when: {train.optimizer.name: sgd}"
    rule = "`when` maps other keys of the space to the values with which this one exists"
    if not isinstance(data, Mapping) or not data:
        text = described(data)
        raise UserError([Issue((WHEN,), f"{text} is not a condition; {rule}; {example}")])
    faults, found = [], []
    for key, allowed in data.items():
        values = allowed if isinstance(allowed, list) else [allowed]
        wrong = [value for value in values or [values] if isinstance(value, list | dict)]
        if wrong:
            text = described(wrong[0])
            message = f"{text} is not a value of a key; {rule}; write one value, or [a, b]"
            faults.append(Issue((WHEN, key), message))
        found.append((key, tuple(values)))
    if faults:
        raise UserError(faults)
    return tuple(found)


def _refuse(kind: type[Distribution], message: str, index: int | None = None) -> UserError:
    path = (kind.name,) if index is None else (kind.name, index)
    return UserError([Issue(path, message)])


def _wrong_shape(kind: type[Distribution], arguments: object) -> str:
    got = f"{len(arguments)} values" if isinstance(arguments, list) else described(arguments)
    rule = f"{kind.name} takes {kind.form}"
    if isinstance(arguments, list) and len(arguments) == 3 and kind.name != "quniform":
        if kind.name.startswith("log"):
            return (
                f"got {got}; {rule}, and a logarithmic range has no step; leave the third out, or "
                f"write {Powers.name}: [low, high, factor], such as powers: [16, 256, 2]"
            )
        return f"got {got}; {rule}; leave the third out, or use quniform for steps"
    return f"got {got}; {rule}; write {kind.name}: {kind.form}"


def _parse_range(kind: type[Distribution], arguments: Sequence[Any]) -> Distribution:
    whole = issubclass(kind, Int)
    labels = ("low", "high", "step")
    faults = []
    for index, value in enumerate(arguments):
        message = None
        if not is_number(value):
            message = (
                f"{described(value)} is not a number; {labels[index]} is a number; write "
                "one, such as 0.1"
            )
        elif not math.isfinite(value):
            message = f"{labels[index]} is {write_flow(value)}; bounds are finite; write a number"
        elif whole and not isinstance(value, int):
            message = (
                f"{labels[index]} is {write_flow(value)}; {kind.name} takes whole "
                "numbers; write one, or use uniform"
            )
        elif kind.name.startswith("log") and index == 0 and value <= 0:
            message = (
                f"low is {write_flow(value)}; a logarithmic range begins above 0; write a "
                f"small number above 0, or use {kind.name[3:]}"
            )
        elif index == 2 and value <= 0:
            message = f"step is {write_flow(value)}; a step is above 0; write a number above 0"
        if message:
            faults.append(Issue((kind.name, index), message))
    if faults:
        raise UserError(faults)
    low, high = arguments[:2]
    if low == high:
        raise _refuse(
            kind,
            f"low and high are both {write_flow(low)}; low is below high; use a "
            "constant: set the key itself and leave it out of `space`",
        )
    if low > high:
        raise _refuse(
            kind,
            f"low {write_flow(low)} is above high {write_flow(high)}; low is below "
            f"high; write [{write_flow(high)}, {write_flow(low)}]",
        )
    if kind is QUniform:
        step = arguments[2]
        span = Decimal(str(high)) - Decimal(str(low))
        if span / Decimal(str(step)) >= _MOST_STEPS:
            raise _refuse(
                kind,
                f"high - low = {span} is {_MOST_STEPS:.0e} steps of {step} or more; steps are "
                "counted; write a larger step, or use uniform",
            )
        # In decimal arithmetic: with binary numbers 0.3 is not exactly three steps of 0.1.
        if span % Decimal(str(step)):
            fit = Decimal(str(low)) + span // Decimal(str(step)) * Decimal(str(step))
            fix = (
                f"write [{low}, {fit}, {step}]"
                if fit > Decimal(str(low))
                else "choose a smaller step"
            )
            raise _refuse(
                kind,
                f"high - low = {span} is not a whole number of steps of {step}; high must "
                f"be on a step; {fix}",
            )
    return kind(*(arguments if whole else map(float, arguments)))


def _parse_choice(options: Sequence[Any]) -> Choice:
    if not options:
        raise _refuse(
            Choice,
            "there is nothing to choose from; a choice has at least one option; "
            "write choice: [a, b]",
        )
    faults = []
    for index, option in enumerate(options):
        message = None
        if isinstance(option, list | dict) and not _is_plain(option):
            message = (
                f"{shown(option)} has a value that JSON cannot store; an option is made of texts, "
                "finite numbers, true, false and null, and the keys of a mapping are texts; "
                "write such values"
            )
        elif isinstance(option, float) and not math.isfinite(option):
            message = (
                f"{write_flow(option)} is not finite; options that are numbers are "
                "finite; write a number"
            )
        # Optuna compares options with Python's equality, by which 1, 1.0 and true are equal.
        elif (earlier := list(options).index(option)) < index:
            message = (
                f"{write_flow(option)} equals option {earlier + 1}; options differ; "
                "remove one of them"
            )
        if message:
            faults.append(Issue(("choice", index), message))
        elif (text := as_option(option)) is not option and text in options:
            message = (
                f"{write_flow(option)} is recorded as the text of option "
                f"{list(options).index(text) + 1}; options differ; remove one of them"
            )
            faults.append(Issue(("choice", index), message))
    if faults:
        raise UserError(faults)
    drawn = tuple(map(as_option, options))
    texts = frozenset(one for one, option in zip(drawn, options, strict=True) if one is not option)
    return Choice(drawn, texts=texts)


def _is_plain(value: object) -> bool:
    """Return whether JSON can store a value exactly."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_plain, value.values()))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)
