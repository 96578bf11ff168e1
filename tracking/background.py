"""A process for what nobody should wait for: it stands behind whoever trains.

Ray starts its workers at niceness 15, so that a lesser niceness would put bookkeeping before
training. Linux' idle class would put it further behind, and starve it on a busy machine, perhaps
while it holds a lock. What must not live here: what such a process does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

_NICENESS = 19


def start_behind(
    command: Sequence[str], environment: Mapping[str, str], *, stderr: IO[str] | None = None
) -> subprocess.Popen[str]:
    """Start a process, with pipes for its input and output.

    It is spared the signals of a terminal, which are for whoever started it: its end should be
    that of its input.

    Args:
        command: A program and its arguments.
        environment: Of the process.
        stderr: Default is that of this process.

    Raises:
        OSError: The system starts no process.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        process_group=0,
    )
    with contextlib.suppress(OSError):  # it has ended; or a sandbox does not allow it
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
    return process
