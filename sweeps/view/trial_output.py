"""What a trial printed, also while it prints more.

What must not live here: writing the log (`trainable.trial_log`).
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from redaction.escapes import visible
from sweeps.view.sweep_view import SweepView
from trainable.storage.regular_files import LARGEST_TEXT, open_regular
from trainable.trial_log import RANK_LOGS, TRIAL_LOG

_POLL_SECONDS = 0.5


def trial_output(view: SweepView, number: int, *, follow: bool) -> Iterator[str]:
    """Yield what a trial printed: prints, warnings, and how its process ended.

    The output of its further ranks follows that of its first.
    """
    view.record(number)

    def is_open() -> bool:
        now = SweepView(view.paths)
        return now.state == "running" and not now.record(number).finished

    directory = view.paths.trial(number)
    return _of_ranks(directory, _texts(directory / TRIAL_LOG, lambda: follow and is_open()))


def _of_ranks(directory: Path, first: Iterator[str]) -> Iterator[str]:
    """Yield the output of the first rank, then that of each further one below its number."""
    yield from first
    logs = {int(path.name.split(".")[1][4:]): path for path in directory.glob(RANK_LOGS)}
    for rank, path in sorted(logs.items()):
        if path.stat().st_size:
            yield f"[rank {rank}]\n"
            yield from _texts(path, lambda: False)


def _texts(path: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """Yield the content of a growing file, with control characters made visible."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    position = 0
    while True:
        is_last = not goes_on()  # asked first, so that the last lines are read after the end
        if path.exists():
            with os.fdopen(open_regular(path, limit=LARGEST_TEXT), "rb") as file:
                if os.fstat(file.fileno()).st_size < position:
                    position = 0
                    yield "[the log was shortened; it begins again]\n"
                file.seek(position)
                content = file.read()
            position += len(content)
            yield visible(decoder.decode(content))
        if is_last:
            return
        time.sleep(_POLL_SECONDS)
