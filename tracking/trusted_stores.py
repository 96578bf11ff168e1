"""To which stores this user lets credentials go, and how they go there.

A sweep's directory says where its stores are, and a directory can be planted. So nothing is
connected to that the address in a spec alone names: the user has to have named it, on a command
line, in the environment, or with `sweep trust`. That is remembered in a file of the user's own:

    $XDG_CONFIG_HOME/gradsweep/trusted-stores     one address a line; see `store_origin`

`SWEEP_TRUSTED_STORES` in the environment holds more of them, separated by spaces. What must not
live here: whose a sweep is, and connections.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import re
import shlex
import stat
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from tracking.store_origin import (
    is_file,
    is_libpq,
    is_local,
    is_placed_by_environment,
    is_readable,
    origin_of,
)

VARIABLE = "SWEEP_TRUSTED_STORES"
"""Of the environment: addresses that are trusted, separated by spaces."""
UNENCRYPTED = "unencrypted"
"""Follows an address of http:// in the file to which a password may go in clear."""

_MOST_BYTES = 1 << 20
_PASSWORDLESS = "scram-sha-256,gss,sspi,none"
"""How a PostgreSQL server may have this user prove who it is: no password leaves with any."""
_REQUIRE_AUTH_SINCE = 160000
_HTTP_VARIABLES = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_AUTH",
)


class StoreUntrusted(ValueError):
    """A store to which this user has not let credentials go; nothing was connected to."""


class TrustFileRefused(StoreUntrusted):
    """The file of trusted stores could have been written by somebody else, or cannot be used."""


def can_be_trusted(uri: str) -> bool:
    """Whether it is an address of a host, which every program reads alike, without a password."""
    from redaction.secrets import redact

    origin = origin_of(uri)
    return is_readable(uri) and redact(origin) == origin


def check_trusted(uri: str) -> None:
    """Make sure that credentials may go to a store, before it is connected to.

    Args:
        uri: The address of a tracking store, a ledger's database, or an object store.

    Raises:
        StoreUntrusted: This user has not named it, or a password would go there in clear.
        TrustFileRefused: The file of trusted stores is not this user's alone.
    """
    if is_local(uri) or _is_named_by_environment(uri):
        return
    origin = origin_of(uri)
    explicit = _consents().get(origin)
    if explicit is None and not is_readable(uri):
        raise StoreUntrusted(
            f"{_shown(uri)} is an address that two programs could read differently, so nobody can "
            "tell where credentials would go; nothing was connected to; an address is "
            "SCHEME://HOST:PORT/PATH; write for example https://mlflow.example"
        )
    if explicit is None:
        raise StoreUntrusted(
            f"{_shown(uri)} is a store that you have not named: credentials go only to stores "
            "that you gave on a command line or allowed; nothing was connected to; if you know "
            f"it, allow it once with: sweep trust {_quoted(origin)}"
        )
    if origin.startswith("http://") and not explicit and _has_http_credentials(origin):
        raise StoreUntrusted(
            f"{_shown(uri)} is not encrypted: no password or token goes over http:// beyond this "
            "machine; nothing was connected to; use https://, or, in a network where nobody "
            f"else listens, allow it once with: sweep trust {_quoted(origin)}"
        )


def check_artifacts(tracking: str, artifacts: str) -> None:
    """Make sure that files may be read or written where a run of a store has its artifacts.

    A server is asked for its artifacts, and what it answers is the word of a store that is
    trusted. A file can be planted, and may name any host.

    Raises:
        StoreUntrusted: The store is a file, and the place one that this user has not named.
        TrustFileRefused: See `check_trusted`.
    """
    if not is_file(tracking):
        return
    if artifacts.startswith("mlflow-artifacts://"):  # asked over either
        artifacts = artifacts.replace("mlflow-artifacts", "http", 1)
    elif artifacts.startswith("mlflow-artifacts:"):
        return
    check_trusted(artifacts)


def secured(uri: str) -> str:
    """Return an address of PostgreSQL with which no password leaves in clear: beyond this machine
    the connection is encrypted, and the server is asked for its certificate where there is a root
    certificate to check it by.

    What the address, or libpq's environment, says itself stays. A libpq older than 16 knows
    nothing that keeps it from answering a server that asks for the password in clear.
    """
    if not is_libpq(uri):
        return uri
    given = dict(parse_qsl(urlsplit(uri).query))
    added = {}
    if "require_auth" not in given and "PGREQUIREAUTH" not in os.environ and _knows_require(uri):
        added["require_auth"] = _PASSWORDLESS
    if not is_local(uri) and "sslmode" not in given and "PGSSLMODE" not in os.environ:
        root = given.get("sslrootcert") or os.environ.get("PGSSLROOTCERT")
        known = root or os.path.exists(os.path.expanduser("~/.postgresql/root.crt"))
        added["sslmode"] = "verify-full" if known else "require"
    if not added:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}{urlencode(added)}"


