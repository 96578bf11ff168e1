"""Decide to which stores credentials may be sent, and how.

A sweep's directory names its stores, and another user may have planted the directory. So the
address in a spec is not enough. Before any connection, this user must have trusted the store: on a
command line, in the environment, or with `sweep doctor --trust`. A file keeps trusted stores:

    $XDG_CONFIG_HOME/gradsweep/trusted-stores     one address a line; see `address`

The environment variable `SWEEP_TRUSTED_STORES` may hold more. What must not live here: who owns a
sweep, and connections.
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

from tracking.address import (
    file_path,
    is_file,
    is_libpq,
    is_local,
    is_placed_by_environment,
    is_readable,
    origin_of,
)

VARIABLE = "SWEEP_TRUSTED_STORES"
"""The environment variable with more trusted addresses, separated by spaces."""
UNENCRYPTED = "unencrypted"
"""The word after an http:// address in the file that allows unencrypted passwords there."""

_MOST_BYTES = 1 << 20
_PASSWORDLESS = "scram-sha-256,gss,sspi,none"
"""Authentication methods of PostgreSQL that never send the password itself."""
_REQUIRE_AUTH_SINCE = 160000
_HTTP_VARIABLES = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_AUTH",
)


class StoreUntrusted(ValueError):
    """This user has not trusted the store; nothing was connected to."""


class TrustFileRefused(StoreUntrusted):
    """Another user could have written the file of trusted stores, or it cannot be used."""


def can_be_trusted(uri: str) -> bool:
    """Whether all programs parse a URI alike, and its line in the file would have no password."""
    from redaction.secrets import redact

    origin = origin_of(uri)
    return is_readable(uri) and redact(origin) == origin


def check_trusted(uri: str) -> None:
    """Check, before a connection, that credentials may be sent to a store."""
    if is_local(uri) or _is_named_by_environment(uri):
        return
    origin = origin_of(uri)
    explicit = _consents().get(origin)
    if explicit is None and not is_readable(uri):
        raise StoreUntrusted(
            f"{_shown(uri)} is an address that two programs could parse differently, so it is "
            "unclear where credentials would be sent; nothing was connected to; an address is "
            "SCHEME://HOST:PORT/PATH; write for example https://mlflow.example"
        )
    if explicit is None:
        raise StoreUntrusted(
            f"{_shown(uri)} is a store that you have not named: credentials are sent only to "
            "stores that you gave on a command line or trusted; nothing was connected to; if you "
            f"know it, trust it once with: sweep doctor --trust {_quoted(origin)}"
        )
    if origin.startswith("http://") and not explicit and _has_http_credentials(origin):
        raise StoreUntrusted(
            f"{_shown(uri)} is not encrypted: no password or token goes over http:// to other "
            "machines; nothing was connected to; use https://, or, in a network where nobody "
            f"else listens, trust it once with: sweep doctor --trust {_quoted(origin)}"
        )


def check_artifacts(tracking: str, artifacts: str) -> None:
    """Check that a run's artifacts may be read or written at the URI that its store names.

    The answer of a server is trusted, because the server itself is trusted. A store that is a file
    may be planted, and may name any host.
    """
    if not is_file(tracking):
        return
    if artifacts.startswith("mlflow-artifacts://"):  # requested over http or https
        artifacts = artifacts.replace("mlflow-artifacts", "http", 1)
    elif artifacts.startswith("mlflow-artifacts:"):
        return
    check_trusted(artifacts)


def is_trusted_directory(path: Path) -> bool:
    """Return whether this user lets sweeps write to a directory outside of their root."""
    trusted_paths = (file_path(one) for one in _consents() if one.startswith("file:"))
    place = Path(os.path.realpath(path))
    return any(one and place.is_relative_to(os.path.realpath(one)) for one in trusted_paths)


