"""Check that a sweep writes only below its root, and into nothing that another sweep uses.

A copy of a root has the original's absolute addresses and its links. Each command that writes into
a sweep calls these checks first. What must not live here: stores that get credentials
(`store_access`), and directories that a user names for output (`path_checks`).
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.paths import RESERVED_NAMES, SweepPaths, artifact_root
from sweeps.spec.spec import SweepSpec
from sweeps.tracker import tracker_at
from tracking.address import file_path, sqlite_file, sqlite_uri
from tracking.artifact_addresses import check_inside, is_below, trust_command
from tracking.tracker import StoreUnreadable
from tracking.trusted_stores import is_trusted_directory
from trainable.storage.private_directories import NotPrivate, check_links, private_directory

logger = logging.getLogger("tracking")
_OF_TRIALS = {
    *("artifacts", "checkpoints", "figures", "inherited"),
    *("logged.jsonl", "metrics.jsonl", "test.jsonl", "trial.log"),
}
"""The directories and files of a trial that are written in their place; a task may have others."""
_WITH_FOLDERS = {"artifacts", "figures"}
"""Those in which a task names folders and files. Others' files are new at each save."""


class OutsideRoot(UserError):
    """A sweep would write to files outside of its root, or to those of another sweep."""


def check_below_root(
    paths: SweepPaths, spec: SweepSpec, warn: Callable[[str], object] = logger.warning
) -> None:
    """Check that what a sweep writes lies below its root, links followed.

    If the root was moved or copied, the addresses of its artifacts in MLflow are corrected first.
    """
    try:
        check_links(paths.root)
    except NotPrivate as error:
        raise OutsideRoot(f"--root {paths.root}: {error}") from error
    for sentence in links_outside(paths):
        raise OutsideRoot(sentence)
    try:
        private_directory(paths.root, sticky=True)
    except NotPrivate as error:  # a root for many users, whose owner they trust
        warn(f"--root {paths.root}: {error}")
    tracker, artifacts = tracker_at(spec.tracking.uri, paths.root), artifact_root(paths.root)
    for former in tracker.correct_addresses():
        warn(
            f"the root was at {former.parent}: the artifacts of its runs in MLflow are now those "
            f"below {artifacts}"
        )
    for address in addresses_outside(paths, spec):
        check_inside(address, artifacts)


def addresses_outside(paths: SweepPaths, spec: SweepSpec) -> list[str]:
    """Return the addresses of artifacts outside of the root and of what the user has trusted.

    None of a server, which is not asked, or if the store cannot be read.
    """
    try:
        found = tracker_at(spec.tracking.uri, paths.root).addresses_outside(spec.name)
        return [
            one
            for one in found
            if (path := file_path(one)) is None or not is_trusted_directory(path)
        ]
    except StoreUnreadable:  # nothing is sent to it now, and each upload is checked
        return []


def links_outside(paths: SweepPaths) -> Iterator[str]:
    """Yield a sentence for each file that is a link out of the root, or shared by a hard link.

    Symbolic links to a directory that the user has trusted are left out.
    """
    root = os.path.realpath(paths.root)
    for place in _written(paths):
        if place.is_symlink():
            target = Path(os.path.realpath(place))
            if not target.is_relative_to(root) and not is_trusted_directory(target):
                yield (
                    f"{place.path} is a link to {target}, outside of the root {paths.root}: a "
                    "sweep writes only below its root, and the link of a copied root leads to the "
                    "original's files; put the files there instead of the link, or, if sweeps "
                    f"may write there: {trust_command(target)}"
                )
        elif place.is_file() and os.stat(place).st_nlink > 1:
            yield (
                f"{place.path} has another name, too (a hard link): a sweep writes into this "
                "file, and so into that of a copy or of the original; make it a file of its own: "
                f"{_own_file(place.path)}"
            )


def _own_file(path: str) -> str:
    old, new = shlex.quote(path), shlex.quote(f"{path}.new")
    return f"cp -p {old} {new} && mv {new} {old}"


def _written(paths: SweepPaths) -> Iterator[os.DirEntry[str]]:
    """Yield the files and directories of a sweep that are written in their place."""
    yield from (e for e in _entries(paths.root) if e.name in (*RESERVED_NAMES, paths.name))
    yield from (*_entries(paths.directory), *_entries(paths.outbox))
    for trial in _entries(paths.trial(0).parent):
        yield trial
        for entry in _entries(trial):
            if entry.name in _OF_TRIALS:
                yield entry
            if entry.name in _WITH_FOLDERS:
                yield from _below(entry)


def _below(entry: os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """Yield what is below a directory, and nothing of a link to one."""
    if entry.is_dir(follow_symlinks=False):
        for inner in _entries(entry):
            yield inner
            yield from _below(inner)


def _entries(directory: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def place_of(paths: SweepPaths) -> dict[str, Any]:
    """Return where a sweep lies, by which `check_no_copy` knows it again."""
    directory = os.path.realpath(paths.directory)
    inode = os.stat(directory).st_ino  # stays when the directory is moved, or mounted elsewhere
    return {"host": socket.gethostname(), "directory": directory, "inode": inode}


def check_no_copy(
    paths: SweepPaths, spec: SweepSpec, before: Mapping[str, Any], *, accepted: bool = False
) -> None:
    """Check that no copy of a sweep writes into the stores of the original."""
    stores = {
        f"{section}.{key}": uri
        for section, key in (
            ("tracking", "uri"),
            ("storage", "checkpoints"),
        )
        if (uri := getattr(getattr(spec, section), key)) is not None
        and not is_below(sqlite_file(uri) or Path("/"), paths.root)
    }
    if not before or not stores or accepted:
        return
    now, then = place_of(paths), Path(before["directory"])
    if now["directory"] == str(then):
        return
    for key, uri in stores.items():
        if (file := sqlite_file(uri)) is not None and file.is_relative_to(then.parent):
            there = Path(now["directory"]).parent / file.relative_to(then.parent)
            raise OutsideRoot(
                f"{key} is {uri}, which is below {then.parent}, where the root was before: that "
                "place would be created again, or belongs to the original; continue with: "
                + paths.command("resume", "-s", f"{key}={sqlite_uri(there)}")
            )
    if now["inode"] == before["inode"]:
        return
    if now["host"] == before["host"] and not SweepPaths(then.parent, paths.name).exists():
        return  # it was moved
    raise OutsideRoot(
        f"{paths.directory} may be a copy of the sweep at {before['host']}:{then}, and "
        f"{' and '.join(f'{key} {uri}' for key, uri in stores.items())} would be those of the "
        "original: a copy would overwrite its records; run a new sweep, or, if the original is "
        f"not used any more, continue with: {paths.command('resume', '--accept-changes')}"
    )
