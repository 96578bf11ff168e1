"""The parts of Optuna's `RDBStorage` that the ledger's storage changes.

What must not live here: transactions, and what is cached of a trial (`ledger.storage`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Set
from typing import Any, ClassVar

import optuna
import optuna.storages._rdb.storage as rdb
import sqlalchemy
from optuna.distributions import BaseDistribution
from optuna.storages._rdb.models import (
    TrialIntermediateValueModel,
    TrialModel,
    TrialUserAttributeModel,
)
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.orm import Session

# Optuna finds a trial by its number a dozen times in a trial's life, and reads all trials of the
# study for it. It creates this index with its tables.
sqlalchemy.Index("gradsweep_trial_numbers", TrialModel.study_id, TrialModel.number)


class _VersionManager(rdb._VersionManager):
    """Import Optuna's migrations once per process, to learn the newest revision of the tables.

    Optuna imports all of them for each question: three times for a new storage, and once for each
    that it opens. They are the same for every storage.
    """

    _migrations: ClassVar[Any] = None

    def _create_alembic_script(self) -> Any:
        if _VersionManager._migrations is None:
            _VersionManager._migrations = super()._create_alembic_script()
        return _VersionManager._migrations


rdb._VersionManager = _VersionManager  # type: ignore[misc]  # RDBStorage takes it from there


def set_trial_id(trial: FrozenTrial, value: int) -> None:
    """Set a trial's id. Samplers need one of each trial, also of a trial in no storage."""
    trial._trial_id = value


class EditableParamsStorage(optuna.storages.RDBStorage):
    """Store each parameter with its own distribution, whatever the study's first trial had.

    Optuna refuses a parameter that has changed its kind or its choices, because samplers fail on
    it. It has no documented hook for this.
    """

    @property
    def database(self) -> sqlalchemy.Engine:
        """The engine, which Optuna does not document."""
        return self.engine

    @contextlib.contextmanager
    def new_session(self) -> Iterator[Session]:
        """Open a session in which Optuna's own methods work, too; it is one transaction."""
        with self.scoped_session() as session, session.begin():
            yield session

    def read_trials(self, study_id: int, ids: Set[int] | None) -> list[FrozenTrial]:
        """Return trials of a study by Optuna's ids, in their order; None: all trials.

        Optuna's own cache reads each unfinished trial again whenever it is asked.
        """
        if ids is None:
            return self._get_trials(study_id, None, set(), -1)
        return self._get_trials(study_id, None, set(ids), max(ids))

    def reopen_trial(self, trial_id: int, *, last_report: int, drop: Iterable[str]) -> None:
        """Make an ended trial without a value RUNNING again, for which Optuna has no method."""
        with self.new_session() as session:
            trial = session.get_one(TrialModel, trial_id)
            trial.state = TrialState.RUNNING
            trial.datetime_complete = None
            session.query(TrialIntermediateValueModel).filter(
                TrialIntermediateValueModel.trial_id == trial_id,
                TrialIntermediateValueModel.step > last_report,
            ).delete()
            session.query(TrialUserAttributeModel).filter(
                TrialUserAttributeModel.trial_id == trial_id,
                TrialUserAttributeModel.key.in_(list(drop)),
            ).delete()

    def _set_trial_param_without_commit(
        self,
        session: Any,
        trial_id: int,
        param_name: str,
        param_value_internal: float,
        distribution: BaseDistribution,
        previous_distribution: BaseDistribution | None = None,
    ) -> None:
        """Compare the distribution with itself, and not with an earlier trial's."""
        del previous_distribution
        super()._set_trial_param_without_commit(
            session,
            trial_id,
            param_name,
            param_value_internal,
            distribution,
            previous_distribution=distribution,
        )
