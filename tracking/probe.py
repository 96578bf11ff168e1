"""Check before a sweep starts that its tracking store can be used.

Later failures are not checked here: the outbox covers a server that becomes unavailable. What must
not live here: records, runs, or waiting for a server to come back.
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
from tracking.address import is_database, is_server, is_supported, parse_error, sqlite_file
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
"""The first MLflow release that accepts parameters of 6,000 characters."""

_SECONDS = 10
_READ_WHOLE = 64 * 1024**2
"""Files up to this many bytes are checked completely at each start, in a third of a second."""
_SEARCH = "/api/2.0/mlflow/experiments/search?max_results=1"
_CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
_OFFLINE = "or run with --offline and deliver later with `sweep sync`"
_WITH_TIMEOUT = ("postgresql:", "postgresql+psycopg2:", "postgresql+psycopg:")
"""Schemes whose database driver has the option `connect_timeout`."""

_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/|$)")


def check_address(uri: str) -> None:
    """Reject a URI that names no tracking store, without connecting to anything."""
    example = "for example https://mlflow.example or sqlite:////home/ada/mlflow.db"
    if is_supported(uri):
        if (fault := parse_error(uri)) is not None:
            raise TrackingUnusable(
                f"{redact(uri)} is not a valid address ({fault}); after :// comes HOST or "
                f"HOST:PORT; write {example}"
            )
        return
    remedy = f"http://{uri}" if _HOST_AND_PORT.match(uri) else example
    raise TrackingUnusable(
        f"{redact(uri)} names no tracking store; it must begin with http://, https://, "
        f"sqlite:///, postgresql://, mysql://, mssql:// or databricks; write {remedy}"
    )


def probe(uri: str, *, known: bool = False, thorough: bool = False) -> None:
    """Check within seconds that runs can be recorded at `uri`."""
    check_address(uri)
    try:
        if is_server(uri):
            if not known:
                _probe_server(uri)
        elif (file := sqlite_file(uri)) is not None:
            _probe_file(uri, file, known=known, thorough=thorough)
        elif is_database(uri):
            _probe_database(uri, known=known)
    except TablesDiffer as error:
        raise _unusable(uri, str(error), error.remedy(redact(uri))) from error


def is_gone(uri: str, run_ids: Iterable[str], *, seconds: float = _SECONDS) -> bool:
    """Whether the SQLite file of a store is missing, or has none of these runs.

    False for a server, and for a file that cannot be read within `seconds`.
    """
    file = sqlite_file(uri)
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
    connect(uri)  # sets mlflow's timeout and number of retries
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
            "correct tracking.uri: it is the address at which MLflow's pages open",
        )
    version = _get(uri, "/version").text.strip()
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise _unusable(
            uri,
            f"is MLflow {version[:20] if numbers else 'of unknown version'}; "
            f"a sweep needs at least {_OLDEST[0]}.{_OLDEST[1]}",
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
            raise _unusable(uri, f"is in {where}, which does not exist", f"mkdir -p {where}")
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
                f"is damaged ({error}); the trials' own files have all of its data",
                f"move it aside: mkdir {aside} && mv {shlex.quote(str(path))}* {aside}, and fill "
                "a new one with `sweep sync NAME --verify`",
            ) from error
        if not known:
            remedy = "correct tracking.uri"
            if "locked" in str(error):
                remedy = "end the process that has it open"
            raise _unusable(uri, f"cannot be opened ({error})", remedy) from error


def _read(db: sqlite3.Connection, whole: bool) -> None:
    """Read some of a store's tables, or check all pages."""
    for query in (EXPERIMENT_QUERY, RUN_QUERY):
        db.execute(query, [""]).fetchone()
    if whole and (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(" ".join(verdict.split()))


def open_database(uri: str) -> Engine:
    """Return an SQLAlchemy engine for a database; a missing file is not created."""
    import sqlalchemy

    check_trusted(uri)

    pool = sqlalchemy.pool.NullPool
    if (file := sqlite_file(uri)) is not None:
        return sqlalchemy.create_engine(
            "sqlite://", creator=lambda: _open(file, _SECONDS), poolclass=pool
        )
    limits = {"connect_timeout": _SECONDS} if uri.startswith(_WITH_TIMEOUT) else {}
    return sqlalchemy.create_engine(secured(uri), connect_args=limits, poolclass=pool)


def _open(file: Path, seconds: float) -> sqlite3.Connection:
    # Not read-only: SQLite then rolls back what a killed process had not committed.
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True, timeout=seconds)


def _probe_database(uri: str, *, known: bool) -> None:
    # Not through mlflow, which would retry for minutes.
    import sqlalchemy

    try:
        with open_database(uri).connect() as db:
            if sqlalchemy.inspect(db).has_table(VERSION_TABLE):
                check_revision(db.execute(sqlalchemy.text(REVISION_QUERY)).fetchone())
    except ImportError as error:
        remedy = "install it beside gradsweep"
        if uri.startswith("postgresql:"):  # SQLAlchemy looks for another driver with this scheme
            remedy = (
                "write postgresql+psycopg2://, whose driver comes with "
                "pip install 'gradsweep[postgres]'"
            )
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
    """The innermost cause as one line; the exceptions around it repeat the URI."""
    reason: BaseException = error
    while (inner := reason.__cause__ or reason.__context__) is not None:
        reason = inner
    lines = redact(str(reason)).strip().split("\n")
    # A host may have several addresses: prefer the line of the one where a server answered.
    line = next((line for line in lines if "FATAL: " in line), lines[0])
    return line[:200] or type(reason).__name__


def _unusable(uri: str, what: str, remedy: str) -> TrackingUnusable:
    return TrackingUnusable(f"{redact(uri)} {what}; {remedy}, {_OFFLINE}")
