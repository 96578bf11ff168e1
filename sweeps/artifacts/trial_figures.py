"""Draw the figures of trials that have ended, and record them with the trials' runs.

A sweep itself draws nothing: `sweep sync` and `sweep ui` draw what is missing, which are trials
without a `figures/` directory. What must not live here: how figures look (`trainable.figures`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redaction.secrets import redact
from sweeps.engine import fork_server
from sweeps.engine.resources import usable_cpus
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.recording.trial_config import load_trial_config
from sweeps.spec.spec import SweepSpec
from tracking.child_process import ChildProcess
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
    """Draw the figures of trials that have ended, in a child process for each CPU."""
    # Without a lock: rows of ended trials do not change. Matplotlib would stay in memory here.
    requests: list[dict[str, Any]] = []
    refused: list[DrawnTrial] = []
    for record in trials:
        directory, target = paths.trial(record.number), scratch / str(record.number)
        if not directory.is_dir():
            refused.append(DrawnTrial(record.number, target, f"there is no {directory}"))
            continue
        try:
            config = load_trial_config(paths, spec, record)
        except OSError as error:
            refused.append(DrawnTrial(record.number, target, str(error)))
            continue
        requests.append(
            {
                "config": config,
                "directory": str(directory),
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
    """Record figures with their runs, or tag these with the reason; needs the sweep's lock."""
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
    """Draw in several child processes; return for each request None, or why it failed."""
    useful = -(-len(requests) // _TRIALS_PER_PROCESS)
    num_processes = min(usable_cpus(), useful, _MAX_PROCESSES)
    errors: list[str | None] = [None] * len(requests)
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                ChildProcess(
                    "trainable.figures",
                    requests=map(json.dumps, requests[first::num_processes]),
                    launcher=fork_server.launcher(),
                    own_session=False,  # whoever ends `sweep sync` ends its whole group
                )
            )
            # A share of the requests each: a killed process loses no more.
            for first in range(num_processes)
        ]
        for first, child in enumerate(children):
            answers: list[str | None] = [json.loads(one).get("refused") for one in child.reply()]
            missing = len(requests[first::num_processes]) - len(answers)
            ended = f"the process that draws ended with {child.last_words}"
            errors[first::num_processes] = [*answers, *[ended] * missing]
    return errors


def _directory(paths: SweepPaths, number: int) -> Path:
    return paths.trial(number) / _DIRECTORY
