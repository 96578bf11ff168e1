"""What a confirmation says: who is probably the best, how far seeds spread, and what to take.

Each number says from how many seeds or runs it is. What must not live here: the statistics
(`statistics`), which trials are needed (`trust.confirm`), and printing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from sweeps.formatting import format_duration, format_number
from sweeps.ledger.trials import TrialSummary
from sweeps.reconcile.extra_training import SeriesResult
from sweeps.spec.spec import SweepSpec
from sweeps.trust.confirm import Confirmation, ConfirmRequest, stored_request
from sweeps.view.sweep_status import NoBest, SweepStatus

if TYPE_CHECKING:
    from sweeps.statistics.race import Contender, Interval, Race

Standing = Literal["first", "tied", "behind", "dropped", "failed"]
_LEVEL = 95
"""Percent: how sure the intervals are."""
_COLUMNS = [
    *("trial", "", "P(best)", "mean", "95 %", "seeds", "search saw", "looked better by"),
    *("values by seed", "time a run"),
]
_CHEAPER = 0.9
"""A run that takes a larger share of another one's time is as dear."""
_TIMING_NOISE = 1.0
"""Seconds: runs that differ by less take as long."""


@dataclass(frozen=True, kw_only=True)
class ConfirmedTrial:
    """What a confirmation says of one leader."""

    number: int
    standing: Standing
    """`first`: most probably the best; `tied`: the data cannot tell it apart from the first;
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

    @property
    def interval_text(self) -> str:
        """The interval of the mean."""
        if self.low is None:
            return "-"
        return f"{format_number(self.low)} to {format_number(self.high)}"

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
    is_decided: bool
    """Whether no run is left to train."""
    reached: bool
    """Whether the first is the best with the probability asked for."""
    until: float
    num_seeds: int
    """Under how many seeds the remaining leaders were trained so far."""
    max_seeds: int
    num_runs: int
    """How many runs ended well."""
    splits: bool
    """Whether each seed has its own split of the data."""
    noise: float | None
    """The standard deviation over seeds of one configuration."""
    noise_runs: int
    """From how many runs."""
    gap: float
    """By how much the search's first trial looked better than its second."""
    cheaper: int | None
    """Of leaders that cannot be told apart, the one whose runs took the least time."""
    leaders: Sequence[ConfirmedTrial]
    """The most probable winner first; those that are out last."""
    word: str
    """What a report is called."""

    @property
    def first(self) -> ConfirmedTrial | None:
        """The most probable winner; None while the race runs, or if every leader failed."""
        best = self.leaders[0]
        return best if self.is_decided and best.standing == "first" else None

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
            **{key: value for key, value in asdict(self).items() if key != "word"},
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
            *self._verdict(),
            *self._tie(),
            *self._optimism(),
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

    def _verdict(self) -> Iterator[str]:
        over = f"{_count(self.num_runs, 'run')} of {len(self.leaders)} leaders under "
        over += _count(self.num_seeds, "seed")
        if not self.is_decided:
            known = f"{self.num_seeds} of at most {_count(self.max_seeds, 'seed')}"
            yield f"The confirmation has not ended: {_count(self.num_runs, 'run')}, {known}."
            return
        if self.first is None:
            yield f"No leader is confirmed: a run of each of the {len(self.leaders)} failed."
            return
        first = self.first
        if first.p_best is None:
            yield f"Trial {first.number} is the only leader left ({over})."
        elif self.reached:
            chance = format_chance(first.p_best)
            best = f"Trial {first.number} is the best of the leaders"
            yield f"{best} with probability {chance} ({over})."
        else:
            others = [
                f"trial {one.number} {format_chance(one.p_best)}"
                for one in self.leaders[1:3]
                if one.p_best
            ]
            chances = ", ".join([f"trial {first.number} {format_chance(first.p_best)}", *others])
            yield (
                f"No leader is the best with probability {self.until:g} ({over}); the most "
                f"probable: {chances}."
            )

    def _tie(self) -> Iterator[str]:
        if not self.is_decided or not self.tied:
            return
        numbers = _listed([str(one.number) for one in self.tied])
        cheap = next((one for one in self.tied if one.number == self.cheaper), None)
        if cheap is None:
            known = all(one.seconds is not None for one in self.tied)
            same = ": their runs take as long" if known else ""
            yield f"Trials {numbers} cannot be told apart; take any of them{same}."
            return
        most = max(one.seconds or 0.0 for one in self.tied)
        against = f"{format_seconds(cheap.seconds)} a run against {format_seconds(most)}"
        yield (
            f"Trials {numbers} cannot be told apart; take the cheapest: trial {cheap.number} "
            f"({against})."
        )

    def _optimism(self) -> Iterator[str]:
        for one in self.leaders[:1]:
            if one.mean is None or one.standing == "failed":
                return
            spread = ""
            if one.low is not None and one.high is not None:
                spread = f" ({format_number(one.low)} to {format_number(one.high)}, {_LEVEL} %)"
            mean = (
                f"{self.metric} of trial {one.number} is {format_number(one.mean)}{spread} over "
                f"{_count(len(one.values), 'seed')}"
            )
            if one.optimism is None:
                yield f"{mean}."
                return
            how = "better" if one.optimism >= 0 else "worse"
            share = one.optimism_share
            much = format_number(abs(one.optimism))
            if share is not None and abs(share) < 10:
                much += f" ({100 * abs(share):.2g} %)"
            after = f", stopped at {self.word} {one.original_epoch}" if one.was_pruned else ""
            yield (
                f"{mean}; the search saw {format_number(one.original)}{after}: it looked {much} "
                f"{how} than it is."
            )

    def _noise_floor(self) -> Iterator[str]:
        if self.noise is None:
            yield "How far seeds spread is not known: that needs two runs of one configuration."
            return
        what = "initial weights, order and split" if self.splits else "initial weights and order"
        sentence = (
            f"One configuration spreads by {format_number(self.noise)} over seeds of {what} "
            f"(standard deviation, from {_count(self.noise_runs, 'run')}); the search's first two "
            f"trials differed by {format_number(self.gap)}"
        )
        if self.noise > 0:
            below = "less than" if self.gap < self.noise else "more than"
            sentence += f", {below} that"
        yield f"{sentence}."


