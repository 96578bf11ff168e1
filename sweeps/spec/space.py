"""The distributions of a search space: which values a parameter may have, with what weight.

    {uniform: [low, high]}           a number, every value as likely
    {loguniform: [low, high]}        a number, every order of magnitude as likely
    {quniform: [low, high, step]}    low, low + step, ..., high
    {int: [low, high]}               a whole number, both ends included
    {int: [low, high], step: n}      low, low + n, ..., high
    {logint: [low, high]}            a whole number, every order of magnitude as likely
    {powers: [low, high, factor]}    low, low * factor, low * factor ** 2, ..., high
    {choice: [a, b, ...]}            one of the listed values, which may be lists and mappings

What must not live here: parsing the short form (`space_parser`), all parameters together
(`search_space`), which fields a space may name (`cross_checks`), and sampling (`sweeps.search`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

from sweeps.spec.priors import Prior
from sweeps.spec.yaml_scalars import write_flow

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Scalar = None | bool | int | float | str

WHEN = "when"
"""The key beside a distribution with the condition under which the parameter exists."""
STEP = "step"
"""The key beside `int` with the distance of its values."""
_RESOLUTION = 6  # decimals of a position: values that are closer are the same
_MOST_VALUES = 100  # whole numbers inside a range that a check of a spec tries


@dataclass(frozen=True)
class Distribution:
    """Base of all distributions; `parse_distribution` parses what `str()` returns."""

    name: ClassVar[str]
    form: ClassVar[str]
    draws: ClassVar[str] = "numbers"

    when: tuple[tuple[str, tuple[Scalar, ...]], ...] = field(default=(), kw_only=True)
    """The parameter exists if each of these keys has one of these values."""
    prior: Prior | None = field(default=None, kw_only=True)
    """Where good values are expected."""

    def to_optuna(self) -> BaseDistribution:
        """Return the same distribution for an Optuna study."""
        raise NotImplementedError

    def to_data(self) -> dict[str, Any]:
        """Return the short form in a spec, such as `{"int": [1, 8]}`."""
        data: dict[str, Any] = {self.name: self.arguments()}
        if self.prior is not None:
            data |= self.prior.to_data(self)
        if self.when:
            data[WHEN] = {k: v[0] if len(v) == 1 else list(v) for k, v in self.when}
        return data

    def arguments(self) -> list[Any]:
        """Return the numbers or options in the order of the short form."""
        raise NotImplementedError

    def boundary_values(self) -> list[tuple[int | None, Any]]:
        """Return values that a searched field must accept, to check them when a spec is read."""
        raise NotImplementedError

    def at(self, share: float) -> Any:
        """Return the quantile at `share`, which is in [0, 1)."""
        raise NotImplementedError

    def share(self, value: Any) -> float:
        """Return at which share `at` returns a contained value; the middle of several."""
        raise NotImplementedError

    def values(self) -> Iterable[Any] | None:
        """Return every value in order; None if a grid cannot have them."""
        return None

    def num_values(self) -> int | None:
        """Return the number of values; None if there is no end of them."""
        return None

    def all_values(self) -> Iterable[Any] | None:
        """Return every value in order; None if there is no end of them."""
        return self.values()

    def position(self, value: Any) -> float:
        """Return where a contained value lies between the first, at 0, and the last, at 1."""
        raise NotImplementedError

    def distance(self, one: Any, other: Any) -> float:
        """Return how far two contained values are from each other, from 0 to 1."""
        return abs(self.position(one) - self.position(other))

    def identity(self, value: Any) -> Any:
        """Return a key that is equal for values which are the same to a training.

        Values of a range are the same if they differ by less than a millionth of it.
        """
        return self.normalize(value)

    def contains(self, value: object) -> bool:
        """Return whether the distribution can draw a value."""
        raise NotImplementedError

    def normalize(self, value: Any) -> Any:
        """Return a contained value in the form in which it is drawn.

        For example 1 becomes 1.0, and a value with a rounding error becomes the exact step.
        """
        return value

    def configured(self, value: Any) -> Any:
        """Return a drawn value in the form of a trial's configuration."""
        return value

    def nearest(self, value: float) -> Any:
        """Return the possible value that is nearest to a number; for numeric distributions."""
        raise NotImplementedError

    def exists(self, values: Mapping[str, Any]) -> bool:
        """Return whether the parameter exists with these values of others."""
        return all(key in values and values[key] in allowed for key, allowed in self.when)

    def __str__(self) -> str:
        return write_flow(self.to_data())


