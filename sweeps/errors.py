"""The errors about a spec, a sweep's files, its lock and its ledger, and the exit codes.

    ValueError
      SpecError            a spec is not valid; lists every issue with its location
      UserError            the user's input is wrong; its issues may have no location yet
        InvalidName        a name cannot become a directory
      WrongDuration        an option is no duration
      RevisionError        `sweep.yaml` cannot be read
      SearchChanged        a resume would change the space that the search has sampled
      OriginChanged        a resume would mix trials that cannot be compared
      SweepExists          the name of a new sweep is taken
    OSError
      LockTaken            a process that is not a driver has locked the lock file
    Exception
      SweepLockedError     another driver holds the sweep's lock
      LedgerError          the ledger is missing or cannot be used
        LedgerRefused      its storage is full, read-only or broken
        LedgerBusy         another process has locked it for too long
      NoReport             a report could not be drawn
      NoVersion            a model could not be registered
    BaseException
      ExitRequested        a signal arrived while there was nothing to drain
      LockLost             another driver may have acquired the lock

Every module of `sweeps` may import this one. What must not live here: the rules that raise these
errors, and imports of other modules of `sweeps`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from redaction.escapes import printable
from redaction.secrets import redact

if TYPE_CHECKING:
    from sweeps.paths import SweepPaths
    from sweeps.sweep_lock import LockOwner

KeyPath = tuple[str | int, ...]


class Issue(NamedTuple):
    """One error in the input: the path of the key and a message, without a file position."""

    path: KeyPath
    message: str
    at_key: bool = False
    """Whether the error is located at the key instead of its value."""


class UserError(ValueError):
    """The user's input is wrong; each message has value, rule and remedy.

    Validators raise it, and later checks if a valid spec requests something impossible.
    `Document.attach_locations` then adds the position in the file.

    Args:
        faults: A message, or issues with paths relative to the validated data.
    """

    def __init__(self, faults: str | Sequence[Issue]) -> None:
        self.faults = [Issue((), faults)] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(_line(dotted(f.path), f.message) for f in self.faults))


class LocatedIssue:
    """One line of a `SpecError`, without secrets.

    Args:
        where: `file:line:column`, `-s KEY=VALUE`, or another source of the value.
        key: The dotted path of the key; empty for the whole file.
        message: Value, rule and remedy.
    """

    def __init__(self, where: str, key: str, message: str) -> None:
        # Each issue is one line, also if a key or a value contains line breaks.
        self.where = printable(redact(where))
        self.key = printable(redact(key))
        self.message = printable(redact(message))

    def __str__(self) -> str:
        return _line(self.where, _line(self.key, self.message))

    def __repr__(self) -> str:
        return f"LocatedIssue({str(self)!r})"


class SpecError(ValueError):
    """A spec is not valid; `str()` lists all issues, one per line."""

    def __init__(self, problems: Sequence[LocatedIssue]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


class InvalidName(UserError):
    """A sweep's name cannot be the name of a directory."""


class WrongDuration(ValueError):
    """An option's value is not a duration."""


class RevisionError(ValueError):
    """No revision of a sweep's spec is valid, or another release wrote the sweep."""


class SearchChanged(ValueError):
    """A resume would change the search space that trials were sampled from."""


class OriginChanged(ValueError):
    """A resume would mix trials that cannot be compared."""


class SweepExists(ValueError):
    """A new sweep has the name of an existing one."""

    def __init__(self, paths: SweepPaths, remedy: str = "choose another name with --name") -> None:
        super().__init__(
            f"sweep '{paths.name}' exists already; a name must be unique below the root; "
            f"see how to continue it with: {paths.command('status')}, or {remedy}"
        )


class LedgerError(Exception):
    """The ledger is missing or cannot be used."""


class LedgerRefused(LedgerError):
    """The ledger's storage is full, read-only or broken; the data in it is intact."""


class LedgerBusy(LedgerError):
    """Another process kept the ledger locked for longer than this process waits."""

    def __init__(
        self,
        place: object,
        seconds: float,
        holder: str = "another process",
        remedy: str = "end the process that has it open",
    ) -> None:
        super().__init__(
            f"{holder} has locked the ledger {place} for {seconds:g} s; transactions take "
            f"milliseconds; {remedy}, then resume"
        )


class LockLost(BaseException):
    """This driver has lost the lock, and another driver may run the sweep.

    Not an `Exception`, so that no handler takes it for an error of a trial or waits for trials.
    """


class SweepLockedError(Exception):
    """Another driver holds the sweep's lock: `holder`, or None if it is unknown."""

    def __init__(self, message: str, holder: LockOwner | None) -> None:
        super().__init__(message)
        self.holder = holder


class LockTaken(OSError):
    """A process that is not a driver has locked the lock file."""


def dotted(path: KeyPath) -> str:
    """Return a key path in the notation of specs: `space.train.optimizer.lr.uniform[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _line(head: str, tail: str) -> str:
    return f"{head}: {tail}" if head else tail


class NoReport(Exception):
    """A sweep's report could not be written."""


class NoVersion(Exception):
    """A model could not be registered."""


class ExitRequested(BaseException):
    """A signal arrived while there was nothing to drain."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


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
