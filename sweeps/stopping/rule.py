"""The interface of stopping rules and of rules that pause, and the rule `none`.

Each other rule has its own module in this package, and `registry` lists all rules. Rules count
reports. An `epoch` in their names and parameters is a report: with a budget in epochs, each epoch
ends with one. What must not live here: Ray, and the ledger. This package lies below `sweeps.spec`,
so that the rules can check a spec. Rules therefore receive plain numbers instead of a spec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from sweeps.statistics.feasibility import Limits
from sweeps.stopping.metric_values import Minimize, Value, all_values, as_value
from trainable.config import Section

if TYPE_CHECKING:
    from sweeps.spec.spec import SweepSpec


class TrialStopper(Protocol):
    """Decides after each report of a trial whether the trial stops.

    A driver that resumes a sweep builds a new stopper and calls `stops` with all past reports. The
    answers must depend on these calls alone, not on clocks or random numbers.
    """

    def stops(self, number: int, epoch: int, value: Value) -> str | None:
        """Record a report; return why its trial stops, or None if it continues.

        The reason follows the report's value in a sentence: "needed at most 0.5, rank 9 of 12".

        Args:
            number: The trial's number.
            epoch: How many reports the trial has made.
            value: The metric at the last one, or all values of several; NaN or infinite, perhaps.
        """


class StoppingRule(Section):
    """Base of the stopping rules. The fields of a rule are its parameters in a spec.

    A rule overrides `make_stopper` (it stops running trials), `pausing` (its trials pause and
    are promoted), or neither (every trial trains to the end).
    """

    name: ClassVar[str]
    """What `early_stopping.scheduler` calls the rule."""
    description: ClassVar[str]
    """What the rule does: the rest of a sentence that begins with the rule's name."""
    decides_per_report: ClassVar[bool] = False
    """Whether the rule may stop a running trial after any report. Reports are then not batched."""
    needs_one_metric: ClassVar[bool] = True
    """Whether the rule compares trials by one number, so that a sweep has a single metric."""
    first_epoch_key: ClassVar[str | None] = None
    """The parameter with the first report at which the rule decides, below those of the budget."""
    is_population: ClassVar[bool] = False
    """Whether trials continue from each other's checkpoints."""
    models_gains: ClassVar[bool] = False
    """For a population: whether a model of past gains chooses the new hyperparameters."""
    rungs_note: ClassVar[str] = ""
    """A sentence for readers of the figure of rungs; may be empty."""

    def rungs(self, epochs: int) -> tuple[int, ...]:
        """Return the epochs at which the rule compares trials, ascending; none by default.

        Args:
            epochs: The reports of a full run. Every rung lies below it.
        """
        del epochs
        return ()

    def first_rung(self, number: int, epochs: int) -> int:
        """Return the index of a trial's first rung in `(*rungs(epochs), epochs)`.

        Args:
            number: The trial's number.
            epochs: The reports of a full run.
        """
        del number, epochs
        return 0

    def no_rungs_reason(self) -> str:
        """Return why a sweep has no figure of rungs; called only if the rule has no rungs."""
        return f"{self.name} has no rungs"

    def comparable_epochs(self, epochs: int) -> tuple[int, ...]:
        """Return the epochs at which a sampler may compare trials of different lengths.

        The last of them is the budget. If there are none, the sampler receives each trial with its
        own last value.

        Args:
            epochs: The reports of a full run.
        """
        del epochs
        return ()

    def pausing(self, *, epochs: int, minimize: Minimize, num_trials: int) -> PausingRule | None:
        """Return when trials pause and which one is promoted next; None: no trial pauses.

        Args:
            epochs: The reports of a full run.
            minimize: Whether less is better; with several metrics, for each.
            num_trials: How many trials the sweep will have.
        """
        del epochs, minimize, num_trials
        return None

    def make_stopper(self, *, epochs: int, minimize: Minimize) -> TrialStopper | None:
        """Return an object that decides after each report; None: the rule stops no running trial.

        Args:
            epochs: The reports of a full run.
            minimize: Whether less is better; with several metrics, for each.
        """
        del epochs, minimize
        return None

    def missing_package(self) -> str | None:
        """Return which package is missing and how to install it; None if none is missing."""
        return None


Reports = Mapping[int, Mapping[int, Value]]
"""By trial, the metric after each reported epoch, or with several metrics or limits all values."""


