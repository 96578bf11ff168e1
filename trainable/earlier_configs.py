"""The configurations that a run had before its present one: `earlier.jsonl` in its directory.

A run has one configuration, unless it ran out of memory and resumed with smaller micro-batches, or
the sweep was resumed with other keys. Each line has an earlier configuration and the step from
which the next one applied: `{"until": 120, "config": {...}}`. Without a change there is no file.
What must not live here: torch, and which changes are allowed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from trainable.config import TrialConfig
from trainable.metrics_file import CurveDamaged
from trainable.storage.regular_files import (
    LARGEST_TEXT,
    IrregularFile,
    read_regular,
    replace_regular,
)

EARLIER = "earlier.jsonl"


class EarlierConfig(NamedTuple):
    """A configuration that a run no longer has."""

    until: int
    """The step after which the next configuration applied."""
    config: TrialConfig


def read_earlier(directory: Path) -> list[EarlierConfig]:
    """Return the earlier configurations of the run in a directory, the oldest first."""
    path = directory / EARLIER
    try:
        lines = read_regular(path, LARGEST_TEXT).decode().splitlines()
        found = [json.loads(line) for line in lines]
        return [
            EarlierConfig(int(one["until"]), TrialConfig.model_validate(one["config"]))
            for one in found
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except IrregularFile as error:
        raise CurveDamaged(str(error)) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CurveDamaged(
            f"{path} is damaged ({type(error).__name__}: {error}); it has the configurations that "
            "the run had before its present one, for `sweep reproduce`; restore it from a backup, "
            "or remove it"
        ) from error


def add_earlier(directory: Path, until: int, config: TrialConfig) -> None:
    """Record that a run resumes from a step with another configuration than before."""
    kept: list[EarlierConfig] = []
    for end, before in (*read_earlier(directory), EarlierConfig(until, config)):
        end = min(end, until)
        if end > (kept[-1].until if kept else 0):
            kept.append(EarlierConfig(end, before))
    if not kept:  # everything is trained again
        (directory / EARLIER).unlink(missing_ok=True)
        return
    lines = (
        json.dumps({"until": one.until, "config": one.config.model_dump(mode="json")})
        for one in kept
    )
    replace_regular(directory / EARLIER, "".join(f"{line}\n" for line in lines).encode())
