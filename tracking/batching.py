"""Batches: which waiting records of a trial are delivered together.

What must not live here: where records wait (`outbox`), and what becomes of them (`delivery`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tracking.limits import MAX_POINTS

Kind = Literal["start", "metrics", "tags", "experiment", "artifact", "finish"]
QUEUED, IN_FLIGHT = 0, 1
"""States of a record; in flight are metrics that may have been sent."""
Stored = tuple[int, Kind, int, int]
"""A record's id, kind, state and number of points."""


@dataclass(frozen=True)
class Record:
    """One queued call: the points of a metrics record, or what JSON made of another one."""

    id: int
    kind: Kind
    payload: Any


@dataclass(frozen=True)
class Batch:
    """Records of one trial to deliver together, in their order.

    Either one artifact, or the experiment's tags; or what a run is told in one request: it may
    begin with the start and end with the finish, with metrics and tags in between. Artifacts hold
    up nothing: what comes behind one may be delivered before it.
    """

    trial: int
    records: list[Record]
    uncertain: bool
    """An earlier attempt had an unknown end: some points may already be at the server."""


def coalesce(rows: Iterable[Stored]) -> list[Stored]:
    """Return how many of a trial's oldest records make a batch."""
    taken: list[Stored] = []
    num_points, of_metrics = 0, None
    for row in rows:
        _, kind, state, points = row
        num_points += points
        if taken and not (
            taken[-1][1] in ("start", "metrics", "tags")
            and kind in ("metrics", "tags", "finish")
            and (kind != "metrics" or of_metrics in (None, state))
            and num_points <= MAX_POINTS
        ):
            break
        taken.append(row)
        if kind == "metrics":
            of_metrics = state
    return taken
