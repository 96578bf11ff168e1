"""Thin a trial's curve for the tracking server; `metrics.jsonl` keeps all rows.

The content of a row alone decides whether it is sent. So the driver, a resumed driver and
`sweep sync` send the same rows. What must not live here: reading curves, and sending them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainable.store.metrics_file import Row

_AT_BOUNDARIES = "epoch"
# Logged every `train.layer_norms_every` steps, so they need no thinning.
_SPARSE = "grad_norm/"


def thin_rows(rows: Iterable[Row], every: int, *, ended: bool = False) -> Iterator[Row]:
    """Yield the rows of a curve that the tracking server receives.

    Rows of the first step, of each epoch's end and of every `every`-th step are complete. Other
    rows keep only the layers' gradient norms.
    """
    rows = list(_merge_steps(rows))
    last = rows[-1] if rows and ended else None
    for row in rows:
        is_boundary = _AT_BOUNDARIES in row.metrics
        if row.step == 1 or row.step % every == 0 or is_boundary or row is last:
            yield row
        elif sparse := {k: v for k, v in row.metrics.items() if k.startswith(_SPARSE)}:
            yield row._replace(metrics=sparse)


def _merge_steps(rows: Iterable[Row]) -> Iterator[Row]:
    """Merge consecutive rows of the same step, as readers of the file do."""
    last: Row | None = None
    for row in rows:
        if last is not None and last.step != row.step:
            yield last
            last = None
        last = row if last is None else row._replace(metrics=last.metrics | row.metrics)
    if last is not None:
        yield last
