"""Every error about a spec, a sweep's files, its lock and its ledger.

    ValueError
      SpecError            a spec is not valid: every fault of it, with its place
      UserError            a message is complete, or faults that have no place yet
        InvalidName        a name cannot become a directory
      WrongDuration        an option is no duration
      RevisionError        `sweep.yaml` cannot be read
      SearchChanged        a resume would change what the search has drawn from
      OriginChanged        a resume would mix trials that cannot be compared
      SweepExists          the name of a new sweep is taken
    OSError
      LockTaken            a process that is no driver has locked the lock's file
    Exception
      SweepLockedError     another driver holds the sweep
      LedgerError          the ledger is missing or cannot be used
        LedgerRefused      its storage is full, read-only or broken
        LedgerBusy         another process has held it for too long
    BaseException
      LockLost             another driver may have taken the lock over

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
    """One thing that is wrong, before it has a place: where in the data, and why."""

    path: KeyPath
    message: str
    at_key: bool = False
    """Point at the key rather than at its value."""


class UserError(ValueError):
    """A verdict whose messages are complete: value, rule, remedy.

    Of a validator, or of whoever finds out later that a valid spec asks for what cannot be had;
    `Document.attach_locations` then says where it was asked for.

    Args:
        faults: A message, or faults with paths relative to what was validated.
    """

    def __init__(self, faults: str | Sequence[Issue]) -> None:
        self.faults = [Issue((), faults)] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(_line(dotted(f.path), f.message) for f in self.faults))


class LocatedIssue:
    """One line of a `SpecError`, without secrets.

    Args:
        where: `file:line:column`, `-s KEY=VALUE`, or what else the value came from.
        key: The dotted path of the key; empty for the file as a whole.
        message: What is wrong; the rule; what to write instead.
    """

    def __init__(self, where: str, key: str, message: str) -> None:
        # One problem is one line, whatever a key or a value holds.
        self.where = printable(redact(where))
        self.key = printable(redact(key))
        self.message = printable(redact(message))

    def __str__(self) -> str:
        return _line(self.where, _line(self.key, self.message))

    def __repr__(self) -> str:
        return f"Problem({str(self)!r})"


class SpecError(ValueError):
    """A spec is not valid; `str()` gives every problem, one to a line."""

    def __init__(self, problems: Sequence[LocatedIssue]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


class InvalidName(UserError):
    """A sweep's name cannot become a directory."""


class WrongDuration(ValueError):
    """What should be a duration is none."""


class RevisionError(ValueError):
    """No revision of a sweep's spec can be read, or a newer release wrote the sweep."""


class SearchChanged(ValueError):
    """A resume would change what has been drawn from already."""


class OriginChanged(ValueError):
    """A resume would mix trials that cannot be compared."""


class SweepExists(ValueError):
    """A new sweep was asked for under a name that is taken."""

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
    """Return a key path as people write it: `space.train.optimizer.lr.uniform[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _line(head: str, tail: str) -> str:
    return f"{head}: {tail}" if head else tail
