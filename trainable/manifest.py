"""`manifest.json` of a checkpoint: metric, length and sha256 of `state.pt`, and its own digest.

What must not live here: torch, or when generations are written and removed (`checkpoint.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainable.storage.generations import MANIFEST, STATE, Files

_FORMAT = 1
_FIELDS = ("number", "step", "epoch", "metric", "mode", "value")
_VALUES = (*_FIELDS, "length", "sha256")


class Pointer(NamedTuple):
    """Address, step and digest of a committed generation.

    Attributes:
        address: Its directory, or its prefix in an object store, `s3://...`.
        step: Optimizer steps taken.
        sha256: Digest of its `state.pt`.
    """

    address: str
    step: int
    sha256: str


@dataclass(frozen=True)
class Generation:
    """The contents of a manifest.

    Attributes:
        address: The generation's directory, or its prefix in an object store, `s3://...`.
        number: Counts commits; the newest generation has the highest.
        step: Optimizer steps taken.
        epoch: Reports made: epochs completed, where each epoch ends with a report.
        metric: Name of the metric that decides which generation is best.
        mode: `min` or `max`.
        value: The metric at this state; None if it was not evaluated.
        length: Bytes of `state.pt`.
        sha256: Digest of `state.pt`.
    """

    address: str
    number: int
    step: int
    epoch: int
    metric: str
    mode: Literal["min", "max"]
    value: float | None
    length: int
    sha256: str

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
    values = {key: _encode(getattr(generation, key)) for key in _VALUES}
    # Without a digest of the manifest a flipped bit could make the wrong generation the best.
    seal = hashlib.sha256((_SEALED % values).encode()).hexdigest()
    return (_LAYOUT % {**values, "seal": _encode(seal)}).encode()


def _layouts() -> tuple[str, str]:
    """Return templates of the digested part and of the whole file, with `%(key)s` for each value.

    Without them, `json.dumps` would take most of the time of verifying a thousand manifests.
    """
    slot = {key: f"%({key})s" for key in (*_VALUES, "seal")}
    files = {STATE: {"length": slot["length"], "sha256": slot["sha256"]}}
    manifest = {"format": _FORMAT, **{key: slot[key] for key in _FIELDS}, "files": files}
    sealed = json.dumps(manifest, sort_keys=True)
    text = json.dumps({"manifest": manifest, "sha256": slot["seal"]}, indent=1, sort_keys=True)
    bare = re.compile(r'"(%\(\w+\)s)"')
    return bare.sub(r"\1", sealed), bare.sub(r"\1", text) + "\n"


_SEALED, _LAYOUT = _layouts()


def _encode(value: str | float | None) -> str:
    """Return what `json.dumps` returns for a text or a finite number; faster for numbers."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return json.dumps(value)
    # float.__repr__, not repr(): a NumPy number is a float too, with another representation
    return float.__repr__(value) if isinstance(value, float) else int.__repr__(value)


def _seal(manifest: dict[str, Any]) -> str:
    """Return the digest of a manifest with these values."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(files: Files, name: str) -> Generation | str:
    """Return the generation that a manifest describes, or a text: why the manifest is invalid.

    Raises:
        StorageError: The storage cannot be read.
    """
    address = files.address(name)
    path = f"{address}/{MANIFEST}"
    try:
        content = files.read(name, MANIFEST)
        record = json.loads(content)
        manifest = record["manifest"]
        if manifest["format"] != _FORMAT:
            return f"{path} has format {manifest['format']}, this version reads {_FORMAT}"
        file = manifest["files"][STATE]
        generation = Generation(
            address=address,
            **{key: manifest[key] for key in _FIELDS},
            length=file["length"],
            sha256=file["sha256"],
        )
        length = files.length(name, STATE)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        return f"{path} cannot be read ({type(problem).__name__}: {problem})"
    if content != format_manifest(generation):
        seal = _seal(manifest)
        if seal != (recorded := record.get("sha256")):
            return f"{path} has sha256 {seal}, it says {recorded}"
        return f"{path} is not as it was written"  # equal as JSON, but not byte for byte
    if length != generation.length:
        return (
            f"{address}/{STATE} has {length} bytes of {generation.length}, sha256 "
            f"{generation.sha256}"
        )
    return generation


def read_state(files: Files, generation: Generation) -> bytes | None:
    """Return the bytes of a generation's state; None if it is missing or its digest differs.

    Raises:
        StorageError: The storage cannot be read.
    """
    try:
        content = files.read(generation.name, STATE)
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == generation.sha256 else None


def describe_damage(files: Files, name: str) -> str:
    """Return which file of a generation is damaged, with both digests."""
    found = read_manifest(files, name)
    if isinstance(found, str):
        return found
    path = f"{files.address(name)}/{STATE}"
    try:
        actual = hashlib.sha256(files.read(name, STATE)).hexdigest()
    except OSError as problem:
        return f"{path} cannot be read ({problem})"
    return f"{path} has sha256 {actual}, its manifest says {found.sha256}"
