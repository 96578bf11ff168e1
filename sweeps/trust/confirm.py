"""Train a sweep's leaders again under common seeds, until it is known which of them is the best.

All train under the first seed, those that can still win under the next. The request in the ledger
and the trials alone decide, so that a resumed confirmation ends as an uninterrupted one. Each
number of the result says from how many seeds or runs it is. What must not live here: the
statistics (`statistics.race`), running the trials (`run`), and printing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sweeps.errors import OriginChanged, UserError
from sweeps.formatting import counted, format_duration, format_number, format_reason, listed
from sweeps.ledger.attributes import Role
from sweeps.ledger.ranking import front, ranking
from sweeps.ledger.reasons import BY_ANOTHER_REQUEST
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.reconcile.extra_training import (
    ExtraTraining,
    NewTrial,
    PlannedExtra,
    SeriesResult,
    SweepTrials,
)
from sweeps.spec.resume_checks import Origin
from sweeps.spec.spec import SweepSpec
from sweeps.view.sweep_view import NoBest, SweepView
from trainable.store.metrics_file import Row

if TYPE_CHECKING:  # slow to import; who reads a sweep needs none of it
    from sweeps.ledger.ledger import Ledger
    from sweeps.run.prepared import RunDisplay, RunOptions
    from sweeps.statistics.race import Race
    from sweeps.view.outcome import SweepOutcome

_ROLE: Role = "confirm"
DEFAULT_TOP, DEFAULT_SEEDS, DEFAULT_UNTIL = 5, 5, 0.95
LEAST_TOP = LEAST_SEEDS = 2
_LEAST_UNTIL = 0.5
_MOST_SEEDS = 100
_TRAINING = ("metric", "select", "seed", "budget", "train", "task", "training_rules")
"""The keys of a spec that decide what a confirming trial trains, beside its parameters."""
_REASON = 200
"""The most characters of a reason within a sentence."""
Standing = Literal["first", "tied", "behind", "dropped", "failed"]
_LEVEL = 95
"""Percent: how sure the intervals are."""


def confirm(
    view: SweepView,
    display: RunDisplay,
    leaders: ConfirmLeaders,
    options: RunOptions,
) -> SweepOutcome | None:
    """Confirm the leaders of a sweep; an interrupted confirmation resumes."""
    from sweeps.run.launch import attempt, read_again  # slow: only who runs trials needs it

    leaders.check_numbers()
    spec, document = read_again(view, say=display.warn)
    before = stored_request(view.sweep_trials.series)
    # Whether the task takes the seed of its split is known once it is loaded.
    known = replace(leaders, split=before is not None and before.split)
    request = known.request(view.with_spec(spec))
    if before is not None:
        found = before.follow(view.records)
        same = replace(request, failures_from=before.failures_from) == before
        if same and found.has_ended and not found.failed:
            return None
    with document.attach_locations():
        options = replace(options, extra=leaders)
        return attempt(view.paths, spec, display, options, new=False)


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
                f"--top {self.top}: one trial cannot be compared with itself; a confirmation "
                f"compares {LEAST_TOP} or more; write --top {LEAST_TOP}"
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
                f"--until {self.until:g}: it is the probability of being the best at which the "
                f"race ends, from {_LEAST_UNTIL:g} to below 1; write --until 0.95"
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
        return self.follow(trials).has_ended

    def most(self, trials: Sequence[TrialSummary]) -> int:
        """Return how many trials it adds at most, if no further leader is dropped."""
        found = self.follow(trials)
        if found.has_ended:
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
        return found.tags() if found.has_ended else {}

    def rows(self, trials: Sequence[TrialSummary]) -> dict[int, Row]:
        """Return the metrics of each leader that was not out by a failure, once it is decided.

        The step is the number of the last trial: a later confirmation has later steps.
        """
        found = self.follow(trials)
        if not found.has_ended or found.race is None:
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
        found = summarize(self, spec, trials)
        best = [found.first.number] if found.first is not None else []
        return SeriesResult(
            kind="confirmed",
            title="Confirmation",
            about="The leaders were trained again by sweep confirm, under seeds that they share. "
            "P(best) is the probability that a leader's mean over all seeds is the best of the "
            "leaders.",
            sentences=found.sentences(),
            columns=list(found.leaders[0].cells()),
            rows=[list(one.cells().values()) for one in found.leaders],
            best=best and ([one.number for one in found.tied] or best),
            compared=self.follow(trials).compared,
        )

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
        """Return the run of each leader under each seed, as far as there is one."""
        found: dict[tuple[int, int], TrialSummary] = {}
        for trial in trials:
            if not self._counts(trial):
                continue
            assert trial.origin is not None
            assert trial.seed_index is not None
            succeeded = trial.state == "complete" and trial.value is not None
            key = trial.origin, trial.seed_index
            # What failed before this request is tried again.
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
    def has_ended(self) -> bool:
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
                chance, seeds = format_number(chances.get(number)), len(self.values[number])
                text = f"best with probability {chance}, {counted(seeds, 'seed')}"
                if number in self.dropped:
                    text += f", out after {counted(self.dropped[number], 'seed')}"
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
    found: dict[str, int] = {}
    for trial in ranking(trials, minimize=spec.modes[0] == "min"):
        if trial.feasible is not False:
            found.setdefault(_point(trial), trial.number)
    if len(found) < LEAST_TOP:
        kind = "feasible configuration" if spec.constraints else "configuration"
        have = counted(len(found), kind) if found else f"no {kind}s"
        remedy = paths.command("trials")
        raise UserError(
            f"{name} has {have} with a result; a confirmation compares {LEAST_TOP} or more; "
            f"see: {remedy}"
        )
    if top is not None and top > len(found):
        raise UserError(
            f"--top {top}: {name} has {len(found)} configurations with a result; write a number "
            f"from {LEAST_TOP} to {len(found)}"
        )
    return list(found.values())[: top or DEFAULT_TOP]


def _point(trial: TrialSummary) -> str:
    """Return a text of the parameters: those of a pruned trial and of its finish are the same."""
    return json.dumps(trial.params, sort_keys=True)


def training_digest(spec: SweepSpec) -> str:
    """Return a digest of what decides a confirming trial's training, beside its parameters."""
    data = spec.model_dump(mode="json", include=set(_TRAINING))
    data["patience"] = str(spec.early_stopping.patience)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


