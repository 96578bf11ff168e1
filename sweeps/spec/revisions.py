"""A sweep's `sweep.yaml`: a file of revisions, each a YAML document with its own digest.

    # format 4, revision 1, 2026-11-20T16:08:46Z
    version: 1
    ...
    # sha256 0f3c...
    ---
    # format 4, revision 2, 2026-11-20T17:20:11Z: trials: 4 -> 8
    ...

The newest revision whose digest verifies is the spec. A resume that changes the spec appends a
revision; earlier ones never change. A sweep exists if this file exists. The format number is that
of the whole directory (`sweeps.paths`). What must not live here: the meaning of the keys (`spec`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sweeps.errors import RevisionError
from sweeps.paths import FORMAT
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.spec.trial_run import flatten
from sweeps.spec.yaml_scalars import write_flow
from trainable.config import Section
from trainable.store.regular_files import LARGEST_TEXT, IrregularFile, read_regular

_BREAK = re.compile(rb"^---\n", re.MULTILINE)
_FORMAT = re.compile(r"# format (\d+), revision ")
# A flipped bit in the line break after the digest must not invalidate the revision.
_SEAL = re.compile(rb"^# sha256 ([0-9a-f]{64})(?:\n|[\s\S](?=---\n))", re.MULTILINE)


class Revision(NamedTuple):
    """The newest valid revision of a sweep's spec."""

    spec: SweepSpec
    number: int
    """Counts from 1."""
    damage: str | None
    """A message about later revisions that are not valid; None if there are none."""
    text: str
    """The text of the revision, with as many empty lines before it as in the file."""


def read_spec(path: Path) -> Revision:
    """Return the newest revision of a sweep's spec that verifies."""
    try:
        documents = _BREAK.split(read_regular(path, LARGEST_TEXT))
    except IrregularFile as error:
        raise RevisionError(str(error)) from None
    except OSError as error:
        raise RevisionError(
            f"{path} cannot be read ({error.strerror}); it describes the sweep; correct its "
            "permissions, or restore it from a backup"
        ) from None
    for number in range(len(documents), 0, -1):
        text, rest = _unsealed(documents[number - 1])
        if text is not None:
            _check_format(text, path)
            above = sum(document.count(b"\n") + 1 for document in documents[: number - 1])
            text = "\n" * above + text  # so that positions in messages are those of the file
            damage = None
            if rest or number < len(documents):
                damage = (
                    f"{path}: what follows revision {number} cannot be used: it is damaged, cut "
                    f"short or edited; revision {number} is used; repeat later changes with "
                    "-s KEY=VALUE"
                )
            return Revision(parse_spec(text, str(path), drawn=None), number, damage, text)
    raise RevisionError(
        f"{path} has no valid revision of the spec: it is damaged, cut short or edited; each "
        "revision has its sha256, and changes are made with `sweep resume NAME -s KEY=VALUE`; "
        "restore the file from a backup; the ledger and the checkpoints are unchanged"
    )


def read_revisions(path: Path) -> list[SweepSpec]:
    """Return all valid revisions of a sweep's spec, the newest last."""
    texts = [_unsealed(document)[0] for document in _BREAK.split(read_regular(path, LARGEST_TEXT))]
    return [parse_spec(text, str(path), drawn=None) for text in texts if text is not None]


def write_spec(path: Path, spec: SweepSpec, note: str = "") -> None:
    """Append `spec` as the newest revision if it is another, atomically, even in a power loss."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)  # left by a driver that died while writing
    before, what = b"", ""
    if path.exists():
        newest = read_spec(path)
        if is_unchanged(newest.spec, spec) and not note:
            return
        before = read_regular(path, LARGEST_TEXT)
        before += (b"" if before.endswith(b"\n") else b"\n") + b"---\n"
        if changed := "; ".join(filter(None, (describe_changes(newest.spec, spec), note))):
            what = f": {changed}"
    number = len(_BREAK.findall(before)) + 1
    time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    head = f"# format {FORMAT}, revision {number}, {time}{what}"
    text = f"{head}\n{spec.to_yaml()}".encode()
    seal = f"# sha256 {hashlib.sha256(text).hexdigest()}\n".encode()
    with aside.open("wb") as file:
        file.write(before + text + seal)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def is_unchanged(before: SweepSpec, after: SweepSpec) -> bool:
    """Return whether two specs have the same YAML.

    Python's equality is not enough: it ignores the order of keys, and 1 equals True.
    """
    return before.to_yaml() == after.to_yaml()


def describe_changes(before: Section, after: Section, prefix: str = "") -> str:
    """Return the differences of two specs or sections in one line, such as `trials: 4 -> 8`."""
    return ", ".join(
        f"{prefix}{key}: {old} -> {new}" for key, (old, new) in changes(before, after).items()
    )


def changes(before: Section, after: Section) -> dict[str, tuple[str, str]]:
    """Return the keys in which two specs or configurations differ, with both values as YAML."""
    old, new = _leaves(before), _leaves(after)
    return {
        key: (_written(old, key), _written(new, key))
        for key in {**old, **new}
        if _written(old, key) != _written(new, key)
    }


def _leaves(spec: Section) -> dict[str, Any]:
    leaves = dict(flatten(spec.model_dump(mode="json")))
    if isinstance(spec, SweepSpec):  # the file leaves these out at their defaults
        for key in ("workers", "placement", "reuse_workers"):
            leaves[f"resources.{key}"] = getattr(spec.resources, key)
    return leaves


def _written(leaves: Mapping[str, Any], key: str) -> str:
    return write_flow(leaves[key]) if key in leaves else "nothing"


def _check_format(text: str, path: Path) -> None:
    """Check the format number in a revision; the first format had none."""
    found = _FORMAT.match(text)
    if (number := int(found[1]) if found else 1) == FORMAT:
        return
    remedy = "upgrade gradsweep"
    if number < FORMAT:
        remedy = "use the version that made the sweep, or run its spec again as a new sweep"
    raise RevisionError(
        f"{path} is of a sweep of format {number}; this version of gradsweep reads format "
        f"{FORMAT} alone, and has changed nothing; {remedy}"
    )


def _unsealed(document: bytes) -> tuple[str | None, bytes]:
    """Return the text before a valid digest, or None, and the bytes after the digest."""
    seal = _SEAL.search(document)
    if seal is None or hashlib.sha256(document[: seal.start()]).hexdigest().encode() != seal[1]:
        return None, b""
    return document[: seal.start()].decode(), document[seal.end() :]
