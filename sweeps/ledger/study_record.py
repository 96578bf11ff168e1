"""Store what belongs to a sweep as a whole: its identity, origin, drivers and time.

One Optuna study is the only record, and these are its attributes. What must not live here: trials
(`ledger.study_trials`, `ledger.ledger`), connections and transactions (`ledger.storage`).
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import optuna
from sqlalchemy.exc import SQLAlchemyError

from sweeps.errors import LedgerError
from sweeps.ledger.attributes import (
    ABORT,
    ATTEMPT,
    PLAN,
    RUN_FROM,
    SECONDS,
    SERIES,
    WARM_START,
    Abort,
    abort_in,
    attempts_in,
)
from sweeps.ledger.sqlite import LedgerFile
from sweeps.ledger.storage import EditableRDBStorage
from sweeps.ledger.texts import clipped_reason
from sweeps.ledger.warm_start import WarmStart
from sweeps.spec.provenance_check import Origin

_P = ParamSpec("_P")
_R = TypeVar("_R", bound="StudyRecord")
_T = TypeVar("_T")


def translated(
    method: Callable[Concatenate[_R, _P], _T],
) -> Callable[Concatenate[_R, _P], _T]:
    """Decorate a method that reads: hold the mutex, and raise storage errors as `LedgerError`."""

    @functools.wraps(method)
    def wrapped(self: _R, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._mutex, translate_errors(self.location):
            return method(self, *args, **kwargs)

    return wrapped


def in_transaction(
    method: Callable[Concatenate[_R, _P], _T],
) -> Callable[Concatenate[_R, _P], _T]:
    """Decorate a method that writes: it runs in one transaction, with one sync of the disk.

    If the process dies within the method, nothing is stored. Storage errors become `LedgerError`.
    """

    @functools.wraps(method)
    def wrapped(self: _R, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.transaction(lambda: method(self, *args, **kwargs))

    return wrapped


@contextlib.contextmanager
def translate_errors(location: LedgerFile) -> Iterator[None]:
    """Raise errors of the database as `LedgerError`."""
    try:
        yield
    except LedgerError:
        raise
    except Exception as error:
        known = (optuna.exceptions.StorageInternalError, SQLAlchemyError, sqlite3.Error)
        if not isinstance(error, known):
            raise
        raise location.refusal(error) from error


class StudyRecord:
    """What a ledger stores of its sweep as a whole."""

    def __init__(
        self, location: LedgerFile, study: optuna.Study, storage: EditableRDBStorage
    ) -> None:
        self.location = location
        self._mutex = threading.RLock()
        self._study = study
        self._storage = storage
        self._study_id = storage.get_study_id_from_name(study.study_name)

    def transaction(self, work: Callable[[], _T]) -> _T:
        """Run `work` in one transaction, with one sync of the disk."""
        with self._mutex, translate_errors(self.location):
            try:
                return self._storage.transact(work)
            except BaseException:  # also on an interruption: it was rolled back; raised again
                self._forget()
                raise

    def _forget(self) -> None:
        """Forget what was read within a transaction that failed."""

    @property
    @translated
    def sweep_id(self) -> str:
        """The sweep's identity, by which tracking finds its runs again."""
        return str(self._study.user_attrs["sweep_id"])

    @property
    @translated
    def origin(self) -> Origin:
        """The code, data and samples from which the sweep's trials ran."""
        attributes = self._study.user_attrs
        return Origin(**attributes.get("origin", {}), samples=attributes.get("samples", {}))

    @in_transaction
    def store_origin(self, origin: Origin) -> None:
        """Store the code, data and samples from which trials run from now on."""
        before = self.origin
        if (origin.code, origin.data) != (before.code, before.data):
            self._study.set_user_attr("origin", {"code": dict(origin.code), "data": origin.data})
        if origin.samples != before.samples:  # separate: databases bound the length of a value
            self._study.set_user_attr("samples", dict(origin.samples))

    @property
    @translated
    def run_from(self) -> dict[str, Any]:
        """Where the sweep and its code lay for the last driver; see `attributes.RUN_FROM`."""
        return dict(self._study.user_attrs.get(RUN_FROM, {}))

    @in_transaction
    def store_run_from(self, run_from: Mapping[str, Any]) -> None:
        """Store where the sweep and its code lie now."""
        if run_from != self.run_from:
            self._study.set_user_attr(RUN_FROM, dict(run_from))

    @property
    @translated
    def attempts(self) -> list[dict[str, str]]:
        """The host, command and versions of each driver of the sweep, as tags."""
        return attempts_in(self._study.user_attrs)

    @in_transaction
    def add_attempt(self, tags: Mapping[str, str]) -> None:
        """Store the host, command and versions of one more driver of the sweep."""
        number = len(self.attempts) + 1
        self._study.set_user_attr(f"{ATTEMPT}{number}", dict(tags))
        if self.abort is not None:  # the earlier driver's
            self._study.set_user_attr(ABORT, None)

    @property
    @translated
    def abort(self) -> Abort | None:
        """Why the last driver stopped the sweep by itself; None if it did not."""
        return abort_in(self._study.user_attrs)

    @in_transaction
    def store_abort(self, abort: Abort) -> None:
        """Store why this driver stops the sweep by itself; the next driver clears it."""
        why = clipped_reason(abort.why)
        self._study.set_user_attr(ABORT, [abort.key, why, abort.trial, abort.kind])

    @property
    @translated
    def series(self) -> dict[str, Any] | None:
        """The last request for extra trials that are added in turns; None: none was made."""
        return self._study.user_attrs.get(SERIES)

    @in_transaction
    def store_series(self, request: Mapping[str, Any]) -> None:
        """Store a request for extra trials; an earlier one is replaced."""
        self._study.set_user_attr(SERIES, dict(request))

    @property
    @translated
    def num_published(self) -> int:
        """How many trials the sweep had when its best trial was last published; 0 before."""
        return int(self._study.user_attrs.get("concluded", 0))

    @in_transaction
    def mark_published(self) -> None:
        """Record that the outbox holds everything about the trials so far."""
        self._study.set_user_attr("concluded", self._storage.get_n_trials(self._study_id))

    @property
    @translated
    def seconds(self) -> float:
        """For how many seconds all drivers together have run the sweep's trials."""
        return float(self._study.user_attrs.get(SECONDS, 0.0))

    @in_transaction
    def store_seconds(self, seconds: float) -> None:
        """Store for how many seconds the sweep's trials have been run."""
        self._study.set_user_attr(SECONDS, round(seconds, 3))

    @in_transaction
    def store_plan(self, plan: Mapping[str, Any]) -> None:
        """Store what the sweep is expected to take.

        A resume keeps the plan with which trials began, unless it changes what was planned.
        """
        before = self._study.user_attrs.get(PLAN) or {}
        if any(before.get(key) != plan[key] for key in ("trials", "epochs", "rule")):
            self._study.set_user_attr(PLAN, dict(plan))

    @property
    @translated
    def warm_start(self) -> WarmStart:
        """The trials of earlier sweeps that the sampler learns from, fixed at creation."""
        attributes = self._storage.get_study_system_attrs(self._study_id)
        return WarmStart.from_data(attributes.get(WARM_START))

    @in_transaction
    def store_warm_start(self, warm: WarmStart) -> None:
        """Store which trials of earlier sweeps a new sweep's sampler learns from."""
        self._storage.set_study_system_attr(self._study_id, WARM_START, warm.to_data())
