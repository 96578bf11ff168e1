"""Two notes in a run's directory: its results on test data, and its earlier configurations.

A run has one configuration, unless it ran out of memory and resumed with smaller micro-batches, or
the sweep was resumed with other keys. A line of `earlier.jsonl` has an earlier one and the step
from which the next one applied: `{"until": 120, "config": {...}}`. What must not live here: torch,
and the evaluation itself (`evaluate_test.py`).
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainable.config import TrialConfig
from trainable.store.generations import MISSING
from trainable.store.metrics_file import CurveDamaged, Row, damage_named
from trainable.store.regular_files import LARGEST_TEXT, read_regular, replace_regular

TESTED = "test.jsonl"
_TESTED_RULE = (
    "it has a line of JSON for each evaluation on the test data; restore it from a backup, or "
    "remove it, and test again"
)
PREFIX = "test/"
"""The prefix of the metrics on test data. A run reports none of them while it trains."""


class RecordedTest(NamedTuple):
    """One evaluation on the test data; `sha256` is the digest of the checkpoint."""

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
    with suppress(*MISSING), damage_named(path, _TESTED_RULE):
        lines = read_regular(path, LARGEST_TEXT).splitlines()
        found = [RecordedTest(**json.loads(line)) for line in lines]
        for one in found:
            metrics = {name: float(value) for name, value in one.metrics.items()}
            Row(int(one.step), int(one.timestamp_ms), metrics)
        return found
    return []


def append_tested(directory: Path, new: RecordedTest) -> None:
    """Add an evaluation, durably; the file is replaced as a whole."""
    lines = [json.dumps(one._asdict()) + "\n" for one in [*read_tested(directory), new]]
    replace_regular(directory / TESTED, "".join(lines).encode(), durable=True)


def latest_tested(directory: Path) -> RecordedTest | None:
    """Return the newest evaluation; None if there is none, or if the file is damaged."""
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
_EARLIER_RULE = (
    "it has the configurations that the run had before its present one, for `sweep audit "
    "--reproduce`; restore it from a backup, or remove it"
)


class EarlierConfig(NamedTuple):
    """A configuration that a run no longer has."""

    until: int
    """The step after which the next configuration applied."""
    config: TrialConfig


def read_earlier(directory: Path) -> list[EarlierConfig]:
    """Return the earlier configurations of the run in a directory, the oldest first."""
    path = directory / EARLIER
    with suppress(*MISSING), damage_named(path, _EARLIER_RULE):
        lines = read_regular(path, LARGEST_TEXT).decode().splitlines()
        return [
            EarlierConfig(int(one["until"]), TrialConfig.model_validate(one["config"]))
            for one in map(json.loads, lines)
        ]
    return []


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
