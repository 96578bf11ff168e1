"""Describe the failure of a trial as plain data, which crosses process boundaries.

What must not live here: what follows from a failure (the driver's policy), and the wording of
exceptions (`exception_text.py`).
"""

from __future__ import annotations

import socket
from typing import Any

from redaction.secrets import redact
from trainable.errors import OutOfMemory, StorageError, TrainingError
from trainable.exception_text import place_of, reason_of, traceback_of
from trainable.memory import is_out_of_memory


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return `kind`, `reason`, `traceback` and `place` of a failure.

    Of a storage error also `errno`, `system` (the operating system's message) and `host`, which
    the driver needs to tell a limit of this process from a failed storage.
    """
    if isinstance(error, TrainingError):
        kind = error.kind
    else:
        kind = OutOfMemory.kind if is_out_of_memory(error) else "error"
    failure: dict[str, Any] = {
        "kind": kind,
        "reason": reason_of(error, kind),
        "traceback": traceback_of(error),
        "place": place_of(error),
    }
    problem = error.__cause__
    if isinstance(error, StorageError) and isinstance(problem, OSError):
        failure |= {"errno": problem.errno, "system": redact(str(problem))}
        failure["host"] = getattr(problem, "host", socket.gethostname())  # of the rank that failed
    return failure
