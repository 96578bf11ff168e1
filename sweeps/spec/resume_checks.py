"""Refuse a resume that changes what is fixed, or that makes a sweep's trials incomparable.

Trials are comparable while the task's code, its data and certain keys of the spec stay the same.
What must not live here: changes of the space (`sweeps.search.shown_trials` projects earlier trials
to the current space), and computing the digests (`trainable.user_code.fingerprint`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sweeps.errors import OriginChanged, SearchChanged, dotted
from sweeps.spec.revisions import changes
from sweeps.spec.search_checks import range_faults
from sweeps.spec.spec import SweepSpec
from sweeps.spec.yaml_scalars import write_flow
from trainable.user_code.fingerprint import ARGUMENTS, differences


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
    if before.reported != after.reported:
        raise SearchChanged(
            f"constraints limits {write_flow(list(before.constraints))} in this sweep and cannot "
            f"limit {write_flow(list(after.constraints))}: the ledger has of each report the "
            "metrics that had limits then; change the limits of these (one that no trial reaches "
            "lifts it), or start a new sweep with `sweep run FILE --name NAME`"
        )
    old, new = before.search, after.search
    if old.warm_start != new.warm_start:
        raise SearchChanged(
            f"search.warm_start is {write_flow(old.warm_start)} in this sweep and cannot become "
            f"{write_flow(new.warm_start)}: a warm start is read once, when a sweep is created; "
            "start a new sweep with `sweep run FILE --name NAME`"
        )
    if new.priors == "history" != old.priors:
        raise SearchChanged(
            f"search.priors is {write_flow(old.priors)} in this sweep and cannot become history: "
            "earlier sweeps are read once, when a sweep is created; write prior: VALUE beside a "
            "distribution, or start a new sweep with `sweep run FILE --name NAME`"
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


FIXED = ("name", "metric", "mode")
"""Keys that never change: a ledger compares one metric in one mode, tracking uses the name."""
_MEANING = ("task", "seed", "training_rules")
_DIGITS = 12  # digits of a digest in a message
_SHOWN = 3  # differing samples in a message
UNKNOWN = "unknown"
"""Stands for a fingerprint that cannot be computed."""


@dataclass(frozen=True)
class Origin:
    """Digests of the code and the data that a sweep was run with."""

    code: Mapping[str, str] = field(default_factory=dict)
    """sha256 by source file."""
    data: str | None = None
    """None if the task does not provide one."""
    samples: Mapping[str, Any] = field(default_factory=dict)
    """A summary of the data, compared with a tolerance; empty if unknown."""

    def tags(self) -> dict[str, str]:
        """Return the digests of code and data as tags; `unknown` for one that is missing."""
        code = json.dumps(sorted(self.code.items())).encode()
        return {
            "gradsweep.code": hashlib.sha256(code).hexdigest() if self.code else UNKNOWN,
            "gradsweep.data": UNKNOWN if self.data is None else self.data,
        }


def check_origin(
    before: Origin, now: Origin, old: SweepSpec, new: SweepSpec, *, accepted: bool
) -> None:
    """Refuse a resume under which trials could not be compared."""
    differing = changes(old, new)
    for key in FIXED:
        if key in differing:
            was, wanted = differing[key]
            raise OriginChanged(
                f"{key} is {was} in this sweep and cannot become {wanted}: all of its trials are "
                "ranked and found by it; start a new sweep with `sweep run FILE --name NAME`"
            )
    if "resources.workers" in differing and not accepted:
        raise OriginChanged(
            f"trials of this sweep were trained with {_workers(old)}, and this resume asks for "
            f"{new.resources.workers}: a trial that has begun goes on as before up to rounding, "
            "not bit for bit; of one that stopped within an epoch, what its task collects on each "
            "rank in that epoch is counted otherwise; undo the change, or accept it with "
            "--accept-changes"
        )
    found = [*_spec_differences(differing), *_code_differences(before.code, now.code)]
    if before.data is not None and now.data != before.data:
        found.append(f"data {_short(before.data)} -> {_short(now.data)}")
    found += _sample_differences(before.samples, now.samples)
    if found and not accepted:
        raise OriginChanged(
            f"trials of this sweep were run with other code, data or keys: {'; '.join(found)}; "
            "trials before and after could not be compared; undo the change, or accept it with "
            "--accept-changes"
        )


def workers_tag(revisions: Sequence[SweepSpec]) -> dict[str, str]:
    """Return the number of workers of each trial as a tag; none if it has always been one.

    None either where it is searched: then each trial has its own number, and its own tag.
    """
    if revisions[-1].searched_workers or all(one.resources.workers == 1 for one in revisions):
        return {}
    return {"gradsweep.workers": str(revisions[-1].resources.workers)}


def _workers(spec: SweepSpec) -> str:
    count = spec.resources.workers
    return f"{count} worker{'s' if count > 1 else ''} each"


def code_changes(before: Origin, now: Origin) -> Iterator[str]:
    """Yield each source file that has changed, with its digests; none if they are unknown."""
    if now.code:
        yield from _code_differences(before.code, now.code)


def _spec_differences(differing: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    for key, (was, wanted) in differing.items():
        if key.partition(".")[0] in _MEANING:
            yield f"{key} {was} -> {wanted}"


def _code_differences(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    if not before:
        return
    for file in sorted({*before, *now}):
        if before.get(file) != now.get(file):
            yield f"{file} {_short(before.get(file))} -> {_short(now.get(file))}"


def _sample_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    # After an edit of the space, the task may get other arguments, which may give other data.
    if not before or not now or before.get(ARGUMENTS) != now.get(ARGUMENTS):
        return
    if differing := differences(before, now):
        more = len(differing) - _SHOWN
        shown = [*differing[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        yield f"what the task builds differs in {', '.join(shown)}"


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:_DIGITS]
