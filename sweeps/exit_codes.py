"""Exit codes of the command line; scripts depend on them. Interruptions add 128 + the signal."""

from __future__ import annotations

LATE = 1
"""What was asked for has not happened, or not in time."""
WRONG_INPUT = 2
"""The user can put it right; nothing was half-created."""
NO_SUCCESS = 3
"""No trial succeeded, or a sweep had to stop: trial after trial failed in the same way, its
storage is full, read-only or broken, or its cluster is gone. Of a single run: its loss is not
finite, or its memory did not suffice."""
HELD = 4
"""Another process holds what is needed."""
