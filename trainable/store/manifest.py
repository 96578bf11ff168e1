"""`manifest.json` of a checkpoint: metric, length and sha256 of its files, and its own digest.

Format 1 has one file, `state.pt`. Format 2 is that of a sharded state: it lists the shard of each
rank, too. What must not live here: torch, or when generations are written and removed
(`checkpoint.py`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainable.store.generations import MANIFEST, STATE, Files, shard_name

_FORMAT, _SHARDED_FORMAT = 1, 2
_FIELDS = ("number", "step", "epoch", "metric", "mode", "value")


class Pointer(NamedTuple):
    """Address, step and digest of `state.pt` of a committed generation."""

    address: str
    step: int
    sha256: str


class Shard(NamedTuple):
    """Length in bytes and sha256 of the file with a rank's part of a sharded state."""

    length: int
    sha256: str


@dataclass(frozen=True)
class Generation:
    """The contents of a manifest; `epoch` counts reports, `number` commits."""

    address: str
    number: int
    step: int
    epoch: int
    metric: str
    mode: Literal["min", "max"]
    value: float | None
    length: int
    sha256: str
    shards: tuple[Shard, ...] = ()

    @property
    def contents(self) -> dict[str, Shard]:
        """Length and digest of each file that has tensors, by name."""
        shards = {shard_name(rank): shard for rank, shard in enumerate(self.shards)}
        return {STATE: Shard(self.length, self.sha256), **shards}

    @property
    def files(self) -> tuple[str, ...]:
        """The names of all its files, the manifest last."""
        return (*self.contents, MANIFEST)

    @property
    def pointer(self) -> Pointer:
        """The pointer to this generation."""
        return Pointer(self.address, self.step, self.sha256)

    @property
    def name(self) -> str:
        """The name of its directory, such as `step-00000120`."""
        return self.address.rpartition("/")[2]

    @property
    def path(self) -> Path:
        """Its directory; not for a generation in an object store."""
        assert "://" not in self.address, self.address
        return Path(self.address)


def best_first(generation: Generation) -> tuple[float, int]:
    """Sort key for generations with a value: the best first; of equals, the earlier one first."""
    assert generation.value is not None
    return (generation.value if generation.mode == "min" else -generation.value, generation.number)


def format_manifest(generation: Generation) -> bytes:
    """Return the bytes of `manifest.json`."""
    manifest = {
        "format": _SHARDED_FORMAT if generation.shards else _FORMAT,
        **{key: getattr(generation, key) for key in _FIELDS},
        "files": {name: one._asdict() for name, one in generation.contents.items()},
    }
    # Without a digest of the manifest a flipped bit could make the wrong generation the best.
    sealed = {"manifest": manifest, "sha256": _seal(manifest)}
    return f"{json.dumps(sealed, indent=1, sort_keys=True, allow_nan=False)}\n".encode()


def _seal(manifest: dict[str, Any]) -> str:
    """Return the digest of a manifest with these values."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(files: Files, name: str) -> Generation | str:
    """Return a manifest's generation, or why it is invalid; StorageError: it cannot be read."""
    address = files.address(name)
    path = f"{address}/{MANIFEST}"
    try:
        content = files.read(name, MANIFEST)
        record = json.loads(content)
        manifest = record["manifest"]
        if manifest["format"] not in (_FORMAT, _SHARDED_FORMAT):
            return (
                f"{path} has format {manifest['format']}, this version reads {_SHARDED_FORMAT} "
                f"and {_FORMAT}"
            )
        found = {file: Shard(**entry) for file, entry in manifest["files"].items()}
        generation = Generation(
            address=address,
            **{key: manifest[key] for key in _FIELDS},
            **found[STATE]._asdict(),
            shards=tuple(found[shard_name(rank)] for rank in range(len(found) - 1)),
        )
        lengths = {file: files.length(name, file) for file in found}
        expected = format_manifest(generation)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        return f"{path} cannot be read ({type(problem).__name__}: {problem})"
    if content != expected:
        seal = _seal(manifest)
        if seal != (recorded := record.get("sha256")):
            return f"{path} has sha256 {seal}, it says {recorded}"
        return f"{path} is not as it was written"  # equal as JSON, but not byte for byte
    for file, one in found.items():
        if lengths[file] != one.length:
            return (
                f"{address}/{file} has {lengths[file]} bytes of {one.length}, sha256 {one.sha256}"
            )
    return generation


def read_state(files: Files, generation: Generation) -> bytes | None:
    """Return the bytes of `state.pt`; None if it or a shard is missing or has another digest."""
    content = None
    for file, one in reversed(generation.contents.items()):  # the state is the last
        content = read_verified(files, generation.name, file, one.sha256)
        if content is None:
            return None
    return content


def read_verified(files: Files, name: str, file: str, sha256: str) -> bytes | None:
    """Return a file's bytes; None: missing or another digest. StorageError: it cannot be read."""
    try:
        content = files.read(name, file)
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == sha256 else None


def describe_damage(files: Files, name: str) -> str:
    """Return which file of a generation is damaged, with both digests."""
    found = read_manifest(files, name)
    if isinstance(found, str):
        return found
    damage = ""
    for file, one in found.contents.items():
        path = f"{files.address(name)}/{file}"
        try:
            actual = hashlib.sha256(files.read(name, file)).hexdigest()
        except OSError as problem:
            return f"{path} cannot be read ({problem})"
        damage = f"{path} has sha256 {actual}, its manifest says {one.sha256}"
        if actual != one.sha256:
            break
    return damage
