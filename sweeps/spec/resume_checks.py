"""Refuse a resume that changes a part of the search which is fixed once a sweep exists.

What must not live here: changes of the space (`sweeps.search.shown_trials` projects earlier trials
to the current space), and changes of code, data or metric (`provenance_check`).
"""

from __future__ import annotations

from sweeps.errors import SearchChanged, dotted
from sweeps.spec.range_checks import range_faults
from sweeps.spec.spec import SweepSpec
from sweeps.spec.yaml_scalars import write_flow


def check_search_changes(before: SweepSpec, after: SweepSpec, num_trials: int) -> None:
    """Refuse changes of a search that would concern trials that exist already."""
    if num_trials:
        _check_population(before, after)
        _check_reports(before, after)
        _check_ranges(before, after)
    if before.select != after.select:
        raise SearchChanged(
            f"select is {before.select} in this sweep and cannot become {after.select}: the "
            "sampler has received the values of trials that have ended, and Optuna never changes "
            "them; start a new sweep with `sweep run FILE --name NAME`"
        )
    old, new = before.search, after.search
    if old.warm_start != new.warm_start:
        raise SearchChanged(
            f"search.warm_start is {write_flow(old.warm_start)} in this sweep and cannot become "
            f"{write_flow(new.warm_start)}: a warm start is read once, when a sweep is created; "
            "start a new sweep with `sweep run FILE --name NAME`"
        )
    if old.points[:num_trials] != new.points[:num_trials]:
        raise SearchChanged(
            f"search.try_first is {write_flow(old.try_first)} in this sweep, and its first "
            f"{num_trials} points cannot change: {num_trials} trials have been drawn, and point 0 "
            f"is trial 0; start a new sweep, with `search.warm_start: {before.name}` to learn "
            "from these trials"
        )


def _check_ranges(before: SweepSpec, after: SweepSpec) -> None:
    """Refuse new ranges as those of a new sweep; with another sampler, all are new to it."""
    kept = before.space if before.search.sampler == after.search.sampler else {}
    changed = {key: one for key, one in after.space.items() if kept.get(key) != one}
    for fault in range_faults(changed, after.search):
        raise SearchChanged(f"{dotted(fault.path)}: {fault.message}")


def _check_reports(before: SweepSpec, after: SweepSpec) -> None:
    """Refuse a change of what a report is. A longer or shorter budget only changes how many."""
    old, new = before.budget, after.budget
    if old.report_kind == new.report_kind:
        return
    was, wanted = (
        ", ".join(f"{key}: {value}" for key, value in one.model_dump(mode="json").items())
        for one in (old, new)
    )
    raise SearchChanged(
        f"budget is {was} in this sweep and cannot become {wanted}: trials are compared at their "
        "reports, which would fall elsewhere or be of other samples; change only the length, or "
        "start a new sweep with `sweep run FILE --name NAME`"
    )


def _check_population(before: SweepSpec, after: SweepSpec) -> None:
    """Refuse to turn trials into a population or a population into trials, or to resize it."""
    old, new = before.early_stopping, after.early_stopping
    another = "start a new sweep with `sweep run FILE --name NAME`"
    if old.rule.is_population != new.rule.is_population:
        raise SearchChanged(
            f"early_stopping.scheduler is {old.scheduler} in this sweep and cannot become "
            f"{new.scheduler}: the members of a population train together from the beginning; "
            f"{another}"
        )
    if new.rule.is_population and before.trials != after.trials:
        raise SearchChanged(
            f"trials is {before.trials} in this sweep and cannot become {after.trials}: the "
            f"members of a population ({new.scheduler}) train together from the beginning; "
            f"{another}"
        )
