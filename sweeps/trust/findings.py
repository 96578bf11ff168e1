"""State what a sweep found, in a few sentences, and how it continues.

Each is stated only if the numbers support it, and says from how many trials it is. What must not
live here: printing, figures (`report`), and what is unhealthy (`trainable.watch.health`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

from sweeps.errors import NO_SUCCESS, LedgerError
from sweeps.formatting import counted, format_number, format_reason, format_value, listed
from sweeps.ledger.ranking import ranking
from sweeps.ledger.trials import TrialSummary, of_search
from sweeps.paths import SweepPaths
from sweeps.reconcile.stop_criteria import is_stopped_early
from sweeps.spec.own_values import own_values
from sweeps.spec.space import is_number
from sweeps.statistics.variance_shares import VarianceShares
from sweeps.stopping.patience import BY_PATIENCE
from sweeps.trust.evidence import (
    NearBound,
    Region,
    bad_regions,
    chance_difference,
    near_bounds,
)
from sweeps.trust.importance import (
    as_numbers,
    ended_places,
    has_effect,
    importance_of,
    importance_sentence,
    percent,
    search_curves,
)
from sweeps.trust.next_search import next_overrides
from sweeps.view.outcome import SweepOutcome
from sweeps.view.sweep_view import SweepView
from sweeps.view.usage import spared_seeds

_FEWEST_FOR_MEDIAN = 5
_MOST_REGIONS, _MOST_BOUNDS, _MOST_REASONS = 2, 1, 2
_LONGEST_REASON = 160
_MOST_WARNINGS = 2
_NUMBER = re.compile(r"\d[\d.e+-]*")


class Finding(NamedTuple):
    """One sentence about a sweep."""

    topic: str
    """`best`, `constraints`, `equal`, `importance`, `region`, `bound`, `epochs`, `space`,
    `failures` or `health`, or the kind of a `SeriesResult`."""
    sentence: str


@dataclass(frozen=True)
class Findings:
    """What a sweep found, and how it continues."""

    sentences: Sequence[Finding]
    overrides: Sequence[str]
    """Overrides of `sweep resume` that continue a finished sweep; none if it cannot continue."""
    importance: VarianceShares | None = None
    """What mattered; None if too few trials have ended to tell."""

    def as_dict(self) -> dict[str, Any]:
        """Return the `findings` of `sweep status --json`."""
        return {
            "sentences": [one._asdict() for one in self.sentences],
            "resume_with": list(self.overrides),
            "importance": self.importance
            and {key: as_numbers(one) for key, one in self.importance.shares.items()},
        }

    @property
    def changes_space(self) -> bool:
        """Whether the overrides narrow or widen the space."""
        return any(one.startswith("space.") for one in self.overrides)

    @property
    def next_label(self) -> str:
        """What the command does that continues a finished sweep."""
        return "try next, in a better space" if self.changes_space else "try more"


def find(view: SweepView) -> Findings:
    """Return what a sweep found so far."""
    return _Evidence(view).findings()


def findings_at_end(view: SweepView) -> Findings | None:
    """Return what a sweep found; None if it has not ended."""
    return find(view) if view.state in ("finished", "failed") else None


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or the key itself if that is ambiguous."""
    # A `name` alone says too little, so the part before it is added.
    shortened = {
        key: ".".join(key.split(".")[-2 if key.endswith(".name") else -1 :]) for key in keys
    }
    count = Counter(shortened.values())
    return {key: short if count[short] == 1 else key for key, short in shortened.items()}


