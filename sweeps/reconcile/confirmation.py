"""Which leaders a confirmation still races, and which trials it needs next.

`sweep confirm` trains the leaders of a sweep again under common seeds: all of them under the first
seed, then those who can still win under the next one. The request and the trials in the ledger
alone decide, so that a resumed confirmation ends as an uninterrupted one. What must not live here:
the statistics (`statistics.race`), adding trials (`run.confirming`), and what users read of
the result (`trust.confirmation`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sweeps.errors import OriginChanged, UserError
from sweeps.formatting import format_reason
from sweeps.ledger.confirm_request import ConfirmRequest
from sweeps.ledger.ranking import ranking
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.spec.spec import SweepSpec

if TYPE_CHECKING:
    from sweeps.statistics.race import Race

DEFAULT_TOP, DEFAULT_SEEDS, DEFAULT_UNTIL = 5, 5, 0.95
LEAST_TOP = LEAST_SEEDS = 2
_TRAINING = ("metric", "select", "seed", "budget", "train", "task", "training_rules")
"""The keys of a spec that decide what a confirming trial trains, beside its parameters."""
_REASON = 200
"""The most characters of a reason within a sentence."""


@dataclass(frozen=True, kw_only=True)
class ConfirmOptions:
    """What a user asks of a confirmation; None: as the last one, or the default without one.

    Attributes:
        top: How many leaders are confirmed.
        seeds: Under how many seeds at most.
        until: The probability of being the best at which the race ends.
        split: Whether the task takes the seed of its split.
    """

    top: int | None = None
    seeds: int | None = None
    until: float | None = None
    split: bool = False


@dataclass(frozen=True)
class Confirmation:
    """How far a confirmation is."""

    request: ConfirmRequest
    values: Mapping[int, Sequence[float]]
    """The values of each leader that has any, in the order of the seeds."""
    trials: Mapping[int, Sequence[int]]
    """The numbers of the trials that have these values."""
    compared: Mapping[int, Sequence[float]]
    """The values that `race` compares: those of complete seeds, without failed leaders."""
    dropped: Mapping[int, int]
    """The leaders that could not win any more, and after how many seeds."""
    failed: Mapping[int, str]
    """The leaders that are out because a run of them did not succeed, and why."""
    needed: Sequence[tuple[int, int]]
    """The next runs, a leader and the number of a seed each; none when it is decided."""
    race: Race | None
    """The comparison after the last complete seed; None before the first."""

    @property
    def is_decided(self) -> bool:
        """Whether no run is left to train."""
        return not self.needed

    @cached_property
    def alive(self) -> list[int]:
        """The leaders that can still win, or could when it ended, in the order of the request."""
        out = {*self.dropped, *self.failed}
        return [number for number in self.request.leaders if number not in out]

    @property
    def winner(self) -> int | None:
        """The leader that is most probably the best; None while the race runs or if all failed."""
        if self.needed or self.race is None:
            return None
        order = [one.number for one in self.race.contenders]
        return next((number for number in order if number in self.alive), None)

    @property
    def num_runs(self) -> int:
        """How many runs have ended well."""
        return sum(map(len, self.values.values()))

    @property
    def num_seeds(self) -> int:
        """Under how many seeds the leaders that are left were trained."""
        return max(map(len, self.values.values()), default=0)


def follow(
    request: ConfirmRequest, trials: Iterable[TrialSummary], *, minimize: bool
) -> Confirmation:
    """Return how far a confirmation is."""
    from sweeps.statistics.race import race  # slow to import; few sweeps have a confirmation

    trials = list(trials)
    runs = _runs(request, trials)
    original = {one.number: one.value for one in trials if one.number in request.leaders}
    values: dict[int, list[float]] = {}
    numbers: dict[int, list[int]] = {}
    compared: dict[int, list[float]] = {}
    dropped: dict[int, int] = {}
    failed: dict[int, str] = {}
    needed: list[tuple[int, int]] = []
    found: Race | None = None
    alive = list(request.leaders)
    for seed in range(request.seeds):
        for leader in alive:
            run = runs.get((leader, seed))
            if run is None or not run.finished:
                needed.append((leader, seed))
            elif run.state != "complete" or run.value is None:
                failed[leader] = _failure(run)
            else:
                values.setdefault(leader, []).append(run.value)
                numbers.setdefault(leader, []).append(run.number)
        alive = [leader for leader in alive if leader not in failed]
        if needed or not alive:
            break
        compared = {
            leader: list(known) for leader, known in values.items() if leader not in failed
        }
        found = race(
            compared,
            minimize=minimize,
            until=request.until,
            original={number: value for number, value in original.items() if value is not None},
        )
        dropped |= {leader: seed + 1 for leader in alive if found[leader].dropped}
        alive = [leader for leader in alive if leader not in dropped]
        # One value has no spread: a leader that failures left as the only one trains twice, too.
        if seed > 0 and (found.decided or len(alive) < 2):
            break
    return Confirmation(request, values, numbers, compared, dropped, failed, needed, found)


def num_unstarted(
    request: ConfirmRequest | None, trials: Sequence[TrialSummary], *, minimize: bool
) -> int:
    """Return how many runs a confirmation needs next that have no trial yet."""
    if request is None:
        return 0
    needed = follow(request, trials, minimize=minimize).needed
    return len(without_open(needed, request, trials))


def most_runs(
    request: ConfirmRequest | None, trials: Sequence[TrialSummary], *, minimize: bool
) -> int:
    """Return how many trials a confirmation adds at most, if no further leader is dropped."""
    if request is None:
        return 0
    found = follow(request, trials, minimize=minimize)
    if not found.needed:
        return 0
    seed = found.needed[0][1]
    later = len(found.alive) * (request.seeds - 1 - seed)
    return len(without_open(found.needed, request, trials)) + later


def without_open(
    runs: Iterable[tuple[int, int]], request: ConfirmRequest, trials: Iterable[TrialSummary]
) -> list[tuple[int, int]]:
    """Return the runs, a leader and a seed each, without those whose trial has not ended."""
    unended = {
        (one.origin, one.seed_index)
        for one in trials
        if _counts(one, request) and not one.finished
    }
    return [run for run in runs if run not in unended]


def superseded(
    request: ConfirmRequest, trials: Sequence[TrialSummary], *, minimize: bool
) -> list[int]:
    """Return the confirming trials that have not ended, and that a new request does not need."""
    needed = set(follow(request, trials, minimize=minimize).needed)
    return [
        one.number
        for one in trials
        if one.role == "confirm"
        and not one.finished
        and not (_counts(one, request) and (one.origin, one.seed_index) in needed)
    ]


def _counts(trial: TrialSummary, request: ConfirmRequest) -> bool:
    return trial.role == "confirm" and trial.number >= request.counted_from


def _runs(
    request: ConfirmRequest, trials: Iterable[TrialSummary]
) -> dict[tuple[int, int], TrialSummary]:
    """Return the run of each leader under each seed, as far as there is one.

    Runs of earlier requests count if they succeeded. What failed before this request is tried
    again.
    """
    found: dict[tuple[int, int], TrialSummary] = {}
    for trial in trials:
        if not _counts(trial, request):
            continue
        assert trial.origin is not None
        assert trial.seed_index is not None
        succeeded = trial.state == "complete" and trial.value is not None
        key = trial.origin, trial.seed_index
        if succeeded or (trial.number >= request.failures_from and key not in found):
            found[key] = trial
    return found


def _failure(run: TrialSummary) -> str:
    if run.state == "complete":
        why = "has no finite value"
    else:
        ended = "failed" if run.state == "failed" else "was stopped"
        why = f"{ended} ({format_reason(run.reason or 'no reason was given')[:_REASON]})"
    return f"its run under seed {run.seed_index}, trial {run.number}, {why}"


def make_request(
    paths: SweepPaths,
    spec: SweepSpec,
    trials: Sequence[TrialSummary],
    before: ConfirmRequest | None,
    options: ConfirmOptions,
) -> ConfirmRequest:
    """Return what a confirmation is asked for; the stored request if undecided and the same."""
    minimize = spec.modes[0] == "min"
    top, seeds, until, split = options.top, options.seeds, options.until, options.split
    open_before = before is not None and not follow(before, trials, minimize=minimize).is_decided
    if before is not None:
        top = len(before.leaders) if top is None else top
        seeds = before.seeds if seeds is None else seeds
        until = before.until if until is None else until
    leaders = find_leaders(paths, spec, trials, top)
    training = training_digest(spec)
    comparable = before is not None and before.training == training and before.split == split
    wanted = ConfirmRequest(
        leaders=leaders,
        seeds=DEFAULT_SEEDS if seeds is None else seeds,
        until=DEFAULT_UNTIL if until is None else until,
        split=split,
        training=training,
        counted_from=before.counted_from if before is not None and comparable else len(trials),
        failures_from=len(trials),
    )
    if before is not None and open_before:
        # An interrupted confirmation resumes unchanged, with the failures that it has seen.
        same = replace(wanted, failures_from=before.failures_from)
        return before if same == before else wanted
    return wanted


def find_leaders(
    paths: SweepPaths, spec: SweepSpec, trials: Sequence[TrialSummary], top: int | None
) -> tuple[int, ...]:
    """Return the numbers of the best trials, the best first, each configuration once."""
    name = f"sweep '{paths.name}'"
    if len(spec.metrics) > 1:
        raise UserError(
            f"{name} has {len(spec.metrics)} metrics ({', '.join(spec.metrics)}); a confirmation "
            "asks which trial is the best, and no trial of a Pareto front is; choose one with: "
            f"{paths.command('best')}"
        )
    if spec.early_stopping.rule.is_population:
        raise UserError(
            f"{name} trains a population ({spec.early_stopping.scheduler}), whose members copy "
            "weights and change parameters during training; a confirmation trains one "
            "configuration from its first step; search without a population, starting from its "
            f"best values: {paths.command('best')}"
        )
    # A pruned trial and the one that finishes it have the same parameters.
    found: dict[str, int] = {}
    for trial in ranking(trials, minimize=spec.modes[0] == "min"):
        found.setdefault(json.dumps(trial.params, sort_keys=True), trial.number)
    if len(found) < LEAST_TOP:
        have = f"{len(found) or 'no'} configuration{'s' * (not found)} with a result"
        remedy = paths.command("trials")
        raise UserError(
            f"{name} has {have}; a confirmation compares {LEAST_TOP} or more; see: {remedy}"
        )
    if top is not None and top > len(found):
        raise UserError(
            f"--top {top}: {name} has {len(found)} configurations with a result; write a number "
            f"from {LEAST_TOP} to {len(found)}"
        )
    return tuple(found.values())[: top or DEFAULT_TOP]


def check_unchanged(
    paths: SweepPaths,
    spec: SweepSpec,
    request: ConfirmRequest | None,
    trials: Sequence[TrialSummary],
) -> None:
    """Check that a changed spec trains the rest of a confirmation as it began."""
    if request is None or request.training == training_digest(spec):
        return
    if follow(request, trials, minimize=spec.modes[0] == "min").is_decided:
        return
    finish = paths.command("confirm")
    raise OriginChanged(
        f"sweep '{paths.name}' is in the middle of a confirmation, and the change affects how its "
        f"runs train; runs that are compared must train alike; end it first with: {finish}; or "
        "resume with --accept-changes"
    )


def training_digest(spec: SweepSpec) -> str:
    """Return a digest of what decides a confirming trial's training, beside its parameters."""
    data = spec.model_dump(mode="json", include=set(_TRAINING))
    data["patience"] = str(spec.early_stopping.patience)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
