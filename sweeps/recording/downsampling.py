"""What of a trial's curve tracking is given; the file on disk keeps all of it.

A row is kept or thinned by what stands in it alone, so that whoever sends it, when, and how often
makes no difference. What must not live here: reading curves, and sending them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainable.metrics_file import Row

_AT_BOUNDARIES = "epoch"
# Logged every `train.layer_norms_every` steps: they have a policy of their own.
_SPARSE = "grad_norm/"


def thin_rows(rows: Iterable[Row], every: int, *, ended: bool = False) -> Iterator[Row]:
    """Yield what tracking is given of a curve.

    Of the first step, each epoch's end and every `every`-th step that is everything; of the
    others, the norms of layers alone.

    Args:
        rows: In the order of their steps.
        every: `tracking.every` of the spec.
        ended: No further row will come, in this attempt or another: the last one stays.
    """
    rows = list(_joined(rows))
    last = rows[-1] if rows and ended else None
    for row in rows:
        is_boundary = _AT_BOUNDARIES in row.metrics
        if row.step == 1 or row.step % every == 0 or is_boundary or row is last:
            yield row
        elif sparse := {k: v for k, v in row.metrics.items() if k.startswith(_SPARSE)}:
            yield row._replace(metrics=sparse)


def _joined(rows: Iterable[Row]) -> Iterator[Row]:
    """Join neighbours of the same step, as those who read the file do."""
    last: Row | None = None
    for row in rows:
        if last is not None and last.step != row.step:
            yield last
            last = None
        last = row if last is None else row._replace(metrics=last.metrics | row.metrics)
    if last is not None:
        yield last