def find_confirmation(view: SweepStatus) -> ConfirmationResult | None:
    """Return what the last confirmation of a sweep says; None if there was none."""
    request = stored_request(view.series)
    return None if request is None else summarize(request, view.spec, view.records)


def confirmed_trial(view: SweepStatus) -> TrialSummary:
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
    if not found.is_decided:
        raise NoBest(
            f"the confirmation of sweep '{name}' has not ended; continue it with: {command}"
        )
    if found.first is None:
        raise NoBest(
            f"no trial of sweep '{name}' is confirmed: a run of each leader failed; after a fix, "
            f"try again with: {command}"
        )
    return view.record(found.first.number)


def leader_in_confirmation(view: SweepStatus, number: int) -> dict[str, Any] | None:
    """Return what the last confirmation says of one trial, in a sentence and in numbers.

    None if there was none, or if the trial was no leader.
    """
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
    tied = [one for one in leaders if one.standing in ("first", "tied")]
    timed = [one for one in tied if one.seconds is not None]
    cheaper = None
    if found.is_decided and len(tied) == len(timed) > 1:
        least, *_, most = sorted(timed, key=lambda one: one.seconds or 0.0)
        short, long = least.seconds or 0.0, most.seconds or 0.0
        if short < min(_CHEAPER * long, long - _TIMING_NOISE):
            cheaper = least.number
    return ConfirmationResult(
        metric=spec.metrics[0],
        is_decided=found.is_decided,
        reached=result is not None and result.decided,
        until=request.until,
        num_seeds=found.num_seeds,
        max_seeds=request.seeds,
        num_runs=found.num_runs,
        splits=request.split,
        noise=noise.sd if noise else None,
        noise_runs=noise.num_values if noise else 0,
        gap=(second - first) * (1 if request.minimize else -1),
        cheaper=cheaper,
        leaders=leaders,
        word=spec.budget.report_word,
    )


