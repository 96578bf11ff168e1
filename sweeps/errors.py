"""The errors about a spec, a sweep's files, its lock and its ledger.

    ValueError
      SpecError            a spec is not valid: all problems, with their positions
      UserError            an error of the user: a message, or issues without positions
        InvalidName        a name cannot be the name of a directory
      WrongDuration        a text is not a duration
      RevisionError        `sweep.yaml` has no valid revision
      SearchChanged        a resume would change a fixed part of the search
      OriginChanged        a resume would mix trials that cannot be compared
      SweepExists          the name of a new sweep is taken
    OSError
      LockTaken            a process that is not a driver has locked the lock's file
    Exception
      SweepLockedError     another driver holds the sweep
      LedgerError          the ledger is missing or cannot be used
        LedgerRefused      its storage is full, read-only or broken
        LedgerBusy         another process has held it for too long
    BaseException
      LockLost             another driver may have acquired the lock

Each module of `sweeps` may import this one. What must not live here: the rules that raise them,
and an import of any other module of `sweeps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from redaction.escapes import printable
from redaction.secrets import redact

if TYPE_CHECKING:
    from sweeps.paths import SweepPaths
    from sweeps.sweep_lock import LockOwner

KeyPath = tuple[str | int, ...]


class Issue(NamedTuple):
    """One problem, before its position in the file is known: its key path and its message."""

    path: KeyPath
    message: str
    at_key: bool = False
    """Point at the key rather than at its value."""


class UserError(ValueError):
    """An error of the user, with complete messages: value, rule, remedy.

    A validator raises it, or a later check of a valid spec, for example of the resources of the
    machine; `Document.attach_locations` then adds the positions.

    Args:
        faults: A message, or issues with paths relative to the validated value.
    """

    def __init__(self, faults: str | Sequence[Issue]) -> None:
        self.faults = [Issue((), faults)] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(_line(dotted(f.path), f.message) for f in self.faults))


class LocatedIssue:
    """One line of a `SpecError`, without secrets.

    Args:
        where: `file:line:column`, `-s KEY=VALUE`, or another source of the value.
        key: The dotted path of the key; empty for the file as a whole.
        message: What is wrong; the rule; what to write instead.
    """

    def __init__(self, where: str, key: str, message: str) -> None:
        # One problem is one line: line breaks in keys and values are escaped.
        self.where = printable(redact(where))
        self.key = printable(redact(key))
        self.message = printable(redact(message))

    def __str__(self) -> str:
        return _line(self.where, _line(self.key, self.message))

    def __repr__(self) -> str:
        return f"LocatedIssue({str(self)!r})"


class SpecError(ValueError):
    """A spec is not valid; `str()` lists every problem, one per line."""

    def __init__(self, problems: Sequence[LocatedIssue]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


class InvalidName(UserError):
    """A sweep's name cannot be the name of a directory."""


class WrongDuration(ValueError):
    """A text is not a duration."""


class RevisionError(ValueError):
    """No revision of a sweep's spec is valid, or a newer release wrote the sweep."""


class SearchChanged(ValueError):
    """A resume would change a fixed part of the search."""


class OriginChanged(ValueError):
    """A resume would mix trials that cannot be compared."""


class SweepExists(ValueError):
    """The name of a new sweep is taken."""

    def __init__(self, paths: SweepPaths) -> None:
        super().__init__(
            f"sweep '{paths.name}' exists already; a name is given once; "
            f"continue it with: {paths.command('resume')}, or choose another with --name"
        )


class LedgerError(Exception):
    """The ledger is missing or cannot be used."""


class LedgerRefused(LedgerError):
    """The storage refuses the ledger: it is full, read-only or broken; what it holds is whole."""


class LedgerBusy(LedgerError):
    """Another process held the ledger for longer than is waited."""

    def __init__(self, place: object, seconds: float) -> None:
        super().__init__(
            f"another process has held the ledger {place} for {seconds:g} s; its transactions "
            "take milliseconds; end what has it open, then resume"
        )


class LockLost(BaseException):
    """The lock was taken away: another driver may run the sweep by now.

    No `Exception`: no handler on the way out may take it for an error of a trial, or wait for
    trials. `sweep_lock.lock_lost` builds it.
    """


class SweepLockedError(Exception):
    """Another driver holds the sweep. `sweep_lock.sweep_locked` builds it.

    Args:
        message: Who holds it, and how to watch it.
        holder: The driver, where it is known.
    """

    def __init__(self, message: str, holder: LockOwner | None) -> None:
        super().__init__(message)
        self.holder = holder


class LockTaken(OSError):
    """A process that is no driver has locked the sweep's lock."""


def dotted(path: KeyPath) -> str:
    """Return a key path in its dotted form: `space.train.optimizer.lr.uniform[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _line(head: str, tail: str) -> str:
    return f"{head}: {tail}" if head else tail
