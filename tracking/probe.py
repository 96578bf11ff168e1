"""Whether a tracking address can be used, asked before anything is created.

Afterwards nothing is asked any more: a server that goes away later is what the outbox is for. What
must not live here: records, runs, or waiting for a server to come back.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tracking.mlflow_server import connect
from tracking.provenance import redact

_OLDEST = (2, 8)
"""The first release whose parameters may have 6,000 characters."""

_SECONDS = 10
_SEARCH = "/api/2.0/mlflow/experiments/search?max_results=1"
_CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
_OFFLINE = "or run with --offline and deliver later with `sweep sync`"


class TrackingUnusable(ValueError):
    """A tracking address that nothing can be recorded at."""


def probe(uri: str) -> None:
    """Find out whether `uri` can be recorded at, within seconds.

    Args:
        uri: An MLflow tracking URI: a server, or a database.

    Raises:
        TrackingUnusable: It does not answer, refuses the credentials, is too old, or is no
            tracking store at all.
    """
    if uri.startswith(("http://", "https://")):
        _probe_server(uri)
    elif uri.startswith("sqlite:"):
        _probe_file(uri)
    elif "://" in uri and not uri.startswith("databricks"):
        _probe_database(uri)


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
    # mlflow's own request, so that certificates, proxies and tokens are those of all later calls.
    from mlflow.exceptions import MlflowException
    from mlflow.utils import credentials, rest_utils

    request: Any = rest_utils.http_request  # these two have no types
    read_credentials: Any = credentials.get_default_host_creds
    try:
        return request(
            read_credentials(uri.rstrip("/")),
            endpoint,
            "GET",
            max_retries=0,
            timeout=_SECONDS,
            raise_on_status=False,
        )
    except MlflowException as error:
        raise _unusable(
            uri, f"does not answer ({_cause(error)})", "start the server, correct tracking.uri"
        ) from error


def _probe_file(uri: str) -> None:
    directory = Path(uri.removeprefix("sqlite:///").partition("?")[0]).parent
    if not directory.is_dir():
        raise _unusable(uri, f"lies in {directory}, which does not exist", f"mkdir -p {directory}")


def _probe_database(uri: str) -> None:
    # Not through mlflow: it would try for minutes.
    import sqlalchemy

    try:
        engine = sqlalchemy.create_engine(uri)
        with engine.connect():
            pass
        engine.dispose()
    except ImportError as error:
        raise _unusable(
            uri, f"needs a database driver ({error})", "install it beside gradsweep"
        ) from error
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise _unusable(
            uri, f"cannot be opened ({_cause(error)})", "start the database, correct tracking.uri"
        ) from error


def _cause(error: BaseException) -> str:
    """The innermost reason, in one line: what wraps it repeats the address."""
    reason: BaseException = error
    while (inner := reason.__cause__ or reason.__context__) is not None:
        reason = inner
    return redact(str(reason)).strip().split("\n")[0][:200] or type(reason).__name__


def _unusable(uri: str, what: str, remedy: str) -> TrackingUnusable:
    return TrackingUnusable(f"tracking.uri: {redact(uri)} {what}; {remedy}, {_OFFLINE}")