# -- the result ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConfirmedTrial:
    """What a confirmation says of one leader."""

    number: int
    standing: Standing
    """`first`: the one to take; `tied`: the data cannot tell it apart from the first;
    `dropped`: it could not win any more; `failed`: a run did not succeed."""
    original: float
    """The value for which it was a leader."""
    original_epoch: int | None
    """The report of that value."""
    was_pruned: bool
    """Whether that training was stopped early."""
    values: Sequence[float]
    """Its values under the common seeds, in their order."""
    trials: Sequence[int]
    """The trials that have these values."""
    mean: float | None
    low: float | None
    """The lower end of the interval of the mean."""
    high: float | None
    p_best: float | None
    """The probability that its mean over all seeds is the best."""
    optimism: float | None
    """By how much its original value looked better than its mean; negative: worse."""
    optimism_low: float | None
    optimism_high: float | None
    seconds: float | None
    """How long a run took, on average."""
    why: str | None = None
    """Why it is out."""

    def cells(self) -> dict[str, str]:
        """Return the row of a table, by the titles of its columns."""
        low, high = format_number(self.low), format_number(self.high)
        return {
            "trial": str(self.number),
            "": self.standing,
            "P(best)": format_chance(self.p_best),
            "mean": format_number(self.mean),
            "95 %": "-" if self.low is None else f"{low} to {high}",
            "seeds": str(len(self.values)),
            "search saw": format_number(self.original),
            "looked better by": format_number(self.optimism),
            "values by seed": ", ".join(map(format_number, self.values)) or "-",
            "time a run": format_seconds(self.seconds),
        }

    @property
    def optimism_share(self) -> float | None:
        """The optimism as a share of the mean; None for a mean near zero."""
        if self.optimism is None or not self.mean:
            return None
        return self.optimism / abs(self.mean)


