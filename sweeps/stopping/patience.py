"""The key `early_stopping.patience`: a trial ends when its last reports brought no new best.

It holds beside any stopping rule. The run itself ends (`trainable.base_run`); this module tells
from the reports alone that it did, and why. What must not live here: stopping rules, which compare
trials with each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from sweeps.formatting import counted, format_number

BY_PATIENCE = "patience"
"""How the reason of such an end begins, and the tag `stopped_by` of its run."""


class Patience(NamedTuple):
    """When a trial ends before its budget without being stopped."""

    limit: int
    """So many reports without a new best end the trial."""
    minimize: bool
    """Whether less is better."""
    last: int
    """The last report of the budget: a trial that made it has trained to its end."""
    word: str
    """What a report is called."""

    def reason(self, reports: Mapping[int, float], metric: str) -> str | None:
        """Return why a trial with these reports has ended; None: not by patience."""
        best: int | None = None
        since = 0
        for number in sorted(reports):
            better = math.isfinite(reports[number]) and (
                best is None
                or (
                    reports[number] < reports[best]
                    if self.minimize
                    else reports[number] > reports[best]
                )
            )
            best, since = (number, 0) if better else (best, since + 1)
        if since < self.limit or best is None or max(reports) >= self.last:
            return None
        return (
            f"{BY_PATIENCE} at {self.word} {max(reports)}: {metric} not better than "
            f"{format_number(reports[best])} of {self.word} {best} in {counted(since, self.word)}"
        )
