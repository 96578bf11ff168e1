"""Compare the best trials of sweeps, as DataFrames.

What must not live here: choosing and comparing trials (`view.compare`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sweeps.view.compare import compare as compare_views
from sweeps.view.sweep_view import SweepView
from sweeps.view.tables import leaders_frame

if TYPE_CHECKING:
    import pandas as pd

    from sweeps.api.sweep import Sweep


@dataclass(frozen=True)
class Comparison:
    """The best trials of several sweeps, and how they differ: what `sweep compare` prints.

    Attributes:
        leaders: One row for each of the best trials, the best first, by `sweep` and `trial`. The
            columns are `state`; the metrics by which the trials were chosen; with several metrics
            `pareto`, whether no other trial beats it; `epochs`, `attempts`, `seconds`,
            `clip_fraction` and `run_id`; and each parameter in which these trials differ, by its
            dotted key.
        same: The searched parameters in which they do not differ, with their values.
    """

    leaders: pd.DataFrame
    same: dict[str, Any]


def compare(*sweeps: Sweep, top: int = 5) -> Comparison:
    """Compare the best trials of one or several sweeps that have the same metric.

    Examples:
        >>> from sweeps import Sweep, compare
        >>> found = compare(Sweep.open("digits"), Sweep.open("wider"), top=3)
        >>> found.leaders[["state", "val/loss", "train.optimizer.lr"]]
        >>> found.same

    Args:
        sweeps: The sweeps.
        top: How many of the best trials of each sweep.

    Raises:
        Incomparable: The sweeps do not have the same metric, mode and `select`.
        UnknownSweep: A sweep has not begun.
        ValueError: No sweep is given.
    """
    if not sweeps or top < 1:
        raise ValueError("compare() needs at least one sweep, and a `top` of at least 1")
    views = {sweep.paths.directory: SweepView(sweep.paths) for sweep in sweeps}
    found = compare_views(list(views.values()), top=top)
    return Comparison(leaders_frame(found), found["same"])