@dataclass(frozen=True, kw_only=True)
class ConfirmationResult:
    """The result of a confirmation, or how far it is."""

    metric: str
    minimize: bool
    has_ended: bool
    """Whether no run is left to train."""
    until: float
    """The probability of being the best at which it ends."""
    num_seeds: int
    """Under how many seeds the remaining leaders were trained so far."""
    max_seeds: int
    num_runs: int
    """How many runs ended well."""
    splits: bool
    """Whether each seed has its own split of the data."""
    folds: bool
    """Whether each seed holds out another fold of the data."""
    noise: float | None
    """The standard deviation over seeds of one configuration."""
    noise_runs: int
    """From how many runs."""
    gap: float
    """By how much the search's first trial looked better than its second."""
    newer: int | None
    """A trial that ended later and looked better in the search than all leaders."""
    newer_value: float | None
    leaders: Sequence[ConfirmedTrial]
    """The one with the least expected loss first; those that are out last."""
    word: str
    """What a report is called."""

    @property
    def first(self) -> ConfirmedTrial | None:
        """The one to take: that with the least expected loss.

        None while the race runs, or if every leader failed.
        """
        best = self.leaders[0]
        return best if self.has_ended and best.standing == "first" else None

    @property
    def is_decided(self) -> bool:
        """Whether it has ended, and no other leader is as good within the noise."""
        return self.first is not None and not self.tied

    @property
    def tied(self) -> list[ConfirmedTrial]:
        """Those that cannot be told apart, the first included; none if there is only the first."""
        found = [one for one in self.leaders if one.standing in ("first", "tied")]
        return found if len(found) > 1 else []

    @property
    def failed_leaders(self) -> list[int]:
        """The leaders that are out because a run of them did not succeed."""
        return [one.number for one in self.leaders if one.standing == "failed"]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            **{key: value for key, value in asdict(self).items() if key not in ("word", "folds")},
            "is_decided": self.is_decided,
            "winner": self.first and self.first.number,
            "tied": [one.number for one in self.tied],
            "leaders": [
                asdict(one) | {"optimism_share": one.optimism_share} for one in self.leaders
            ],
            "sentences": self.sentences(),
        }

    @cached_property
    def _words(self) -> list[str]:
        return [
            *self._newer(),
            *self._verdict(),
            *self._expected(),
            *self._noise_floor(),
            *(f"Trial {one.number} is out: {one.why}." for one in self.leaders if one.why),
        ]

    def sentences(self) -> list[str]:
        """Return what was found, the most important first."""
        return list(self._words)

    def in_one_sentence(self) -> str:
        """Return who is the best, and how sure that is."""
        return self._words[0]

    # -- sentences --------------------------------------------------------------------------------

    def _newer(self) -> Iterator[str]:
        if self.has_ended and self.newer is not None:
            was = min if self.minimize else max
            best = format_number(was(one.original for one in self.leaders))
            yield (
                f"Confirm again: trial {self.newer} ended later, and looked better in the search "
                f"than all leaders ({format_number(self.newer_value)} against {best})."
            )

    def _verdict(self) -> Iterator[str]:
        over = f"{counted(self.num_runs, 'run')} of {len(self.leaders)} leaders under "
        over += counted(self.num_seeds, "seed")
        if not self.has_ended:
            known = f"{self.num_seeds} of at most {counted(self.max_seeds, 'seed')}"
            yield f"The confirmation has not ended: {counted(self.num_runs, 'run')}, {known}."
            return
        if self.first is None:
            yield f"No leader is confirmed: a run of each of the {len(self.leaders)} failed."
            return
        first, tied = self.first, self.tied
        if first.p_best is None:
            yield f"Take trial {first.number}, the only leader left ({over})."
        elif not tied:
            chance = format_chance(first.p_best)
            yield (
                f"Take trial {first.number}: it is the best of the leaders with probability "
                f"{chance} ({over})."
            )
        else:
            chances = [f"trial {one.number} {format_chance(one.p_best)}" for one in tied]
            yield (
                f"Take trial {first.number}, which should have the best {self.metric}; "
                f"{listed([f'trial {one.number}' for one in tied[1:]])} cannot be told apart from "
                f"it. Probability of being the best: {listed(chances)} ({over})."
            )

    def _expected(self) -> Iterator[str]:
        one = self.leaders[0]
        if one.mean is None or one.standing == "failed":
            return
        spread = ""
        if one.low is not None and one.high is not None:
            spread = f" ({format_number(one.low)} to {format_number(one.high)}, {_LEVEL} %)"
        mean = (
            f"Expect {self.metric} {format_number(one.mean)}{spread} of trial {one.number}, its "
            f"mean over {counted(len(one.values), 'seed')}"
        )
        if one.optimism is None:
            yield f"{mean}."
            return
        after = f" (stopped at {self.word} {one.original_epoch})" if one.was_pruned else ""
        share = one.optimism_share
        how = "better" if one.optimism >= 0 else "worse"
        much = format_number(abs(one.optimism))
        if share is not None and abs(share) < 10:
            much = f"{100 * abs(share):.2g} %"
        yield f"{mean}; in the search it had {format_number(one.original)}{after}, {much} {how}."

    def _noise_floor(self) -> Iterator[str]:
        if self.noise is None:
            yield "How far seeds spread is not known: that needs two runs of one configuration."
            return
        varied = ["initial weights", "order", *["split"] * self.splits, *["fold"] * self.folds]
        what = listed(varied)
        gap = f"were {format_number(self.gap)} apart" if self.gap else "had the same value"
        yield (
            f"The same configuration varies by {format_number(self.noise)} from seed to seed "
            f"(standard deviation over {what}, from {counted(self.noise_runs, 'run')}); the "
            f"search's two best trials {gap}."
        )


