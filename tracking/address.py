"""Parse an MLflow tracking URI: a server, or a database that each program opens itself.

What must not live here: whether the store at a URI answers (see `tracking.probe`).
"""

from __future__ import annotations

import os
import re
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

_DATABASES = frozenset({"sqlite", "postgresql", "mysql", "mssql"})
_BUILT_IN = re.compile(
    r"https?://[^/]|sqlite(\+\w+)?:///.|(postgresql|mysql|mssql)(\+\w+)?://|databricks(://|$)"
)
_ESCAPE = re.compile(r"%(?=[0-9A-Fa-f]{2})")

CREDENTIALS = (
    "MLFLOW_TRACKING_URI",  # may contain a user name and a password
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "PGPASSWORD",
    "PGPASSFILE",
    "PGSERVICEFILE",
)
"""The environment variables with the credentials of tracking stores and ledgers. Those of
PostgreSQL are among them for each sweep: they may be for the store of another one."""


def is_supported(uri: str) -> bool:
    """Whether MLflow has a store class for this URI: built in, or registered by a plugin.

    A directory is supported only if `MLFLOW_ALLOW_FILE_STORE` is set.
    """
    if _BUILT_IN.match(uri):
        return True
    scheme, colon, _ = uri.partition(":")
    if not colon or scheme == "file":
        return os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
    return scheme in entry_points(group="mlflow.tracking_store").names


def parse_error(uri: str) -> str | None:
    """Why the URI of a server or a database cannot be parsed; None when it can."""
    if is_server(uri) or is_database(uri):
        try:
            _ = urlsplit(uri).port
        except ValueError as error:
            return str(error)
    return None


def is_server(uri: str) -> bool:
    """Whether the URI names an HTTP server, which a browser can open."""
    return uri.startswith(("http://", "https://"))


def is_database(uri: str) -> bool:
    """Whether the URI names a database. It stores no files, so the client gives their location."""
    scheme, separator, _ = uri.partition(":")
    return bool(separator) and scheme.partition("+")[0] in _DATABASES


def sqlite_uri(file: Path) -> str:
    """The URI of an SQLite file. Characters that have a meaning in a URI are escaped."""
    path = _ESCAPE.sub("%25", str(file)).replace("?", "%3F")
    # With the scheme `sqlite`, MLflow creates the parent directory without decoding the escapes.
    scheme = "sqlite" if path == str(file) else "sqlite+pysqlite"
    return f"{scheme}:///{path}"


def sqlite_file(uri: str) -> Path | None:
    """The file that an SQLite URI names; None for any other URI."""
    scheme, found, path = uri.partition(":///")
    if not found or scheme.partition("+")[0] != "sqlite":
        return None
    return Path(unquote(path.partition("?")[0]))


def file_path(address: str) -> Path | None:
    """The path that an address of artifacts names on this machine; None for any other address."""
    parts = urlsplit(address)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path)) if parts.scheme else Path(address)


def store_identity(uri: str) -> str:
    """The part of a URI that identifies a tracking store.

    It contains no credentials and no path of an SQLite file: the file may move with its sweeps.
    """
    if sqlite_file(uri) is not None:
        return "sqlite"
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
