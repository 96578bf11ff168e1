"""The search space: what values a parameter may take, and with what weight.

    {uniform: [low, high]}           a number, every value as likely
    {loguniform: [low, high]}        a number, every order of magnitude as likely
    {quniform: [low, high, step]}    low, low + step, ..., high
    {int: [low, high]}               a whole number, both ends included
    {logint: [low, high]}            a whole number, every order of magnitude as likely
    {choice: [a, b, ...]}            one of the listed values

What must not live here: which fields a space may name (`spec`), and how values are drawn (the
sampler).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar

from sweeps.problems import Fault, Refused, nearest
from sweeps.scalars import shown, write_flow

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Scalar = None | bool | int | float | str

_MOST_VALUES = 100  # whole numbers of a range that are tried one by one when a spec is checked


@dataclass(frozen=True)
class Distribution:
    """Base of all distributions; `str()` is the YAML form, and `parse_distribution` reads it
    back."""

    name: ClassVar[str]
    form: ClassVar[str]
    draws: ClassVar[str] = "numbers"

    def to_optuna(self) -> BaseDistribution:
        """Return the same distribution for an Optuna study."""
        raise NotImplementedError

    def to_data(self) -> dict[str, list[Any]]:
        """Return the short form as it stands in a spec, such as `{"int": [1, 8]}`."""
        return {self.name: self.arguments()}

    def arguments(self) -> list[Any]:
        """Return the numbers or options in the order of the short form."""
        raise NotImplementedError

    def probes(self) -> list[tuple[int | None, Any]]:
        """Return values that every field of this distribution must accept.

        Returns:
            Pairs of the argument's index (None: a value in between) and the value as it would be
            drawn.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return write_flow(self.to_data())


@dataclass(frozen=True)
class _Range(Distribution):
    low: float
    high: float

    form: ClassVar[str] = "[low, high]"

    def arguments(self) -> list[Any]:
        return [self.low, self.high]

    def probes(self) -> list[tuple[int | None, Any]]:
        return [(0, self.low), (1, self.high)]


@dataclass(frozen=True)
class Uniform(_Range):
    """A number between `low` and `high`."""

    name: ClassVar[str] = "uniform"

    def to_optuna(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high)


@dataclass(frozen=True)
class LogUniform(_Range):
    """A number between `low` and `high`, uniform in its logarithm."""

    name: ClassVar[str] = "loguniform"

    def to_optuna(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=True)


@dataclass(frozen=True)
class QUniform(_Range):
    """One of `low`, `low + step`, ..., `high`."""

    step: float

    name: ClassVar[str] = "quniform"
    form: ClassVar[str] = "[low, high, step]"

    def arguments(self) -> list[Any]:
        return [self.low, self.high, self.step]

    def to_optuna(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, step=self.step)


@dataclass(frozen=True)
class Int(Distribution):
    """A whole number from `low` to `high`, both included."""

    low: int
    high: int

    name: ClassVar[str] = "int"
    form: ClassVar[str] = "[low, high]"
    draws: ClassVar[str] = "whole numbers"

    def arguments(self) -> list[Any]:
        return [self.low, self.high]

    def probes(self) -> list[tuple[int | None, Any]]:
        inner = range(self.low + 1, self.high) if self.high - self.low <= _MOST_VALUES else ()
        return [(0, self.low), (1, self.high), *((None, value) for value in inner)]

    def to_optuna(self) -> BaseDistribution:
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high)


@dataclass(frozen=True)
class LogInt(Int):
    """A whole number from `low` to `high`, uniform in its logarithm."""

    name: ClassVar[str] = "logint"

    def to_optuna(self) -> BaseDistribution:
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high, log=True)


@dataclass(frozen=True)
class Choice(Distribution):
    """One of the listed values."""

    options: tuple[Scalar, ...]

    name: ClassVar[str] = "choice"
    form: ClassVar[str] = "[first, second, ...]"

    def arguments(self) -> list[Any]:
        return list(self.options)

    def probes(self) -> list[tuple[int | None, Any]]:
        return list(enumerate(self.options))

    def to_optuna(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.options)


KINDS: dict[str, type[Distribution]] = {
    kind.name: kind for kind in (Uniform, LogUniform, QUniform, Int, LogInt, Choice)
}
_FORMS = ", ".join(KINDS)


