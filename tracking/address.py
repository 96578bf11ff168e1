"""What an MLflow tracking address names: a server, or a database that each program opens itself.

What must not live here: whether there is anything at the address (see `tracking.probe`).
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

_OF_SERVERS = (
    "MLFLOW_TRACKING_URI",  # may hold them
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
_OF_POSTGRES = ("PGPASSWORD", "PGPASSFILE")


def names_store(uri: str) -> bool:
    """Whether MLflow has a store for such an address: its own, a plugin's, or, if asked to by
    `MLFLOW_ALLOW_FILE_STORE`, a directory.
    """
    if _BUILT_IN.match(uri):
        return True
    scheme, colon, _ = uri.partition(":")
    if not colon or scheme == "file":
        return os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
    return scheme in entry_points(group="mlflow.tracking_store").names


def fault_of(uri: str) -> str | None:
    """Why the address of a server, or of a database, cannot be parsed; None when it can."""
    if is_server(uri) or is_database(uri):
        try:
            _ = urlsplit(uri).port
        except ValueError as error:
            return str(error)
    return None


def is_server(uri: str) -> bool:
    """Whether it is a server's, whose pages open in a browser as they are."""
    return uri.startswith(("http://", "https://"))


def is_database(uri: str) -> bool:
    """Whether it is a database's: it holds no files, so whoever records says where they lie."""
    scheme, separator, _ = uri.partition(":")
    return bool(separator) and scheme.partition("+")[0] in _DATABASES


def address_of(file: Path) -> str:
    """The address of an SQLite file, with what would not stand for itself there as escapes."""
    path = _ESCAPE.sub("%25", str(file)).replace("?", "%3F")
    # After the short scheme MLflow makes the directory that is written, escapes and all.
    scheme = "sqlite" if path == str(file) else "sqlite+pysqlite"
    return f"{scheme}:///{path}"


def file_of(uri: str) -> Path | None:
    """The file that an SQLite address names; None for any other address."""
    scheme, found, path = uri.partition(":///")
    if not found or scheme.partition("+")[0] != "sqlite":
        return None
    return Path(unquote(path.partition("?")[0]))


def store_of(uri: str) -> str:
    """What tells one tracking store from another in their addresses: no password, and of a file
    not where it lies, for it moves with its sweeps.
    """
    if file_of(uri) is not None:
        return "sqlite"
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"


def credentials(*uris: str | None) -> tuple[str, ...]:
    """The environment variables that let a process write to the stores at some addresses; None is
    the embedded one's.
    """
    databases = any(uri is not None and uri.startswith("postgresql") for uri in uris)
    return _OF_SERVERS + (_OF_POSTGRES if databases else ())
