"""Whether a tracking address can be used, asked before anything is created.

Afterwards nothing is asked any more: a server that goes away later is what the outbox is for. What
must not live here: records, runs, or waiting for a server to come back.
"""

from __future__ import annotations

import re
import shlex
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redaction.secrets import redact
from tracking.address import fault_of, file_of, is_database, is_server, names_store
from tracking.mlflow_compat import (
    EXPERIMENT_QUERY,
    REVISION_QUERY,
    RUN_QUERY,
    VERSION_TABLE,
    TablesDiffer,
    check_revision,
    http_get,
)
from tracking.mlflow_server import connect
from tracking.tracker import TrackingUnusable
from tracking.trusted_stores import check_trusted, secured

if TYPE_CHECKING:
    from sqlalchemy import Engine

_OLDEST = (2, 8)
"""The first release whose parameters may have 6,000 characters."""

_SECONDS = 10
_READ_WHOLE = 64 * 1024**2
"""Bytes of a file that are looked through at each start: a third of a second."""
_SEARCH = "/api/2.0/mlflow/experiments/search?max_results=1"
_CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
_OFFLINE = "or run with --offline and deliver later with `sweep sync`"
_WITH_TIMEOUT = ("postgresql:", "postgresql+psycopg2:", "postgresql+psycopg:")
"""Whose driver knows a `connect_timeout`."""

_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/|$)")


def check_address(uri: str) -> None:
    """Refuse an address that names no store, without asking anybody.

    Raises:
        TrackingUnusable: MLflow would have no use for it, now or later.
    """
    example = "for example https://mlflow.example or sqlite:////home/ada/mlflow.db"
    if names_store(uri):
        if (fault := fault_of(uri)) is not None:
            raise TrackingUnusable(
                f"{redact(uri)} is no address ({fault}); what follows :// is HOST or HOST:PORT; "
                f"write {example}"
            )
        return
    remedy = f"http://{uri}" if _HOST_AND_PORT.match(uri) else example
    raise TrackingUnusable(
        f"{redact(uri)} names no tracking store; it must begin with http://, https://, "
        f"sqlite:///, postgresql://, mysql://, mssql:// or databricks; write {remedy}"
    )


def probe(uri: str, *, known: bool = False, thorough: bool = False) -> None:
    """Find out whether `uri` can be recorded at, within seconds.

    Args:
        uri: An MLflow tracking URI: a server, or a database.
        known: It needs no proof, because it was recorded at before: one that does not answer now
            will answer later. All that is asked is whether a database fits this MLflow, and
            whether a file can be read.
        thorough: Look through all of a file, however large it is.

    Raises:
        TrackingUnusable: It does not answer, refuses the credentials, is too old, is damaged, is
            no tracking store at all, or another version of MLflow made its tables.
    """
    check_address(uri)
    try:
        if is_server(uri):
            if not known:
                _probe_server(uri)
        elif (file := file_of(uri)) is not None:
            _probe_file(uri, file, known=known, thorough=thorough)
        elif is_database(uri):
            _probe_database(uri, known=known)
    except TablesDiffer as error:
        raise _unusable(uri, str(error), error.remedy(redact(uri))) from error


def is_gone(uri: str, run_ids: Iterable[str], *, seconds: float = _SECONDS) -> bool:
    """Whether the file of a store is not there, or is another's: it has none of some runs.

    Of a server, and of a file that cannot be read within `seconds`, nothing is said: False.
    """
    file = file_of(uri)
    if file is None or not file.exists():
        return file is not None
    try:
        with closing(_open(file, seconds)) as db:
            return not any(db.execute(RUN_QUERY, [run_id]).fetchone() for run_id in run_ids)
    except sqlite3.OperationalError as error:
        return "no such table" in str(error)
    except sqlite3.DatabaseError:
        return False


def _probe_server(uri: str) -> None:
    connect(uri)  # sets how long mlflow waits and how often it repeats
    answer = _get(uri, _SEARCH)
    if answer.status_code in (401, 403):
        raise _unusable(
            uri,
            f"refuses the credentials (HTTP {answer.status_code})",
            f"set {_CREDENTIALS} in the environment",
        )
    if answer.status_code != 200:
        raise _unusable(
            uri,
            f"does not answer as an MLflow server does (HTTP {answer.status_code})",
            "correct tracking.uri: the address at which the MLflow pages open",
        )
    version = _get(uri, "/version").text.strip()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise _unusable(
            uri,
            f"is MLflow {version[:20] if numbers else 'of unknown version'}; "
            f"{_OLDEST[0]}.{_OLDEST[1]} is the oldest that takes what a sweep records",
            "upgrade the server",
        )


