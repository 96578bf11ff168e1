"""Generations in an object store: no rename, no sync, and the manifest is what commits.

Beside `ObjectFiles`, which works on any fsspec file system, here is the one store that an address
names, S3 or what speaks like it: found and opened by the environment, and tried before it is used.
What must not live here: which runs have their generations there (`locate.files_of`).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from redaction.secrets import redact
from trainable.errors import StorageError, WriterReplaced
from trainable.storage.generations import (
    MANIFEST,
    STATE,
    Write,
    fenced,
    is_generation,
    quarantined,
    reading,
    unused_name,
)
from trainable.storage.local import LocalFiles

SCHEME = "s3://"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_CONNECT_SECONDS, _SILENCE_SECONDS, _ATTEMPTS = 3, 10, 3
"""A request that brings nothing for so long has failed; so many have, and the store is away."""
_PROBE_SECONDS = 2


class StoreUnusable(ValueError):
    """An object store that no checkpoint could be kept in: which, why, and what to do."""


class _Writer(NamedTuple):
    """Who may change the generations, as it has signed.

    Attributes:
        token: In the names of all that it adds; empty: there is none.
        found: What was whole when it came.
        replaced: The tokens of those that came before it; what else they add is no generation.
            Earlier versions sign neither.
    """

    token: str = ""
    found: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()

    @classmethod
    def of(cls, signature: bytes) -> _Writer:
        token, *lines = signature.decode(errors="replace").split("\n")
        found = frozenset(filter(is_generation, lines))
        return cls(token, found, frozenset(lines) - found)

    def signature(self) -> bytes:
        return "\n".join([self.token, *sorted(self.found), *sorted(self.replaced)]).encode()

    def counts(self, name: str) -> bool:
        """Whether what has a manifest is a generation."""
        return name in self.found or _token(name) not in self.replaced


class ObjectFiles:
    """Generations below a prefix of an object store: nothing is renamed, and nothing is synced.

    An object is whole or not there, so the manifest, written last and removed first, is what
    commits. A writer signs `writer`, with what was whole when it came and who is replaced, and
    looks again before each manifest. No two writers share a name: one that is replaced between
    this look and its write changes nobody's generation, and its own, which the signature does not
    name, is none. One that nobody has replaced loses nothing to another that began to open before.

    Only what the store itself says is not there counts as missing. A store that cannot be reached,
    or refuses, is a `StorageError`: nothing in it is damaged, and nothing is set aside for it.

    Args:
        system: An `fsspec.AbstractFileSystem`.
        root: The prefix, such as `bucket/sweeps/digits/trials/0007/checkpoints`.
    """

    remedy = (
        "see that the store answers, and that the credentials in the environment may list, read, "
        "write and remove there"
    )

    def __init__(self, system: Any, root: PurePosixPath | str) -> None:
        self._system, self._root = system, PurePosixPath(root)
        self._token = uuid.uuid4().hex[:12]
        self._writer: _Writer | None = None
        """This one, once it is open."""

    def at(self, address: str) -> ObjectFiles:
        return ObjectFiles(self._system, address.removeprefix(SCHEME))

    def address(self, name: str) -> str:
        return f"{SCHEME}{self._key(name)}"

    def names(self) -> list[str]:
        with reading(self):
            writer = self._writer or self._signed()
        return list(filter(writer.counts, self._listed()))

    def unused(self, step: int) -> str:
        return unused_name(f"step-{step:08d}-{self._token}", self.names())

    def damaged(self) -> list[str]:
        return sorted(map(quarantined, self._list(self._root / quarantined())))

    def read(self, name: str, file: str) -> bytes:
        with reading(self, f"{name}/{file}"):
            content: bytes = self._system.cat_file(self._key(name, file))
        return content

    def length(self, name: str, file: str) -> int:
        with reading(self, f"{name}/{file}"):
            return int(self._system.size(self._key(name, file)))

    def open(self) -> None:
        # From the first signature on nobody else begins to commit, and what arrives late still
        # counts. The second one shuts it out.
        before = self._signed()
        self._sign(before._replace(token=self._token))
        listed = self._listed()
        found = frozenset(n for n in filter(before.counts, listed) if self._has_manifest(n))
        replaced = before.replaced.union([before.token], map(_token, listed)) - {"", self._token}
        self._check_fence()
        self._sign(_Writer(self._token, found, replaced))
        self._remove_strangers()

    def commit(self, name: str, write: Write) -> None:
        self._check_fence()
        with self._system.open(self._key(name, STATE), "wb") as file:
            manifest = write(file)
        self._check_fence()
        self._system.pipe_file(self._key(name, MANIFEST), manifest)

    def remove(self, name: str) -> None:
        self._check_fence()
        with contextlib.suppress(FileNotFoundError):  # another writer was at it, too
            if self._has_manifest(name):
                self._system.rm_file(self._key(name, MANIFEST))
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._key(name), recursive=True)

    def quarantine(self, name: str) -> None:
        self._check_fence()
        target, count = quarantined(name), 0
        while self._system.exists(self._key(target)):
            count += 1
            target = quarantined(f"{name}-{count}")
        for file in (STATE, MANIFEST):
            if self._system.exists(self._key(name, file)):
                self._system.cp_file(self._key(name, file), self._key(target, file))
        self.remove(name)

    def close(self) -> None:
        # Of a store that is away, the next one signs over it.
        with contextlib.suppress(OSError, WriterReplaced, StorageError):
            self._remove_strangers()
            self._system.rm_file(self._key("writer"))

    def _sign(self, writer: _Writer) -> None:
        self._writer = writer
        self._system.pipe_file(self._key("writer"), writer.signature())

    def _remove_strangers(self) -> None:
        """Remove what was never committed, or by somebody who had been replaced.

        Raises:
            Fenced: Another one has opened, or did so at once with this one.
        """
        writer, listed = self._writer or _Writer(), self._listed()
        self._check_fence()  # who has replaced this one adds nothing before it signs
        for name in listed:
            if not writer.counts(name):
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm(self._key(name), recursive=True)
            elif name not in writer.found and _token(name) != self._token:
                raise fenced(self.address(""))

    def _check_fence(self) -> None:
        if self._signed().token != self._token:
            raise fenced(self.address(""))

    def _signed(self) -> _Writer:
        """The last writer that has not closed."""
        try:
            return _Writer.of(bytes(self._system.cat_file(self._key("writer"))))
        except FileNotFoundError:
            return _Writer()

    def _has_manifest(self, name: str) -> bool:
        return bool(self._system.exists(self._key(name, MANIFEST)))

    def _key(self, *names: str) -> str:
        return str(self._root.joinpath(*names))

    def _listed(self) -> list[str]:
        return sorted(filter(is_generation, self._list(self._root)))

    def _list(self, prefix: PurePosixPath) -> list[str]:
        self._system.invalidate_cache()
        try:
            with reading(self):
                entries = self._system.ls(str(prefix), detail=False)
        except FileNotFoundError:
            return []
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]


def _token(name: str) -> str:
    """Return the token of who added a generation; none has what no writer added."""
    return name.partition(".")[0].rpartition("-")[2]


class RunObjects(ObjectFiles):
    """The generations of a run whose other files lie in a directory.

    Whoever opens them opens the directory, too: a curve there has the same one writer.

    Args:
        system: An `fsspec.AbstractFileSystem`.
        root: The generations' prefix.
        room: The run's own, in its directory; it holds no generation.
    """

    def __init__(self, system: Any, root: PurePosixPath | str, room: LocalFiles) -> None:
        super().__init__(system, root)
        self._room = room

    def open(self) -> None:
        self._room.open()
        try:
            super().open()
        except BaseException:  # an interruption too; raised again
            self._room.close()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._room.close()

    def replace(self, path: Path, content: bytes) -> None:
        self._room.replace(path, content)

    def translate_fenced(self) -> AbstractContextManager[None]:
        return self._room.translate_fenced()

    def has_writer(self) -> bool:
        return self._room.has_writer()


def connect(silence: float = _SILENCE_SECONDS) -> Any:
    """Return the object store that the environment names, as an fsspec file system.

    `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL` says where it is, when it is not Amazon's;
    credentials and region are found as the AWS SDK finds them. Asks nothing yet.

    Args:
        silence: Seconds without a byte after which a request has failed.

    Raises:
        StoreUnusable: The endpoint is no address.
    """
    return _connect(*_endpoint(), silence)


@cache
def _connect(scheme: str | None, place: str | None, silence: float) -> Any:
    # Seconds to import, which only those who keep checkpoints there pay.
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    return ArrowFSWrapper(
        S3FileSystem(
            scheme=scheme,
            endpoint_override=place,
            connect_timeout=min(_CONNECT_SECONDS, silence),
            request_timeout=silence,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
            allow_delayed_open=True,  # a small state is one request
        )
    )


def _endpoint() -> tuple[str | None, str | None]:
    """Return the scheme and `HOST:PORT` of the store; None: Amazon's."""
    for variable in _ENDPOINTS:
        if address := os.environ.get(variable):
            break
    else:
        return None, None
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError:  # of no host, or of no port
        parts = urlsplit("")
    plain = parts.hostname and parts.path in ("", "/") and not (parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or "@" in address or not plain:
        raise StoreUnusable(
            f"{variable} is {redact(address)!r}; it is the address of an object store, without "
            "credentials or a path; write for example https://minio.example.org:9000"
        )
    return parts.scheme, parts.netloc


def probe(prefix: str, *, empty: str | None = None) -> None:
    """Find out, within seconds, whether checkpoints can be kept below a prefix.

    Lists, writes, reads and removes one small object, and asks for one that is not there.

    Args:
        prefix: Such as `s3://bucket/sweeps`.
        empty: What below it must hold nothing yet; None: anything may be there.

    Raises:
        StoreUnusable: It does not answer or refuses, or something is in the way.
    """
    root = PurePosixPath(prefix.removeprefix(SCHEME))
    key = str(root / f".probe-{uuid.uuid4().hex[:12]}")
    system = connect(_PROBE_SECONDS)
    failed = "listed"
    try:
        with contextlib.suppress(FileNotFoundError):
            if system.ls(str(root / (empty or "")), detail=False) and empty is not None:
                raise StoreUnusable(
                    f"{prefix}/{empty} holds objects already; a new sweep's checkpoints lie where "
                    "nothing is; remove what is there, or choose another --name or prefix"
                )
        failed = "written to"
        system.pipe_file(key, b"probe")
        failed = "read from"
        try:
            system.cat_file(key)
        except OSError:
            with contextlib.suppress(OSError):  # who may not read may often not remove, either
                system.rm_file(key)
            raise
        failed = "cleared of an object"
        system.rm_file(key)
        failed = "asked for what is not there"
        system.exists(key)
    except OSError as problem:
        raise StoreUnusable(
            f"{prefix} cannot be {failed}: {redact(str(problem))}; trials list, write, read and "
            f"remove objects there; correct the address, {_ENDPOINTS[-1]}, or the credentials in "
            "the environment"
        ) from problem


def open_run(address: str, run: Path) -> RunObjects:
    """Return the generations at an address, of the run in a directory."""
    return RunObjects(connect(), address.removeprefix(SCHEME), LocalFiles.of(run))
