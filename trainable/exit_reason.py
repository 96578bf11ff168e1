"""End a child process with the reason as the last line of its standard error.

Its caller reads that line. What must not live here: which reasons there are, and their exit codes.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_with(reason: object, code: int = 1) -> NoReturn:
    """Write why this process cannot do its work, and end it at once.

    Libraries may write to standard error when the interpreter ends, as nanobind's modules do of
    leaks; the caller would take that for the reason.
    """
    print(reason, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
