"""What a trial reports to the ledger.

What must not live here: storing it (`ledger`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LedgerReport(NamedTuple):
    """The metrics that a trial reports after an epoch.

    Attributes:
        epoch: Epochs completed.
        step: Optimizer steps taken.
        value: The (first) metric.
        others: The sweep's other metrics.
        seconds: For how long workers have trained the trial; None: unknown.
    """

    epoch: int
    step: int
    value: float
    others: Sequence[float] = ()
    seconds: float | None = None
