"""Write a sweep's report in a child process that starts before the sweep ends.

    python -m sweeps.publishing.report_worker

imports the drawing libraries at the lowest priority and then prints a line. For the line
`["ROOT", "NAME", "TARGET"]` in its input, it writes that report and exits as `report` does. At the
end of its input it exits, so that it never outlives the driver. What must not live here: the
page's content (`report`).
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
_POLL_SECONDS, _MIN_CPU_SHARE = 0.5, 0.25
"""On a busy machine a process of the lowest priority may never finish its imports. With less than
a quarter of a processor it is killed, and one of normal priority is started."""
_LAST_FRACTION = 4
"""The process starts when a quarter of the trials is left, because it takes about 200 MB."""


class ReportWorker:
    """Writes the report at a sweep's end.

    Args:
        left: How many trials have not ended yet.
        at_once: How many trials run in parallel.
    """

    def __init__(self, left: int, at_once: int) -> None:
        self._num_left = left
        self._start_at = max(at_once, left // _LAST_FRACTION)
        self._process: subprocess.Popen[str] | None = None

    def trial_ended(self) -> None:
        """Count a trial that has ended, and start the process near the end of the sweep."""
        self._num_left -= 1
        if self._process is None and self._num_left <= self._start_at:
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
        _, stderr = process.communicate(request + "\n")
        if process.returncode < 0:  # a signal killed it, for example for too little memory
            return draw_report(paths, target)
        return answer(process.returncode, stderr, target)

    def __enter__(self) -> ReportWorker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _end(self._process)


def _start() -> subprocess.Popen[str] | None:
    from sweeps.engine.process_cleanup import untagged_env

    with contextlib.suppress(OSError):  # `write` starts another process then
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "sweeps.publishing.report_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=untagged_env(),  # so that the clean-up of the driver's Ray does not end it
            process_group=0,  # so that only the caller handles Ctrl-C
        )
    return None


def _is_ready(process: subprocess.Popen[str]) -> bool:
    """Wait for the process's imports; False if it gets too little processor time for them."""
    assert process.stdout is not None
    spent = _cpu_seconds(process)
    while not select.select([process.stdout], [], [], _POLL_SECONDS)[0]:
        before, spent = spent, _cpu_seconds(process)
        if spent - before < _MIN_CPU_SHARE * _POLL_SECONDS:
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
    # Only this thread's priority: the main thread, which writes the report, must keep its own.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    from sweeps.publishing.report import warm_up

    warm_up()
    sys.stdout.write(_READY)
    sys.stdout.flush()


def _main() -> None:
    from trainable.lazy_imports import without_collection

    with without_collection():
        preparing = threading.Thread(target=_prepare, daemon=True)
        preparing.start()
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # no report is wanted: do not wait for the imports
        preparing.join()
        from sweeps.publishing.report import main

        main(json.loads(line))
        os._exit(0)  # skip the slow clean-up of all imported modules


if __name__ == "__main__":
    _main()