def as_series_result(
    request: ConfirmRequest, spec: SweepSpec, trials: Sequence[TrialSummary]
) -> SeriesResult:
    """Return what a confirmation says, for reports."""
    found = summarize(request, spec, trials)
    best = [found.first.number] if found.first is not None else []
    return SeriesResult(
        kind="confirmed",
        title="Confirmation",
        about="The leaders were trained again by sweep confirm, under seeds that they share. "
        "P(best) is the probability that a leader's mean over all seeds is the best of the leaders.",
        sentences=found.sentences(),
        columns=_COLUMNS,
        rows=[_row(one) for one in found.leaders],
        best=best and ([one.number for one in found.tied] or best),
    )


def _row(one: ConfirmedTrial) -> list[str]:
    return [
        str(one.number),
        one.standing,
        format_chance(one.p_best),
        format_number(one.mean),
        one.interval_text,
        str(len(one.values)),
        format_number(one.original),
        format_number(one.optimism),
        ", ".join(map(format_number, one.values)) or "-",
        format_seconds(one.seconds),
    ]


def seed_values(view: SweepStatus) -> Mapping[int, Mapping[int, float]]:
    """Return the values under several seeds, by the search's trial and the common seed.

    Of confirming trials they are those that the last confirmation compares.
    """
    found: dict[int, dict[int, float]] = {}
    # Confirming trials and repeats have common seeds of their own: never the same.
    for record in view.records:
        value = record.own_value
        if record.role not in ("search", "repeat") or record.seed_index is None or value is None:
            continue
        if record.state == "complete":
            found.setdefault(record.search_number, {})[2 * record.seed_index] = value
    if (request := stored_request(view.series)) is not None:
        for number, values in request.follow(view.records).compared.items():
            confirmed = {2 * index + 1: value for index, value in enumerate(values)}
            found.setdefault(number, {}).update(confirmed)
    return found


def chance_difference(view: SweepStatus) -> float | None:
    """Return the difference that seeds alone make of two equal configurations, or less.

    It is exceeded in 5 of 100 pairs. The difference of two values, each the mean over the seeds
    of the search, has the variance `2 sd**2 / seeds`. None if no configuration was trained under
    several seeds.
    """
    from sweeps.statistics.common_seeds import half_width, noise_floor, table_of  # slow to import

    values = seed_values(view)
    floor = noise_floor(table_of(values)) if values else None
    if floor is None:
        return None
    error = floor.sd * math.sqrt(2 / view.spec.repeats.seeds)
    return half_width(error, floor.freedom, 1 - _LEVEL / 100)


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


def _leader(
    found: Confirmation, result: Race | None, trials: Sequence[TrialSummary], number: int
) -> ConfirmedTrial:
    record, runs = trials[number], found.trials.get(number, ())
    is_known = result is not None and any(one.number == number for one in result.contenders)
    said: Contender | None = result[number] if result is not None and is_known else None
    seconds = [s for run in runs if (s := trials[run].seconds) is not None]
    mean = _ends(said.interval if said else None)
    optimism = _ends(said.optimism_interval if said else None)
    return ConfirmedTrial(
        number=number,
        standing=_standing(found, result, number),
        original=record.value or 0.0,
        original_epoch=record.best_epoch,
        was_pruned=record.state == "pruned",
        values=found.values.get(number, ()),
        trials=runs,
        mean=said.mean if said else None,
        low=mean[0],
        high=mean[1],
        p_best=said.p_best if said else None,
        optimism=said.optimism if said else None,
        optimism_low=optimism[0],
        optimism_high=optimism[1],
        seconds=fmean(seconds) if seconds else None,
        why=found.failed.get(number) or _dropped(found, number),
    )


def _standing(found: Confirmation, result: Race | None, number: int) -> Standing:
    if number in found.failed:
        return "failed"
    if number in found.dropped:
        return "dropped"
    if number == found.winner:
        return "first"
    return "tied" if result is not None and number in result.tied else "behind"


def _dropped(found: Confirmation, number: int) -> str | None:
    if number not in found.dropped:
        return None
    return f"it could not win any more after {_count(found.dropped[number], 'seed')}"


def _ends(interval: Interval | None) -> tuple[float | None, float | None]:
    return (None, None) if interval is None else (interval.low, interval.high)


def _count(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
