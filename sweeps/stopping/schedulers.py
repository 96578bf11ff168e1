"""The scheduler that Ray Tune calls, and what it decides again about unfinished trials.

With `asha_promote` and `pbt`, a trial pauses at a rung without a decision of the scheduler, and
the searcher promotes it. For Tune, the training between two pauses is a separate trial, so Tune
keeps no state of a paused trial. A random share of the trials (`early_stopping.exempt`) is never
stopped: the trials that a rule lets live looked good early, and only trials that were spared at
random show how often it stops one that would have become good. What must not live here: which rule
a spec names (`registry`), and the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from sweeps.stopping.asha import FrontStopper
from sweeps.stopping.metric_values import (
    Value,
    all_values,
    as_losses,
    as_value,
    stop_reason,
)
from sweeps.stopping.rule import (
    Reports,
    Standing,
    StopDecider,
    judged_reports,
    judging,
    make_pausing_rule,
    minimize_of,
)
from sweeps.stopping.seed_means import SeedMeans, over_seeds
from trainable.adapters.ray import OBJECTIVE, OBJECTIVES
from trainable.seeding import derive_seed

if TYPE_CHECKING:  # this package lies below the specs
    from sweeps.spec.spec import SweepSpec
    from sweeps.stopping.rule import TrialStopper

TIME = "epoch"
"""The result key by which schedulers measure the progress of a trial."""


class WouldStop(NamedTuple):
    """Where a rule would have stopped a trial that is exempt from early stopping."""

    epoch: int
    """The trial's reports by then."""
    reason: str
    """Why, as for a trial that is stopped."""


