"""A trial as the ledger has it: its fields, and what follows from them.

What must not live here: how it is read (`reader`), and which trial is the best (`ranking`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeVar

from sweeps.ledger.attributes import COUNTED, ORIGIN_COLUMNS, PbtPerturbation, Role
from sweeps.ledger.failed_attempts import FailedAttempt, Reopened
from sweeps.ledger.over_seeds import OverSeeds, num_missing
from sweeps.spec.sections import Select
from sweeps.spec.trial_run import TrialSeed
from sweeps.statistics.feasibility import Limits
from sweeps.stopping.metric_values import Value

NO_LIMITS = Limits()
Ending = Literal["complete", "pruned", "failed"]
ENDINGS: tuple[Ending, ...] = ("complete", "pruned", "failed")
STATES = {
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}
"""A trial's state by the name of Optuna's."""


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """One trial in the ledger, without its curve."""

    number: int
    state: str
    """`waiting`, `running`, `complete`, `pruned` or `failed`."""
    params: dict[str, Any]
    """Its current parameters; for a population, those of the last change."""
    value: float | None
    """Its value of the (first) metric, as `value_of` defines it; None before the first report."""
    others: tuple[float, ...] = ()
    """The sweep's other metrics in the report of `value`: all belong to one checkpoint."""
    limited: tuple[float, ...] = ()
    """The metrics that only have limits, in the same report."""
    limits: Limits = NO_LIMITS
    """The sweep's limits on reported metrics."""
    select: Select = "checkpoint"
    """What the values of the sweep's trials are."""
    started_at: datetime | None = None
    """When a worker first started it, in local time; None: never."""
    ended_at: datetime | None = None
    """When its end was recorded, in local time."""
    seconds: float | None = None
    """For how long workers trained it, all attempts together; None: none did yet."""
    cpu_seconds: float | None = None
    """Its seconds times the CPUs that it had, attempt by attempt; None: none trained yet."""
    gpu_seconds: float | None = None
    """The same for its GPUs or its share of one; 0 on CPUs."""
    finish_order: int = 0
    """Its position in the order of ends, from 1; 0 before its end."""
    attempts: int = 0
    reason: str | None = None
    traceback: str | None = None
    step: int = 0
    epoch: int = 0
    best_step: int | None = None
    """The step of `value`'s report: the best one, or the last one with `select: final`."""
    best_epoch: int | None = None
    signals: tuple[str, ...] | None = None
    """The health signals of its last report, in sentences; None if it never had any."""
    lacks_model: bool = False
    """Whether its checkpoints have no model: those of a custom loop that yields none."""
    lost_workers: tuple[str, ...] = ()
    """Why workers were lost that another one replaced, the earliest first."""
    accumulation: int | None = None
    """Micro-batches per step, if the configured number needed too much memory."""
    suggested: dict[str, Any] = field(default_factory=dict)
    """Its first parameters."""
    lineage: tuple[PbtPerturbation, ...] = ()
    """The changes of its parameters during training, the earliest first."""
    role: Role = "search"
    origin: int | None = None
    """The number of the trial whose point it trains; None for a trial of the search."""
    seed_index: int | None = None
    """The position of its common seed, from 0; None: its seed is its own."""
    split: bool = False
    """Whether its common seed also decides how the task splits the data."""
    stored_place: int | None = None
    """Its `place`, if it is not its number."""
    promoted_at: int | None = None
    """The report of the rung from which it was last promoted; None: from none."""
    exempt: bool = False
    """Whether it is exempt from early stopping; see `early_stopping.exempt`."""
    would_stop_at: int | None = None
    """The report at which it would have been stopped if it were not exempt; None: at none."""
    would_stop_reason: str | None = None
    """Why it would have been stopped there."""
    from_priors: bool = False
    """Whether its values were drawn around priors instead of by the sampler."""
    failed_attempts: tuple[FailedAttempt, ...] = ()
    """The failures after which it was run again, the earliest first."""
    reopened: Reopened | None = None
    """What is still to be done before it may train again; None: nothing."""
    over_seeds: OverSeeds | None = None
    """Its configuration, if the sweep has `repeats` and this is the first seed. `value` and
    `others` are then those of the configuration."""

    @property
    def finishes(self) -> int | None:
        """The number of the trial that it trains on, to its end; None: it finishes none."""
        return self.origin if self.role == "finish" else None

    @property
    def origins(self) -> dict[str, int | None]:
        """Its origin by the column of its role; None in the columns of the other roles."""
        return {
            column: self.origin if self.role == role else None
            for role, column in ORIGIN_COLUMNS.items()
        }

    @property
    def search_number(self) -> int:
        """The number of the search's trial that has its point: its own, or its origin's."""
        return self.number if self.origin is None else self.origin

    @property
    def place(self) -> int:
        """The number that it, or its origin, would have if all trials were of the search.

        Seed, exemption and bracket follow from it, so that a search goes on as if there were no
        extra trials.
        """
        return self.search_number if self.stored_place is None else self.stored_place

    @property
    def seed(self) -> TrialSeed:
        """What its seed is derived from; a trial that finishes another one has that one's."""
        if self.seed_index is None:
            return TrialSeed("trial", self.place)
        # The first seed of a configuration is of the search, and so is one that is finished.
        purpose = "repeat" if self.role in (*COUNTED, "repeat") else self.role
        return TrialSeed(purpose, self.seed_index, self.split)

    @property
    def finished(self) -> bool:
        return self.state in ENDINGS

    @property
    def settled(self) -> bool:
        """Whether it has ended, and all seeds of its configuration have."""
        return self.finished and (self.over_seeds is None or self.over_seeds.state != "running")

    @property
    def has_result(self) -> bool:
        """Whether it counts among the best.

        With `repeats`, a configuration counts once all of its seeds have trained to their end, and
        its first seed stands for it.
        """
        if self.over_seeds is not None:
            return self.over_seeds.state == "complete"
        return self.role in COUNTED and has_result(self.state, self.select)

    @property
    def has_result_so_far(self) -> bool:
        """Whether it counts among the best so far: ended with a result, or likely to.

        Its best report already has a checkpoint; its last value is not yet that of `final`.
        """
        unended = not self.finished and self.over_seeds is None and self.role in COUNTED
        return self.has_result or (unended and self.select == "checkpoint")

    @property
    def ended_ms(self) -> int | None:
        """When its end was recorded, in milliseconds since the Unix epoch."""
        return None if self.ended_at is None else round(self.ended_at.timestamp() * 1000)

    def params_at(self, epoch: int) -> dict[str, Any]:
        """Return the parameters with which it trained an epoch, counted from 1."""
        before = [one.params for one in self.lineage if one.epoch < epoch]
        return before[-1] if before else self.suggested

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of `value`'s report."""
        return self.params if self.best_epoch is None else self.params_at(self.best_epoch)

    @property
    def values(self) -> tuple[float, ...]:
        """The value of each metric; none before the first report."""
        return () if self.value is None else (self.value, *self.others)

    @property
    def feasible(self) -> bool | None:
        """Whether its values satisfy all limits; None without limits or without a value."""
        return None if not self.limits or self.value is None else not self.violation

    @property
    def violation(self) -> float:
        """By how much it misses its limits in all; see `Limits.violation`."""
        return self.limits.violation(self.judged) if self.judged else 0.0

    @property
    def judged(self) -> tuple[float, ...]:
        """What its limits judge: the values of all reported metrics; none before a report."""
        return (*self.values, *self.limited) if self.values else ()

    @property
    def missed(self) -> str:
        """Which limits it misses, in words; empty if it is feasible."""
        return self.limits.sentence(self.judged) if self.judged else ""

    @property
    def own_value(self) -> float | None:
        """The value of this training alone, whatever other seeds its configuration has."""
        if self.over_seeds is None:
            return self.value
        return self.over_seeds.own[0] if self.over_seeds.own else None

    @property
    def result(self) -> float | list[float] | None:
        """The value as messages show it: a number, or a list for several metrics."""
        return [*self.values] if self.others else self.value

    @property
    def best_word(self) -> str:
        """What the best trial is called: one that has not ended is the best so far."""
        return "best" if self.finished else "best so far"


