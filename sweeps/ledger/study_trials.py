"""Read the trials of a sweep from its study; one that has not changed is not read again.

What must not live here: anything that writes a trial (`ledger.ledger`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from sweeps.ledger.attributes import (
    SELECT,
    repeats_in,
    reports_in,
    trial_fields,
)
from sweeps.ledger.over_seeds import with_seeds
from sweeps.ledger.ranking import front, value_of
from sweeps.ledger.sqlite import LedgerFile
from sweeps.ledger.storage import EditableRDBStorage
from sweeps.ledger.study_record import StudyRecord, translated
from sweeps.ledger.trials import TrialRecord
from sweeps.spec.sections import Select

_STATES: dict[TrialState, str] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


class StudyTrials(StudyRecord):
    """The trials of a sweep, as its study has them."""

    def __init__(
        self, location: LedgerFile, study: optuna.Study, storage: EditableRDBStorage
    ) -> None:
        super().__init__(location, study, storage)
        # Only this process writes, so that trials are read again which a method has looked up.
        self._known: dict[int, FrozenTrial] = {}
        self._looked_up: set[int] | None = None  # by Optuna's id; None: all are read
        self.minimizes = tuple(one == StudyDirection.MINIMIZE for one in study.directions)
        """For each metric, whether less is better."""
        self.select: Select = study.user_attrs.get(SELECT, "checkpoint")
        """What the values of the sweep's trials are; see `ranking.value_of`."""
        self.repeats = repeats_in(study.user_attrs)
        """How many seeds each configuration gets; None: one."""
        self.earlier_budgets: Collection[int] = ()
        """The reports of a full training under each revision of the spec. The driver sets it: a
        trial that is complete by one of them may be short for a later one."""

    @property
    def minimize(self) -> bool:
        """Whether less of the (first) metric is better."""
        return self.minimizes[0]

    @translated
    def trials(self) -> list[TrialRecord]:
        """Return all trials, in the order of their numbers."""
        return with_seeds([*map(self._record, self.frozen_trials())], self.repeats)

    @translated
    def frozen_trials(self) -> list[FrozenTrial]:
        """Return all trials as Optuna's objects, in the order of their numbers.

        A trial that has not changed since the last call is the same object.
        """
        if self._looked_up is None or self._looked_up:
            found = self._storage.read_trials(self._study_id, self._looked_up)
            self._known.update((trial.number, trial) for trial in found)
            self._looked_up = set()
        return list(self._known.values())

    @translated
    def trial(self, number: int) -> TrialRecord:
        """Return one trial by itself, with the value of its own training."""
        return self._record(self._storage.get_trial(self._id(number)))

    @translated
    def front(self) -> list[TrialRecord]:
        """Return the best trial, or with several metrics the Pareto front; see `ranking.front`."""
        return front(self.trials(), self.minimizes)

    def best(self) -> TrialRecord | None:
        """Return the best trial; None if there is none, or if the Pareto front has several."""
        best = self.front()
        return best[0] if len(best) == 1 else None

    @property
    def directions(self) -> list[StudyDirection]:
        """Whether less or more of each metric is better, as Optuna's type."""
        return self._study.directions

    def _id(self, number: int) -> int:
        storage = self._storage
        return self._look_up(
            storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        )

    def _look_up(self, trial_id: int) -> int:
        """Return an id of Optuna, whose trial may change from now on."""
        if self._looked_up is not None:
            self._looked_up.add(trial_id)
        return trial_id

    def _forget(self) -> None:
        self._known, self._looked_up = {}, None

    def _reports(self, trial: FrozenTrial) -> Mapping[int, Sequence[float]]:
        """Return the value of each metric after each reported epoch."""
        if len(self.minimizes) > 1:
            return reports_in(trial.user_attrs)
        return {epoch: (value,) for epoch, value in sorted(trial.intermediate_values.items())}

    def _record(self, trial: FrozenTrial) -> TrialRecord:
        several = self._reports(trial)
        reports = {epoch: values[0] for epoch, values in several.items()}
        values: tuple[float | None, ...]
        values = value_of(several, minimize=self.minimize, select=self.select) or (None,)
        return TrialRecord(
            number=trial.number,
            state=_STATES[trial.state],
            reports=reports,
            all_reports={e: tuple(one) for e, one in several.items()}
            if len(self.minimizes) > 1
            else {},
            value=values[0],
            others=tuple(value for value in values[1:] if value is not None),
            select=self.select,
            **trial_fields(dict(trial.params), trial.user_attrs, trial.datetime_complete),
        )