def _get(uri: str, endpoint: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return http_get(uri, endpoint, timeout=_SECONDS)
    except MlflowException as error:
        raise _unusable(
            uri, f"does not answer ({_cause(error)})", "start the server, correct tracking.uri"
        ) from error


def _probe_file(uri: str, path: Path, *, known: bool, thorough: bool) -> None:
    if not path.exists():
        if not path.parent.is_dir() and not known:
            where = path.parent
            raise _unusable(uri, f"lies in {where}, which does not exist", f"mkdir -p {where}")
        return
    try:
        with closing(_open(path, _SECONDS)) as db:
            tables = "SELECT 1 FROM sqlite_master WHERE name = ?"
            if db.execute(tables, [VERSION_TABLE]).fetchone():
                check_revision(db.execute(REVISION_QUERY).fetchone())
                _read(db, thorough or path.stat().st_size <= _READ_WHOLE)
    except sqlite3.Error as error:
        is_damaged = not isinstance(error, sqlite3.OperationalError) or "no such" in str(error)
        if is_damaged:
            aside = shlex.quote(str(path.parent / "damaged"))
            raise _unusable(
                uri,
                f"is damaged ({error}); the trials' own files have all that it held",
                f"move it aside: mkdir {aside} && mv {shlex.quote(str(path))}* {aside}, and fill "
                "a new one with `sweep sync NAME --verify`",
            ) from error
        if not known:
            remedy = "correct tracking.uri"
            if "locked" in str(error):
                remedy = "end the process that has it open"
            raise _unusable(uri, f"cannot be opened ({error})", remedy) from error


def _read(db: sqlite3.Connection, whole: bool) -> None:
    """Read a store's tables.

    Raises:
        sqlite3.DatabaseError: They are damaged.
    """
    for query in (EXPERIMENT_QUERY, RUN_QUERY):
        db.execute(query, [""]).fetchone()
    if whole and (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(" ".join(verdict.split()))


def open_database(uri: str, seconds: float = _SECONDS) -> Engine:
    """Return an engine for a database; a file that is not there is not made.

    Raises:
        ImportError: The driver of its kind is not installed.
        StoreUntrusted: The user has not named the database.
    """
    import sqlalchemy

    check_trusted(uri)

    pool = sqlalchemy.pool.NullPool
    if (file := file_of(uri)) is not None:
        return sqlalchemy.create_engine(
            "sqlite://", creator=lambda: _open(file, seconds), poolclass=pool
        )
    limits = {"connect_timeout": int(seconds)} if uri.startswith(_WITH_TIMEOUT) else {}
    return sqlalchemy.create_engine(secured(uri), connect_args=limits, poolclass=pool)


def _open(file: Path, seconds: float) -> sqlite3.Connection:
    # Not read-only: what a killed process left half written is then undone first.
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True, timeout=seconds)


def _probe_database(uri: str, *, known: bool) -> None:
    # Not through mlflow: it would try for minutes.
    import sqlalchemy

    try:
        with open_database(uri).connect() as db:
            if sqlalchemy.inspect(db).has_table(VERSION_TABLE):
                check_revision(db.execute(sqlalchemy.text(REVISION_QUERY)).fetchone())
    except ImportError as error:
        remedy = "install it beside gradsweep"
        if uri.startswith("postgresql:"):  # psycopg 3's to SQLAlchemy
            remedy = "write postgresql+psycopg2://, which pip install 'gradsweep[postgres]' brings"
        raise _unusable(uri, f"needs a database driver ({error})", remedy) from error
    except sqlalchemy.exc.SQLAlchemyError as error:
        if not known:
            raise _unusable(
                uri,
                f"cannot be opened ({_cause(error)})",
                "start the database, correct tracking.uri; PostgreSQL reads PGUSER, PGPASSWORD "
                "and PGPASSFILE from the environment",
            ) from error


def _cause(error: BaseException) -> str:
    """The innermost reason, in one line: what wraps it repeats the address."""
    reason: BaseException = error
    while (inner := reason.__cause__ or reason.__context__) is not None:
        reason = inner
    lines = redact(str(reason)).strip().split("\n")
    # Of several addresses of a database's host, the one at which a server answered.
    said = next((line for line in lines if "FATAL: " in line), lines[0])
    return said[:200] or type(reason).__name__


def _unusable(uri: str, what: str, remedy: str) -> TrackingUnusable:
    return TrackingUnusable(f"{redact(uri)} {what}; {remedy}, {_OFFLINE}")
