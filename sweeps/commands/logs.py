"""`sweep logs`: print what a trial printed, and follow it while it trains.

What must not live here: writing the log (`trainable.trial_log`).
"""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from sweeps.commands.console import Name, Root, TrialNumber, err, input_errors, view_of

_POLL_SECONDS = 0.5


def logs(
    name: Name,
    trial: TrialNumber,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Print new lines until the trial ends, or Ctrl-C."),
    ] = False,
    root: Root = None,
) -> None:
    """Print the output of a trial: its own prints, warnings, and how its process ended."""
    from trainable.trial_log import TRIAL_LOG

    with input_errors():
        view = view_of(name, root)
        view.record(trial)
        path = view.paths.trial(trial) / TRIAL_LOG
        is_empty = True
        for text in _texts(path, lambda: follow and _is_open(name, root, trial)):
            sys.stdout.write(text)
            sys.stdout.flush()
            is_empty = is_empty and not text
    if is_empty:
        show = view.paths.command("show", str(trial))
        err.print(f"trial {trial} has printed nothing; see: {show}", soft_wrap=True)


def _is_open(name: str, root: Path | None, trial: int) -> bool:
    """Whether a driver runs the sweep, and the trial has no end."""
    view = view_of(name, root)
    return view.state == "running" and not view.record(trial).finished


def _texts(path: Path, goes_on: Callable[[], bool]) -> Iterator[str]:
    """Yield the content of a growing file, with control characters made visible."""
    from redaction.escapes import visible
    from trainable.storage.regular_files import LARGEST_TEXT, open_regular

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
