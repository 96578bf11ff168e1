"""How a sweep ended: the best trials, why it failed, and what is left to do.

What must not live here: finding that out (`sweep_view`, `run.finalize`), and text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.ledger.ranking import closest
from sweeps.ledger.reasons import kind_of
from sweeps.ledger.trials import TrialSummary
from sweeps.reconcile.failure_policy import INFRASTRUCTURE_FAILURES, is_fixable, remedy
from sweeps.reconcile.stop_criteria import StopCriterionMet
from sweeps.spec.resume_checks import FIXED
from sweeps.spec.spec import SweepSpec
from tracking.notifications import Undelivered
from trainable.errors import ConfigError

INFEASIBLE = "infeasible"
"""The kind of the failure of a sweep without a feasible trial."""


@dataclass(frozen=True)
class SweepFailure:
    """Why no trial succeeded, or why the sweep stopped itself."""

    cause: str
    """The cause, in one line."""
    trial: int | None = None
    """The number of a trial that failed for it."""
    kind: str | None = None
    """The kind of the failure."""
    is_aborted: bool = False
    """Whether the sweep stopped itself, because each further trial repeats the failure."""

    @property
    def remedy(self) -> str:
        """What to change before the sweep continues."""
        return remedy(self.kind)

    @property
    def is_of_the_task(self) -> bool:
        """Whether trials failed for it that may succeed once the cause is removed."""
        return (
            self.kind is not None
            and self.kind not in INFRASTRUCTURE_FAILURES
            and is_fixable(f"{self.kind}:")
        )

    @property
    def needs_new_sweep(self) -> bool:
        """Whether the cause is a key that a resume may not change."""
        return any(f": {ConfigError.kind}: {key}: " in self.cause for key in FIXED)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a later `sync` or `resume` delivers."""

    records: int = 0
    """Records that were not delivered to the tracking server yet."""
    weights: str | None = None
    """Why the best weights are published only by the next resume."""
    notifications: Undelivered | None = None
    """The notifications that wait for the webhook; None if none does."""


@dataclass(frozen=True, kw_only=True)
class SweepOutcome:
    """How a sweep ended, and what can be done next."""

    exit_code: int
    metrics: Sequence[str] = ()
    """The metrics by which the best trials were chosen."""
    best: Sequence[TrialSummary] = ()
    """The best trial; with several metrics the Pareto front. Empty when none succeeded."""
    num_retryable: int = 0
    """How many trials failed for another reason than their parameters: `--retry` takes them."""
    can_finish: bool = False
    """Whether the best trial is a pruned one that `--finish` can train to its end."""
    lost_weights: str | None = None
    """Why there are no weights of the best trial."""
    num_trials: int
    """How many trials the search has; those that finish a pruned one do not count."""
    max_trials: int = 0
    """To how many trials a resume can extend the sweep; `num_trials` if it cannot grow."""
    num_left: int = 0
    """Trials that have not ended, or not started."""
    stop: StopCriterionMet | None = None
    """The criterion that ended the sweep before all of its trials ran."""
    failure: SweepFailure | None = None
    waiting: Waiting = Waiting()

    @property
    def grows(self) -> bool:
        """Whether a resume can add trials."""
        return self.max_trials > self.num_trials

    @property
    def needs_new_sweep(self) -> bool:
        """Whether no trial succeeded because of a key that a resume may not change."""
        return not self.best and self.failure is not None and self.failure.needs_new_sweep


def num_retryable(spec: SweepSpec, records: Sequence[TrialSummary]) -> int:
    """Return how many trials `sweep resume --retry` is offered for."""
    if spec.early_stopping.rule.is_population:
        return 0
    return sum(one.state == "failed" and is_fixable(one.reason) for one in records)


def infeasible_sentence(near: TrialSummary) -> str:
    """Return by how much the closest trial misses the limits."""
    return f"no trial is feasible; the closest is trial {near.number}: {near.missed}"


def find_failure(records: Sequence[TrialSummary]) -> SweepFailure:
    """Return why no trial succeeded: none is feasible, or the reason of the last failed trial."""
    if (near := closest(records)) is not None:
        return SweepFailure(infeasible_sentence(near), near.number, INFEASIBLE)
    failed = [record for record in records if record.state == "failed"]
    if not failed:
        return SweepFailure("no trial succeeded")
    count, last = len(failed), failed[-1]
    who = (
        f"no trial succeeded, {count} failed; trial {last.number}"
        if count > 1
        else "the trial failed"
    )
    return SweepFailure(f"{who}: {last.reason}", last.number, kind_of(last.reason or ""))