@dataclass(frozen=True, kw_only=True)
class TrialRecord(TrialSummary):
    """One trial with its curve."""

    reports: dict[int, float]
    """The (first) metric after each reported epoch."""
    all_reports: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """With several metrics, or with metrics that only have limits, all of them after each reported
    epoch; else empty."""

    @property
    def compared_reports(self) -> dict[int, Value]:
        """The reports by which early stopping compares it with other trials.

        An exempt trial counts as if it had ended where it would have been stopped.
        """
        found: Mapping[int, Value] = self.all_reports or self.reports
        end = self.would_stop_at
        return {epoch: one for epoch, one in found.items() if end is None or epoch <= end}


Trial = TypeVar("Trial", bound=TrialSummary)


def of_search(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials of the search, without those that train the point of another trial.

    `trials` of the spec counts these, and samplers, stopping rules and stop criteria receive only
    these. So a sweep decides the same whether or not a pruned trial was trained to its end.
    """
    return [trial for trial in trials if trial.role == "search"]


def places(trials: Iterable[TrialSummary]) -> dict[int, int]:
    """Return the place of each trial of the search, by its number."""
    return {trial.number: trial.place for trial in of_search(trials)}


def count_trials(spec_trials: int, trials: Sequence[TrialSummary], seeds: int = 1) -> int:
    """Return how many trials a sweep has when it is complete, with the extra ones.

    With several seeds it is the most that the sweep can have: a configuration that is stopped gets
    no further seeds, and the number then becomes smaller.
    """
    num_new = max(0, spec_trials - len(of_search(trials)))
    return len(trials) + num_missing(trials, seeds) + seeds * num_new


def has_result(state: str, select: Select) -> bool:
    """Return whether a trial in this state counts among the best.

    Each new best value is saved in a checkpoint, so a pruned trial has one like a complete trial.
    The last value of a pruned trial is not that of a whole training, so `final` leaves it out. A
    running trial may still change, and the result of a failed one may be wrong.
    """
    return state == "complete" or (state == "pruned" and select == "checkpoint")
