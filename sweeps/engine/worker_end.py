"""Find out how a worker's process ended: its exit code or signal, and its last output.

What must not live here: what the end means for a trial (`driver`).
"""

from __future__ import annotations

import glob
import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

from redaction.escapes import visible
from redaction.secrets import redact
from sweeps.engine import fork_server

_PATIENCE = 1.0
"""Seconds by which Ray may notice a worker's end before the fork server does."""
_PID = re.compile(r"^\s*pid: (\d+)", re.MULTILINE)
_DETAIL = re.compile(r"Worker exit detail: (.*?)(?:\. |\.?$)", re.MULTILINE)
_LAST_BYTES, _LAST_LINES = 16 << 10, 20


class WorkerEnd(NamedTuple):
    """How a worker's process ended.

    Attributes:
        how: In words that follow "it ended"; empty if unknown.
        last_lines: The end of its standard error, without secrets.
    """

    how: str
    last_lines: str


def end_of_worker(error: BaseException | None) -> WorkerEnd:
    """Return how a lost worker ended.

    Args:
        error: Ray's error about the lost actor.
    """
    text = str(error)
    if (found := _PID.search(text)) is None:
        return WorkerEnd("", "")
    pid = int(found[1])
    code = fork_server.exit_code(pid, _PATIENCE)
    if code is not None:
        return WorkerEnd(in_words(code), _last_lines(pid))
    detail = _DETAIL.search(text)
    return WorkerEnd(f"({detail[1]})" if detail else "", _last_lines(pid))


def in_words(code: int) -> str:
    """Return an exit code in words; a negative one is a signal."""
    if code >= 0:
        return f"with exit status {code}"
    try:
        return f"by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        return f"by signal {-code}"


def _last_lines(pid: int) -> str:
    from ray._private import worker

    node = worker._global_node
    if node is None:
        return ""
    pattern = f"{glob.escape(node.get_logs_dir_path())}/worker-*-{pid}.err"
    for path in map(Path, glob.glob(pattern)):
        try:
            with path.open("rb") as file:
                cut = path.stat().st_size > _LAST_BYTES
                file.seek(-_LAST_BYTES if cut else 0, os.SEEK_END if cut else os.SEEK_SET)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:  # the output only helps the user
            continue
        # Drop the first line if it is incomplete: a part of a secret would not be recognized.
        return visible(redact("\n".join(lines[cut:][-_LAST_LINES:])))
    return ""
