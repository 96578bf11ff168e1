"""Pictures of every trial that has ended, drawn beside the sweep and put on the trial's own run.

A child process behind all others draws one trial after another from the rows on disk, and several
do once nothing is trained any more; threads hand them the trials and record what they made. A
trial's `figures/` directory is there once all of them are recorded: after a crash, what is missing
is drawn again. What must not live here: how a picture looks (see `trainable.figures`).
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
from tracking.idle_process import start_behind
from tracking.recorder import Recorder

_DIRECTORY = "figures"
_SECONDS_FOR_THE_FIRST = 60.0  # one second on an idle machine
_WORTH_A_PROCESS = 8  # trials, whose pictures take a few times as long as its start
_MOST_PROCESSES = 8  # each of which takes some 100 MB


def undrawn(paths: SweepPaths, trials: Iterable[TrialSummary]) -> list[TrialSummary]:
    """Return the trials that have ended and have no pictures yet."""
    return [one for one in trials if one.finished and not _figures(paths, one.number).is_dir()]


def drawn_files(paths: SweepPaths, number: int) -> list[Path]:
    """The pictures of a trial; none when they are not drawn."""
    return sorted(_figures(paths, number).glob("*.png"))


class NotDrawn(Exception):
    """A trial's pictures could not be drawn."""


