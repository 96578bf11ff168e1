"""Compare configurations instead of trials, where each configuration trains with several seeds.

A rule sees one number for a configuration at each report: the mean or the median over its seeds
that have reached it. What must not live here: a particular rule, and starting seeds (`search`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from sweeps.stopping.metric_values import Value, all_values, as_value
from sweeps.stopping.rule import Reports, TrialStopper

Combine = Callable[[Sequence[float]], float]
"""Returns one number for the values of several seeds."""


def over_seeds(
    reports: Reports, origins: Mapping[int, int], combine: Combine
) -> dict[int, dict[int, Value]]:
    """Return the reports of each configuration: each metric over the seeds that reached them."""
    every: dict[int, dict[int, list[tuple[float, ...]]]] = {}
    for number, mine in reports.items():
        epochs = every.setdefault(origins.get(number, number), {})
        for epoch, value in mine.items():
            epochs.setdefault(epoch, []).append(all_values(value))
    return {
        number: {
            epoch: as_value([combine(metric) for metric in zip(*values, strict=True)])
            for epoch, values in sorted(epochs.items())
        }
        for number, epochs in every.items()
    }


class SeedMeans:
    """Ask a rule about the first seed of a configuration, among the values over seeds of others.

    A further seed is never stopped: it starts when the first one has passed every rung. When it
    reports, the value of its configuration there changes, and with it the bar for all others. The
    rule has no way to change a value that it has seen, so it is then made anew. It gets all values
    so far in the order of configurations. As a rule asks about a report among all values that it
    has seen, the order does not matter.
    """

    def __init__(
        self, make_rule: Callable[[], TrialStopper], rungs: Set[int], combine: Combine
    ) -> None:
        self._make_rule, self._rungs, self._combine = make_rule, rungs, combine
        self._reports: dict[int, dict[int, Value]] = {}
        self._origins: dict[int, int] = {}
        self._rule, self._is_stale = make_rule(), False

    def join(self, origins: Mapping[int, int]) -> None:
        """Add trials that train a configuration with a further seed, when they are created."""
        self._origins |= origins

    def stops(self, number: int, epoch: int, value: Value) -> str | None:
        """Record a report of a first seed; return why it stops, or None."""
        if self._is_stale:
            self._rule, self._is_stale = self._make_rule(), False
            for other, mine in over_seeds(self._reports, self._origins, self._combine).items():
                for at, known in mine.items():
                    self._rule.stops(other, at, known)
        self._reports.setdefault(number, {}).setdefault(epoch, value)
        return self._rule.stops(number, epoch, value)

    def repeats(self, number: int, epoch: int, value: Value) -> None:
        """Record a report of a trial that has joined."""
        self._reports.setdefault(number, {}).setdefault(epoch, value)
        self._is_stale |= not self._rungs or epoch in self._rungs