class StopperScheduler(FIFOScheduler):
    """Ask a `TrialStopper` after each report, and keep its reasons.

    Ray's own schedulers cannot be used. None of them states why a trial stops. Ray's median rule
    rejects past reports of a trial that it would have stopped, and counts the trial's last report
    twice. Ray's ASHA compares with NaN, and draws a trial's bracket anew after a resume.
    """

    def __init__(
        self,
        stopper: TrialStopper | SeedMeans | None,
        rule: str,
        metrics: str | Sequence[str],
        word: str = "epoch",
        places: dict[int, int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stopper, self._rule, self._word = stopper, rule, word
        self._places = {} if places is None else places
        self._metrics = [metrics] if isinstance(metrics, str) else metrics
        self.stop_reasons: dict[int, str] = {}
        """By trial number, why the trial was stopped."""
        self.would_stop: dict[int, WouldStop] = {}
        """By the number of an exempt trial, where it would have been stopped: by the ledger, or
        by a decision of this scheduler. Its later reports, and those of its further seeds, are
        compared with those of no other trial, as if it had ended."""
        self._last_epoch: dict[int, int] = {}
        """By trial, its last report. An exempt trial that repeats an epoch is not judged again:
        among the trials that have reported since, the rule might stop it elsewhere."""

    @property
    def compares(self) -> bool:
        """Whether there is a rule that compares running trials."""
        return self._stopper is not None

    def join(self, origins: Mapping[int, int]) -> None:
        """Add trials that train a configuration with a further seed; see `SeedMeans.join`."""
        if isinstance(self._stopper, SeedMeans):
            self._stopper.join(origins)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        del tune_controller
        self._join(trial.config)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        del tune_controller
        number, epoch = trial.config["number"], result[TIME]
        is_new = epoch > self._last_epoch.get(number, 0)
        self._last_epoch[number] = max(epoch, self._last_epoch.get(number, 0))
        why = self._ask(trial.config, result)
        if why is None:
            return TrialScheduler.CONTINUE
        if trial.config.get("exempt", False):
            if is_new:
                self.would_stop.setdefault(number, WouldStop(epoch, why))
            return TrialScheduler.CONTINUE
        self.stop_reasons[number] = why
        return TrialScheduler.STOP

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        del tune_controller
        # The last result of a failed trial has no metric; that of a stopped one was judged before.
        if OBJECTIVE in result and result[TIME] > self._last_epoch.get(trial.config["number"], 0):
            self._ask(trial.config, result)

    def replay(
        self,
        number: int,
        reports: Mapping[int, Value],
        *,
        would_stop: WouldStop | None = None,
        repeats: int | None = None,
        place: int | None = None,
    ) -> str | None:
        """Record the past reports of a trial, and decide nothing."""
        if would_stop is not None:
            self.would_stop[number] = would_stop
        role = {} if repeats is None else {"role": "repeat", "origin": repeats}
        placed = {} if place is None else {"place": place}
        self._join(config := {"number": number, **role, **placed})
        why = None
        for epoch in sorted(reports):
            values = all_values(reports[epoch])
            result = {TIME: epoch, OBJECTIVE: values[0]}
            why = self._ask(config, result | ({OBJECTIVES: values} if len(values) > 1 else {}))
        self._last_epoch[number] = max(reports, default=0)
        return why

    def _join(self, config: Mapping[str, Any]) -> None:
        role = config.get("role", "search")
        if role == "repeat":
            self.join({config["number"]: config["origin"]})
        if role == "search" and "place" in config:
            self._places[config["number"]] = config["place"]

    def _ask(self, config: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
        """Record a report; return why the rule stops its trial, or None if it continues."""
        if self._stopper is None:
            return None
        number, epoch, role = config["number"], result[TIME], config.get("role", "search")
        end = self.would_stop.get(config["origin"] if role == "repeat" else number)
        if end is not None and epoch > end.epoch:
            return None
        value = as_value(result.get(OBJECTIVES) or (result[OBJECTIVE],))
        if role == "repeat" and isinstance(self._stopper, SeedMeans):
            self._stopper.repeats(number, epoch, value)
        if role != "search":
            return None  # a trial that trains another one's point trains to the end
        why = self._stopper.stops(number, epoch, value)
        if why is None:
            return None
        when = f"{self._word} {epoch}"
        return stop_reason(self._rule, when, self._metrics, all_values(value), why)


class ByPlace:
    """Ask a rule that receives the place of a trial among those of the search as its number.

    So HyperBand, which chooses by number, takes the same brackets with or without extra trials.
    """

    def __init__(self, rule: TrialStopper, places: Mapping[int, int]) -> None:
        self.rule, self._places = rule, places
        if isinstance(rule, FrontStopper):
            rule.name_of = self._number_of  # its reasons name trials

    def stops(self, number: int, epoch: int, value: Value) -> str | None:
        """Record a report; return why its trial stops, or None if it continues."""
        return self.rule.stops(self._places.get(number, number), epoch, value)

    def _number_of(self, place: int) -> int:
        return next((number for number, one in self._places.items() if one == place), place)


def make_verdict_fn(
    spec: SweepSpec,
    origins: Mapping[int, int] = MappingProxyType({}),
    places: Mapping[int, int] = MappingProxyType({}),
) -> StopDecider:
    """Return a function that returns which unfinished trials of a sweep must stop, and why.

    A driver may die after a report, before it stops the trial because of that report. The next
    driver then decides again. A paused trial stops when it can no longer be promoted.
    """
    pausing = make_pausing_rule(spec)

    def paused(now: Standing) -> dict[int, str]:
        if origins:
            known = over_seeds(now.reports, origins, spec.repeats.combine)
            now = now._replace(reports=known, unfinished=now.unfinished - origins.keys())
        return never_promoted(spec, now)

    def verdict(now: Standing) -> dict[int, str]:
        # Where an exempt trial would be stopped is decided as for the others.
        asked = now.unfinished - now.live
        return stopped_trials(make_scheduler(spec), now.reports, asked, origins, places)

    return verdict if pausing is None else paused


def never_promoted(spec: SweepSpec, now: Standing) -> dict[int, str]:
    """Return the paused trials that can no longer be promoted, and why; see `PausingRule`."""
    pausing = make_pausing_rule(spec)
    if pausing is None:
        return {}
    reasons, reports = {}, judged_reports(now.reports, spec)
    for number in sorted(pausing.never_promoted(now._replace(reports=reports))):
        epoch = max(reports[number], default=0)
        seen = {other: one[epoch] for other, one in reports.items() if epoch in one}
        own = now.reports[number].get(epoch)
        if own is None:  # it never reported
            reasons[number] = f"{spec.early_stopping.scheduler}: never promoted"
            continue
        ranked = as_losses(seen, pausing.minimize)
        mine = ranked.get(number, math.inf)
        rank = 1 + sum(one < mine for one in ranked.values())
        rule, when = spec.early_stopping.scheduler, f"{spec.budget.report_word} {epoch}"
        why = f"never promoted, rank {rank} of {len(seen)}"
        if missed := spec.limits.sentence(all_values(own)):
            why = f"infeasible ({missed}), {why}"
        reasons[number] = stop_reason(rule, when, spec.reported, all_values(own), why)
    return reasons


def make_scheduler(spec: SweepSpec) -> StopperScheduler:
    """Build the scheduler of a sweep without reports."""
    rule, epochs, minimize = spec.early_stopping.rule, spec.budget.reports, minimize_of(spec)
    places: dict[int, int] = {}
    stopper: TrialStopper | SeedMeans | None = None

    def make_stopper() -> TrialStopper:
        made = rule.make_stopper(epochs=epochs, minimize=minimize)
        assert made is not None
        return judging(ByPlace(made, places), spec)

    if rule.make_stopper(epochs=epochs, minimize=minimize) is not None:
        stopper = make_stopper()
        if spec.repeats.seeds > 1:
            rungs = frozenset(rule.rungs(epochs))
            stopper = SeedMeans(make_stopper, rungs, spec.repeats.combine)
    return StopperScheduler(stopper, rule.name, spec.reported, spec.budget.report_word, places)


def stopped_trials(
    scheduler: StopperScheduler,
    reports: Reports,
    undecided: Set[int],
    origins: Mapping[int, int] = MappingProxyType({}),
    places: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, str]:
    """Return the trials that the scheduler stops at their last report, and why.

    After the earlier reports the trial continued, so the scheduler had not stopped it there.
    """
    scheduler.join(origins)
    asked = undecided - origins.keys()
    for number in sorted(reports.keys() - asked):
        scheduler.replay(
            number, reports[number], repeats=origins.get(number), place=places.get(number)
        )
    found = {
        number: scheduler.replay(number, reports[number], place=places.get(number))
        for number in sorted(asked)
    }
    return {number: why for number, why in found.items() if why is not None}


_SEEDS = 2.0**63


def is_exempt(share: float, seed: int, place: int) -> bool:
    """Return whether a new trial is exempt; the same after each resume."""
    return derive_seed(seed, "exempt", place) < share * _SEEDS
