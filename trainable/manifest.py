"""What a committed generation says of itself: `manifest.json`, which carries its own digest.

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
    """Where a committed generation lies.

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
    """What a manifest says.

    Attributes:
        address: The generation's directory, or its prefix in an object store, `s3://...`.
        number: Counts commits; the newest has the highest.
        step: Optimizer steps taken.
        epoch: Epochs completed.
        metric: Name of the metric that decides which is best.
        mode: `min` or `max`.
        value: The metric as evaluated at this state; None when it was not.
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
        """Its name among the run's generations."""
        return self.address.rpartition("/")[2]

    @property
    def path(self) -> Path:
        """Its directory; there is none in an object store."""
        assert "://" not in self.address, self.address
        return Path(self.address)


def rank(generation: Generation) -> tuple[float, int]:
    """Sort key of generations that have a value: the best first, and of equals the earlier one."""
    assert generation.value is not None
    return (generation.value if generation.mode == "min" else -generation.value, generation.number)


def format_manifest(generation: Generation) -> bytes:
    """Return the bytes of `manifest.json`."""
    values = {key: _encode(getattr(generation, key)) for key in _VALUES}
    # The manifest carries its own digest: a flipped bit in a value would otherwise make the wrong
    # generation the best.
    seal = hashlib.sha256((_SEALED % values).encode()).hexdigest()
    return (_LAYOUT % {**values, "seal": _encode(seal)}).encode()


def _layouts() -> tuple[str, str]:
    """What is sealed, and the file, with a place for each value: laying them out is most of the
    time that a thousand manifests take to be verified, and always comes to the same.
    """
    place = {key: f"%({key})s" for key in (*_VALUES, "seal")}
    files = {STATE: {"length": place["length"], "sha256": place["sha256"]}}
    manifest = {"format": _FORMAT, **{key: place[key] for key in _FIELDS}, "files": files}
    sealed = json.dumps(manifest, sort_keys=True)
    text = json.dumps({"manifest": manifest, "sha256": place["seal"]}, indent=1, sort_keys=True)
    bare = re.compile(r'"(%\(\w+\)s)"')
    return bare.sub(r"\1", sealed), bare.sub(r"\1", text) + "\n"


_SEALED, _LAYOUT = _layouts()


def _encode(value: str | float | None) -> str:
    """What `json.dumps` returns of a text or a finite number, of the latter much sooner."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return json.dumps(value)
    # of the type itself: a NumPy number is a float, too, and describes itself otherwise
    return float.__repr__(value) if isinstance(value, float) else int.__repr__(value)


def _seal(manifest: dict[str, Any]) -> str:
    """The digest that a manifest with these values carries."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(files: Files, name: str) -> Generation | str:
    """Return what a generation's manifest says, or why it cannot be trusted.

    Raises:
        StorageError: The storage cannot be read.
    """
    address = files.address(name)
    told = f"{address}/{MANIFEST}"
    try:
        content = files.read(name, MANIFEST)
        record = json.loads(content)
        manifest = record["manifest"]
        if manifest["format"] != _FORMAT:
            return f"{told} has format {manifest['format']}, this version reads {_FORMAT}"
        file = manifest["files"][STATE]
        generation = Generation(
            address=address,
            **{key: manifest[key] for key in _FIELDS},
            length=file["length"],
            sha256=file["sha256"],
        )
        length = files.length(name, STATE)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        return f"{told} cannot be read ({type(problem).__name__}: {problem})"
    if content != format_manifest(generation):
        seal = _seal(manifest)
        if seal != (said := record.get("sha256")):
            return f"{told} has sha256 {seal}, it says {said}"
        return f"{told} is not as it was written"  # the same to JSON
    if length != generation.length:
        return (
            f"{address}/{STATE} has {length} bytes of {generation.length}, sha256 "
            f"{generation.sha256}"
        )
    return generation


def read_state(files: Files, generation: Generation) -> bytes | None:
    """Return the bytes of a state whose digest verifies, or None.

    Raises:
        StorageError: The storage cannot be read.
    """
    try:
        content = files.read(generation.name, STATE)
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == generation.sha256 else None


def describe_damage(files: Files, name: str) -> str:
    """Return which file of a generation does not verify, with both digests."""
    found = read_manifest(files, name)
    if isinstance(found, str):
        return found
    path = f"{files.address(name)}/{STATE}"
    try:
        actual = hashlib.sha256(files.read(name, STATE)).hexdigest()
    except OSError as problem:
        return f"{path} cannot be read ({problem})"
    return f"{path} has sha256 {actual}, its manifest says {found.sha256}"
