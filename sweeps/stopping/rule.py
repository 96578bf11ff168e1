"""The interface of a stopping rule, as a spec, the driver, samplers and the report use it.

Each rule has its own module in this package, and `registry` lists all rules. Rules count reports.
An `epoch` in their names and parameters is a report: with a budget in epochs, each epoch ends with
one. What must not live
here: a particular rule, Ray, and the ledger. This package lies below `sweeps.spec`, so that the
rules can check a spec. Rules therefore receive plain numbers instead of a spec.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from sweeps.stopping.metric_values import Minimize, Value
from sweeps.stopping.pausing_rules import PausingRule
from trainable.config import Section


class TrialStopper(Protocol):
    """Decides after each report of a trial whether the trial stops.

    A driver that resumes a sweep builds a new stopper and calls `stops` with all past reports. The
    answers must depend on these calls alone, not on clocks or random numbers.
    """

    def stops(self, number: int, epoch: int, value: Value) -> str | None:
        """Record a report; return why its trial stops, or None if it continues.

        The reason follows the report's value in a sentence: "needed <= 0.5, rank 9 of 12".

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
