"""Exit codes of the command line, on which scripts depend. After a signal: 128 + its number."""

from __future__ import annotations

LATE = 1
"""The requested action has failed, or was not complete in time."""
WRONG_INPUT = 2
"""The user must correct the input; nothing was half-created."""
NO_SUCCESS = 3
"""No trial succeeded, or the sweep had to stop: trials failed repeatedly in the same way, its
storage is full, read-only or broken, or its cluster is lost. Of a single run: its loss is not
finite, or it ran out of memory."""
HELD = 4
"""Another process holds the sweep's lock or its ledger."""