def parse_distribution(data: object) -> Distribution:
    """Read a distribution from its short form.

    Args:
        data: A mapping of one name to its arguments, such as `{"loguniform": [1e-4, 0.1]}`, or a
            `Distribution`.

    Raises:
        Refused: With one fault for everything that is wrong.
    """
    if isinstance(data, Distribution):
        # Built in Python: the same rules hold.
        data = data.to_data()
    if not isinstance(data, dict):
        text = shown(data) if not isinstance(data, list) else "a list"
        raise Refused(
            f"{text} is not a distribution; a space holds one distribution per key; write "
            f"{{choice: [...]}} or {{uniform: [low, high]}}, or move a fixed value out of `space`"
        )
    if len(data) != 1:
        raise Refused(
            f"{len(data)} distributions stand here; a parameter has exactly one; "
            f"write one of: {_FORMS}"
        )
    ((name, arguments),) = data.items()
    kind = KINDS.get(str(name))
    if kind is None:
        meant = nearest(str(name), KINDS)
        fix = f"; did you mean '{meant}'?" if meant else ""
        raise Refused(
            [Fault((str(name),), f"unknown distribution '{name}'; valid: {_FORMS}{fix}", True)]
        )
    size = {"[low, high]": 2, "[low, high, step]": 3}.get(kind.form)
    if not isinstance(arguments, list) or (size is not None and len(arguments) != size):
        raise _refuse(kind, _wrong_shape(kind, arguments))
    if kind is Choice:
        return _parse_choice(arguments)
    return _parse_range(kind, arguments)


def _refuse(kind: type[Distribution], message: str, index: int | None = None) -> Refused:
    path = (kind.name,) if index is None else (kind.name, index)
    return Refused([Fault(path, message)])


def _wrong_shape(kind: type[Distribution], arguments: object) -> str:
    got = f"{len(arguments)} values" if isinstance(arguments, list) else _kind_of(arguments)
    rule = f"{kind.name} takes {kind.form}"
    if isinstance(arguments, list) and len(arguments) == 3 and kind.name != "quniform":
        if kind.name.startswith("log"):
            return f"got {got}; {rule}, and a logarithmic range has no step; leave the step out"
        return f"got {got}; {rule}; leave the third out, or use quniform for steps"
    return f"got {got}; {rule}; write {kind.name}: {kind.form}"


def _kind_of(value: object) -> str:
    return "a mapping" if isinstance(value, dict) else shown(value)


def _parse_range(kind: type[Distribution], arguments: Sequence[Any]) -> Distribution:
    whole = issubclass(kind, Int)
    labels = ("low", "high", "step")
    faults = []
    for index, value in enumerate(arguments):
        message = None
        if isinstance(value, bool) or not isinstance(value, int | float):
            message = (
                f"{_kind_of(value)} is not a number; {labels[index]} is a number; write "
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
            faults.append(Fault((kind.name, index), message))
    if faults:
        raise Refused(faults)
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
        # In decimal, as people write it: 0.3 is three steps of 0.1, which binary numbers deny.
        if span % Decimal(str(step)):
            fit = Decimal(str(low)) + span // Decimal(str(step)) * Decimal(str(step))
            fix = (
                f"write [{low}, {fit}, {step}]"
                if fit > Decimal(str(low))
                else "choose a smaller step"
            )
            raise _refuse(
                kind,
                f"high - low = {span} is not a whole number of steps of {step}; high "
                f"lies on a step; {fix}",
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
        if isinstance(option, list | dict):
            message = (
                "a list or a mapping cannot be an option; options are texts, numbers, "
                "true, false or null; write single values"
            )
        elif isinstance(option, float) and not math.isfinite(option):
            message = (
                f"{write_flow(option)} is not finite; options that are numbers are "
                "finite; write a number"
            )
        # Python's equality (1 == 1.0 == true) is also Optuna's, which could not tell them apart.
        elif (earlier := list(options).index(option)) < index:
            message = (
                f"{write_flow(option)} equals option {earlier + 1}; options differ; "
                "remove one of them"
            )
        if message:
            faults.append(Fault(("choice", index), message))
    if faults:
        raise Refused(faults)
    return Choice(tuple(options))
