"""What runs in the tracking store receive besides their curves: tags, the value over seeds.

What must not live here: tags about the machine and the code (`engine.provenance`), which rows of a
curve are sent (`tracking.unsent_rows`), and sending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from sweeps.ledger.attributes import ACCUMULATION, ORIGIN_COLUMNS, Role
from sweeps.ledger.reasons import BY_ANOTHER_REQUEST, BY_THE_SWEEP, BY_THE_USER, kind_of
from sweeps.ledger.trials import TrialRecord, TrialSummary
from sweeps.paths import SweepPaths
from sweeps.recording.descriptions import DESCRIPTION, describe_trial
from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import flatten
from sweeps.stopping.patience import BY_PATIENCE
from sweeps.stores import find_tracker, tracker_at
from tracking.limits import MAX_TAG_VALUE, clip_start
from tracking.mlflow_chart_view import SharedView, shared_view
from tracking.outbox import TAG_REPEATS
from tracking.recorder import BeforeRecords, Recorder, Status, process_with
from tracking.tracker import TrackedSweep
from trainable.store.metrics_file import Row

if TYPE_CHECKING:  # the first imports optuna, which takes half a second
    from sweeps.ledger.ledger import Ledger
    from sweeps.ledger.reader import LedgerReader

STOPPED_BY_INTERRUPT = {"stopped_by": "interrupt"}
NOT_STOPPED = {"stopped_by": ""}
"""Clears the tag of a trial's run that resumes after an interruption."""
VALUE_OVER_SEEDS = "over_seeds/value"
"""The metric of a configuration's run: its value over all of its seeds."""
SWEEP_RESUMED = NOT_STOPPED | {"reason": "", "health": "", DESCRIPTION: ""}
"""Clears the tags of the sweep's own run that its end sets again."""


def outcome(trial: TrialSummary) -> str:
    """Return how a trial ended: `complete`, `pruned`, `stopped` (by the user) or `failed`."""
    return "stopped" if trial.reason == BY_THE_USER else trial.state


def run_status(trial: TrialSummary) -> Status:
    """Return the status of an ended trial's run: a pruned one ended as planned."""
    if trial.state == "failed":
        return "FAILED"
    return "KILLED" if trial.reason == BY_THE_USER else "FINISHED"


def end_tags(record: TrialRecord, spec: SweepSpec, paths: SweepPaths) -> dict[str, str]:
    """Return the tags for the end of a trial: why it ended, its best step, its description."""
    how = outcome(record)
    tags = status_tags(record, spec) | {
        "outcome": how,
        DESCRIPTION: describe_trial(record, spec, paths, how),
    }
    if record.best_step is not None:
        tags |= {"best_step": str(record.best_step), "best_epoch": str(record.best_epoch)}
    tags["stopped_by"] = _stopped_by(record, spec)
    tags |= feasibility_tags(record)
    if record.reason is not None:
        tags["reason"] = record.reason
    if record.state != "failed" or record.reason is None:
        return tags
    tags["failure.kind"] = kind_of(record.reason)
    if record.traceback:  # the exception is at its end
        tags["failure.traceback"] = clip_start(record.traceback, MAX_TAG_VALUE)
    return tags


def feasibility_tags(record: TrialSummary) -> dict[str, str]:
    """Return whether a trial satisfies the sweep's limits, and by how much it misses them."""
    if record.feasible is None:
        return {}
    missed = record.limits.missed(record.judged)
    return {
        "feasible": str(record.feasible).lower(),
        "constraint_violation": "; ".join(f"{metric}: {by!r}" for metric, by in missed.items()),
    }


def status_tags(record: TrialRecord, spec: SweepSpec) -> dict[str, str]:
    """Return tags for a trial's attempts, health, accumulation, lineage, and where it is from."""
    tags = lineage_tags(record, spec) | origin_tags(record.role, record.origin)
    if record.seed_index is not None:
        tags["gradsweep.seed_index"] = str(record.seed_index)
    if record.from_priors:
        tags["gradsweep.from_priors"] = "true"
    if record.attempts:
        tags["gradsweep.attempts"] = str(record.attempts)
    tags |= retried_tags(record)
    if record.signals is not None:
        tags["health"] = "; ".join(record.signals)
    if record.accumulation is not None:
        tags[f"gradsweep.{ACCUMULATION}"] = str(record.accumulation)
    return tags


def retried_tags(record: TrialSummary) -> dict[str, str]:
    """Return the failures after which a trial was run again, and clear the tags of its old end."""
    if not record.failed_attempts:
        return {}
    history = "; ".join(one.sentence for one in record.failed_attempts)
    cleared = ("outcome", "reason", "failure.kind", "failure.traceback", DESCRIPTION)
    return {"gradsweep.failed_attempts": history, **dict.fromkeys(cleared, "")}


def origin_tags(role: Role, origin: int | None) -> dict[str, str]:
    """Return why a trial exists that the search did not suggest; empty for other trials."""
    if role == "repeat":
        # the tracking store shows its run below that of its first seed
        return {TAG_REPEATS: str(origin)}
    return {f"gradsweep.{ORIGIN_COLUMNS[role]}": str(origin)} if role in ORIGIN_COLUMNS else {}


def _stopped_by(record: TrialRecord, spec: SweepSpec) -> str:
    reason = record.reason or ""
    if record.state == "complete" and reason.startswith(BY_PATIENCE):
        return BY_PATIENCE
    if record.state != "pruned":
        return ""
    if reason == BY_THE_USER or reason.startswith(BY_ANOTHER_REQUEST):
        return "user"
    return "sweep" if reason.startswith(BY_THE_SWEEP) else spec.early_stopping.scheduler