class Standing(NamedTuple):
    """What a sweep knows of its trials when it decides which go on.

    Attributes:
        reports: The reports of all trials, including finished ones.
        unfinished: The trials that have not ended.
        live: Those of them that go on from their last report: they run, were promoted, or a driver
            has let them go on.
        exempt: The trials that are exempt from early stopping.
        complete: The trials that have trained to their end. It may lie before the budget: by
            `patience`, or because a loop of the user ends by itself.
    """

    reports: Reports
    unfinished: Set[int]
    live: Set[int] = frozenset()
    exempt: Set[int] = frozenset()
    complete: Set[int] = frozenset()


StopDecider = Callable[[Standing], Mapping[int, str]]
"""Returns which unfinished trials stop at their last report, and why, as the driver would have
decided that died. An exempt trial would stop there."""


@dataclass(frozen=True, kw_only=True)
class PausingRule(ABC):
    """The rungs of a sweep whose trials pause at each one until they are promoted.

    A pausing rule keeps no state between two calls. A driver that resumes a sweep therefore
    decides as the earlier driver did.

    Attributes:
        rungs: Epochs at which a trial pauses, ascending.
        minimize: Whether less is better; with several metrics, for each.
        num_trials: How many trials the sweep will have.
    """

    rungs: tuple[int, ...]
    minimize: Minimize
    num_trials: int

    def pause_at_epoch(self, epoch: int) -> int | None:
        """Return the next rung after an epoch; None: the trial trains to the end."""
        return next((rung for rung in self.rungs if rung > epoch), None)

    def pauses_at(self, reports: Mapping[int, Value]) -> bool:
        """Return whether an unfinished trial with these reports waits for its promotion."""
        return max(reports, default=0) in self.rungs

    @abstractmethod
    def next_promotion(self, now: Standing) -> int | None:
        """Return the trial that resumes next; None while all trials must wait."""

    @abstractmethod
    def never_promoted(self, now: Standing) -> frozenset[int]:
        """Return the trials that can no longer be promoted, given that no trial is running."""


def minimize_of(spec: SweepSpec) -> Minimize:
    """Return whether less of the metric is better; with several metrics, for each."""
    lows = tuple(mode == "min" for mode in spec.modes)
    return lows if len(lows) > 1 else lows[0]


class JudgingStopper:
    """Ask a rule about each report as `Limits.compared` has it: feasible before infeasible."""

    def __init__(self, rule: TrialStopper, limits: Limits, minimize: Minimize) -> None:
        self.rule, self._limits, self._minimize = rule, limits, minimize

    def stops(self, number: int, epoch: int, value: Value) -> str | None:
        """Record a report; return why its trial stops, or None if it continues."""
        why = self.rule.stops(number, epoch, judged(value, self._limits, self._minimize))
        if why is None:
            return None
        missed = self._limits.sentence(all_values(value))
        return f"infeasible ({missed}), {why}" if missed else why


def judged(value: Value, limits: Limits, minimize: Minimize) -> Value:
    """Return a report, of all reported metrics, as rules compare it."""
    if not limits:
        return value
    lows = minimize if isinstance(minimize, tuple) else (minimize,)
    return as_value(limits.compared(all_values(value), lows))


def judged_reports(reports: Reports, spec: SweepSpec) -> Reports:
    """Return reports as rules compare them."""
    limits, minimize = spec.limits, minimize_of(spec)
    if not limits:
        return reports
    return {
        number: {epoch: judged(value, limits, minimize) for epoch, value in mine.items()}
        for number, mine in reports.items()
    }


def judging(stopper: TrialStopper, spec: SweepSpec) -> TrialStopper:
    """Return a stopper that knows the limits of a sweep."""
    limits = spec.limits
    return JudgingStopper(stopper, limits, minimize_of(spec)) if limits else stopper


def make_pausing_rule(spec: SweepSpec) -> PausingRule | None:
    """Return when the trials of a sweep pause and which is promoted; None: no trial pauses."""
    return spec.early_stopping.rule.pausing(
        epochs=spec.budget.reports,
        minimize=minimize_of(spec),
        num_trials=spec.num_trials,
    )


class NoStopping(StoppingRule):
    """Let every trial finish. It is the rule of a spec without the section `early_stopping`."""

    name: ClassVar[str] = "none"
    description: ClassVar[str] = "lets every trial finish."
    needs_one_metric: ClassVar[bool] = False

    def no_rungs_reason(self) -> str:
        """Return that no trial is stopped."""
        return "this sweep stops no trial early"
