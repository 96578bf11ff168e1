"""The ledger: which trials exist, their parameters, intermediate values, states and attempts.

One Optuna study is the only record. A trial that is RUNNING in the study is unfinished, whether
or not a process is working on it; it keeps its number and parameters until it has one of
three ends. What must not live here: Ray, files of training runs, tracking.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from sweeps.config.provenance_check import Origin
from sweeps.ledger.location import LedgerLocation, as_place
from sweeps.ledger.reader import (
    ACCUMULATION,
    ATTEMPT,
    ENDED,
    GENERATION,
    LINEAGE,
    REPORT,
    SECONDS,
    SIGNALS,
    WARM_START,
    Ending,
    PbtPerturbation,
    TrialRecord,
    attempts_in,
    best_report,
    best_reports,
    front,
    is_finite,
    noted,
    reports_in,
)
from sweeps.ledger.storage import EditableRDBStorage, open_storage
from sweeps.ledger.suggestion import Suggestion
from sweeps.ledger.texts import clipped_reason, clipped_traceback
from sweeps.ledger.warm_start import WarmStart
from sweeps.paths import LedgerError
from trainable.config import Mode

__all__ = [
    "ACCUMULATION",
    "SIGNALS",
    "Ending",
    "Ledger",
    "LedgerError",
    "LedgerReport",
    "TrialRecord",
]


_STATES: dict[TrialState, str] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
_ENDINGS: dict[Ending, TrialState] = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


class LedgerReport(NamedTuple):
    """What a trial came to after an epoch.

    Attributes:
        epoch: Epochs completed.
        step: Optimizer steps taken.
        value: The (first) metric.
        others: The sweep's other metrics.
    """

    epoch: int
    step: int
    value: float
    others: Sequence[float] = ()


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _storing(
    method: Callable[Concatenate[Ledger, _P], _T],
) -> Callable[Concatenate[Ledger, _P], _T]:
    """Make errors of the storage below a method that reads errors of the ledger."""

    @functools.wraps(method)
    def wrapped(self: Ledger, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._turn, _clear_errors(self.place):
            return self._storage.look(lambda: method(self, *args, **kwargs))

    return wrapped


def _at_once(
    method: Callable[Concatenate[Ledger, _P], _T],
) -> Callable[Concatenate[Ledger, _P], _T]:
    """Make one transaction of all that a method stores: whoever dies in it leaves nothing of it,
    and the disk is waited for once. Errors become those of the ledger.
    """

    @functools.wraps(method)
    def wrapped(self: Ledger, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.transaction(lambda: method(self, *args, **kwargs))

    return wrapped


class Ledger:
    """A sweep's trials in an Optuna study.

    Every method may raise `LedgerBusy` when another process does not let go of it, and
    `LedgerError` when it cannot be used; those that write `LockLost`, when another driver may by
    now. Methods may be called from any thread; they take turns.

    Args:
        place: Where it is.
        study: The opened study.
        storage: The storage below the study.
    """

    def __init__(
        self, place: LedgerLocation, study: optuna.Study, storage: EditableRDBStorage
    ) -> None:
        self.place = place
        self._turn = threading.RLock()
        self._study = study
        self._storage = storage
        self._study_id = storage.get_study_id_from_name(study.study_name)
        # Also because the study's cache only knows trials that it has seen.
        trials = study.get_trials(deepcopy=False)
        self._ends = sum(trial.state.is_finished() for trial in trials)
        self.minimizes = tuple(one == StudyDirection.MINIMIZE for one in study.directions)
        """Of each metric, whether less is better."""

    @classmethod
    def create(
        cls, place: LedgerLocation | Path, *, mode: Mode | Sequence[Mode], sweep_id: str
    ) -> Ledger:
        """Create an empty ledger.

        Args:
            place: Where it is; a path stands for the file there.
            mode: Whether less or more of the metric is better; one for each of several.

        Raises:
            LedgerError: There is one already.
        """
        modes = [mode] if isinstance(mode, str) else mode
        directions = [
            StudyDirection.MINIMIZE if one == "min" else StudyDirection.MAXIMIZE for one in modes
        ]
        place = as_place(place)
        with _clear_errors(place):
            storage = open_storage(place)

            def create() -> optuna.Study:
                study = optuna.create_study(
                    storage=storage, study_name=place.study, directions=directions
                )
                study.set_user_attr("sweep_id", sweep_id)
                for key, value in place.notes.items():
                    study.set_user_attr(key, value)
                return study

            try:
                study = storage.transact(create)
            except optuna.exceptions.DuplicatedStudyError:
                raise LedgerError(f"{place} already holds a ledger") from None
            return cls(place, study, storage)

    @classmethod
    def open(cls, place: LedgerLocation | Path) -> Ledger:
        """Open an existing ledger. One that is damaged is left as it is.

        Raises:
            LedgerError: There is none, or it is not readable as one.
        """
        place = as_place(place)
        with _clear_errors(place):
            # Asked before Optuna is, which would make tables of its own in a file that lost them.
            if place.num_trials() is None:
                raise place.damaged("it holds no study")
            try:
                storage = open_storage(place)
                study = optuna.load_study(storage=storage, study_name=place.study)
                return cls(place, study, storage)
            except (SQLAlchemyError, LedgerError):
                raise
            except Exception as error:  # a flipped bit may surface in any decoder below
                if isinstance(error, optuna.exceptions.StorageInternalError):
                    raise
                raise place.damaged(f"{type(error).__name__}: {error}") from error

    def transaction(self, work: Callable[[], _T]) -> _T:
        """Store all that is stored within, or nothing of it; the disk is waited for once.

        Args:
            work: May be done again, where a database went away meanwhile.
        """
        with self._turn, _clear_errors(self.place):
            return self._storage.transact(work)

    @property
    @_storing
    def sweep_id(self) -> str:
        """The sweep's identity, by which tracking finds its runs again."""
        return str(self._study.user_attrs["sweep_id"])

    @property
    @_storing
    def origin(self) -> Origin:
        """What the sweep's trials were run from."""
        attributes = self._study.user_attrs
        return Origin(**attributes.get("origin", {}), samples=attributes.get("samples", {}))

    @_at_once
    def note_origin(self, origin: Origin) -> None:
        """Note what trials are run from now on."""
        before = self.origin
        if (origin.code, origin.data) != (before.code, before.data):
            self._study.set_user_attr("origin", {"code": dict(origin.code), "data": origin.data})
        if origin.samples != before.samples:  # apart: databases bound the length of a value
            self._study.set_user_attr("samples", dict(origin.samples))

    @property
    @_storing
    def attempts(self) -> list[dict[str, str]]:
        """From where and with what each driver of the sweep ran it, as tags."""
        return attempts_in(self._study.user_attrs)

    @_at_once
    def note_attempt(self, tags: Mapping[str, str]) -> None:
        """Note from where and with what a driver runs the sweep."""
        number = len(self.attempts) + 1
        self._study.set_user_attr(f"{ATTEMPT}{number}", dict(tags))

    @property
    @_storing
    def concluded(self) -> int:
        """How many trials the sweep had when its best was last published; 0 before."""
        return int(self._study.user_attrs.get("concluded", 0))

    @_at_once
    def mark_published(self) -> None:
        """Note that everything about the trials so far has been handed to tracking."""
        self._study.set_user_attr("concluded", len(self.trials()))

    @property
    @_storing
    def seconds(self) -> float:
        """How long the sweep's trials have been run, by all drivers together."""
        return float(self._study.user_attrs.get(SECONDS, 0.0))

    @_at_once
    def note_seconds(self, seconds: float) -> None:
        """Note how long the sweep's trials have been run by now."""
        self._study.set_user_attr(SECONDS, round(seconds, 3))

    @property
    def minimize(self) -> bool:
        """Of the (first) metric, whether less is better."""
        return self.minimizes[0]

    @_storing
    def trials(self) -> list[TrialRecord]:
        """All trials, in the order of their numbers."""
        return [self._record(trial) for trial in self._study.get_trials(deepcopy=False)]

    @_storing
    def frozen_trials(self) -> list[FrozenTrial]:
        """All trials as Optuna has them, for what it draws of them."""
        return self._study.get_trials(deepcopy=False)

    @_storing
    def trial(self, number: int) -> TrialRecord:
        """One trial.

        Raises:
            KeyError: There is no trial of that number.
        """
        return self._record(self._storage.get_trial(self._id(number)))

    @_storing
    def front(self) -> list[TrialRecord]:
        """The best trial, or with several metrics the Pareto front; see `ledger_view.front`."""
        return front(self.trials(), self.minimizes)

    def best(self) -> TrialRecord | None:
        """The trial that is the best; None when none is complete, or several are."""
        best = self.front()
        return best[0] if len(best) == 1 else None

    @property
    @_storing
    def warm_start(self) -> WarmStart:
        """What the sweep was given of earlier ones when it was created."""
        attributes = self._storage.get_study_system_attrs(self._study_id)
        return WarmStart.from_data(attributes.get(WARM_START))

    @_at_once
    def note_warm_start(self, warm: WarmStart) -> None:
        """Note what a new sweep is given of earlier ones."""
        self._storage.set_study_system_attr(self._study_id, WARM_START, warm.to_data())

    @property
    def directions(self) -> list[StudyDirection]:
        """Whether less or more of the metric is better, as Optuna has it."""
        return self._study.directions

    @_at_once
    def add(self, proposal: Suggestion) -> TrialRecord:
        """Create the next trial, with its parameters, in one transaction."""
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=dict(proposal.params),
            distributions=dict(proposal.distributions),
            system_attrs=dict(proposal.notes),
        )
        trial_id = self._storage.create_new_trial(self._study_id, template_trial=trial)
        return self._record(self._storage.get_trial(trial_id))

    @_at_once
    def complete(self, number: int, proposal: Suggestion) -> TrialRecord:
        """Store the parameters that a trial lacks."""
        known = self._storage.get_trial(self._id(number)).params
        for name, distribution in proposal.distributions.items():
            if name not in known:
                value = distribution.to_internal_repr(proposal.params[name])
                self._storage.set_trial_param(self._id(number), name, value, distribution)
        return self.trial(number)

    @_at_once
    def start(self, number: int) -> int:
        """Count an attempt at a trial.

        Returns:
            The attempt's number, from 1.
        """
        attempts = self._attempts(self._storage.get_trial(self._id(number))) + 1
        self._storage.set_trial_user_attr(self._id(number), "attempts", attempts)
        return attempts

    def report(
        self, number: int, *, epoch: int, step: int, value: float, others: Sequence[float] = ()
    ) -> None:
        """Record the metric after an epoch. A repeated epoch is left as it was first told."""
        self.report_all(number, [LedgerReport(epoch, step, value, others)])

    @_at_once
    def report_all(self, number: int, reports: Iterable[LedgerReport]) -> None:
        """Record several reports, or none of them."""
        for report in reports:
            self._report(number, *report)

    def _report(
        self, number: int, epoch: int, step: int, value: float, others: Sequence[float]
    ) -> None:
        trial = self._storage.get_trial(self._id(number))
        known = self._reports(trial)
        if epoch in known or trial.state.is_finished():
            return
        progress = {**trial.user_attrs.get("progress", {}), "step": step, "epoch": epoch}
        before = [values[0] for values in known.values() if is_finite(values)]
        # NaN and infinity are never best; of equals the earlier stays it.
        if is_finite((value, *others)) and all(
            value < other if self.minimize else value > other for other in before
        ):
            progress |= {"best_step": step, "best_epoch": epoch}
        self._storage.set_trial_user_attr(self._id(number), "progress", progress)
        if others:
            self._storage.set_trial_user_attr(
                self._id(number), f"{REPORT}{epoch}", [value, *others]
            )
        else:
            self._storage.set_trial_intermediate_value(self._id(number), epoch, value)

    @_at_once
    def set_attr(self, number: int, key: str, value: Any) -> None:
        """Keep something about a trial that is neither a parameter nor a result."""
        self._storage.set_trial_user_attr(self._id(number), key, value)

    @property
    @_storing
    def generation(self) -> int:
        """The epoch at which a population last decided who goes on from whom; 0 before."""
        return int(self._study.user_attrs.get(GENERATION, 0))

    @_at_once
    def mutate(self, epoch: int, mutations: Mapping[int, PbtPerturbation]) -> None:
        """Note what a population decided at an epoch, all of it or nothing.

        Args:
            epoch: Where all members wait.
            mutations: By number, how those that do not go on as they were go on.
        """
        for number, mutation in mutations.items():
            lineage = [*self.trial(number).lineage, mutation]
            self._storage.set_trial_user_attr(self._id(number), LINEAGE, lineage)
        self._storage.set_study_user_attr(self._study_id, GENERATION, epoch)

    @_at_once
    def take_back_mutation(self, number: int) -> None:
        """Forget a member's last mutation, which nobody can carry out: it goes on as it was."""
        lineage = self.trial(number).lineage[:-1]
        self._storage.set_trial_user_attr(self._id(number), LINEAGE, lineage)

    @_at_once
    def finish(
        self,
        number: int,
        ending: Ending,
        *,
        reason: str | None = None,
        traceback: str | None = None,
        lineage: Sequence[PbtPerturbation] | None = None,
    ) -> TrialRecord:
        """Give a trial its one end; the first one stays.

        A complete trial's value is its best reported one, which is the value of its best
        checkpoint; of several metrics, the values that this one report had.

        Args:
            lineage: How it changed, where that is less than was decided; None: as it was decided.

        Returns:
            The trial with its end.
        """
        record = self.trial(number)
        if record.finished:
            return record
        if lineage is not None and tuple(lineage) != record.lineage:
            self._storage.set_trial_user_attr(self._id(number), LINEAGE, list(lineage))
        if reason is not None:
            self._storage.set_trial_user_attr(self._id(number), "reason", clipped_reason(reason))
        if traceback is not None:
            self._storage.set_trial_user_attr(
                self._id(number), "traceback", clipped_traceback(traceback)
            )
        self._ends += 1  # of a transaction that fails a number is left out
        self._storage.set_trial_user_attr(self._id(number), ENDED, self._ends)
        value = record.result if ending == "complete" else None
        return self._record(self._study.tell(number, value, state=_ENDINGS[ending]))

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    @staticmethod
    def _attempts(trial: FrozenTrial) -> int:
        return int(trial.user_attrs.get("attempts", 0))

    def _reports(self, trial: FrozenTrial) -> Mapping[int, Sequence[float]]:
        """The value of each metric after each reported epoch."""
        if len(self.minimizes) > 1:
            return reports_in(trial.user_attrs)
        return {epoch: (value,) for epoch, value in sorted(trial.intermediate_values.items())}

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        several = self._reports(trial)
        reports = {epoch: values[0] for epoch, values in several.items()}
        best: tuple[float | None, ...] = (best_report(reports.values(), minimize=self.minimize),)
        if len(self.minimizes) > 1:
            best = best_reports(several, minimize=self.minimize) or (None,)
        return TrialRecord(
            number=trial.number,
            state=_STATES[trial.state],
            reports=reports,
            value=best[0],
            others=tuple(value for value in best[1:] if value is not None),
            ended_at=trial.datetime_complete,
            **noted(dict(trial.params), trial.user_attrs),
        )


@contextlib.contextmanager
def _clear_errors(place: LedgerLocation) -> Iterator[None]:
    try:
        yield
    except LedgerError:
        raise
    except Exception as error:
        known = (optuna.exceptions.StorageInternalError, SQLAlchemyError, *place.errors)
        if not isinstance(error, known):
            raise
        raise place.refusal(error) from error
