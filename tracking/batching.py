"""Batches: which waiting records of a trial are delivered together.

What must not live here: where records are stored (`outbox`), and how they are sent (`delivery`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tracking.limits import MAX_POINTS

Kind = Literal["start", "metrics", "tags", "experiment", "artifact", "finish", "replace"]
QUEUED, IN_FLIGHT = 0, 1
"""States of a record. IN_FLIGHT marks metrics that may already have been sent."""
Stored = tuple[int, Kind, int, int]
"""A record's id, kind, state and number of points."""


@dataclass(frozen=True)
class Record:
    """One queued call. Its payload is a list of points for metrics, else parsed JSON."""

    id: int
    kind: Kind
    payload: Any


@dataclass(frozen=True)
class Batch:
    """Records of one trial to deliver together, in their order.

    A batch is one artifact, or the experiment's tags, or the replacement of a run, or the records
    of one request to a run: an optional start, metrics and tags, an optional finish. Records
    queued after an artifact may be delivered before it.
    """

    trial: int
    records: list[Record]
    uncertain: bool
    """The outcome of an earlier attempt is unknown: the server may already have some points."""


def coalesce(rows: Iterable[Stored]) -> list[Stored]:
    """Return the oldest of a trial's records that fit into one batch."""
    taken: list[Stored] = []
    num_points, metrics_state = 0, None
    for row in rows:
        _, kind, state, points = row
        num_points += points
        if taken and not (
            taken[-1][1] in ("start", "metrics", "tags")
            and kind in ("metrics", "tags", "finish")
            and (kind != "metrics" or metrics_state in (None, state))
            and num_points <= MAX_POINTS
        ):
            break
        taken.append(row)
        if kind == "metrics":
            metrics_state = state
    return taken