class FigureWorkerPool:
    """Draws trials in the order in which they ended, in a thread and a process of its own; once
    the sweep has ended, in as many as there are CPUs.

    Leaving it as a context manager drops what is not drawn yet; the next driver of the sweep
    draws it, or `sweep sync`.

    Args:
        spec: The sweep.
        paths: Where each trial's directory is.
        trials: Those that ended before and have no pictures are drawn too.
        recorder: Takes the pictures; a trial without any is tagged `figures` with the reason.
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
        self._news = threading.Condition()  # guards what follows
        self._waiting: dict[int, TrialSummary] = {}
        self._ranked: Sequence[int] = ()
        self._drawing: set[int] = set()
        self._left = 0
        self._closing = self._dropping = self._refused = False
        self._artists: set[_Artist] = set()
        self._threads: list[threading.Thread] = []
        self._draw_in_a_thread()
        for record in undrawn(paths, trials):
            self.add(record)

    def add(self, record: TrialSummary) -> None:
        """Draw a trial that has just ended, when its turn comes."""
        with self._news:
            self._waiting[record.number] = record
            self._news.notify_all()

    def show_again(self, numbers: Iterable[int]) -> None:
        """Give the recorder the pictures that are drawn already."""
        for number in numbers:
            if drawn := self.pictures(number):
                self._show(number, drawn)

    def pictures(self, number: int) -> list[Path]:
        """The pictures of a trial; none when they are not drawn."""
        return drawn_files(self._paths, number)

    @property
    def age(self) -> float:
        """For how many seconds it has been open."""
        return time.monotonic() - self._opened

    def flush_now(self, ranked: Sequence[int] = ()) -> None:
        """No more will be added: draw on every CPU, and in the order in which they matter."""
        with self._news:
            self._ranked = ranked
            if self._closing:
                return
            self._closing = True
            self._news.notify_all()
            useful = 1 + len(self._waiting) // _WORTH_A_PROCESS
        for _ in range(1, min(usable_cpus(), useful, _MOST_PROCESSES)):
            self._draw_in_a_thread()

    def finish(self, timeout: float | None = None, ranked: Sequence[int] = ()) -> int:
        """Wait until all are drawn, but not much longer than `timeout` seconds; drop the rest.

        Args:
            timeout: In seconds; None waits for all.
            ranked: In which order they matter; the first one is waited for beyond the timeout.

        Returns:
            How many were dropped.
        """
        started = time.monotonic()
        first = ranked[0] if ranked else None
        self.flush_now(ranked)
        with self._news:
            self._news.wait_for(
                lambda: first is None or first not in self._waiting.keys() | self._drawing,
                _SECONDS_FOR_THE_FIRST,
            )
        for thread in self._threads:
            waited = time.monotonic() - started
            thread.join(None if timeout is None else max(0.0, timeout - waited))
        return self._drop()

    def __enter__(self) -> FigureWorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def _draw_in_a_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="pictures", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _drop(self) -> int:
        with self._news:
            dropped, self._waiting = list(self._waiting), {}
            self._closing = self._dropping = True
            self._news.notify_all()
            for artist in self._artists:
                artist.kill()
        for thread in self._threads:
            thread.join()
        for number in dropped:
            self._leave(number)
        return self._left

    def _work(self) -> None:
        artist: _Artist | None = None
        while (record := self._take()) is not None:
            number = record.number
            try:
                artist = artist or self._engage()
                self._draw(record, artist)
            except (NotDrawn, OSError, LockLost, LedgerError) as problem:
                if self._dropping:  # its process was killed
                    self._leave(number)
                else:
                    self._tell(number, f"missing: {problem}")
                    if artist is not None and artist.has_drawn and not artist.lives:
                        # It drew and has ended since, such as for want of memory: the next trial
                        # may have another one.
                        self._dismiss(artist)
                        artist = None
            finally:
                with self._news:
                    self._drawing.discard(number)
                    self._news.notify_all()
        if artist is not None:
            self._dismiss(artist)

    def _take(self) -> TrialSummary | None:
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            number = next(filter(self._waiting.__contains__, self._ranked), None)
            number = next(iter(self._waiting)) if number is None else number
            self._drawing.add(number)
            return self._waiting.pop(number)

    def _engage(self) -> _Artist:
        with self._news:
            if self._dropping:
                raise NotDrawn("the sweep did not wait")
            artist = _Artist()
            self._artists.add(artist)
            return artist

    def _dismiss(self, artist: _Artist) -> None:
        artist.close()  # which may take it a while, and can be cut short
        with self._news:
            self._artists.discard(artist)

    def _draw(self, record: TrialSummary, artist: _Artist) -> None:
        figures = _figures(self._paths, record.number)
        config = load_trial_config(self._paths, self._spec, record)
        aside = figures.with_name(f".{_DIRECTORY}")
        shutil.rmtree(aside, ignore_errors=True)  # of a driver that died
        try:
            drawn = artist.draw(config, figures.parent, aside, bool(record.lineage))
            self._show(record.number, drawn)
            aside.replace(figures)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _show(self, number: int, drawn: Iterable[Path]) -> None:
        for file in drawn:
            self._recorder.artifact(number, file, f"{_DIRECTORY}/{file.name}")
        self._tell(number, "drawn")

    def _tell(self, number: int, text: str) -> None:
        # What takes no tag, a disk or a lock, is met by the driver, which ends the sweep for it;
        # a database that is away is waited for each time.
        if self._dropping and self._refused:
            return
        try:
            self._recorder.tag(number, {"figures": text})
        except (OSError, LockLost, LedgerError):
            self._refused = True

    def _leave(self, number: int) -> None:
        with self._news:
            self._left += 1
        later = f"{self._paths.command('sync')} draws them"
        self._tell(number, f"missing: the sweep did not wait for them; {later}")


def _figures(paths: SweepPaths, number: int) -> Path:
    return paths.trial(number) / _DIRECTORY


class _Artist:
    """The process that draws: Matplotlib would stay in this one's memory."""

    def __init__(self) -> None:
        self.has_drawn = False
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in close()
        self._process = start_behind(
            [sys.executable, "-P", "-m", "trainable.figures"],
            untagged_env(),  # it outlives the driver's Ray
            stderr=self._complaints,
        )

    def draw(
        self, config: Mapping[str, Any], directory: Path, target: Path, changed: bool
    ) -> list[Path]:
        """Draw a run.

        Args:
            config: What the trial was trained with.
            directory: The run's directory.
            target: Where the pictures go; made when missing.
            changed: Whether it was trained with other parameters before.

        Raises:
            NotDrawn: It could not be done; the message says why.
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
            raise NotDrawn(f"the process that draws ended with {self._last_words()}")
        answer: dict[str, list[str]] = json.loads(line)
        if "refused" in answer:
            raise NotDrawn(answer["refused"])
        self.has_drawn = True
        return list(map(Path, answer["written"]))

    @property
    def lives(self) -> bool:
        """Whether it can be asked for more."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it now; whoever waits for a drawing is told."""
        self._process.kill()

    def close(self) -> None:
        """Let it come to its end."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._complaints.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"
