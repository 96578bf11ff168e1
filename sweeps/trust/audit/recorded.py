"""What a trial's own files say for the audit: its clipped steps, and its validation samples.

What must not live here: the ledger (`read`), and what the numbers mean (`clipping`, `validation`).
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from statistics import fmean, quantiles

from sweeps.trust.audit.data import Clipping
from trainable.store.metrics_file import FILE_NAME
from trainable.store.regular_files import LARGEST_CURVE, LARGEST_TEXT, open_regular, read_regular
from trainable.user_code.fingerprint import BUILT

_WHOLE = 8 << 20
"""A longer file is read in parts: a long training has gigabytes of rows."""
_PARTS, _PART = 64, 64 << 10
_SHARE = re.compile(rb'"train/clip_fraction": ([0-9.e+-]+)')
_NORM = re.compile(rb'"train/grad_norm": ([0-9.e+-]+)')
_LENGTH, _TENSOR = "val: its length", "val: tensor 0"


def read_clipping(directory: Path, max_norm: float | None, steps: int) -> Clipping | None:
    """Return how often a trial's gradients were clipped; None if it logged no share of steps."""
    try:
        text = _rows(directory / FILE_NAME)
    except OSError:
        return None
    shares, norms = _numbers(_SHARE, text), _numbers(_NORM, text)
    if not shares:
        return None
    usual = quantiles(norms, n=10)[-1] if len(norms) > 10 else None
    return Clipping(max_norm, fmean(shares), steps, usual)


def read_num_validation(directory: Path) -> int | None:
    """Return how many validation samples a trial's data had; None if that is unknown.

    A stream of samples has no length, and a loop of the user's own tells none.
    """
    try:
        found = json.loads(read_regular(directory / BUILT, LARGEST_TEXT))
        size = found[_LENGTH] if _LENGTH in found else found[_TENSOR][1][0]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def _rows(path: Path) -> bytes:
    """Return the rows of a run, or of a longer file whole rows from evenly spaced parts."""
    with open(open_regular(path, limit=LARGEST_CURVE), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE:
            return file.read()
        parts = []
        for index in range(_PARTS):
            file.seek(index * (size - _PART) // (_PARTS - 1))
            parts.append(b"".join(file.read(_PART).splitlines(keepends=True)[1:-1]))
        return b"".join(parts)


def _numbers(pattern: re.Pattern[bytes], text: bytes) -> list[float]:
    found = []
    for match in pattern.finditer(text):
        try:
            value = float(match[1])
        except ValueError:
            continue
        if math.isfinite(value):
            found.append(value)
    return found
