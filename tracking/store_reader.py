"""Read what a tracking store holds of a sweep's runs, with few queries.

A database is read with plain SQL, which needs no MLflow and counts the points of each curve. A
server is read through MLflow's client. What must not live here: what a store should hold, and
writing to one.

    python -m tracking.store_reader

reads a line of JSON, `[uri, experiment, experiment_id, sweep_id]`, and writes the sweep's runs as
a line of JSON. It serves a process that must not import MLflow.
"""

from __future__ import annotations

import json
import math
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tracking.address import is_database, sqlite_file
from tracking.child_process import ChildFailed, run_child
from tracking.delivery import TAG_ROLE, TAG_SWEEP, TAG_TRIAL
from tracking.mlflow_compat import (
    ARTIFACT_ADDRESSES_QUERY,
    CURVES_QUERY,
    LAST_VALUES_QUERY,
    PARAMS_QUERY,
    RUNS_TABLE,
    STEPS_QUERY,
    SWEEP_RUNS_QUERY,
    TAGS_QUERY,
)
from tracking.outbox import SWEEP
from tracking.tracker import Curve, RunData, StoredRun, StoreReader, StoreUnreadable
from tracking.trusted_stores import StoreUntrusted, check_artifacts

if TYPE_CHECKING:
    from sqlalchemy import Connection

_CHILD_SECONDS = 20.0
_THREADS = 8
"""Metric histories that are requested from a server in parallel."""


def open_reader(uri: str, experiment: str, experiment_id: str | None) -> StoreReader:
    """Return a reader of the store at `uri`. It creates nothing there."""
    if is_database(uri):
        return _Database(uri)
    return _Client(uri, experiment, experiment_id)


def read_runs(
    uri: str,
    experiment: str,
    experiment_id: str | None,
    sweep_id: str,
    environment: Mapping[str, str],
) -> list[StoredRun]:
    """Return a sweep's runs without importing MLflow here; a child process reads from a server."""
    if is_database(uri):
        return open_reader(uri, experiment, experiment_id).runs(sweep_id)
    try:
        reply = run_child(
            "tracking.store_reader",
            requests=[json.dumps([uri, experiment, experiment_id, sweep_id])],
            environment=environment,
            seconds=_CHILD_SECONDS,
        )
    except (OSError, ChildFailed) as error:
        raise StoreUnreadable(uri, error) from error
    answer = json.loads(reply)
    if isinstance(answer, str):
        raise StoreUnreadable(uri, answer)
    return [StoredRun(*run) for run in answer]


def artifact_addresses(uri: str, experiment: str) -> set[str]:
    """Return the addresses of the artifacts of an experiment and of its runs, in a database."""
    return _Database(uri).artifact_addresses(experiment)