class _Evidence:
    """A sweep's trials, and the sentences that they support."""

    def __init__(self, view: SweepView) -> None:
        self.view, self.spec, self.records = view, view.spec, of_search(view.records)
        self.metric, self.minimize = self.spec.metrics[0], view.ledger.minimize
        self.curves = search_curves(view)
        self.names = short_names(list(self.spec.space))
        # A pruned trial and the one that finishes it are one point; the finished one counts.
        finished = {one.finishes for one in view.records if one.has_result}
        ranked = ranking(view.records, minimize=self.minimize)
        ranked = [one for one in ranked if one.number not in finished]
        self.ranked = [one for one in ranked if one.feasible is not False]
        self.infeasible = [one for one in ranked if one.feasible is False]

    def findings(self) -> Findings:
        regions, bounds = self.regions[0][:_MOST_REGIONS], self.bounds[:_MOST_BOUNDS]
        sentences = [
            *self._best(),
            *self._infeasible(),
            *self._equal(),
            *self._extra(),
            *self._importance(),
            *(self._region(region) for region in regions),
            *map(self._bound, bounds),
            *self._epochs(),
            *self._exhausted(),
            *self._failures(),
            *(Finding("health", sentence) for sentence in health_sentences(self.view.records)),
        ]
        finished = self.view.state == "finished"
        more = next_overrides(self.view, regions, bounds) if finished else ()
        return Findings(sentences, more, self.importance)

    # -- numbers ----------------------------------------------------------------------------------

    @cached_property
    def importance(self) -> VarianceShares | None:
        return importance_of(self.view)

    @cached_property
    def places(self) -> Mapping[int, float]:
        """The place of each ended trial in the final order."""
        return ended_places(self.view)

    @cached_property
    def params(self) -> Mapping[int, Mapping[str, Any]]:
        """The parameters of each trial; none for a population, whose trials change theirs."""
        changed = self.spec.early_stopping.rule.is_population
        return {} if changed else {record.number: record.params for record in self.records}

    @cached_property
    def regions(self) -> tuple[list[Region], str]:
        """Where the space was bad, and what happened to the trials there."""
        for what, bad, compared in self._endings():
            params = {n: point for n, point in self.params.items() if n in compared}
            if bad and (found := bad_regions(self.spec.space, params, bad)):
                return found, what
        return [], ""

    @cached_property
    def bounds(self) -> list[NearBound]:
        if len(self.spec.metrics) > 1 or not self.params:
            return []
        found = near_bounds(self.spec.space, self.params, [one.best_params for one in self.ranked])
        return [one for one in found if has_effect(self.importance, one.key) is not False]

    def _endings(self) -> Iterator[tuple[str, set[int], set[int]]]:
        """Yield what is bad, in words, which trials ended so, and with which they are compared."""
        ended = {record.number for record in self.records if record.finished}
        failed = {record.number for record in self.records if record.state == "failed"}
        stopped = {r.number: r.epoch for r in self.records if is_stopped_early(r)}
        word = self.spec.budget.report_word
        if missing := {record.number for record in self.infeasible if record.role == "search"}:
            yield "missed a constraint", missing, ended
        if stopped:
            first = min(stopped.values())
            at_first = {number for number, epoch in stopped.items() if epoch == first}
            yield f"were stopped at {word} {first}", at_first | failed, ended
            yield "were stopped early", set(stopped) | failed, ended
        yield "failed", failed, ended
        if self.places:
            middle = median(self.places.values())
            worse = {number for number, at in self.places.items() if at > middle}
            yield "ended in the worse half", worse, set(self.places)

    # -- sentences --------------------------------------------------------------------------------

    def _best(self) -> Iterator[Finding]:
        front = self.view.ledger.front()
        if not front:
            return
        best = front[0]
        if len(self.spec.metrics) > 1:
            kind = "feasible trials" if self.spec.constraints else "trials"
            count = f"{len(front)} of {len(self.ranked)} {kind} with a result"
            verb = "are" if len(front) > 1 else "is"
            lead = f"{count} {verb} on the Pareto front"
            value = f"{self.metric}, {format_number(best.value)}"
            yield Finding("best", f"{lead}; trial {best.number} has the best {value}.")
            return
        lead = f"Trial {best.number} has the best {self.metric}, {format_number(best.value)}"
        if best.over_seeds is not None:
            lead += f" ({best.over_seeds.in_words()})"
        elif best.best_epoch is not None and self.spec.budget.reports > 1:
            budget = self.spec.budget
            lead += f" after {budget.report_word} {best.best_epoch} of {budget.reports}"
        if alike := [one.number for one in self.ranked[1:] if one.value == best.value]:
            others = f"trial {alike[0]} has" if len(alike) == 1 else f"{len(alike)} others have"
            lead += f" ({others} the same)"
        yield Finding("best", f"{lead}{self._margin(best)}.")

    def _infeasible(self) -> Iterator[Finding]:
        if not self.infeasible:
            return
        missed = Counter(
            metric for one in self.infeasible for metric in one.limits.missed(one.judged)
        )
        each = ", ".join(f"{metric} in {count}" for metric, count in missed.most_common())
        total = len(self.infeasible) + len(self.ranked)
        count, near = len(self.infeasible), self.infeasible[0]
        yield Finding(
            "constraints",
            f"{count} of {total} trials with a result {'is' if count == 1 else 'are'} infeasible "
            f"({each}); the closest is trial {near.number}: {near.missed}.",
        )

    def _equal(self) -> Iterator[Finding]:
        values = {one.value for one in self.ranked}
        if len(self.spec.metrics) > 1 or len(values) > 1 or len(self.ranked) < _FEWEST_FOR_MEDIAN:
            return
        yield Finding(
            "equal",
            f"All {len(self.ranked)} trials with a result have the same {self.metric}, so it does "
            "not tell which parameters are better; see whether a model learns at all, longer or "
            "at other values, and whether the metric can show it.",
        )

    def _extra(self) -> Iterator[Finding]:
        found = self.view.series_result
        if found is not None:
            yield Finding(found.kind, found.sentences[0])

    def _margin(self, best: TrialSummary) -> str:
        """Return by how much the best trial is better than one without a search, or others."""
        own = [r for r in self.ranked if self._has_own_values(r)]
        word = self.spec.budget.report_word
        if best in own:
            others = len(self.ranked) - len(own)
            if not others:
                return "; it has the values without the search"
            which = f"none of {others} others is" if others > 1 else "the other one is no"
            return f"; it has the values without the search, and {which} better"
        if own:
            other = own[0]
            who = f"of trial {other.number}, which has the values without the search"
            if other.state == "complete" and best.value is not None and other.value is not None:
                return f": {_against(best.value, other.value)} {who}{self._uncertainty()}"
            epoch = max(self.curves[other.number], default=0)
            mine, theirs = (self.curves[one.number].get(epoch) for one in (best, other))
            if mine is not None and theirs is not None:
                against = _against(mine, theirs)
                return f"; at {word} {epoch} it had {format_number(mine)}: {against} {who}"
        whole = [
            one.value for one in self.ranked if one.state == "complete" and one.value is not None
        ]
        if len(whole) < _FEWEST_FOR_MEDIAN or best.value is None:
            return ""
        against = _against(best.value, median(whole))
        who = f"the median of {len(whole)} trials that trained to the end"
        could = self.spec.space.keys() <= self._own_values.keys()
        return f": {against}, {who}{' (none has the values without the search)' * could}"

    def _uncertainty(self) -> str:
        """Return how much seeds alone change the difference of two values."""
        found, word = chance_difference(self.view), self.spec.repeats.word
        if found is None:
            return f"; each was trained once, so that {word}s may explain a part of it"
        up_to = format_number(found)
        return f"; a difference up to {up_to} may come from the {word}s alone (95 %)"

    def _has_own_values(self, record: TrialSummary) -> bool:
        own, params = self._own_values, record.best_params
        return bool(params) and all(
            key in own and _same(own[key], value) for key, value in params.items()
        )

    @cached_property
    def _own_values(self) -> dict[str, Any]:
        return own_values(self.spec)

    def _exhausted(self) -> Iterator[Finding]:
        if len(self.records) >= self.spec.num_trials < self.spec.trials:
            sentence = f"The space has {counted(self.spec.num_trials, 'point')}, each was tried"
            yield Finding(
                "space",
                f"{sentence}, and the sweep ended before trials: {self.spec.trials}.",
            )

    def _importance(self) -> Iterator[Finding]:
        if self.importance is not None:
            sentence = importance_sentence(self.importance, self.names, self.metric)
            yield Finding("importance", sentence)

    def _region(self, region: Region) -> Finding:
        failed = sum(self.view.records[number].state == "failed" for number in region.trials)
        what = "failed" if failed == len(region.trials) else self.regions[1]
        if 0 < failed < len(region.trials):
            what = f"{what} or failed"
        where = region.words(self.names[region.key])
        number = len(region.trials)
        said = f"{f'All {number} trials' if number > 1 else 'The one trial'} with {where} {what}."
        prior = self.spec.space[region.key].prior
        if prior is not None and region.contains(prior.value):
            said = f"{said} Its prior {format_value(prior.value)} lies there."
        return Finding("region", said)

    def _bound(self, bound: NearBound) -> Finding:
        end = "lower" if bound.side == "below" else "upper"
        name, value = self.names[bound.key], format_number(bound.value)
        return Finding(
            "bound",
            f"The {bound.num_leaders} best trials have {name} near the {end} end of its range "
            f"({format_number(bound.bound)}), the best {value}: better values may lie beyond it.",
        )

    def _epochs(self) -> Iterator[Finding]:
        """State how much training early stopping saved."""
        every = [r for r in self.view.records if r.role in ("search", "repeat")]
        ended = [r for r in every if r.state == "complete" or is_stopped_early(r)]
        if not any(is_stopped_early(r) or (r.reason or "").startswith(BY_PATIENCE) for r in ended):
            return
        trained, spared = (
            sum(record.epoch for record in ended),
            sum(spared_seeds(self.view).values()),
        )
        whole = max(self.spec.budget.reports, *(r.epoch for r in ended))
        possible = (len(ended) + spared) * whole
        beside = ""
        if spared:
            further = counted(spared, f"further {self.spec.repeats.word}")
            beside = f", those of {further} that never started included"
        yield Finding(
            "epochs",
            f"{counted(len(ended), 'trial')} trained {trained:,} of "
            f"{counted(possible, self.spec.budget.report_word)}{beside}: early stopping saved "
            f"{percent(1 - trained / possible)}.",
        )

    def _failures(self) -> Iterator[Finding]:
        failed = [record for record in self.records if record.state == "failed"]
        if not failed:
            return
        groups: dict[str, list[TrialSummary]] = {}
        for record in failed:
            alike = _NUMBER.sub("#", record.reason or "")
            groups.setdefault(alike, []).append(record)
        largest = sorted(groups.values(), key=len, reverse=True)
        parts = []
        for group in largest[:_MOST_REASONS]:
            reason = group[0].reason or "no reason was given"
            if len(reason) > _LONGEST_REASON:
                reason = f"{reason[:_LONGEST_REASON]}…"
            count = f"{len(group)} like trial" if len(group) > 1 else "trial"
            parts.append(f"{count} {group[0].number} ({format_reason(reason)})")
        if rest := len(largest) - len(parts):
            parts.append(f"{rest} other reasons" if rest > 1 else "1 other reason")
        yield Finding(
            "failures",
            f"{len(failed)} of {counted(len(self.records), 'trial')} failed: {listed(parts)}.",
        )


