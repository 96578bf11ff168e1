"""A sweep's report by a process that is there before the report is wanted.

    python -m sweeps.publishing.report_worker

imports what draws a report, behind those who train, and says so; then it writes the
one that a line of its input asks for, `["ROOT", "NAME", "TARGET"]`, and ends as the program of
`report` does. Without such a line it ends with its input, so that it never outlives the driver.
What must not live here: what the page shows (`report`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from sweeps.paths import SweepPaths

_READY = "ready\n"
_LOOK_SECONDS, _STARVED = 0.5, 0.25
"""On a machine that others use whole, who is behind them all may wait for ever. With less than a
quarter of a processor it is given up, and one that is behind nobody is started."""
_PART = 4
"""Of so many parts of a sweep's trials, the last is left when the process starts, for it holds
some 200 MB."""


class ReportWorker:
    """Writes the report at a sweep's end.

    Args:
        left: How many trials have not ended yet.
        at_once: How many train at a time.
    """

    def __init__(self, left: int, at_once: int) -> None:
        self._left = left
        self._soon = max(at_once, left // _PART)
        self._process: subprocess.Popen[str] | None = None

    def trial_ended(self) -> None:
        """Start the process, should the end be near."""
        self._left -= 1
        if self._process is None and self._left <= self._soon:
            self._process = _start()

    def write(self, paths: SweepPaths, target: Path) -> Path:
        """Write the report, as `draw_report` does."""
        from sweeps.publishing.export import answer, draw_report

        process, self._process = self._process, None
        if process is None:
            return draw_report(paths, target)
        if not _is_ready(process):
            _end(process)
            return draw_report(paths, target)
        request = json.dumps([str(paths.root), paths.name, str(target)])
        _, said = process.communicate(request + "\n")
        if process.returncode < 0:  # ended while it waited, such as for want of memory
            return draw_report(paths, target)
        return answer(process.returncode, said, target)

    def __enter__(self) -> ReportWorker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _end(self._process)


def _start() -> subprocess.Popen[str] | None:
    from sweeps.engine.process_cleanup import untagged_env

    with contextlib.suppress(OSError):  # there will be another try when the report is wanted
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "sweeps.publishing.report_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=untagged_env(),  # it outlives the driver's Ray
            process_group=0,  # Ctrl-C at the terminal is for the caller
        )
    return None


def _is_ready(process: subprocess.Popen[str]) -> bool:
    """Whether it has imported all, which is waited for as long as it comes on with it."""
    assert process.stdout is not None
    spent = _cpu_seconds(process)
    while not select.select([process.stdout], [], [], _LOOK_SECONDS)[0]:
        before, spent = spent, _cpu_seconds(process)
        if spent - before < _STARVED * _LOOK_SECONDS:
            return False
    return process.stdout.readline() == _READY


def _cpu_seconds(process: subprocess.Popen[str]) -> float:
    try:
        used = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return used.user + used.system


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _prepare() -> None:
    # Of this thread alone, where the system knows that: a process cannot come back for the report.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    from sweeps.publishing.report import rehearse

    rehearse()
    sys.stdout.write(_READY)
    sys.stdout.flush()


def _main() -> None:
    from trainable.lazy_imports import without_collection

    with without_collection():
        preparing = threading.Thread(target=_prepare, daemon=True)
        preparing.start()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # nobody wants a report, and what is being imported need not be waited for
        preparing.join()
        from sweeps.publishing.report import main

        main(json.loads(line))
        os._exit(0)  # taking down all that was imported is for nobody


if __name__ == "__main__":
    _main()
