"""Describe a failure without secrets, also as plain data for other ranks and for a parent.

What must not live here: what it means for the trial (`adapters/ray.py`).
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from redaction.escapes import printable, visible
from redaction.secrets import redact, redact_clipped
from trainable.errors import ConfigError, OutOfMemory, RankFailed, StorageError, TrainingError
from trainable.memory import is_out_of_memory

LONGEST_REASON = 4_000
"""The most characters of an exception's text that are read."""
_LONGEST_LINE = 2_000
_FIRST_LINES, _LAST_LINES = 50, 150


def reason_of(error: BaseException, kind: str) -> str:
    """Return in one line why a trial failed, for any text of the exception."""
    try:
        text = str(error)
    except Exception as problem:  # from the user's own `__str__`
        text = f"its text cannot be shown: {type(problem).__name__}"
    name = type(error).__name__ if kind == "error" else kind
    return printable(redact_clipped(f"{name}: {text}".removesuffix(": "), LONGEST_REASON))


def place_of(error: BaseException) -> str:
    """Return the file and the line that raised an exception, on whichever rank that was."""
    there: str | None = getattr(error, "place", None) if isinstance(error, TrainingError) else None
    where = traceback.extract_tb(error.__traceback__)
    return there or (f"{where[-1].filename}:{where[-1].lineno}" if where else "")


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception and its causes: the first and last lines, shortened."""
    lines = "".join(traceback.format_exception(error)).split("\n")
    left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    if left_out > 0:
        lines[_FIRST_LINES:-_LAST_LINES] = [f"[{left_out} lines are left out here]"]
    text = "\n".join(redact_clipped(line, _LONGEST_LINE) for line in lines)
    return visible(redact(text))  # redact the whole text, too: a private key has several lines


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


_LONGEST = 20_000
"""Characters sent of a message, and of a traceback."""


def as_note(error: BaseException, rank: int) -> dict[str, Any]:
    """Return an error of a rank as plain data."""
    kind = OutOfMemory.__name__ if is_out_of_memory(error) else type(error).__name__
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return {
        "rank": rank,
        "class": kind,
        "known": isinstance(error, TrainingError) or kind == OutOfMemory.__name__,
        "text": str(error)[:_LONGEST],
        "traceback": "".join(lines)[-_LONGEST:],
        "place": place_of(error),
        "system": as_system_note(error.__cause__),
        "facts": {
            name: value
            for name, value in vars(error).items()
            if isinstance(value, (int, float, str)) and not name.startswith("_")
        },
    }


def as_error(note: dict[str, Any]) -> TrainingError:
    """Return an error of the same kind as that of another rank."""
    classes = {one.__name__: one for one in _below(TrainingError)}
    known = note["known"] and note["class"] in classes
    kind = classes[note["class"]] if known else RankFailed
    text = note["text"] if known else f"{note['class']}: {note['text']}"
    error = kind.__new__(kind)
    message = f"rank {note['rank']}: {text}"
    Exception.__init__(error, message)
    for name, value in note["facts"].items():
        setattr(error, name, value)
    if isinstance(error, ConfigError):
        error.message, error.key = message, note["facts"].get("key", "")
    error.place = note["place"]
    error.__cause__ = as_system_error(note["system"], note["rank"])
    error.add_note(f"The traceback of rank {note['rank']}:\n{note['traceback']}")
    return error


def mark_shared(error: BaseException) -> BaseException:
    """Mark an error that every rank of the trial raises now, and return it."""
    error._is_shared = True  # type: ignore[attr-defined]
    return error


def is_shared(error: BaseException) -> bool:
    """Return whether every rank raises this error now, or the error that has led to it."""
    return any(hasattr(one, "_is_shared") for one in with_causes(error))


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what has led to it, each once: errors may be causes of each other."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def as_system_note(error: BaseException | None) -> dict[str, Any] | None:
    """Return an error of the operating system as plain data; None for any other one."""
    if not isinstance(error, OSError):
        return None
    parts = [error.errno, error.strerror] if error.errno else [str(error)]
    return {"parts": parts, "path": str(error.filename or ""), "host": socket.gethostname()}


def as_system_error(note: dict[str, Any] | None, rank: int) -> OSError | None:
    """Return the error of the operating system that another rank met; `host` says where."""
    if note is None:
        return None
    *number, text = note["parts"]
    path = [note["path"]] if number and note["path"] else []
    error = OSError(*number, f"{text} (rank {rank})", *path)
    error.host = note["host"]  # type: ignore[attr-defined]
    return error


def _below(kind: type[TrainingError]) -> list[type[TrainingError]]:
    return [kind, *(one for direct in kind.__subclasses__() for one in _below(direct))]


def exit_with(reason: object, code: int = 1) -> NoReturn:
    """Write why this process cannot do its work, and end it at once.

    Libraries may write to standard error when the interpreter ends, as nanobind's modules do of
    leaks; the caller would take that for the reason.
    """
    print(reason, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