def find_confirmation(view: SweepView) -> ConfirmationResult | None:
    """Return what the last confirmation of a sweep says; None if there was none."""
    request = stored_request(view.sweep_trials.series)
    return None if request is None else summarize(request, view.spec, view.records)


def confirmed_trial(view: SweepView) -> TrialSummary:
    """Return the trial that the last confirmation found to be the best."""
    found, name = find_confirmation(view), view.paths.name
    if len(view.spec.metrics) > 1:
        raise NoBest(
            f"no trial of sweep '{name}' is confirmed: it has {len(view.spec.metrics)} metrics, "
            "and no trial of a Pareto front is the best; choose one with: "
            f"{view.paths.command('best')}"
        )
    command = view.paths.command("confirm")
    if found is None:
        raise NoBest(f"no trial of sweep '{name}' is confirmed; confirm its best with: {command}")
    if not found.has_ended:
        raise NoBest(
            f"the confirmation of sweep '{name}' has not ended; continue it with: {command}"
        )
    if found.first is None:
        raise NoBest(
            f"no trial of sweep '{name}' is confirmed: a run of each leader failed; after a fix, "
            f"try again with: {command}"
        )
    return view.record(found.first.number)


def leader_in_confirmation(view: SweepView, number: int) -> dict[str, Any] | None:
    """Return what the last confirmation says of one trial; None if that was no leader of one."""
    found = find_confirmation(view)
    mine = [one for one in found.leaders if one.number == number] if found else []
    if found is None or not mine:
        return None
    return {"said": found.in_one_sentence(), **asdict(mine[0])}