@dataclass(frozen=True)
class _Range(Distribution):
    low: float
    high: float

    form: ClassVar[str] = "[low, high]"
    is_log: ClassVar[bool] = False

    def arguments(self) -> list[Any]:
        return [self.low, self.high]

    def to_optuna(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=self.is_log)

    def boundary_values(self) -> list[tuple[int | None, Any]]:
        return [(0, self.low), (1, self.high)]

    def at(self, share: float) -> Any:
        return min(self.high, self.low + share * (self.high - self.low))

    def share(self, value: Any) -> float:
        return self.position(value)

    def contains(self, value: object) -> bool:
        return is_number(value) and self.low <= value <= self.high

    def normalize(self, value: Any) -> Any:
        return float(value)

    def nearest(self, value: float) -> Any:
        return float(min(max(value, self.low), self.high))

    def position(self, value: Any) -> float:
        if self.is_log:
            return _log_position(self.low, self.high, value)
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def identity(self, value: Any) -> Any:
        return round(self.position(value), _RESOLUTION)


@dataclass(frozen=True)
class Uniform(_Range):
    """A number between `low` and `high`."""

    name: ClassVar[str] = "uniform"


@dataclass(frozen=True)
class LogUniform(_Range):
    """A number between `low` and `high`, uniform in its logarithm."""

    name: ClassVar[str] = "loguniform"
    is_log: ClassVar[bool] = True

    def at(self, share: float) -> Any:
        return min(self.high, max(self.low, self.low * (self.high / self.low) ** share))


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

    def at(self, share: float) -> Any:
        return self._on_step(int(share * self._count()))

    def share(self, value: Any) -> float:
        index: int = round((value - self.low) / self.step)
        return (index + 0.5) / self._count()

    def values(self) -> Iterable[Any] | None:
        return map(self._on_step, range(self._count()))

    def num_values(self) -> int | None:
        return self._count()

    def contains(self, value: object) -> bool:
        if not is_number(value) or not math.isfinite(value):
            return False
        steps = (value - self.low) / self.step
        near = math.isclose(steps, round(steps), rel_tol=0, abs_tol=1e-8)  # Optuna's tolerance
        return near and 0 <= round(steps) < self._count()

    def identity(self, value: Any) -> Any:
        return self.normalize(value)

    def normalize(self, value: Any) -> Any:
        found = self.nearest(value)
        return found if self.contains(found) else float(value)  # Optuna must accept it, too

    def nearest(self, value: float) -> Any:
        return self._on_step(round((super().nearest(value) - self.low) / self.step))

    def _count(self) -> int:
        return round((self.high - self.low) / self.step) + 1

    def _on_step(self, index: int) -> float:
        # In decimal arithmetic, so that three steps of 0.1 are 0.3.
        return float(Decimal(str(self.low)) + index * Decimal(str(self.step)))


