"""Draw the figures of trials that have ended, and record them with the trials' runs.

A sweep draws nothing, neither while it runs nor at its end: `sweep sync` and `sweep ui` draw what
is missing. A trial's `figures/` directory exists once its figures are recorded; after a crash the
next `sync` draws the rest. What must not live here: how a figure looks (`trainable.figures`).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redaction.secrets import redact
from sweeps.engine.resources import usable_cpus
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.recording.trial_config import load_trial_config
from sweeps.spec.spec import SweepSpec
from tracking.recorder import Recorder

_DIRECTORY = "figures"
_TRIALS_PER_PROCESS = 8
"""Starting a process takes as long as drawing a few trials."""
_MAX_PROCESSES = 8
"""Each takes about 100 MB."""


class DrawnTrial(NamedTuple):
    """The figures of a trial in a scratch directory, or why there are none."""

    number: int
    directory: Path
    error: str | None = None


def trials_without_figures(
    paths: SweepPaths, trials: Iterable[TrialSummary]
) -> list[TrialSummary]:
    """Return the trials that have ended and whose figures are not recorded yet."""
    return [one for one in trials if one.finished and not _directory(paths, one.number).is_dir()]


def figure_files(paths: SweepPaths, number: int) -> list[Path]:
    """Return the files of a trial's recorded figures; empty before they are drawn."""
    return sorted(_directory(paths, number).glob("*.png"))


def draw_figures(
    spec: SweepSpec, paths: SweepPaths, trials: Sequence[TrialSummary], scratch: Path
) -> list[DrawnTrial]:
    """Draw the figures of trials that have ended, in a child process for each CPU.

    The caller needs no lock, because the rows of a trial that has ended do not change. Child
    processes keep Matplotlib out of the caller's memory.
    """
    requests: list[dict[str, Any]] = []
    refused: list[DrawnTrial] = []
    for record in trials:
        target = scratch / str(record.number)
        try:
            config = load_trial_config(paths, spec, record)
        except OSError as error:
            refused.append(DrawnTrial(record.number, target, str(error)))
            continue
        requests.append(
            {
                "config": config,
                "directory": str(paths.trial(record.number)),
                "target": str(target),
                "changed": bool(record.lineage),
            }
        )
    drawn = [
        DrawnTrial(int(Path(request["target"]).name), Path(request["target"]), error)
        for request, error in zip(requests, _draw(requests), strict=True)
    ]
    return drawn + refused


def record_figures(paths: SweepPaths, drawn: Iterable[DrawnTrial], recorder: Recorder) -> int:
    """Record figures with the trials' runs; a trial without any is tagged with the reason.

    The caller holds the sweep's lock.
    """
    num_recorded = 0
    for one in drawn:
        if one.error is not None:
            recorder.tag(one.number, {"figures": f"missing: {redact(one.error)}"})
            continue
        target = _directory(paths, one.number)
        if not target.is_dir():  # else another process has recorded them in the meantime
            _record(one.number, sorted(one.directory.glob("*.png")), recorder)
            one.directory.replace(target)
            num_recorded += 1
    return num_recorded


def record_figures_again(paths: SweepPaths, numbers: Iterable[int], recorder: Recorder) -> None:
    """Record the figures that exist, for a tracking store that has not received them."""
    for number in numbers:
        if files := figure_files(paths, number):
            _record(number, files, recorder)


def _record(number: int, files: Iterable[Path], recorder: Recorder) -> None:
    for file in files:
        recorder.artifact(number, file, f"{_DIRECTORY}/{file.name}")
    recorder.tag(number, {"figures": "drawn"})


def _draw(requests: Sequence[dict[str, Any]]) -> list[str | None]:
    """Draw in several child processes; return for each request None, or why it failed.

    Each process has a share of the requests, so that a killed process loses only its share.
    """
    useful = -(-len(requests) // _TRIALS_PER_PROCESS)
    num_processes = min(usable_cpus(), useful, _MAX_PROCESSES)
    errors: list[str | None] = [None] * len(requests)
    with contextlib.ExitStack() as stack:
        shares = [
            stack.enter_context(_Share(requests[first::num_processes]))
            for first in range(num_processes)
        ]
        for first, share in enumerate(shares):
            errors[first::num_processes] = share.errors()
    return errors


class _Share:
    """A child process that draws some of the requests."""

    def __init__(self, requests: Sequence[dict[str, Any]]) -> None:
        self._num_requests = len(requests)
        with contextlib.ExitStack() as stack:
            lines, self._answers, self._stderr = (
                stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)
            )
            lines.writelines(json.dumps(request) + "\n" for request in requests)
            lines.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainable.figures"],
                stdin=lines,
                stdout=self._answers,
                stderr=self._stderr,
            )
            self._files = stack.pop_all()

    def errors(self) -> list[str | None]:
        """Wait for the process; return for each request None, or why it failed."""
        code = self._process.wait()
        self._answers.seek(0)
        # A line without its end means that the process was killed while it wrote.
        answers = [json.loads(line) for line in self._answers if line.endswith("\n")]
        self._stderr.seek(0)
        words = self._stderr.read().strip().splitlines() or [f"exit code {code}"]
        missing = self._num_requests - len(answers)
        return [
            *(answer.get("refused") for answer in answers),
            *[f"the process that draws ended with {words[-1]}"] * missing,
        ]

    def __enter__(self) -> _Share:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # if the caller was interrupted
        self._process.wait()
        self._files.close()


def _directory(paths: SweepPaths, number: int) -> Path:
    return paths.trial(number) / _DIRECTORY