def secured(uri: str) -> str:
    """Return a PostgreSQL URI with options so that no password is sent unencrypted.

    A connection to another machine is encrypted. If there is a root certificate, the server's
    certificate is checked. Options in the URI or in libpq's environment stay as they are. A libpq
    older than 16 cannot be kept from sending the password to a server that asks for it.
    """
    if not is_libpq(uri):
        return uri
    given = dict(parse_qsl(urlsplit(uri).query))
    added = {}
    if (
        "require_auth" not in given
        and "PGREQUIREAUTH" not in os.environ
        and _has_require_auth(uri)
    ):
        added["require_auth"] = _PASSWORDLESS
    if not is_local(uri) and "sslmode" not in given and "PGSSLMODE" not in os.environ:
        root = given.get("sslrootcert") or os.environ.get("PGSSLROOTCERT")
        known = root or os.path.exists(os.path.expanduser("~/.postgresql/root.crt"))
        added["sslmode"] = "verify-full" if known else "require"
    if not added:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}{urlencode(added)}"


def add_trusted(uri: str, *, explicit: bool = False) -> None:
    """Add a store to this user's file of trusted stores."""
    origin = origin_of(uri)
    explicit = explicit and origin.startswith("http://")
    is_named = is_local(uri) or _is_named_by_environment(uri)
    if not is_readable(uri) or (is_named and not uri.startswith("file:")):
        return
    consents = _consents()
    if consents.get(origin, False) or (origin in consents and not explicit):
        return
    path = trust_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(os.stat(path.parent), path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        with open(os.open(path, flags, 0o600), "ab") as file:
            _check_owner(os.fstat(file.fileno()), path)
            file.write(f"{origin}{f' {UNENCRYPTED}' if explicit else ''}\n".encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TrustFileRefused(
            f"{path} cannot be written ({error.strerror}): it lists the stores to which "
            "credentials may be sent; correct its permissions, or set "
            f"{VARIABLE}={_quoted(origin)} in the environment"
        ) from error


def remove_trusted(uri: str) -> bool:
    """Remove a store from the file; returns whether it was in it."""
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
    """Return all trusted stores, of the file and of the environment, as lines of the file."""
    return [
        f"{origin} {UNENCRYPTED}" if explicit and origin.startswith("http://") else origin
        for origin, explicit in sorted(_consents().items())
    ]


def trust_file() -> Path:
    """Return the path of this user's file of trusted stores."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.config")
    if not os.path.isabs(base):  # no home directory: the working directory cannot be trusted
        base = os.devnull
    return Path(base, "gradsweep", "trusted-stores")


def _consents() -> dict[str, bool]:
    """Return, for each trusted store, whether a password may be sent there unencrypted."""
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
            f"{path} cannot be read ({error.strerror}); it lists the stores to which credentials "
            "may be sent; correct its permissions"
        ) from error
    with open(handle, "rb") as file:
        _check_owner(directory, path.parent)
        _check_owner(os.fstat(file.fileno()), path)
        text = file.read(_MOST_BYTES).decode(errors="replace")
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line.strip()


def _check_owner(found: os.stat_result, path: Path) -> None:
    """Refuse a file or directory that another user could have written to."""
    kind = stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)
    if kind and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return
    mode = "700" if stat.S_ISDIR(found.st_mode) else "600"
    raise TrustFileRefused(
        f"{path} has mode {stat.S_IMODE(found.st_mode):o} and the owner {found.st_uid}: it lists "
        "the stores to which credentials may be sent, so only you may be able to write to it; "
        f"check its content, then run: chown {os.geteuid()} {shlex.quote(str(path))} && "
        f"chmod {mode} {shlex.quote(str(path))}"
    )


def _is_named_by_environment(uri: str) -> bool:
    """Whether the environment names the host of a URI, or names the same store."""
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
        return True  # an unreadable file may contain credentials


def _has_require_auth(uri: str) -> bool:
    """Whether the libpq that the URI's driver uses knows the option `require_auth`."""
    try:
        if uri.startswith("postgresql+psycopg:"):
            return int(import_module("psycopg.pq").version()) >= _REQUIRE_AUTH_SINCE
        from psycopg2.extensions import libpq_version

        return int(libpq_version()) >= _REQUIRE_AUTH_SINCE
    except ImportError:
        return False


def _shown(uri: str) -> str:
    """Return a URI for a message; control characters are escaped, as the URI may be planted."""
    from redaction.secrets import redact

    origin = redact(origin_of(uri))
    return origin if origin.isascii() and origin.isprintable() else ascii(origin)


def _quoted(origin: str) -> str:
    return shlex.quote(_shown(origin))