class _Database:
    """Reads MLflow's tables with SQL. A missing file counts as empty."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._client: _Client | None = None

    def runs(self, sweep_id: str) -> list[StoredRun]:
        names = {"role": TAG_ROLE, "trial": TAG_TRIAL, "sweep": TAG_SWEEP, "id": sweep_id}
        found = []
        with self._connect() as db:
            for run_id, role, number, status, stage, within, artifacts in (
                _rows(db, SWEEP_RUNS_QUERY, names) if db else ()
            ):
                trial = SWEEP if role == "sweep" else _number(number)
                if trial is not None:
                    deleted = "deleted" in (stage, within)
                    found.append(StoredRun(run_id, trial, status, deleted, artifacts or ""))
        return found

    def artifact_addresses(self, experiment: str) -> set[str]:
        with self._connect() as db:
            rows = _rows(db, ARTIFACT_ADDRESSES_QUERY, {"name": experiment}) if db else ()
            return {address for (address,) in rows if address}

    def data(self, run_ids: Sequence[str]) -> dict[str, RunData]:
        with self._connect() as db:
            if db is None:
                return {}
            ids = {"ids": list(run_ids)}
            params: dict[str, set[str]] = {one: set() for one in run_ids}
            tags: dict[str, dict[str, str]] = {one: {} for one in run_ids}
            curves: dict[str, dict[str, Curve]] = {one: {} for one in run_ids}
            last: dict[str, dict[str, float]] = {one: {} for one in run_ids}
            for run_id, key in _rows(db, PARAMS_QUERY, ids):
                params[run_id].add(key)
            for run_id, key, value in _rows(db, TAGS_QUERY, ids):
                tags[run_id][key] = value or ""
            for run_id, key, count, total in _rows(db, CURVES_QUERY, ids):
                curves[run_id][key] = Curve(count, int(total))
            for run_id, key, value, is_nan in _rows(db, LAST_VALUES_QUERY, ids):
                last[run_id][key] = math.nan if is_nan else float(value)
        return {
            one: RunData(frozenset(params[one]), tags[one], curves[one], last[one])
            for one in run_ids
        }

    def steps(self, run_id: str, key: str) -> set[int]:
        with self._connect() as db:
            return {step for (step,) in _rows(db, STEPS_QUERY, {"run": run_id, "metric": key})}

    def files(self, run: StoredRun, folder: str) -> set[str]:
        if urlsplit(run.artifacts).scheme not in ("", "file"):
            self._client = self._client or _Client(self._uri, "", None)
            return self._client.files(run, folder)
        directory = Path(unquote(urlsplit(run.artifacts).path), folder)
        return {one.name for one in directory.iterdir()} if directory.is_dir() else set()

    @contextmanager
    def _connect(self) -> Iterator[Any]:
        """Yield a connection; None for a file that is missing, or has no tables yet."""
        import sqlalchemy

        from tracking.probe import open_database

        file = sqlite_file(self._uri)
        if file is not None and not file.exists():
            yield None
            return
        try:
            engine = open_database(self._uri)
        except ImportError as error:
            raise StoreUnreadable(self._uri, error) from error
        try:
            with engine.connect() as db:
                yield db if sqlalchemy.inspect(db).has_table(RUNS_TABLE) else None
        except (sqlalchemy.exc.SQLAlchemyError, sqlite3.Error) as error:
            raise StoreUnreadable(self._uri, error.__cause__ or error) from error
        finally:
            engine.dispose()


def _rows(db: Connection, query: str, values: Mapping[str, Any]) -> Iterator[Any]:
    """Run a query. `{key}` in it becomes the quoted column name, a reserved word in MySQL."""
    import sqlalchemy

    statement = sqlalchemy.text(query.format(key=db.dialect.identifier_preparer.quote("key")))
    if "ids" in values:
        statement = statement.bindparams(sqlalchemy.bindparam("ids", expanding=True))
    yield from db.execute(statement, dict(values))


class _Client:
    """Reads a server through MLflow's client, which returns curves point by point only."""

    def __init__(self, uri: str, experiment: str, experiment_id: str | None) -> None:
        self._uri, self._experiment, self._experiment_id = uri, experiment, experiment_id
        self._data: dict[str, tuple[frozenset[str], dict[str, str], dict[str, float]]] = {}
        with self._translated():
            from tracking.mlflow_server import connect

            self._client = connect(uri)

    def runs(self, sweep_id: str) -> list[StoredRun]:
        from mlflow.exceptions import MlflowException

        from tracking.mlflow_server import search, trial_of

        found = []
        with self._translated():
            named = self._client.get_experiment_by_name(self._experiment)
            experiments = {self._experiment_id, named.experiment_id if named else None} - {None}
            for experiment_id in sorted(map(str, experiments)):
                try:
                    runs = list(search(self._client, experiment_id, sweep_id))
                except MlflowException as error:
                    if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                        raise
                    continue  # the answer of some servers for a missing experiment
                for run in runs:
                    if (trial := trial_of(run)) is None:
                        continue
                    info, data = run.info, run.data
                    self._data[info.run_id] = (
                        frozenset(data.params),
                        dict(data.tags),
                        dict(data.metrics),
                    )
                    deleted = info.lifecycle_stage == "deleted"
                    where = info.artifact_uri or ""
                    found.append(StoredRun(info.run_id, trial, info.status, deleted, where))
        return found

    def data(self, run_ids: Sequence[str]) -> dict[str, RunData]:
        asked = [(one, key) for one in run_ids for key in self._data[one][2]]

        def count(of: tuple[str, str]) -> Curve:
            steps = self.steps(*of)
            return Curve(len(steps), sum(steps))

        curves: dict[str, dict[str, Curve]] = {one: {} for one in run_ids}
        with ThreadPoolExecutor(_THREADS) as pool:
            for (run_id, key), curve in zip(asked, pool.map(count, asked), strict=True):
                curves[run_id][key] = curve
        return {
            one: RunData(self._data[one][0], self._data[one][1], curves[one], self._data[one][2])
            for one in run_ids
        }

    def steps(self, run_id: str, key: str) -> set[int]:
        with self._translated():
            return {point.step for point in self._client.get_metric_history(run_id, key)}

    def files(self, run: StoredRun, folder: str) -> set[str]:
        check_artifacts(self._uri, run.artifacts)
        with self._translated():
            found = self._client.list_artifacts(run.run_id, folder or None)
        return {one.path.rpartition("/")[2] for one in found}

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a server or its artifact store may raise any exception
            if isinstance(error, StoreUnreadable | StoreUntrusted):
                raise
            raise StoreUnreadable(self._uri, error) from error


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def main() -> None:
    """Read a request from standard input and write the answer to standard output."""
    uri, experiment, experiment_id, sweep_id = json.loads(sys.stdin.readline())
    with redirect_stdout(sys.stderr):  # a library may print
        try:
            answer: Any = open_reader(uri, experiment, experiment_id).runs(sweep_id)
        except StoreUnreadable as error:
            answer = str(error.__cause__ or error)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
