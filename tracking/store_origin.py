"""What an address of a store names: a file, something on this machine, or hosts beyond it.

An address is read by several programs (libpq, SQLAlchemy, requests), and what they do not all read
alike counts as a host beyond this machine. What must not live here: whose word counts
(`tracking.trusted_stores`).
"""

from __future__ import annotations

import ipaddress
import os
import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
_ADDRESS = re.compile(
    r"(?P<scheme>[a-z][a-z0-9.-]*)(?:\+\w+)?://(?:[\w.%~-]*(?::[\w.%~!$*+-]*)?@)?(?P<hosts>[^/?#@\\\s]*)"
    r"(?:/[^?#@\\\s]*)?(?:\?(?P<query>[^?#@\\\s]*))?",
    re.ASCII,
)
"""An address that every parser reads alike: libpq, SQLAlchemy, requests and Python."""
_NO_HOST = re.compile(r"[a-z][\w.+-]*:(?!//)[\w.:/~+=,-]+", re.ASCII)
"""An address of a plugin, such as `arn:...`."""
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
"""Options in an address that name no host, and loosen nothing on this machine's loopback."""
_LIBPQ = re.compile(r"postgresql(\+psycopg2?)?://")
_FILES = re.compile(r"sqlite(\+pysqlite)?:|file:|[^:]*$")
_DATABRICKS = ("databricks", "databricks-uc", "uc")
"""MLflow's names of a service whose address stands in a configuration of the user's."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


class _Where(NamedTuple):
    """What an address names.

    Attributes:
        hosts: Names, or paths of sockets; empty where the address itself names none.
        is_plain: Nothing in it but hosts, a path and harmless options.
    """

    hosts: tuple[str, ...]
    is_plain: bool


def origin_of(uri: str) -> str:
    """Return what is trusted of an address: scheme, hosts and ports.

    Options in the address may name other hosts, or switch encryption off: an address with options
    is another one than without. An address that two programs could read differently stands for
    itself alone.
    """
    found = _ADDRESS.fullmatch(uri)
    if found is None or not all(map(_HOST.fullmatch, found["hosts"].lower().split(","))):
        return uri
    port = _PORTS.get(found["scheme"])
    hosts = found["hosts"].lower().split(",")
    if port is not None and found["hosts"]:
        hosts = [one if re.search(r":\d+$", one) else f"{one.rstrip(':')}:{port}" for one in hosts]
    query = f"?{found['query']}" if found["query"] else ""
    return f"{found['scheme']}://{','.join(hosts)}{query}"


def is_readable(uri: str) -> bool:
    """Whether every program reads an address alike, and it fits on one line."""
    found = _ADDRESS.fullmatch(uri)
    if found is None:
        return _NO_HOST.fullmatch(uri) is not None
    return all(map(_HOST.fullmatch, found["hosts"].lower().split(",")))


def is_libpq(uri: str) -> bool:
    """Whether it is an address of PostgreSQL that is opened by libpq."""
    return _LIBPQ.match(uri) is not None


def is_file(uri: str) -> bool:
    """Whether an address is a file's, which nobody sends a password to."""
    return uri not in _DATABRICKS and _FILES.match(uri) is not None


def is_local(uri: str) -> bool:
    """Whether all that an address names is a file, a Unix socket, or on this machine's loopback.

    `s3://` names no host: the environment says where it is.
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
    """Whether the environment, and not the address, says which host it is."""
    if uri.startswith("s3://"):
        return _endpoint() is not None
    where = _where(uri)
    return uri in _DATABRICKS or (is_libpq(uri) and where.is_plain and not where.hosts)


def _where(uri: str) -> _Where:
    found = _ADDRESS.fullmatch(uri)
    if found is None:
        return _Where((uri,), is_plain=False)
    named, libpq = found["hosts"], is_libpq(uri)
    # libpq alone takes a comma for one between hosts, and an escape for what it stands for: to
    # others they are parts of one name, which a server of names beyond this machine can answer
    # for. SQLAlchemy leaves escapes to libpq, which takes them for a name then, too: one without
    # a dot.
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
    if host.startswith("/") or host.count(":") == 1:  # SQLAlchemy takes HOST:PORT in an option
        host = re.sub(r":\d*$", "", host, flags=re.ASCII)
    if host == "localhost" or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
