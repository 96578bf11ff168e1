"""Checkpoints in an object store, where writing the manifest commits a generation; files_of.

`ObjectFiles` works on any fsspec file system; `files_of` and `files_at` choose between it and
local files. What must not live here: local files (`local.py`).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from redaction.secrets import redact
from trainable.errors import StorageError, WriterReplaced
from trainable.store.fencing import ObjectFence, ObjectWriter, fenced, token_of
from trainable.store.generations import (
    MANIFEST,
    STATE,
    Files,
    RunFiles,
    Write,
    WriteShard,
    is_generation,
    quarantined,
    reading,
    unused_name,
)
from trainable.store.local import LocalFiles

SCHEME = "s3://"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_CONNECT_SECONDS, _TIMEOUT_SECONDS, _ATTEMPTS = 3, 10, 3
"""Seconds until a connection or a request without data fails; attempts before giving up."""
_PROBE_SECONDS = 2


class StoreUnusable(ValueError):
    """Checkpoints cannot be kept in an object store: which store, why, and what to do."""


class ObjectFiles:
    """Generations below a prefix of an object store, without renames.

    An object is complete or does not exist. So the manifest, written last and removed first,
    commits a generation. A replaced writer is fenced by `ObjectFence`.

    A file counts as missing only if the store says so. If the store is unreachable or refuses
    access, readers raise `StorageError`, and no generation is quarantined.
    """

    remedy = (
        "check that the store responds, and that the credentials in the environment may list, "
        "read, write and remove there"
    )

    def __init__(self, system: Any, root: PurePosixPath | str) -> None:
        self._system, self._root = system, PurePosixPath(root)
        self._fence = ObjectFence(system, self._key("writer"), self.address(""))

    def at(self, address: str) -> ObjectFiles:
        return ObjectFiles(self._system, address.removeprefix(SCHEME))

    def address(self, name: str) -> str:
        return f"{SCHEME}{self._key(name)}"

    def names(self) -> list[str]:
        with reading(self):
            writer = self._fence.writer or self._fence.read()
        return list(filter(writer.is_valid, self._listed()))

    def unused(self, step: int) -> str:
        return unused_name(f"step-{step:08d}-{self._fence.token}", self.names())

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
        # After the first write no other writer begins a commit, and a commit that is already under
        # way is still valid. The second write makes later ones invalid.
        before, token = self._fence.read(), self._fence.token
        self._fence.write(before._replace(token=token))
        listed = self._listed()
        found = frozenset(n for n in filter(before.is_valid, listed) if self._has_manifest(n))
        replaced = before.replaced.union([before.token], map(token_of, listed)) - {"", token}
        self._fence.check()
        self._fence.write(ObjectWriter(token, found, replaced))
        self._remove_invalid()

    def begin(self, name: str) -> str:
        return self.address(name)

    def add_shard(self, begun: str, file: str, write: WriteShard) -> None:
        with self._system.open(f"{begun.removeprefix(SCHEME)}/{file}", "wb") as shard:
            write(shard)

    def commit(self, name: str, write: Write) -> None:
        self._fence.check()
        with self._system.open(self._key(name, STATE), "wb") as file:
            manifest = write(file)
        self._fence.check()
        self._system.pipe_file(self._key(name, MANIFEST), manifest)

    def remove(self, name: str) -> None:
        self._fence.check()
        with contextlib.suppress(FileNotFoundError):  # another writer may remove it as well
            if self._has_manifest(name):
                self._system.rm_file(self._key(name, MANIFEST))
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._key(name), recursive=True)

    def quarantine(self, name: str) -> None:
        self._fence.check()
        target = quarantined(unused_name(name, self._list(self._root / quarantined())))
        for file in self._list(self._root / name):
            self._system.cp_file(self._key(name, file), self._key(target, file))
        self.remove(name)

    def close(self) -> None:
        # If the store is unavailable, the object `writer` stays; the next writer overwrites it.
        with contextlib.suppress(OSError, WriterReplaced, StorageError):
            self._remove_invalid()
            self._system.rm_file(self._key("writer"))

    def _remove_invalid(self) -> None:
        """Remove generations that a replaced writer committed late or never completed."""
        writer, listed = self._fence.writer or ObjectWriter(), self._listed()
        self._fence.check()  # a new writer adds nothing before it has written its token
        for name in listed:
            if not writer.is_valid(name):
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm(self._key(name), recursive=True)
            elif name not in writer.found and token_of(name) != self._fence.token:
                raise fenced(self.address(""))

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


class RunObjects(ObjectFiles):
    """The generations of a run whose other files are in a directory, with the same writer."""

    def __init__(self, system: Any, root: PurePosixPath | str, local: LocalFiles) -> None:
        super().__init__(system, root)
        self._local = local

    def open(self) -> None:
        self._local.open()
        try:
            super().open()
        except BaseException:  # KeyboardInterrupt too; raised again
            self._local.close()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._local.close()

    def replace(self, path: Path, content: bytes) -> None:
        self._local.replace(path, content)

    def translate_fenced(self) -> AbstractContextManager[None]:
        return self._local.translate_fenced()

    def has_writer(self) -> bool:
        return self._local.has_writer()


def connect(timeout: float = _TIMEOUT_SECONDS) -> Any:
    """Return the object store that the environment names, for fsspec; sends nothing."""
    return _connect(*_endpoint(), timeout)


@cache
def _connect(scheme: str | None, endpoint: str | None, timeout: float) -> Any:
    # These take seconds to import: do it only for runs with checkpoints in an object store.
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    return ArrowFSWrapper(
        S3FileSystem(
            scheme=scheme,
            endpoint_override=endpoint,
            connect_timeout=min(_CONNECT_SECONDS, timeout),
            request_timeout=timeout,
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
    except ValueError:  # the host or the port is invalid
        parts = urlsplit("")
    plain = parts.hostname and parts.path in ("", "/") and not (parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or "@" in address or not plain:
        raise StoreUnusable(
            f"{variable} is {redact(address)!r}; it must be the address of an object store, "
            "without credentials or a path; write for example https://minio.example.org:9000"
        )
    return parts.scheme, parts.netloc


def probe(prefix: str, *, empty: str | None = None) -> None:
    """Check within seconds that checkpoints can be kept below a prefix, by one small object."""
    root = PurePosixPath(prefix.removeprefix(SCHEME))
    key = str(root / f".probe-{uuid.uuid4().hex[:12]}")
    system = connect(_PROBE_SECONDS)
    failed = "listed"
    try:
        with contextlib.suppress(FileNotFoundError):
            if system.ls(str(root / (empty or "")), detail=False) and empty is not None:
                raise StoreUnusable(
                    f"{prefix}/{empty} holds objects already; a new sweep needs an empty prefix "
                    "for its checkpoints; remove the objects, or choose another --name or prefix"
                )
        failed = "written to"
        system.pipe_file(key, b"probe")
        failed = "read from"
        try:
            system.cat_file(key)
        except OSError:
            with contextlib.suppress(OSError):  # without the right to read, removing may fail too
                system.rm_file(key)
            raise
        failed = "cleared of an object"
        system.rm_file(key)
        failed = "asked whether an object exists"
        system.exists(key)
    except OSError as problem:
        raise StoreUnusable(
            f"{prefix} cannot be {failed}: {redact(str(problem))}; trials must list, write, read "
            f"and remove objects there; correct the address, {_ENDPOINTS[-1]}, or the credentials "
            "in the environment"
        ) from problem


def object_sizes(prefix: str) -> dict[str, int]:
    """Return the sizes in bytes of all objects below a prefix, by key."""
    from pyarrow.fs import FileSelector, FileType

    root = prefix.removeprefix(SCHEME)
    with _explained(prefix, "listed"):
        found = connect().fs.get_file_info(
            FileSelector(root, recursive=True, allow_not_found=True)
        )
    return {one.path: one.size for one in found if one.type == FileType.File}


def remove_objects(prefix: str) -> None:
    """Remove all objects below a prefix. After an interruption, call it again."""
    with _explained(prefix, "cleared"), contextlib.suppress(FileNotFoundError):
        connect().fs.delete_dir(prefix.removeprefix(SCHEME))


@contextlib.contextmanager
def _explained(prefix: str, verb: str) -> Iterator[None]:
    """Raise `StoreUnusable` for an error of the store."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise StoreUnusable(
            f"{prefix} cannot be {verb}: {redact(str(problem))}; you must be able to list and "
            f"remove objects there; correct {_ENDPOINTS[-1]}, or the credentials in the "
            "environment, and repeat the command"
        ) from problem


def open_run(address: str, run: Path) -> RunObjects:
    """Return the generations at an address, for the run in a local directory."""
    return RunObjects(connect(), address.removeprefix(SCHEME), LocalFiles.of(run))


def files_of(run: Path, address: str | None = None) -> RunFiles:
    """Return the storage of a run's generations. Only this function decides which one it is."""
    if address is None:
        return LocalFiles.of(run)
    return open_run(address, run)


def files_at(address: str) -> Files:
    """Return the generations at an address for reading: a directory, or `s3://BUCKET/...`."""
    if "://" not in address:
        return LocalFiles(Path(address))
    return ObjectFiles(connect(), address.partition("://")[2])
