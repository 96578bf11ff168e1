"""Find out how a worker's process ended: its exit code or signal, and its last output.

What must not live here: what the end means for a trial (`run`).
"""

from __future__ import annotations

import os
import re
import signal
from typing import NamedTuple

from redaction.escapes import visible
from redaction.secrets import redact
from sweeps.engine import fork_server
from sweeps.engine.ray_compat.ray_internals import error_logs, lost_worker
from trainable.errors import NodeLeaves

_PATIENCE = 1.0
"""How many seconds earlier than the fork server Ray may notice a worker's end."""
_LAST_BYTES, _LAST_LINES = 16 << 10, 20
_OF_RAY = (":job_id:", ":actor_name:", ":task_name:")
"""What Ray writes into a worker's error log for itself."""
# As `trainable.adapters.ray_ranks` writes them.
_RANK = re.compile(r"the process of rank (\d+) was lost")
_SILENT_RANK = re.compile(r"rank (\d+) did not answer, and was ended")
_ANY_RANK = re.compile(r"waited for the other \d+ ranks of its trial, and one was lost")


class WorkerEnd(NamedTuple):
    """How a worker's process ended.

    Attributes:
        how: The words that follow "it ended" in a message; empty if unknown.
        last_lines: The end of its standard error, without secrets.
        rank: Which process of the trial it was; None: the first one. Empty: which is not known.
    """

    how: str
    last_lines: str
    rank: str | None = None

    @property
    def whose(self) -> str:
        """Which process it was."""
        if self.rank is None:
            return "the trial's process"
        return f"the process of rank {self.rank}" if self.rank else "the process of one rank"

    def sentence(self) -> str:
        """Return how it ended, of a trial that continues."""
        how = f" {self.how}" if self.how else ""
        return f"{self.whose} ended{how}; the trial continues from its newest checkpoint"


def end_of_worker(error: BaseException | None) -> WorkerEnd:
    """Return how a lost worker ended."""
    rank = _lost_rank(error)
    if _SILENT_RANK.search(str(error)):
        return WorkerEnd("because it did not answer in time", "", rank)
    if (lost := lost_worker(error)) is None:
        return WorkerEnd("", "", rank)
    code = fork_server.exit_code(lost.pid, _PATIENCE)
    if code is not None:
        return WorkerEnd(in_words(code), _last_lines(lost.pid), rank)
    return WorkerEnd(f"({lost.detail})" if lost.detail else "", _last_lines(lost.pid), rank)


def end_with_node(error: BaseException | None) -> WorkerEnd:
    """Return that a worker was lost with its whole node."""
    return WorkerEnd("with its node", "", _lost_rank(error))


def left_its_node(error: BaseException | None) -> bool:
    """Return whether a trial has left a node that is about to be taken away."""
    return NodeLeaves.text in str(error)


def _lost_rank(error: BaseException | None) -> str | None:
    """Return the number of a lost rank; None: the trial's first process was lost."""
    text = str(error)
    found = _RANK.search(text) or _SILENT_RANK.search(text)
    return found[1] if found else ("" if _ANY_RANK.search(text) else None)


def in_words(code: int) -> str:
    """Return an exit code in words; a negative one is a signal."""
    if code >= 0:
        return f"with exit status {code}"
    try:
        return f"by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:  # a real-time signal
        return f"by signal {-code}"


def _last_lines(pid: int) -> str:
    for path in error_logs(pid):
        try:
            with path.open("rb") as file:
                cut = path.stat().st_size > _LAST_BYTES
                file.seek(-_LAST_BYTES if cut else 0, os.SEEK_END if cut else os.SEEK_SET)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:  # only a help for the user: do without it
            continue
        # Drop the first line if it is incomplete: a part of a secret would not be recognized.
        own = [line for line in lines[cut:] if not line.startswith(_OF_RAY)]
        return visible(redact("\n".join(own[-_LAST_LINES:])))
    return ""
