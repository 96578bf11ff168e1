"""Parse the address of a store: what it is, and whether it is on this machine or on other hosts.

Several programs parse the same URI (libpq, SQLAlchemy, requests). A URI that they could parse
differently counts as one of another host. What must not live here: whether the store answers
(`tracking.probe`), and which stores are trusted (`tracking.trusted_stores`).
"""

from __future__ import annotations

import ipaddress
import os
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

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


_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
_ADDRESS = re.compile(
    r"(?P<scheme>[a-z][a-z0-9.-]*)(?:\+\w+)?://(?:[\w.%~-]*(?::[\w.%~!$*+-]*)?@)?(?P<hosts>[^/?#@\\\s]*)"
    r"(?:/[^?#@\\\s]*)?(?:\?(?P<query>[^?#@\\\s]*))?",
    re.ASCII,
)
"""A URI that libpq, SQLAlchemy, requests and Python parse alike."""
_NO_HOST = re.compile(r"[a-z][\w.+-]*:(?!//)[\w.:/~+=,-]+", re.ASCII)
"""A plugin's URI without a host, such as `arn:...`."""
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[\w.%~-]*)(?::(?P<port>\d*))?", re.ASCII)
_HARMLESS = frozenset(
    {
        "application_name",
        "charset",
        "connect_timeout",
        "dbname",
        "options",
        "port",
        "sslmode",
        "user",
    }
)
"""Options in a URI that name no host and weaken no security on this machine's loopback."""
_LIBPQ = re.compile(r"postgresql(\+psycopg2?)?://")
_FILES = re.compile(r"sqlite(\+pysqlite)?:|file:|[^:]*$")
_DATABRICKS = ("databricks", "databricks-uc", "uc")
"""MLflow's names of a service whose address is in a configuration file of the user."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


class _Where(NamedTuple):
    """The hosts in a URI.

    Attributes:
        hosts: Host names or paths of sockets; empty if the URI names none.
        is_plain: The URI has only hosts, a path and harmless options.
    """

    hosts: tuple[str, ...]
    is_plain: bool


def origin_of(uri: str) -> str:
    """Return the part of a URI that a user trusts: scheme, hosts, ports and options.

    Options are included because they may name other hosts or disable encryption. Of a directory,
    `file://PATH`, it is all of it. A URI that two programs could parse differently is returned
    unchanged.
    """
    found = _ADDRESS.fullmatch(uri)
    if found is None or not all(map(_HOST.fullmatch, found["hosts"].lower().split(","))):
        return uri
    if found["scheme"] == "file":
        return uri.rstrip("/")
    port = _PORTS.get(found["scheme"])
    hosts = found["hosts"].lower().split(",")
    if port is not None and found["hosts"]:
        hosts = [one if re.search(r":\d+$", one) else f"{one.rstrip(':')}:{port}" for one in hosts]
    query = f"?{found['query']}" if found["query"] else ""
    return f"{found['scheme']}://{','.join(hosts)}{query}"


def is_readable(uri: str) -> bool:
    """Whether all programs parse a URI alike, and it has no spaces or line breaks."""
    found = _ADDRESS.fullmatch(uri)
    if found is None:
        return _NO_HOST.fullmatch(uri) is not None
    return all(map(_HOST.fullmatch, found["hosts"].lower().split(",")))


def is_libpq(uri: str) -> bool:
    """Whether it is a PostgreSQL URI, which libpq opens."""
    return _LIBPQ.match(uri) is not None


def is_file(uri: str) -> bool:
    """Whether a URI names a file, for which no credentials are sent."""
    return uri not in _DATABRICKS and _FILES.match(uri) is not None


def is_local(uri: str) -> bool:
    """Whether a URI names only a file, a Unix socket, or hosts on this machine's loopback.

    `s3://` names no host: an environment variable names the endpoint.
    """
    if is_file(uri):
        return True
    if uri.startswith("s3://"):
        endpoint = _endpoint()
        return endpoint is not None and is_local(endpoint)
    where = _where(uri)
    hosts = where.hosts
    if not hosts and is_libpq(uri):
        named = os.environ.get("PGHOSTADDR") or os.environ.get("PGHOST") or "/"
        hosts = tuple(named.split(","))
    return where.is_plain and bool(hosts) and all(map(_is_loopback, hosts))


def is_placed_by_environment(uri: str) -> bool:
    """Whether an environment variable, and not the URI, names the host."""
    if uri.startswith("s3://"):
        return _endpoint() is not None
    where = _where(uri)
    return uri in _DATABRICKS or (is_libpq(uri) and where.is_plain and not where.hosts)


def _where(uri: str) -> _Where:
    found = _ADDRESS.fullmatch(uri)
    if found is None:
        return _Where((uri,), is_plain=False)
    named, libpq = found["hosts"], is_libpq(uri)
    # Only libpq splits hosts at a comma and decodes escapes. Other programs take the whole text as
    # one host name, which a DNS server may resolve to another machine. SQLAlchemy passes escapes
    # to libpq undecoded, so that libpq takes them as a host name, too. It is local only if it has
    # no dot.
    if ("," in named and not libpq) or ("%" in named and ("." in named or not libpq)):
        return _Where((uri,), is_plain=False)
    hosts = []
    for one in filter(None, named.split(",")):
        host = _HOST.fullmatch(one.lower())
        hosts.append(one if host is None else unquote(host["name"]).strip("[]"))
    options = parse_qsl(found["query"] or "", keep_blank_values=True)
    for key, value in options:
        if libpq and key in ("host", "hostaddr"):
            hosts += value.split(",")
    known = _HARMLESS | ({"host", "hostaddr"} if libpq else set())
    return _Where(tuple(hosts), all(key in known for key, _ in options))


def _endpoint() -> str | None:
    return next((at for name in _ENDPOINTS if (at := os.environ.get(name))), None)


def _is_loopback(host: str) -> bool:
    if host.startswith("/") or host.count(":") == 1:  # SQLAlchemy allows HOST:PORT in an option
        host = re.sub(r":\d*$", "", host, flags=re.ASCII)
    if host == "localhost" or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
