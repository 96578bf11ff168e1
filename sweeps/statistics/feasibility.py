"""Which results are feasible: limits on reported metrics, and by how much a result misses them.

One set of limits judges everywhere: the best trial, stopping rules, samplers, tracking. What must
not live here: the spec's section (`spec.sections`), and constraints between parameters
(`spec.constraints`), which a trial satisfies before it trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sweeps.formatting import format_number

INFEASIBLE_LOSS = 1e300
"""From here on lie the losses by which stopping rules compare infeasible reports."""
_LARGEST = 1e300


class Limit(NamedTuple):
    """One limit on one metric."""

    metric: str
    column: int
    """The position of the metric among the values of a report."""
    kind: Literal["max", "min"]
    value: float

    def missed_by(self, values: Sequence[float]) -> float:
        """Return by how much the metric is beyond the limit, in its own unit; at most 0 if not."""
        above = values[self.column] - self.value
        return above if self.kind == "max" else -above

    def sentence(self, values: Sequence[float]) -> str:
        """Return what a missed limit allows: `val/latency_ms 7, at most 5 allowed`."""
        word = "at most" if self.kind == "max" else "at least"
        value = format_number(values[self.column])
        return f"{self.metric} {value}, {word} {format_number(self.value)} allowed"


@dataclass(frozen=True)
class Limits:
    """All limits of a sweep. They judge the values of one report, or those over several seeds.

    These values are the sweep's metrics, and after them the metrics that are only limited.
    """

    num_metrics: int = 1
    each: tuple[Limit, ...] = ()

    @classmethod
    def of(
        cls,
        constraints: Mapping[str, Mapping[str, float | None]],
        metrics: Sequence[str],
    ) -> Limits:
        """Return the limits of `constraints`: metric -> {max, min}, None for no limit."""
        names = reported_metrics(metrics, constraints)
        return cls(
            len(metrics),
            tuple(
                Limit(metric, names.index(metric), kind, value)
                for metric, one in constraints.items()
                for kind in ("max", "min")
                if (value := one.get(kind)) is not None
            ),
        )

    def __bool__(self) -> bool:
        return bool(self.each)

    def margins(self, values: Sequence[float]) -> list[float]:
        """Return, for each limit, how far beyond it a value is; above 0 is a violation.

        It is a share of the limit, so that metrics of different units can be added; beyond a limit
        of 0 it is the value itself.
        """
        shares = (one.missed_by(values) / (abs(one.value) or 1.0) for one in self.each)
        return [max(-_LARGEST, min(share, _LARGEST)) for share in shares]

    def violation(self, values: Sequence[float]) -> float:
        """Return the sum of the positive margins; 0 for a feasible result."""
        return sum(margin for margin in self.margins(values) if margin > 0)

    def missed(self, values: Sequence[float]) -> dict[str, float]:
        """Return by how much each violated metric misses its limit, in its own unit."""
        found = ((one.metric, one.missed_by(values)) for one in self.each)
        return {metric: amount for metric, amount in found if amount > 0}

    def sentence(self, values: Sequence[float]) -> str:
        """Return which limits are missed, for a message; empty for a feasible result."""
        return "; ".join(one.sentence(values) for one in self.each if one.missed_by(values) > 0)

    def compared(self, values: Sequence[float], minimizes: Iterable[bool]) -> tuple[float, ...]:
        """Return the values of the metrics as stopping rules compare them.

        Those of an infeasible report are worse than those of each feasible one, and the worse the
        larger its violation is.
        """
        violation = self.violation(values)
        if not violation:
            return tuple(values[: self.num_metrics])
        loss = INFEASIBLE_LOSS * (1 + violation / (1 + violation))
        return tuple(loss if low else -loss for low in minimizes)


def reported_metrics(metrics: Sequence[str], constrained: Iterable[str]) -> tuple[str, ...]:
    """Return what each report must have: the metrics, then those that are only limited."""
    return tuple(dict.fromkeys((*metrics, *constrained)))
