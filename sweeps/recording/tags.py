"""What runs in the tracking store say of themselves, as tags.

What must not live here: where a sweep ran and from what (`tracking.provenance`, `origin`), and who
sets the tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from sweeps.config.spec import SweepSpec
from sweeps.ledger.reader import ACCUMULATION, TrialRecord, TrialSummary
from sweeps.policies.failure_policy import kind_of
from sweeps.policies.stop_criteria import BY_THE_SWEEP
from tracking.limits import MAX_TAG_VALUE, clip_start
from tracking.mlflow_chart_view import SharedView, shared_view
from tracking.recorder import Status

BY_THE_USER = "stopped by the user"
"""The reason of a trial that was pruned so."""
STOPPED_BY_INTERRUPT = {"stopped_by": "interrupt"}
NOT_STOPPED = {"stopped_by": ""}
"""What a run that goes on is tagged with: the interruption it was stopped by is over."""
SWEEP_GOES_ON = NOT_STOPPED | {"reason": "", "health": ""}
"""The same of a sweep's own run, whose end says anew why it failed and who deserves a look."""


def outcome(trial: TrialSummary) -> str:
    """Return how an ended trial ended: `complete`, `pruned`, `stopped` (by the user) or `failed`."""
    return "stopped" if trial.reason == BY_THE_USER else trial.state


def run_status(trial: TrialSummary) -> Status:
    """Return the status of an ended trial's run.

    A pruned trial ended as planned. KILLED is for what a person stopped, FAILED for failures.
    """
    statuses: dict[str, Status] = {"stopped": "KILLED", "failed": "FAILED"}
    return statuses.get(outcome(trial), "FINISHED")


def end_tags(record: TrialRecord, spec: SweepSpec) -> dict[str, str]:
    """Return why a trial ended, and where it was at its best."""
    tags = status_tags(record) | {"outcome": outcome(record)}
    if record.best_step is not None:
        tags |= {"best_step": str(record.best_step), "best_epoch": str(record.best_epoch)}
    tags["stopped_by"] = _stopped_by(record.reason or "", spec) if record.state == "pruned" else ""
    if record.reason is not None:
        tags["reason"] = record.reason
    if record.state != "failed" or record.reason is None:
        return tags
    tags["failure.kind"] = kind_of(record.reason)
    if record.traceback:  # what was raised stands at its end
        tags["failure.traceback"] = clip_start(record.traceback, MAX_TAG_VALUE)
    return tags


def status_tags(record: TrialRecord) -> dict[str, str]:
    """Return what the ledger notes of how often a trial was begun, how it trains, and from whom it
    went on.
    """
    tags = lineage_tags(record)
    if record.attempts:
        tags["gradsweep.attempts"] = str(record.attempts)
    if record.signals is not None:
        tags["health"] = "; ".join(record.signals)
    if record.accumulation is not None:
        tags[f"gradsweep.{ACCUMULATION}"] = str(record.accumulation)
    return tags


def _stopped_by(reason: str, spec: SweepSpec) -> str:
    if reason == BY_THE_USER:
        return "user"
    return "sweep" if reason.startswith(BY_THE_SWEEP) else spec.early_stopping.scheduler


def lineage_tags(record: TrialSummary) -> dict[str, str]:
    """Return from whom a member of a population went on, and when; nothing for other trials."""
    if not record.lineage:
        return {}
    steps = [f"epoch {one.epoch} from trial {one.donor}" for one in record.lineage]
    return {"gradsweep.lineage": "; ".join(steps)}


def best_tags(best: TrialRecord) -> dict[str, str]:
    """Return, for the sweep's own run, which trial was the best."""
    found = {"best_trial": best.number, "best_value": best.value, "best_step": best.best_step}
    return {name: repr(value) for name, value in found.items()}


def leaders_view(spec: SweepSpec, sweep_id: str | None = None) -> SharedView:
    """Return the view of a sweep's trials in MLflow's charts: what was searched, best first.

    Args:
        sweep_id: Only its trials; None: all in the experiments that are looked at.
    """
    curves = list(dict.fromkeys([*spec.metrics, "train/loss"]))
    ascending = spec.modes[0] == "min"
    return shared_view(
        list(spec.space), f"best/{spec.metrics[0]}", curves, ascending=ascending, sweep_id=sweep_id
    )


def leaders_views(spec: SweepSpec, sweep_id: str) -> dict[str, str]:
    """Return, as tags of the experiment, the view of the sweep alone, and that for comparisons."""
    return {one.tag: one.state for one in (leaders_view(spec, sweep_id), leaders_view(spec))}


def front_tags(
    front: Sequence[TrialRecord], records: Sequence[TrialRecord]
) -> dict[int | None, dict[str, str]]:
    """Return, by trial and for the sweep's own run (None), which trials the Pareto front is.

    A trial that more trials have pushed off it is told so.
    """
    numbers = [record.number for record in front]
    complete = [record.number for record in records if record.state == "complete"]
    return {
        None: {"pareto_front": ", ".join(map(str, sorted(numbers)))},
        **{number: {"pareto": str(number in numbers).lower()} for number in complete},
    }


def health_tags(records: Sequence[TrialRecord]) -> dict[str, str]:
    """Return, for the sweep's own run, which trials deserve a look and why."""
    found = [record for record in records if record.signals]
    if not found:
        return {}
    each = [f"trial {record.number}: {', '.join(record.signals or ())}" for record in found]
    return {"health": f"{len(found)} of {len(records)} trials; {'; '.join(each)}"}


def curve_tags(every: Sequence[int]) -> dict[str, str]:
    """Return, for the sweep's own run, what its curves leave out; nothing where they are whole.

    Args:
        every: `tracking.every` in each revision of the spec, the newest last.
    """
    now, *before = reversed([density for density, _ in groupby(every)])
    if now == 1 and not before:
        return {}
    told = [f"{_density(now)} since that was changed" if before else _density(now)]
    told += [f"{_density(one)} before{' that' * (i > 0)}" for i, one in enumerate(before)]
    return {"curves": f"{', '.join(told)}; every step is in metrics.jsonl"}


def _density(every: int) -> str:
    if every == 1:
        return "every step"
    return f"the first step, every {every} steps, and each epoch's end"


def attempt_tags(attempts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return from where and with what a sweep was run, by all drivers that it had.

    The first one's tags stay as they were; those in which a later one differs have its number:
    `gradsweep.command.2`.

    Args:
        attempts: The tags of each driver in turn.
    """
    first = attempts[0] if attempts else {}
    tags = dict(first)
    for number, later in enumerate(attempts[1:], start=2):
        tags |= {f"{k}.{number}": v for k, v in later.items() if first.get(k) != v}
    return tags
