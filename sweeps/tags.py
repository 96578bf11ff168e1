"""What runs in the tracking store say of themselves, as tags.

What must not live here: where a sweep ran and from what (`tracking.provenance`, `origin`), and who
sets the tags.
"""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.failures import kind_of
from sweeps.ledger import TrialRecord
from sweeps.spec import SweepSpec
from tracking.limits import MAX_TAG_VALUE, clip_start

BY_THE_USER = "stopped by the user"
"""The reason of a trial that was pruned so."""
STOPPED_BY_INTERRUPT = {"stopped_by": "interrupt"}
NOT_STOPPED = {"stopped_by": ""}
"""What a run that goes on is tagged with: the interruption it was stopped by is over."""


def end_tags(record: TrialRecord, spec: SweepSpec) -> dict[str, str]:
    """Return why a trial ended, and where it was at its best."""
    tags: dict[str, str] = {}
    if record.best_step is not None:
        tags |= {"best_step": str(record.best_step), "best_epoch": str(record.best_epoch)}
    if record.state == "pruned":
        by_user = record.reason == BY_THE_USER
        return tags | {"stopped_by": "user" if by_user else spec.early_stopping.scheduler}
    tags |= NOT_STOPPED
    if record.reason is None:
        return tags
    tags |= {"reason": record.reason, "failure.kind": kind_of(record.reason)}
    if record.traceback:  # what was raised stands at its end
        tags["failure.traceback"] = clip_start(record.traceback, MAX_TAG_VALUE)
    return tags


def best_tags(best: TrialRecord) -> dict[str, str]:
    """Return, for the sweep's own run, which trial was the best."""
    found = {"best_trial": best.number, "best_value": best.value, "best_step": best.best_step}
    return {name: repr(value) for name, value in found.items()}


def health_tags(records: Sequence[TrialRecord]) -> dict[str, str]:
    """Return, for the sweep's own run, which trials deserve a look and why."""
    found = [record for record in records if record.signals]
    if not found:
        return {}
    each = [f"trial {record.number}: {', '.join(record.signals)}" for record in found]
    return {"health": f"{len(found)} of {len(records)} trials; {'; '.join(each)}"}


def curve_tags(every: int) -> dict[str, str]:
    """Return, for the sweep's own run, what its curves leave out."""
    if every == 1:
        return {}
    return {
        "curves": f"the first step, every {every} steps, and each epoch's end; every step is in "
        "metrics.jsonl"
    }