def lineage_tags(record: TrialSummary, spec: SweepSpec) -> dict[str, str]:
    """Return from which donors a trial of a population resumed; empty for other trials."""
    if not record.lineage:
        return {}
    word = spec.budget.report_word
    steps = [f"{word} {one.epoch} from trial {one.donor}" for one in record.lineage]
    return {"gradsweep.lineage": "; ".join(steps)}


def best_tags(best: TrialRecord) -> dict[str, str]:
    """Return, for the sweep's own run, tags that name the best trial."""
    found = {"best_trial": best.number, "best_value": best.value, "best_step": best.best_step}
    if best.over_seeds is not None:  # its steps are those of its first seed alone
        del found["best_step"]
        found["best_weights"] = best.over_seeds.typical()
    return {name: repr(value) for name, value in found.items()}


def leaders_view(spec: SweepSpec, sweep_id: str | None = None) -> SharedView:
    """Return a view for MLflow's charts: a sweep's trials and searched parameters, best first."""
    curves = list(dict.fromkeys([*spec.metrics, "train/loss"]))
    ascending = spec.modes[0] == "min"
    value = spec.metrics[0] if spec.select == "final" else f"best/{spec.metrics[0]}"
    if spec.repeats.seeds > 1:
        value = VALUE_OVER_SEEDS
    return shared_view(list(spec.space), value, curves, ascending=ascending, sweep_id=sweep_id)


def leaders_views(spec: SweepSpec, sweep_id: str) -> dict[str, str]:
    """Return the experiment's tags for two views: of this sweep, and of all sweeps to compare."""
    return {one.tag: one.state for one in (leaders_view(spec, sweep_id), leaders_view(spec))}


def front_tags(
    front: Sequence[TrialRecord], records: Sequence[TrialRecord]
) -> dict[int | None, dict[str, str]]:
    """Return tags, by trial and for the sweep's own run (None), that name the Pareto front."""
    numbers = [record.number for record in front]
    ended = [record.number for record in records if record.has_result]
    return {
        None: {"pareto_front": ", ".join(map(str, sorted(numbers)))},
        # those that are dominated by now, too
        **{number: {"pareto": str(number in numbers).lower()} for number in ended},
    }


def health_tags(records: Sequence[TrialRecord]) -> dict[str, str]:
    """Return, for the sweep's own run, which trials have health signals."""
    found = [record for record in records if record.signals]
    if not found:
        return {}
    each = [f"trial {record.number}: {', '.join(record.signals or ())}" for record in found]
    return {"health": f"{len(found)} of {len(records)} trials; {'; '.join(each)}"}


def curve_tags(every: Sequence[int]) -> dict[str, str]:
    """Return, for the sweep's own run, how its curves are thinned; empty if they are complete."""
    densities = [density for density, _ in groupby(every)]
    if densities == [1]:
        return {}
    found = ", then ".join(map(_density, densities))
    return {"curves": f"{found}; every step is in metrics.jsonl"}


def _density(every: int) -> str:
    if every == 1:
        return "every step"
    return f"the first step, every {every} steps, and each epoch's end"


def attempt_tags(attempts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the provenance tags of a sweep, for all drivers that it had."""
    first = attempts[0] if attempts else {}
    tags = dict(first)
    for number, later in enumerate(attempts[1:], start=2):
        # where a later driver differs: `gradsweep.command.2`
        tags |= {f"{k}.{number}": v for k, v in later.items() if first.get(k) != v}
    return tags


def record_configuration(first: TrialRecord, recorder: Recorder) -> None:
    """Record the value of a configuration, its standard error and from how many seeds it is.

    Metrics follow once all seeds are complete, at the step of the first seed's last report.
    """
    seeds = first.over_seeds
    if seeds is None:
        return
    figures = {
        "over_seeds.value": first.value,
        "over_seeds.standard_error": seeds.standard_error,
    }
    known = {key: one for key, one in figures.items() if one is not None}
    tags = {
        "over_seeds.state": seeds.state,
        "over_seeds.num_seeds": f"{seeds.num_values} of {seeds.seeds}",
        **{key: repr(one) for key, one in known.items()},
    }
    recorder.tag(first.number, tags)
    if seeds.state == "complete":
        metrics = {key.replace(".", "/"): one for key, one in known.items()}
        recorder.log(first.number, [Row(first.step, first.ended_ms or 0, metrics)])


def open_recorder(
    paths: SweepPaths,
    spec: SweepSpec,
    ledger: Ledger | LedgerReader,
    *,
    tags: Mapping[str, str] | None,
    environment: Mapping[str, str] | None = None,
    before: BeforeRecords | None = None,
) -> Recorder:
    """Open the recorder of a sweep and its delivery.

    The sweep's run is opened with `tags`, besides those of its attempts; None: it is not opened.
    `environment` is that of the process that delivers; None: records are only queued.
    """
    offline = environment is None
    tracker = tracker_at(spec.tracking.uri, paths.root) if offline else find_tracker(paths, spec)
    attempts = ledger.attempts
    sweep = TrackedSweep(
        experiment=spec.name,
        sweep_id=ledger.sweep_id,
        outbox=paths.outbox,
        tags={**attempt_tags(attempts), **(tags or {})},
        params=dict(flatten(spec.model_dump(mode="json"))),
        inherited=attempts[-1] if attempts else {},
        experiment_tags=leaders_views(spec, ledger.sweep_id),
    )
    return Recorder(
        tracker.uri,
        tracker.artifact_root,
        sweep,
        announce=tags is not None,
        deliver=None if environment is None else process_with(environment),
        before=before,
    )
