"""Train a sweep's leaders again under common seeds, until it is known which of them is the best.

All leaders are trained under the first seed, then those that can still win under the next one. The
request, which the ledger stores, and the trials alone decide, so that a resumed confirmation ends
as an uninterrupted one. What must not live here: the statistics (`statistics.race`), running the
trials (`run`), and what users read of the result (`trust.confirmation`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from sweeps.errors import OriginChanged, UserError
from sweeps.formatting import format_number, format_reason
from sweeps.ledger.attributes import Role
from sweeps.ledger.ranking import ranking
from sweeps.ledger.stop_reasons import BY_ANOTHER_REQUEST
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.reconcile.extra_training import (
    ExtraTraining,
    NewTrial,
    PlannedExtra,
    SeriesResult,
    SweepTrials,
)
from sweeps.spec.provenance_check import Origin
from sweeps.spec.spec import SweepSpec
from trainable.metrics_file import Row

if TYPE_CHECKING:  # slow to import; who reads a sweep needs none of it
    from sweeps.ledger.ledger import Ledger
    from sweeps.run.launch import RunDisplay
    from sweeps.statistics.race import Race
    from sweeps.view.outcome import SweepOutcome
    from sweeps.view.sweep_status import SweepStatus

_ROLE: Role = "confirm"
DEFAULT_TOP, DEFAULT_SEEDS, DEFAULT_UNTIL = 5, 5, 0.95
LEAST_TOP = LEAST_SEEDS = 2
_LEAST_UNTIL = 0.5
_MOST_SEEDS = 100
_TRAINING = ("metric", "select", "seed", "budget", "train", "task", "training_rules")
"""The keys of a spec that decide what a confirming trial trains, beside its parameters."""
_REASON = 200
"""The most characters of a reason within a sentence."""


def confirm(
    view: SweepStatus,
    display: RunDisplay,
    options: ConfirmLeaders,
    *,
    grace: float,
    address: str | None = None,
    accept_changes: bool = False,
    offline: bool = False,
) -> SweepOutcome | None:
    """Confirm the leaders of a sweep; an interrupted confirmation resumes."""
    from sweeps.engine.cluster_address import find_address  # slow: only who runs trials needs it
    from sweeps.run.launch import attempt, read_again

    options.check_numbers()
    spec, document = read_again(view, say=display.warn)
    before = stored_request(view.series)
    # Whether the task takes the seed of its split is known once it is loaded.
    known = replace(options, split=before is not None and before.split)
    request = known.request(view.with_spec(spec))
    if before is not None:
        found = before.follow(view.records)
        same = replace(request, failures_from=before.failures_from) == before
        if same and found.is_decided and not found.failed:
            return None
    with document.attach_locations():
        return attempt(
            view.paths,
            spec,
            display,
            new=False,
            grace=grace,
            address=find_address(address),
            accept_changes=accept_changes,
            extra=options,
            offline=offline,
        )


@dataclass(frozen=True, kw_only=True)
class ConfirmLeaders(ExtraTraining):
    """What a user asks of a confirmation; None: as the last one, or the default without one."""

    only_extra: ClassVar[bool] = True
    top: int | None = None
    """How many leaders are confirmed."""
    seeds: int | None = None
    """Under how many seeds at most."""
    until: float | None = None
    """The probability of being the best at which the race ends."""
    split: bool = False
    """Whether the task takes the seed of its split."""

    def check_numbers(self) -> None:
        """Check the numbers."""
        if self.top is not None and self.top < LEAST_TOP:
            raise UserError(
                f"--top {self.top}: one trial cannot be compared with itself; a confirmation compares "
                f"{LEAST_TOP} or more; write --top {LEAST_TOP}"
            )
        if self.seeds is not None and self.seeds < LEAST_SEEDS:
            raise UserError(
                f"--seeds {self.seeds}: one value has no spread; the noise over seeds is known "
                f"from {LEAST_SEEDS} or more; write --seeds 5"
            )
        if self.seeds is not None and self.seeds > _MOST_SEEDS:
            raise UserError(
                f"--seeds {self.seeds}: so many seeds tell no more than a few dozen; at most "
                f"{_MOST_SEEDS} are raced; write --seeds 20"
            )
        if self.until is not None and not _LEAST_UNTIL <= self.until < 1:
            raise UserError(
                f"--until {self.until:g}: it is the probability of being the best at which the race "
                f"ends, from {_LEAST_UNTIL:g} to below 1; write --until 0.95"
            )

    def for_task(self, *, splits: bool) -> ConfirmLeaders:
        """Let the split vary if the task splits its samples by a seed of its own."""
        return replace(self, split=splits)

    def choose(self, sweep: SweepTrials) -> list[int]:
        """Return the leaders, the best first."""
        before = stored_request(sweep.series)
        top = len(before.leaders) if self.top is None and before is not None else self.top
        return find_leaders(sweep.paths, sweep.spec, sweep.trials, top)

    def request(self, sweep: SweepTrials) -> ConfirmRequest:
        """Return what the ledger stores; the stored request if it is undecided and the same."""
        before, trials = stored_request(sweep.series), sweep.trials
        seeds, until = self.seeds, self.until
        if before is not None:
            seeds = before.seeds if seeds is None else seeds
            until = before.until if until is None else until
        training = training_digest(sweep.spec)
        comparable = (
            before is not None and before.training == training and before.split == self.split
        )
        wanted = ConfirmRequest(
            leaders=tuple(self.choose(sweep)),
            minimize=sweep.spec.modes[0] == "min",
            seeds=DEFAULT_SEEDS if seeds is None else seeds,
            until=DEFAULT_UNTIL if until is None else until,
            split=self.split,
            training=training,
            counted_from=before.counted_from if before is not None and comparable else len(trials),
            failures_from=len(trials),
        )
        if before is not None and not before.is_done(trials):
            # An interrupted confirmation resumes unchanged, with the failures that it has seen.
            same = replace(wanted, failures_from=before.failures_from)
            return before if same == before else wanted
        return wanted

    def plan(
        self, sweep: SweepTrials, chosen: Sequence[int], origins: tuple[Origin, Origin]
    ) -> PlannedExtra:
        """Return the request; its trials are added in turns, while the sweep runs."""
        del origins
        request = self.request(sweep)
        return PlannedExtra(
            request.store,
            f"confirm {', '.join(f'trial {number}' for number in request.leaders)}",
            trains=chosen,
            num_new=len(request.leaders) * request.seeds,
        )


@dataclass(frozen=True, kw_only=True)
class ConfirmRequest:
    """A request to train the leaders again under common seeds; see `TrialSeries`."""

    leaders: tuple[int, ...]
    """The numbers of the trials to confirm, the best first."""
    minimize: bool
    seeds: int
    """Under how many seeds each leader is trained at most."""
    until: float
    """The probability of being the best at which the race ends."""
    split: bool
    """Whether each seed has its own split of the data."""
    training: str
    """A digest of what the spec says about training; see `training_digest`."""
    counted_from: int
    """The first trial whose result counts: earlier ones trained with another configuration."""
    failures_from: int
    """The first trial whose failure counts: what failed for an earlier request is tried again."""

    def store(self, ledger: Ledger) -> None:
        """Store it, and end the runs of an earlier request that this one does not need."""

        def store() -> None:
            for number in self._superseded(ledger.trials()):
                ledger.finish(number, "pruned", reason=f"{BY_ANOTHER_REQUEST} to confirm")
            data = {"role": _ROLE, **asdict(self), "leaders": list(self.leaders)}
            if data != ledger.series:
                ledger.store_series(data)

        ledger.transaction(store)

    def missing(self, trials: Sequence[TrialSummary]) -> list[NewTrial]:
        """Return the runs that are needed next and have no trial yet."""
        needed = self._without_open(self.follow(trials).needed, trials)
        return [NewTrial(_ROLE, leader, seed, self.split) for leader, seed in needed]

    def is_done(self, trials: Sequence[TrialSummary]) -> bool:
        """Return whether it is decided: no run is left to train."""
        return self.follow(trials).is_decided

    def most(self, trials: Sequence[TrialSummary]) -> int:
        """Return how many trials it adds at most, if no further leader is dropped."""
        found = self.follow(trials)
        if found.is_decided:
            return 0
        later = len(found.alive) * (self.seeds - 1 - found.needed[0][1])
        return len(self._without_open(found.needed, trials)) + later

    def check_unchanged(self, sweep: SweepTrials) -> None:
        """Check that a changed spec trains the rest as it began."""
        if self.training == training_digest(sweep.spec) or self.is_done(sweep.trials):
            return
        finish = sweep.paths.command("confirm")
        raise OriginChanged(
            f"sweep '{sweep.paths.name}' is in the middle of a confirmation, and the change "
            "affects how its runs train; runs that are compared must train alike; end it first "
            f"with: {finish}; or resume with --accept-changes"
        )

    def tags(self, trials: Sequence[TrialSummary]) -> dict[int | None, dict[str, str]]:
        """Return what it says of each leader, and who won; nothing until it is decided."""
        found = self.follow(trials)
        return found.tags() if found.is_decided else {}

    def rows(self, trials: Sequence[TrialSummary]) -> dict[int, Row]:
        """Return the metrics of each leader that was not out by a failure, once it is decided.

        The step is the number of the last trial: a later confirmation has later steps.
        """
        found = self.follow(trials)
        if not found.is_decided or found.race is None:
            return {}
        runs = [number for numbers in found.trials.values() for number in numbers]
        at_ms = max(trials[number].ended_ms or 0 for number in runs)
        rows = {}
        for one in found.race.contenders:
            known = {
                "confirm/mean": one.mean,
                "confirm/p_best": one.p_best,
                "confirm/optimism": one.optimism,
                "confirm/num_seeds": float(one.num_seeds),
            }
            metrics = {name: value for name, value in known.items() if value is not None}
            rows[one.number] = Row(max(runs), at_ms, metrics)
        return rows

    def result(self, spec: SweepSpec, trials: Sequence[TrialSummary]) -> SeriesResult:
        """Return what it says, for reports."""
        from sweeps.trust.confirmation import as_series_result  # it imports this module

        return as_series_result(self, spec, trials)

    def follow(self, trials: Iterable[TrialSummary]) -> Confirmation:
        """Return how far it is."""
        from sweeps.statistics.race import race  # slow to import; few sweeps have a confirmation

        trials = list(trials)
        runs = self._runs(trials)
        original = {one.number: one.value for one in trials if one.number in self.leaders}
        values: dict[int, list[float]] = {}
        numbers: dict[int, list[int]] = {}
        compared: dict[int, list[float]] = {}
        dropped: dict[int, int] = {}
        failed: dict[int, str] = {}
        needed: list[tuple[int, int]] = []
        found: Race | None = None
        alive = list(self.leaders)
        for seed in range(self.seeds):
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
                minimize=self.minimize,
                until=self.until,
                original={
                    number: value for number, value in original.items() if value is not None
                },
            )
            dropped |= {leader: seed + 1 for leader in alive if found[leader].dropped}
            alive = [leader for leader in alive if leader not in dropped]
            # One value has no spread: a leader that failures left alone trains twice, too.
            if seed > 0 and (found.decided or len(alive) < 2):
                break
        return Confirmation(self, values, numbers, compared, dropped, failed, needed, found)

    def _without_open(
        self, runs: Iterable[tuple[int, int]], trials: Iterable[TrialSummary]
    ) -> list[tuple[int, int]]:
        """Return the runs, a leader and a seed each, without those whose trial has not ended."""
        unended = {
            (one.origin, one.seed_index)
            for one in trials
            if self._counts(one) and not one.finished
        }
        return [run for run in runs if run not in unended]

    def _superseded(self, trials: Sequence[TrialSummary]) -> list[int]:
        """Return the confirming trials that have not ended, and that it does not need."""
        needed = set(self.follow(trials).needed)
        return [
            one.number
            for one in trials
            if one.role == _ROLE
            and not one.finished
            and not (self._counts(one) and (one.origin, one.seed_index) in needed)
        ]

    def _counts(self, trial: TrialSummary) -> bool:
        return trial.role == _ROLE and trial.number >= self.counted_from

    def _runs(self, trials: Iterable[TrialSummary]) -> dict[tuple[int, int], TrialSummary]:
        """Return the run of each leader under each seed, as far as there is one.

        Runs of earlier requests count if they succeeded. What failed before this request is tried
        again.
        """
        found: dict[tuple[int, int], TrialSummary] = {}
        for trial in trials:
            if not self._counts(trial):
                continue
            assert trial.origin is not None
            assert trial.seed_index is not None
            succeeded = trial.state == "complete" and trial.value is not None
            key = trial.origin, trial.seed_index
            if succeeded or (trial.number >= self.failures_from and key not in found):
                found[key] = trial
        return found


def read_series(data: Mapping[str, Any]) -> ConfirmRequest:
    """Return a request as the ledger stores it."""
    return ConfirmRequest(**{**data, "leaders": tuple(map(int, data["leaders"]))})


def stored_request(series: object) -> ConfirmRequest | None:
    """Return the last request of a sweep; None: it was never confirmed."""
    return series if isinstance(series, ConfirmRequest) else None


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

    def tags(self) -> dict[int | None, dict[str, str]]:
        """Return tags, by trial and for the sweep's own run (None)."""
        chances = {} if self.race is None else {o.number: o.p_best for o in self.race.contenders}
        tags: dict[int | None, dict[str, str]] = {}
        for number in self.request.leaders:
            if number in self.failed:
                text = f"out: {self.failed[number]}"
            else:
                out = f", out after {self.dropped[number]} seeds" if number in self.dropped else ""
                chance = format_number(chances.get(number))
                text = f"best with probability {chance}, {len(self.values[number])} seeds{out}"
            tags[number] = {"confirm": text}
        winner = self.winner
        tags[None] = {"confirmed_trial": "" if winner is None else str(winner)}
        return tags


def _failure(run: TrialSummary) -> str:
    if run.state == "complete":
        why = "has no finite value"
    else:
        ended = "failed" if run.state == "failed" else "was stopped"
        why = f"{ended} ({format_reason(run.reason or 'no reason was given')[:_REASON]})"
    return f"its run under seed {run.seed_index}, trial {run.number}, {why}"


def find_leaders(
    paths: SweepPaths, spec: SweepSpec, trials: Sequence[TrialSummary], top: int | None
) -> list[int]:
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
    return list(found.values())[: top or DEFAULT_TOP]


def training_digest(spec: SweepSpec) -> str:
    """Return a digest of what decides a confirming trial's training, beside its parameters."""
    data = spec.model_dump(mode="json", include=set(_TRAINING))
    data["patience"] = str(spec.early_stopping.patience)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
