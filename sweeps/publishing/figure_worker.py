"""Draw figures of every trial that has ended, in child processes, and record them in its run.

While trials train, one idle process draws from the metrics on disk; after the last trial several
do. Threads send them trials and record their figures. A trial's `figures/` directory exists only
when all of its figures are recorded: after a crash, missing ones are drawn again. What must not
live here: how a figure looks (see `trainable.figures`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeps.config.spec import SweepSpec
from sweeps.engine.process_cleanup import untagged_env
from sweeps.engine.resources import usable_cpus
from sweeps.errors import LedgerError, LockLost
from sweeps.ledger.reader import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.recording.trial_config import load_trial_config
from tracking.idle_process import start_idle
from tracking.recorder import Recorder

_DIRECTORY = "figures"
_FIRST_TRIAL_SECONDS = 60.0  # one second on an idle machine
_TRIALS_PER_PROCESS = 8  # drawing so many takes a few times as long as starting the process
_MAX_PROCESSES = 8  # each takes about 100 MB


def trials_without_figures(
    paths: SweepPaths, trials: Iterable[TrialSummary]
) -> list[TrialSummary]:
    """Return the trials that have ended and have no figures yet."""
    return [one for one in trials if one.finished and not _figures(paths, one.number).is_dir()]


def drawn_files(paths: SweepPaths, number: int) -> list[Path]:
    """Return the files of a trial's figures; empty if they are not drawn."""
    return sorted(_figures(paths, number).glob("*.png"))


class NotDrawn(Exception):
    """A trial's figures could not be drawn."""