def _against(mine: float, other: float) -> str:
    """Return how one value compares with another: `12 % lower than 0.5`."""
    if mine == other:
        return f"equal to {format_number(other)}"
    word = "lower" if mine < other else "higher"
    share = abs(mine - other) / other if other > 0 and mine >= 0 else 0.0
    much = f"{percent(share)} " if 0.005 <= share < 1 else ""
    return f"{much}{word} than {format_number(other)}"


def _same(own: object, value: object) -> bool:
    if is_number(own) and is_number(value):
        return abs(own - value) <= 1e-9 * max(abs(own), abs(value))
    return own == value and isinstance(own, bool) == isinstance(value, bool)


def findings_of(paths: SweepPaths, outcome: SweepOutcome) -> Findings | None:
    """Return what an ended sweep found; None if it was interrupted, or cannot be read now."""
    if outcome.exit_code not in (0, NO_SUCCESS) or outcome.num_left:
        return None
    try:
        return find(SweepView(paths))
    except (LedgerError, OSError):  # the sweep itself has ended well
        return None


def health_sentences(records: Sequence[TrialSummary]) -> list[str]:
    """Return the warnings that most trials had; those that differ only in numbers are one."""
    alike: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        for signal in record.signals or ():
            alike.setdefault(_NUMBER.sub("#", signal), []).append((record.number, signal))
    groups = sorted(alike.values(), key=len, reverse=True)
    sentences = [
        f"{_who(group, len(records))}: {group[0][1]}." for group in groups[:_MOST_WARNINGS]
    ]
    if rest := len(groups) - len(sentences):
        kinds = "kinds" if rest > 1 else "kind"
        sentences.append(
            f"{rest} more {kinds} of health warnings: see `sweep show` of each trial."
        )
    return sentences


def _who(group: Sequence[tuple[int, str]], num_trials: int) -> str:
    number = group[0][0]
    if len(group) == 1:
        return f"Trial {number} has a health warning"
    return f"{len(group)} of {num_trials} trials have a health warning, such as trial {number}"