@dataclass(frozen=True)
class Int(_Range):
    """A whole number from `low` to `high`, both included, `step` apart."""

    low: int
    high: int
    step: int = 1

    name: ClassVar[str] = "int"
    draws: ClassVar[str] = "whole numbers"

    def to_data(self) -> dict[str, Any]:
        data = super().to_data()
        return data if self.step == 1 else {self.name: data.pop(self.name), STEP: self.step} | data

    def boundary_values(self) -> list[tuple[int | None, Any]]:
        # Consecutive values, to find a rule of the field that only some whole numbers break.
        inner = range(self.low + self.step, self.high, self.step)[:_MOST_VALUES]
        return [(0, self.low), (1, self.high), *((None, value) for value in inner)]

    def to_optuna(self) -> BaseDistribution:
        from optuna.distributions import IntDistribution

        return IntDistribution(self.low, self.high, log=self.is_log, step=self.step)

    def at(self, share: float) -> Any:
        return self.low + int(share * ((self.high - self.low) // self.step + 1)) * self.step

    def share(self, value: Any) -> float:
        index: int = (value - self.low) // self.step
        return (index + 0.5) / len(range(self.low, self.high + 1, self.step))

    def values(self) -> Iterable[Any] | None:
        return range(self.low, self.high + 1, self.step)

    def num_values(self) -> int | None:
        return (self.high - self.low) // self.step + 1

    def contains(self, value: object) -> bool:
        within = is_number(value) and self.low <= value <= self.high and value == int(value)
        return within and (int(value) - self.low) % self.step == 0  # type: ignore[call-overload]

    def normalize(self, value: Any) -> Any:
        return int(value)

    def identity(self, value: Any) -> Any:
        return self.normalize(value)

    def nearest(self, value: float) -> Any:
        found = min(max(value, self.low), self.high)
        return self.low + round((round(found) - self.low) / self.step) * self.step


@dataclass(frozen=True)
class LogInt(Int):
    """A whole number from `low` to `high`, uniform in its logarithm."""

    name: ClassVar[str] = "logint"
    is_log: ClassVar[bool] = True

    def at(self, share: float) -> Any:
        low, high = self.low - 0.5, self.high + 0.5  # so that both ends have their full weight
        return min(self.high, max(self.low, round(low * (high / low) ** share)))

    def share(self, value: Any) -> float:
        return _log_position(self.low - 0.5, self.high + 0.5, value)

    def values(self) -> Iterable[Any] | None:
        return None  # a grid would ignore the logarithmic weights

    def all_values(self) -> Iterable[Any] | None:
        return super().values()


@dataclass(frozen=True)
class Choice(Distribution):
    """One of the listed values.

    An option that is a list or a mapping is drawn and recorded as its JSON text, because a study
    stores only single values; `configured` decodes it.
    """

    options: tuple[Scalar, ...]
    texts: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The options that are the JSON text of a list or a mapping."""

    name: ClassVar[str] = "choice"
    form: ClassVar[str] = "[first, second, ...]"

    def arguments(self) -> list[Any]:
        return [*map(self.configured, self.options)]

    def boundary_values(self) -> list[tuple[int | None, Any]]:
        return list(enumerate(self.options))

    def to_optuna(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.options)

    def at(self, share: float) -> Any:
        return self.options[int(share * len(self.options))]

    def share(self, value: Any) -> float:
        return (self.options.index(value) + 0.5) / len(self.options)

    def values(self) -> Iterable[Any] | None:
        return self.options

    def num_values(self) -> int | None:
        return len(self.options)

    def distance(self, one: Any, other: Any) -> float:
        return float(one != other)

    def contains(self, value: object) -> bool:
        return as_option(value) in self.options

    def normalize(self, value: Any) -> Any:
        return self.options[self.options.index(as_option(value))]

    def configured(self, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) and value in self.texts else value


@dataclass(frozen=True)
class Powers(Choice):
    """One of `low`, `low * factor`, `low * factor ** 2`, ..., `high`."""

    name: ClassVar[str] = "powers"
    form: ClassVar[str] = "[low, high, factor]"
    draws: ClassVar[str] = "numbers"

    def arguments(self) -> list[Any]:
        low, second, *_ = values = [x for x in self.options if is_number(x)]
        factor = Decimal(str(second)) / Decimal(str(low))
        return [low, values[-1], int(factor) if factor == int(factor) else float(factor)]

    def boundary_values(self) -> list[tuple[int | None, Any]]:
        first, *inner, last = self.options
        return [(0, first), (1, last), *((None, value) for value in inner)]

    def position(self, value: Any) -> float:
        return self.options.index(value) / max(1, len(self.options) - 1)

    def distance(self, one: Any, other: Any) -> float:
        return abs(self.position(one) - self.position(other))


def configured(space: Mapping[str, Distribution], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return drawn values in the form of a trial's configuration."""
    return {k: space[k].configured(v) if k in space else v for k, v in params.items()}


def as_option(value: Any) -> Any:
    """Return a value in the form in which a choice stores it: JSON text for a list or mapping."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def _log_position(low: float, high: float, value: float) -> float:
    return math.log(value / low) / math.log(high / low) if high > low else 0.0


KINDS: dict[str, type[Distribution]] = {
    kind.name: kind for kind in (Uniform, LogUniform, QUniform, Int, LogInt, Powers, Choice)
}


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