class FigureWorkerPool:
    """Draws the figures of trials, in the order in which they end.

    It uses one process, and after `flush_now` up to one for each CPU. At the exit of the context
    manager, trials that are not drawn are dropped; the next driver or `sweep sync` draws them.

    Args:
        spec: The sweep.
        paths: The paths of the sweep.
        trials: Those that have ended and have no figures are drawn, too.
        recorder: Receives the figures, and the tag `figures`: `drawn`, or why they are missing.
    """

    def __init__(
        self,
        spec: SweepSpec,
        paths: SweepPaths,
        trials: Iterable[TrialSummary],
        recorder: Recorder,
    ) -> None:
        self._spec = spec
        self._paths = paths
        self._recorder = recorder
        self._opened = time.monotonic()
        self._changed = threading.Condition()  # guards the fields below
        self._waiting: dict[int, TrialSummary] = {}
        self._ranked: Sequence[int] = ()
        self._drawing: set[int] = set()
        self._num_dropped = 0
        self._closing = self._dropping = self._refused = False
        self._processes: set[_DrawingProcess] = set()
        self._threads: list[threading.Thread] = []
        self._start_thread()
        for record in trials_without_figures(paths, trials):
            self.add(record)

    def add(self, record: TrialSummary) -> None:
        """Queue a trial that has just ended."""
        with self._changed:
            self._waiting[record.number] = record
            self._changed.notify_all()

    def record_again(self, numbers: Iterable[int]) -> None:
        """Record figures that are drawn already once more."""
        for number in numbers:
            if drawn := self.files(number):
                self._record(number, drawn)

    def files(self, number: int) -> list[Path]:
        """Return the files of a trial's figures; empty if they are not drawn."""
        return drawn_files(self._paths, number)

    @property
    def age(self) -> float:
        """The seconds since the pool was created."""
        return time.monotonic() - self._opened

    def flush_now(self, ranked: Sequence[int] = ()) -> None:
        """Use all CPUs, as no more trials will be added; draw those of `ranked` first."""
        with self._changed:
            self._ranked = ranked
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            useful = 1 + len(self._waiting) // _TRIALS_PER_PROCESS
        for _ in range(1, min(usable_cpus(), useful, _MAX_PROCESSES)):
            self._start_thread()

    def finish(self, timeout: float | None = None, ranked: Sequence[int] = ()) -> int:
        """Wait until all trials are drawn, for about `timeout` seconds; drop the rest.

        Args:
            timeout: In seconds; None waits for all.
            ranked: The best trials, the best first, which is waited for beyond the timeout.

        Returns:
            How many trials were dropped.
        """
        started = time.monotonic()
        first = ranked[0] if ranked else None
        self.flush_now(ranked)
        with self._changed:
            self._changed.wait_for(
                lambda: first is None or first not in self._waiting.keys() | self._drawing,
                _FIRST_TRIAL_SECONDS,
            )
        for thread in self._threads:
            waited = time.monotonic() - started
            thread.join(None if timeout is None else max(0.0, timeout - waited))
        return self._drop()

    def __enter__(self) -> FigureWorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="figures", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _drop(self) -> int:
        with self._changed:
            dropped, self._waiting = list(self._waiting), {}
            self._closing = self._dropping = True
            self._changed.notify_all()
            for process in self._processes:
                process.kill()
        for thread in self._threads:
            thread.join()
        for number in dropped:
            self._count_dropped(number)
        return self._num_dropped

    def _work(self) -> None:
        process: _DrawingProcess | None = None
        while (record := self._take()) is not None:
            number = record.number
            try:
                process = process or self._start_process()
                self._draw(record, process)
            except (NotDrawn, OSError, LockLost, LedgerError) as problem:
                if self._dropping:  # `_drop` killed its process
                    self._count_dropped(number)
                else:
                    self._tag(number, f"missing: {problem}")
                    if process is not None and process.has_drawn and not process.is_alive:
                        # The process had drawn before and has died, for example of too little
                        # memory: start another one for the next trial.
                        self._close_process(process)
                        process = None
            finally:
                with self._changed:
                    self._drawing.discard(number)
                    self._changed.notify_all()
        if process is not None:
            self._close_process(process)

    def _take(self) -> TrialSummary | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            number = next(filter(self._waiting.__contains__, self._ranked), None)
            number = next(iter(self._waiting)) if number is None else number
            self._drawing.add(number)
            return self._waiting.pop(number)

    def _start_process(self) -> _DrawingProcess:
        with self._changed:
            if self._dropping:
                raise NotDrawn("the sweep did not wait")
            process = _DrawingProcess()
            self._processes.add(process)
            return process

    def _close_process(self, process: _DrawingProcess) -> None:
        process.close()  # may take a while, unless `_drop` kills it
        with self._changed:
            self._processes.discard(process)

    def _draw(self, record: TrialSummary, process: _DrawingProcess) -> None:
        figures = _figures(self._paths, record.number)
        config = load_trial_config(self._paths, self._spec, record)
        aside = figures.with_name(f".{_DIRECTORY}")
        shutil.rmtree(aside, ignore_errors=True)  # left by a driver that died
        try:
            drawn = process.draw(config, figures.parent, aside, bool(record.lineage))
            self._record(record.number, drawn)
            aside.replace(figures)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _record(self, number: int, drawn: Iterable[Path]) -> None:
        for file in drawn:
            self._recorder.artifact(number, file, f"{_DIRECTORY}/{file.name}")
        self._tag(number, "drawn")

    def _tag(self, number: int, text: str) -> None:
        # The driver meets the same error and ends the sweep. After one error in `_drop` no more
        # tags are tried, because each attempt may wait for an unavailable database.
        if self._dropping and self._refused:
            return
        try:
            self._recorder.tag(number, {"figures": text})
        except (OSError, LockLost, LedgerError):
            self._refused = True

    def _count_dropped(self, number: int) -> None:
        with self._changed:
            self._num_dropped += 1
        later = f"{self._paths.command('sync')} draws them"
        self._tag(number, f"missing: the sweep did not wait for them; {later}")


def _figures(paths: SweepPaths, number: int) -> Path:
    return paths.trial(number) / _DIRECTORY


class _DrawingProcess:
    """A child process that draws, so that Matplotlib does not stay in the driver's memory."""

    def __init__(self) -> None:
        self.has_drawn = False
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in close()
        self._process = start_idle(
            [sys.executable, "-P", "-m", "trainable.figures"],
            untagged_env(),  # so that the clean-up of the driver's Ray does not end it
            stderr=self._stderr,
        )

    def draw(
        self, config: Mapping[str, Any], directory: Path, target: Path, changed: bool
    ) -> list[Path]:
        """Draw the figures of a trial and return their files.

        Args:
            config: The trial's configuration.
            directory: The trial's directory.
            target: The directory for the figures; created when missing.
            changed: Whether the trial trained with other parameters before.

        Raises:
            NotDrawn: The figures could not be drawn; the message says why.
        """
        request = {
            "config": config,
            "directory": str(directory),
            "target": str(target),
            "changed": changed,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise NotDrawn(f"the process that draws ended with {self._exit_reason()}")
        answer: dict[str, list[str]] = json.loads(line)
        if "refused" in answer:
            raise NotDrawn(answer["refused"])
        self.has_drawn = True
        return list(map(Path, answer["written"]))

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process; a waiting `draw` raises `NotDrawn`."""
        self._process.kill()

    def close(self) -> None:
        """Close the process's input and wait until it exits."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._stderr.close()

    def _exit_reason(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"