def summarize(
    request: ConfirmRequest, spec: SweepSpec, trials: Sequence[TrialSummary]
) -> ConfirmationResult:
    """Return what a confirmation says."""
    found = request.follow(trials)
    result = found.race
    leaders = [_leader(found, result, trials, number) for number in _order(found, result)]
    noise = None if result is None else result.noise
    first, second = (trials[number].value or 0.0 for number in request.leaders[:2])
    newer = _newer(request, trials)
    return ConfirmationResult(
        metric=spec.metrics[0],
        has_ended=found.has_ended,
        until=request.until,
        num_seeds=found.num_seeds,
        max_seeds=request.seeds,
        num_runs=found.num_runs,
        splits=request.split,
        folds=spec.repeats.folds is not None,
        noise=noise.sd if noise else None,
        noise_runs=noise.num_values if noise else 0,
        gap=(second - first) * (1 if request.minimize else -1),
        minimize=request.minimize,
        newer=None if newer is None else newer.number,
        newer_value=None if newer is None else newer.value,
        leaders=leaders,
        word=spec.budget.report_word,
    )


def _newer(request: ConfirmRequest, trials: Sequence[TrialSummary]) -> TrialSummary | None:
    """Return the best trial, if it is better in the search than every leader was."""
    ranked = front(trials, [request.minimize])
    if not ranked or _point(ranked[0]) in [_point(trials[one]) for one in request.leaders]:
        return None
    values = [value for number in request.leaders if (value := trials[number].value) is not None]
    best, sign = ranked[0], 1 if request.minimize else -1
    return best if all(sign * (best.value or 0.0) < sign * value for value in values) else None


def format_chance(chance: float | None) -> str:
    """Format a probability; those next to 0 and 1 are bounds, as they come from draws."""
    if chance is None:
        return "-"
    if chance > 0.995:
        return "above 0.99"
    return "below 0.01" if chance < 0.005 else f"{chance:.2f}"


def format_seconds(seconds: float | None) -> str:
    """Format the time of a run; a short one with its fraction."""
    if seconds is None or seconds >= 10:
        return format_duration(seconds)
    return f"{seconds:.2g}s"


def _order(found: Confirmation, result: Race | None) -> list[int]:
    """Return the leaders: those that can win, then those dropped, then those that failed."""
    known = [] if result is None else [one.number for one in result.contenders]
    ranked = [*known, *(one for one in found.request.leaders if one not in known)]
    out = {**dict.fromkeys(found.dropped, 1), **dict.fromkeys(found.failed, 2)}
    return sorted(ranked, key=lambda number: out.get(number, 0))


_OF_THE_RACE = ("mean", "low", "high", "p_best", "optimism", "optimism_low", "optimism_high")


def _leader(
    found: Confirmation, result: Race | None, trials: Sequence[TrialSummary], number: int
) -> ConfirmedTrial:
    record, runs = trials[number], found.trials.get(number, ())
    known = () if result is None else result.contenders
    said = next((one for one in known if one.number == number), None)
    seconds = [s for run in runs if (s := trials[run].seconds) is not None]
    return ConfirmedTrial(
        number=number,
        standing=_standing(found, result, number),
        original=record.value or 0.0,
        original_epoch=record.best_epoch,
        was_pruned=record.state == "pruned",
        values=found.values.get(number, ()),
        trials=runs,
        seconds=fmean(seconds) if seconds else None,
        why=found.failed.get(number) or _why_dropped(found.dropped.get(number)),
        **{name: getattr(said, name, None) for name in _OF_THE_RACE},
    )


def _standing(found: Confirmation, result: Race | None, number: int) -> Standing:
    if number in found.failed:
        return "failed"
    if number in found.dropped:
        return "dropped"
    if number == found.winner:
        return "first"
    return "tied" if result is not None and number in result.tied else "behind"


def _why_dropped(seeds: int | None) -> str | None:
    return None if seeds is None else f"it could not win any more after {counted(seeds, 'seed')}"