def remember(uri: str, *, explicit: bool = False) -> None:
    """Remember that this user named a store.

    Args:
        uri: Its address. Nothing is written for one that needs no trust, has it, or cannot be
            trusted (`can_be_trusted`).
        explicit: Asked for by `sweep trust`: a password may go there over http://, too.

    Raises:
        TrustFileRefused: The file cannot be written, or is not this user's alone.
    """
    origin = origin_of(uri)
    explicit = explicit and origin.startswith("http://")
    if is_local(uri) or _is_named_by_environment(uri) or not is_readable(uri):
        return
    consents = _consents()
    if consents.get(origin, False) or (origin in consents and not explicit):
        return
    path = trust_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(os.stat(path.parent), path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        with open(os.open(path, flags, 0o600), "ab") as file:
            _check_own(os.fstat(file.fileno()), path)
            file.write(f"{origin}{f' {UNENCRYPTED}' if explicit else ''}\n".encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TrustFileRefused(
            f"{path} cannot be written ({error.strerror}): it remembers to which stores "
            f"credentials may go; correct its permissions, or set {VARIABLE}={_quoted(origin)} in "
            "the environment"
        ) from error


def forget(uri: str) -> bool:
    """Forget a store; returns whether it was remembered.

    Raises:
        TrustFileRefused: The file cannot be written, or is not this user's alone.
    """
    path, origin = trust_file(), origin_of(uri)
    lines = list(_lines())
    kept = [line for line in lines if line.partition(" ")[0] != origin]
    if kept == lines:
        return False
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.writelines(f"{line}\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise TrustFileRefused(
            f"{path} cannot be written ({error.strerror}); correct its permissions"
        ) from error
    return True


def trusted() -> list[str]:
    """Return the lines of all that is trusted, of the file and of the environment.

    Raises:
        TrustFileRefused: The file is not this user's alone.
    """
    return [
        f"{origin} {UNENCRYPTED}" if explicit and origin.startswith("http://") else origin
        for origin, explicit in sorted(_consents().items())
    ]


def trust_file() -> Path:
    """Return where this user's trusted stores are remembered."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.config")
    if not os.path.isabs(base):  # no home: what lies in the present directory is nobody's word
        base = os.devnull
    return Path(base, "gradsweep", "trusted-stores")


def _consents() -> dict[str, bool]:
    """Return what is trusted, and whether a password may go there in clear."""
    found = {origin_of(one): True for one in os.environ.get(VARIABLE, "").split()}
    for line in _lines():
        origin, _, how = line.partition(" ")
        found[origin] = found.get(origin, False) or how == UNENCRYPTED
    return found


def _lines() -> Iterator[str]:
    path = trust_file()
    try:
        directory = os.stat(path.parent)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise TrustFileRefused(
            f"{path} cannot be read ({error.strerror}); it says to which stores credentials may "
            "go; correct its permissions"
        ) from error
    with open(handle, "rb") as file:
        _check_own(directory, path.parent)
        _check_own(os.fstat(file.fileno()), path)
        text = file.read(_MOST_BYTES).decode(errors="replace")
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line.strip()


def _check_own(found: os.stat_result, path: Path) -> None:
    """Refuse a file or directory that anybody else could have written to."""
    kind = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    if kind and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return
    mode = "700" if stat.S_ISDIR(found.st_mode) else "600"
    raise TrustFileRefused(
        f"{path} has mode {stat.S_IMODE(found.st_mode):o} and the owner {found.st_uid}: it says "
        "to which stores credentials may go, so it is a file that nobody but you may write to; "
        f"look what it holds, then: chown {os.geteuid()} {shlex.quote(str(path))} && "
        f"chmod {mode} {shlex.quote(str(path))}"
    )


def _is_named_by_environment(uri: str) -> bool:
    """Whether the environment says which host it is, or says the same."""
    if is_placed_by_environment(uri):
        return True
    named = os.environ.get("MLFLOW_TRACKING_URI")
    if named is None or origin_of(re.sub("://[^/@]*@", "://", named)) != origin_of(uri):
        return False
    return not (uri.startswith("http://") and _has_http_credentials(origin_of(uri)))


def _has_http_credentials(origin: str) -> bool:
    """Whether MLflow would send a password or a token with a request."""
    if any(os.environ.get(name) for name in _HTTP_VARIABLES):
        return True
    if os.path.exists(os.path.expanduser("~/.mlflow/credentials")):
        return True
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        return netrc.netrc(path).authenticators(urlsplit(origin).hostname or "") is not None
    except FileNotFoundError:
        return False
    except (OSError, netrc.NetrcParseError, ValueError):
        return True  # who cannot tell assumes that there is one


def _knows_require(uri: str) -> bool:
    """Whether the libpq of an address's driver can refuse to send a password."""
    try:
        if uri.startswith("postgresql+psycopg:"):
            return int(import_module("psycopg.pq").version()) >= _REQUIRE_AUTH_SINCE
        from psycopg2.extensions import libpq_version

        return int(libpq_version()) >= _REQUIRE_AUTH_SINCE
    except ImportError:
        return False


def _shown(uri: str) -> str:
    """Return an address for a message: a planted one may hold what drives a terminal."""
    from redaction.secrets import redact

    origin = redact(origin_of(uri))
    return origin if origin.isascii() and origin.isprintable() else ascii(origin)


def _quoted(origin: str) -> str:
    return shlex.quote(_shown(origin))
