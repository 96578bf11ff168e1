"""Two notes in a run's directory: its results on test data, and its earlier configurations.

A run has one configuration, unless it ran out of memory and resumed with smaller micro-batches, or
the sweep was resumed with other keys. A line of `earlier.jsonl` has an earlier one and the step
from which the next one applied: `{"until": 120, "config": {...}}`. What must not live here: torch,
and the evaluation itself (`evaluate_test.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from trainable.config import TrialConfig
from trainable.store.metrics_file import CurveDamaged, Row
from trainable.store.regular_files import (
    LARGEST_TEXT,
    IrregularFile,
    read_regular,
    replace_regular,
)

TESTED = "test.jsonl"
PREFIX = "test/"
"""The prefix of the metrics on test data. A run reports none of them while it trains."""


class RecordedTest(NamedTuple):
    """One evaluation on the test data.

    Attributes:
        step: The step under which the metrics are recorded: the checkpoint's, or a later one if
            the run has been tested before.
        timestamp_ms: In milliseconds since the Unix epoch.
        metrics: The values, by name: `test/loss`.
        sha256: The digest of the checkpoint.
        precision: The precision of the forward passes.
    """

    step: int
    timestamp_ms: int
    metrics: dict[str, float]
    checkpoint_step: int
    epoch: int
    sha256: str
    num_samples: int
    device: str
    precision: str

    @property
    def row(self) -> Row:
        """The metrics as a row of the run's curve."""
        return Row(self.step, self.timestamp_ms, self.metrics)


def read_tested(directory: Path) -> list[RecordedTest]:
    """Read the evaluations of the run in `directory`, oldest first; empty if it has none."""
    path = directory / TESTED
    try:
        text = read_regular(path, LARGEST_TEXT)
        found = [RecordedTest(**json.loads(line)) for line in text.splitlines()]
        for one in found:
            Row(
                int(one.step), int(one.timestamp_ms), {k: float(v) for k, v in one.metrics.items()}
            )
    except (FileNotFoundError, NotADirectoryError):
        return []
    # RecursionError: the JSON is nested too deeply; OSError: not a regular file
    except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CurveDamaged(
            f"{path} is damaged ({type(error).__name__}: {error}); it has a line of JSON for each "
            "evaluation on the test data; restore it from a backup, or remove it, and test again"
        ) from error
    return found


def append_tested(directory: Path, new: RecordedTest) -> None:
    """Add an evaluation, durably; the file is replaced as a whole."""
    lines = [json.dumps(one._asdict()) + "\n" for one in [*read_tested(directory), new]]
    replace_regular(directory / TESTED, "".join(lines).encode(), durable=True)


def latest_tested(directory: Path) -> RecordedTest | None:
    """Return the newest evaluation; None if there is none, or if the file is damaged.

    A view shows the rest of a run in any case; `sweep audit --test` names a damaged file.
    """
    try:
        return read_tested(directory)[-1]
    except (IndexError, CurveDamaged):
        return None


def tested_rows(directory: Path) -> list[Row]:
    """Return what tracking must have of a run's evaluations; nothing of a damaged file."""
    try:
        return [one.row for one in read_tested(directory)]
    except CurveDamaged:
        return []


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
            "the run had before its present one, for `sweep audit --reproduce`; restore it from a "
            "backup, or remove it"
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
