"""The stopping variant of successive halving for several metrics.

What must not live here: where the rungs are (`halving`), and how trials are ranked (`dominance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from sweeps.stopping.halving import goes_on_among_equals
from sweeps.stopping.metric_values import Value, front_volumes, is_finite, losses

if TYPE_CHECKING:
    from sweeps.statistics.fronts import Fronts


class FrontStopper:
    """Compare each trial at each rung, by all metrics, with those that reached the rung before.

    The n-th trial at a rung continues if it is among the best (n - 1) / `reduction` there, rounded
    up, itself included; the first always. Of equal trials see `goes_on_among_equals`.
    With one metric this is `HalvingStopper` without the interpolation. Trials are ranked by
    non-dominated front, and within a front by the hypervolume that they alone dominate: Schmucker
    et al., "Multi-objective Asynchronous Successive Halving" (2021), with the tie-break of
    SMS-EMOA in place of the epsilon-net.
    """

    def __init__(
        self,
        brackets: Sequence[Sequence[int]],
        reduction: int,
        *,
        bracket_of: Callable[[int], int] = lambda _: 0,
        minimize: tuple[bool, ...],
    ) -> None:
        self._brackets = brackets
        self._reduction, self._bracket_of = reduction, bracket_of
        self._minimize = minimize
        self.name_of: Callable[[int], int] = int
        """Returns the number by which a reason names a trial."""
        self._seen: dict[tuple[int, int], tuple[Fronts, list[int]]] = {}
        """By bracket and rung, the trials there and their numbers."""
        self._last_rung: dict[int, int] = {}
        """By trial number, the highest rung at which the trial was compared."""

    def stops(self, number: int, epoch: int, value: Value) -> str | None:
        """Record a report; return why its trial stops, or None if it continues."""
        bracket = self._bracket_of(number)
        rung = max((one for one in self._brackets[bracket] if one <= epoch), default=0)
        if rung <= self._last_rung.get(number, 0):
            return None
        if not is_finite(value):
            return "not all finite numbers"
        self._last_rung[number] = rung
        fronts, numbers = self._at(bracket, rung)
        mine = losses(value, self._minimize)
        index = fronts.add(mine)
        numbers.append(number)
        num_seen, front = len(numbers), fronts.points[fronts.front(index)]
        most = max(1, -(-(num_seen - 1) // self._reduction))
        better = int((fronts.ranks < index).sum())
        by_volume = better < most < better + len(front)
        if by_volume:
            volumes = front_volumes(fronts, index)
            better += sum(one > volumes[-1] for one in volumes)  # the last is this trial
        equal = better < most
        num_equal = int((front == mine).all(axis=1).sum())  # itself included
        if equal and (
            num_equal == 1
            or better + num_equal <= most
            or goes_on_among_equals(num_seen, self._reduction)
        ):
            return None
        needed = f"needed rank <= {most}, rank {better + 1} of {num_seen}"
        if equal:
            return f"{needed} (of equal trials 1 in {self._reduction} continues)"
        if by_volume:
            count = f"of the {len(front)} trials of its non-dominated front"
            return f"{needed}: {count}, others add more hypervolume"
        return f"{needed}: {self._why(numbers[one] for one in fronts.dominating(mine))}"

    def _at(self, bracket: int, rung: int) -> tuple[Fronts, list[int]]:
        from sweeps.statistics.fronts import Fronts  # NumPy is imported only where it is needed

        return self._seen.setdefault((bracket, rung), (Fronts(len(self._minimize)), []))

    def _why(self, numbers: Iterable[int]) -> str:
        """Return which trials dominate one."""
        match found := sorted(map(self.name_of, numbers)):
            case [one]:
                who = f"trial {one} is"
            case [one, other]:
                who = f"trials {one} and {other} are"
            case _:
                who = f"trial {found[0]} and {len(found) - 1} others are"
        return f"{who} at least as good in every metric"
