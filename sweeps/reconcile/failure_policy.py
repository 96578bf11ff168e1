"""The failure policy: when a trial is retried, and when the sweep stops after repeated failures.

Each decision depends on the arguments of the calls alone. What must not live here: Ray, files, and
the ledger.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from sweeps.ledger.reasons import PARAMETER_FAILURES, is_of_parameters, kind_of

INFRASTRUCTURE_FAILURES = {"storage", "fenced"}
"""Kinds of failures after which a trial stays unfinished. It resumes once the cause is removed."""

UNCOUNTED_CRASHES = 2
"""Crashes in a row without progress that are attributed to the machine. One more crash at the
same place is attributed to the trial."""

MAX_LOST_STARTS = 5
"""Workers in a row that may exit before a trial has started. No trial causes such an exit. After
one more, the sweep stops and can be resumed."""

_ON_ANOTHER_RANK = re.compile(r"^RankFailed: rank \d+: ")
"""How the reason begins if the task's code raised on a rank that does not report."""

# Errors of the storage, which every process meets.
_STORAGE_ERRNOS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENFILE, errno.ENODEV,
    errno.ENXIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.EBUSY, errno.EAGAIN,
}  # fmt: skip
# Errors of the process that met them, on any host.
_PROCESS_ERRNOS = {errno.EFBIG, errno.EMFILE, errno.ENOMEM, errno.EBADF}


_REMEDIES = {
    "config": "change what the message names",
    "task": "correct the task's code",
    "error": "correct the task's code or data",
    "checkpoint": "restore the checkpoints that cannot be read",
    "storage": "free space on the storage, or correct its permissions",
    "fenced": "end the other process that writes to the trial",
    "lost": "find out what ends the processes, such as lack of memory",
    "limit": "correct what the task changes in its process",
    "hang": "correct the code that blocks, or raise failures.step_timeout",
    "non_finite": "lower the learning rates, or clip gradients",
    "infeasible": "loosen a limit of constraints, or search where trials satisfy it",
    "oom": "use smaller batches or models, or set failures.out_of_memory=halve_batch",
}


def remedy(kind: str | None) -> str:
    """Return what a user changes before a sweep resumes that a failure of this kind stopped."""
    return _REMEDIES.get(kind or "", "correct the cause")


def is_fixable(reason: str | None) -> bool:
    """Return whether a failed trial may succeed with its parameters, once a cause is removed."""
    # A retry is offered only then; otherwise the parameters are the probable cause.
    return reason is not None and kind_of(reason) not in PARAMETER_FAILURES


@dataclass(frozen=True)
class Failure:
    """How one trial failed.

    Attributes:
        kind: That of `trainable.errors`, `error` if the task's code raised, `lost` if the process
            died.
        reason: The failure in one line, for people.
        place: File and line of the exception; empty when none was raised.
        errno: The error number of a storage that rejected a call; None: there is none.
        system: The operating system's message for it.
    """

    kind: str
    reason: str
    traceback: str
    place: str = ""
    errno: int | None = None
    system: str = ""
    host: str = ""

    def may_be_trial_specific(self, host: str) -> bool:
        """Return whether the storage that rejected the trial may accept other processes."""
        if self.kind != "storage" or self.errno is None or self.errno in _STORAGE_ERRNOS:
            return False
        return self.errno in _PROCESS_ERRNOS or self.host == host

    def as_trial_specific(self) -> Failure:
        """Return this failure as one of the trial alone, whose storage accepts other processes."""
        return replace(
            self,
            kind="limit",
            reason=f"limit: {self.system}; the sweep can write there, so only this trial's "
            "process cannot; look for changes that its task makes to the whole process, such as "
            "limits (resource.setrlimit), open files, or permissions",
        )

    @property
    def signature(self) -> tuple[str, str]:
        """Type and place of the exception, or else the kind of the failure.

        Trials with equal signatures have failed in the same way, on whichever rank.
        """
        if not self.place:
            return self.kind, ""
        raised = _ON_ANOTHER_RANK.sub("", self.reason, count=1)
        return raised.partition(":")[0], self.place


@dataclass(frozen=True)
class RepeatedFailure:
    """Why a sweep stopped by itself: trials that failed alike, and the failure of the last one."""

    numbers: tuple[int, ...]
    failure: Failure

    @property
    def cause(self) -> str:
        """The cause in one line."""
        *others, last = map(str, self.numbers)
        who = f"trials {', '.join(others)} and {last}" if others else f"trial {last}"
        alike = " in the same way" if others else ""
        where = f" ({self.failure.place})" if self.failure.place else ""
        return f"{who} failed{alike}: {self.failure.reason}{where}"

    @property
    def key(self) -> str:
        """The key of the spec that stops the sweep for it."""
        return "failures.same_failure_limit" if len(self.numbers) > 1 else "failures"


class RepeatedFailureDetector:
    """Detect that one trial after another fails in the same way."""

    def __init__(self, limit: int, searched: Collection[str] = ()) -> None:
        self._limit = limit
        self._searched = searched
        self._numbers: dict[tuple[str, str], list[int]] = {}
        self.abort_reason: RepeatedFailure | None = None

    def failed(self, number: int, failure: Failure) -> None:
        """Record that a trial failed."""
        if is_of_parameters(failure.reason, self._searched):
            return
        numbers = self._numbers.setdefault(failure.signature, [])
        numbers.append(number)
        if len(numbers) == self._limit and self.abort_reason is None:
            self.abort_reason = RepeatedFailure(tuple(numbers), failure)

    def stopped(self, number: int, failure: Failure) -> None:
        """Record that a trial could not continue, for a reason that holds for every trial."""
        self.abort_reason = self.abort_reason or RepeatedFailure((number,), failure)

    def passed(self) -> None:
        """Record that a trial succeeded: the failures before it do not concern every trial."""
        self._numbers.clear()


class CrashCounter:
    """Count how often in a row the process of a trial crashed without a new checkpoint.

    The first `UNCOUNTED_CRASHES` of these never count, whatever the user allows.
    """

    def __init__(self, max_retries: int) -> None:
        self._allowed = UNCOUNTED_CRASHES + max_retries
        self._in_a_row: dict[int, int] = {}
        self._newest: dict[int, int] = {}

    def started(self, number: int, newest: int) -> None:
        """Record that a trial starts or restarts at checkpoint generation `newest`; 0: none."""
        self._newest.setdefault(number, newest)

    def lost(self, number: int, newest: int) -> bool:
        """Record that the process of a trial crashed."""
        further = newest > self._newest.get(number, 0)
        self._newest[number] = newest
        self._in_a_row[number] = 0 if further else self._in_a_row.get(number, 0) + 1
        return self._in_a_row[number] <= self._allowed

    def in_a_row(self, number: int) -> int:
        """Return how often in a row the process of a trial has crashed without progress."""
        return self._in_a_row.get(number, 0)
