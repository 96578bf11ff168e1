"""What a driver trains besides the search: trials that train the point of another trial.

A command asks for an `ExtraTraining`, which the checks make a `PlannedExtra`; the driver stores
that in the ledger before it runs trials. Where later trials depend on earlier results, the ledger
keeps a `TrialSeries`, and a `SeriesAdder` adds its trials while the sweep runs. What a role counts
for says `ledger.attributes`. What must not live here: which trials are taken (the subclasses).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from sweeps.ledger.attributes import SERIES_MODULES, Role
from sweeps.ledger.trials import TrialRecord, TrialSummary, count_trials
from sweeps.paths import SweepPaths
from sweeps.reconcile.stop_criteria import StopCriterionMet, active_stop_criterion
from sweeps.spec.resume_checks import Origin
from sweeps.spec.spec import SweepSpec
from trainable.store.metrics_file import Row

if TYPE_CHECKING:  # it imports optuna, which takes half a second
    from sweeps.ledger.ledger import Ledger


class NewTrial(NamedTuple):
    """A trial to add."""

    role: Role
    origin: int
    """The number of the trial whose point it trains."""
    seed_index: int | None = None
    """The position of its common seed; None: it has the seed of its origin."""
    split: bool = False
    """Whether the common seed also decides how the task splits the data."""


@dataclass(frozen=True)
class SweepTrials:
    """A sweep whose spec may have been edited, what its ledger says, and what is still to train.

    Driver and views count by it.
    """

    paths: SweepPaths
    spec: SweepSpec
    trials: Sequence[TrialSummary]
    seconds: float
    """For how long the sweep has run its trials."""
    series: TrialSeries | None
    """The last series of extra trials."""

    @cached_property
    def stop(self) -> StopCriterionMet | None:
        """The stop criterion that ends the sweep before all trials have run; None if none does."""
        return active_stop_criterion(self.spec, self.trials, self.seconds)

    @cached_property
    def num_missing(self) -> int:
        """How many extra trials the series needs next that do not exist yet."""
        return 0 if self.series is None else len(self.series.missing(self.trials))

    @property
    def num_unstarted(self) -> int:
        """How many trials of the search do not exist yet, with all of their seeds."""
        count = count_trials(self.spec.num_trials, self.trials, self.spec.repeats.seeds)
        return count - len(self.trials)

    @property
    def num_left(self) -> int:
        """How many trials have not ended, or not started."""
        unfinished = sum(not trial.finished for trial in self.trials)
        return unfinished + (0 if self.stop else self.num_unstarted) + self.num_missing


@dataclass(frozen=True)
class PlannedExtra:
    """What a driver trains besides the search, after the checks."""

    store: Callable[[Ledger], object] = lambda _: None
    """Stores it in the ledger."""
    note: str = ""
    """What was asked for, in one line, for the revision of the spec."""
    warnings: Sequence[str] = ()
    trains: Collection[int] = ()
    """The trials whose points are trained."""
    num_new: int = 0
    """How many trials are added at most."""
    stores_origin: bool = False
    """Whether `store` also stores the origin of code and data, in the same transaction."""


@dataclass(frozen=True)
class ExtraTraining:
    """What a user asks a driver to train besides the search; here nothing."""

    only_extra: ClassVar[bool] = False
    """Whether the driver trains these trials, and none of the search."""
    reopens: ClassVar[bool] = False
    """Whether the chosen trials themselves become unfinished again."""

    def for_task(self, *, splits: bool) -> ExtraTraining:
        """Return it for a task that may split its samples by a seed of its own."""
        del splits
        return self

    def choose(self, sweep: SweepTrials) -> list[int]:
        """Return the trials that it takes, after the checks that need no lock."""
        del sweep
        return []

    @property
    def starts_over(self) -> bool:
        """Whether nothing is kept of what the chosen trials have trained."""
        return False

    def plan(
        self, sweep: SweepTrials, chosen: Sequence[int], origins: tuple[Origin, Origin]
    ) -> PlannedExtra:
        """Return what is trained; `origins`: code and data as stored, and as they are now."""
        del sweep, chosen, origins
        return PlannedExtra()


NO_EXTRA = ExtraTraining()


class SeriesResult(NamedTuple):
    """What a series of extra trials says, as far as it is."""

    kind: str
    title: str
    about: str
    """What was trained, and what the columns mean."""
    sentences: Sequence[str]
    """What was found, the most important first."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[int]
    """The trials that the data cannot tell apart from the best one; empty before the end."""
    compared: Mapping[int, Sequence[float]]
    """The values of each trial under the seeds that all of them have, in their order."""


class TrialSeries(Protocol):
    """Extra trials that are added in turns, because results decide which ones are needed.

    The stored request and the trials in the ledger alone decide, so that a resumed series ends as
    an uninterrupted one.
    """

    def missing(self, trials: Sequence[TrialSummary]) -> list[NewTrial]:
        """Return the trials that are needed next and do not exist yet."""

    def is_done(self, trials: Sequence[TrialSummary]) -> bool:
        """Return whether no trial is left to train."""

    def most(self, trials: Sequence[TrialSummary]) -> int:
        """Return how many trials are added from here on at most."""

    def check_unchanged(self, sweep: SweepTrials) -> None:
        """Check that a changed spec trains the rest of the series as it began."""

    def tags(self, trials: Sequence[TrialSummary]) -> Mapping[int | None, Mapping[str, str]]:
        """Return the tags at the end, by trial and for the sweep's own run (None)."""

    def rows(self, trials: Sequence[TrialSummary]) -> Mapping[int, Row]:
        """Return the metrics at the end, by trial."""

    def result(self, spec: SweepSpec, trials: Sequence[TrialSummary]) -> SeriesResult:
        """Return what it says."""


def read_series(stored: Mapping[str, Any] | None) -> TrialSeries | None:
    """Return the series that a ledger stores; None without one."""
    if stored is None:
        return None
    request = dict(stored)
    # It may import what stands above the driver, which knows it only by its role.
    module = import_module(SERIES_MODULES[request.pop("role")])
    series: TrialSeries = module.read_series(request)
    return series


def add_trials(ledger: Ledger, new: Sequence[NewTrial]) -> list[TrialRecord]:
    """Add trials in one transaction."""
    return ledger.transaction(
        lambda: [
            ledger.add_extra(one.role, one.origin, one.seed_index, split=one.split) for one in new
        ]
    )


class SeriesAdder:
    """Adds the next trials of a series when those before have ended."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        ends: Callable[[], int],
        flush: Callable[[], object],
        fence: Callable[[], None],
    ) -> None:
        self._ledger, self._series = ledger, read_series(ledger.series)
        self._ends, self._flush, self._fence = ends, flush, fence
        self._num_ends: int | None = None

    def __call__(self) -> list[TrialRecord]:
        """Add the trials that are needed next, and return them."""
        # Only the end of a trial calls for others, and reading thousands of them takes long.
        if self._series is None or self._num_ends == (ends := self._ends()):
            return []
        self._flush()
        self._num_ends = ends
        trials = self._ledger.trials()
        missing = self._series.missing(trials)
        if self._series.is_done(trials):
            self._series = None
        if not missing:
            return []
        self._fence()
        return add_trials(self._ledger, missing)
