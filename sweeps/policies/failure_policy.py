"""Policy: which failures are tried again, and when more trials would only fail in the same way.

Decides from what it is told. What must not live here: Ray, files, or writing anything down.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace

# Whether a loss diverges or the memory suffices depends on the parameters: that some trials fail
# so is a result of the search and no reason to end it.
_PARAMETERS_DOING = {"non_finite", "oom"}
NOT_THE_TRIALS_DOING = {"storage", "fenced"}
"""Kinds of failures after which a trial has no end: it goes on once what is wrong is put right."""

UNCOUNTED_LOSSES = 2
"""Losses of a process in a row, without progress, that are put down to the machine and counted
against nobody: whoever dies at the same place once more does so by its own doing."""

MOST_LOST_STARTS = 5
"""Workers in a row that may end before a trial has begun with any of them. That is no trial's
doing: where another one ends, the sweep stops and can be resumed."""

_KINDS = {"config", "task", "non_finite", "oom", "checkpoint", "lost", "limit", "hang"}

# What these say is true of the storage for every process.
_OF_THE_STORAGE = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENFILE, errno.ENODEV,
    errno.ENXIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.EBUSY, errno.EAGAIN,
}  # fmt: skip
# What these say is about the process that was told so, on whatever host it runs.
_OF_THE_PROCESS = {errno.EFBIG, errno.EMFILE, errno.ENOMEM, errno.EBADF}


def kind_of(reason: str) -> str:
    """The kind of failure that a reason begins with; `error` for what the task's code raised."""
    kind = reason.partition(":")[0]
    return kind if kind in _KINDS else "error"


@dataclass(frozen=True)
class Failure:
    """How one trial failed.

    Attributes:
        kind: The short word of `trainable.errors`; `error` for what the task's code raised, `lost`
            for a process that died.
        reason: In one line, for people.
        traceback: Where it was raised.
        place: File and line where it was raised; empty when nothing was.
        errno: Of what the system said, where a storage refused; None: it said nothing.
        system: What it said.
        host: The host on which the trial ran then.
    """

    kind: str
    reason: str
    traceback: str
    place: str = ""
    errno: int | None = None
    system: str = ""
    host: str = ""

    def may_be_the_trials_own(self, host: str) -> bool:
        """Whether a storage that refused the trial may well take the same from other processes.

        Args:
            host: Where the others were asked: a directory that one host lacks another one has.
        """
        if self.kind != "storage" or self.errno is None or self.errno in _OF_THE_STORAGE:
            return False
        return self.errno in _OF_THE_PROCESS or self.host == host

    def as_the_trials_own(self) -> Failure:
        """Return it as the failure of a trial whose storage takes the same from others."""
        return replace(
            self,
            kind="limit",
            reason=f"limit: {self.system}; the sweep can write there, so this trial's process "
            "alone is refused; look for what its task changes for the whole process, such as "
            "limits (resource.setrlimit), files left open, or permissions",
        )

    @property
    def way(self) -> tuple[str, str]:
        """What two trials that failed in the same way share: the exception's type and its place,
        or else the reason.
        """
        return (self.reason.partition(":")[0], self.place) if self.place else (self.kind, "")


@dataclass(frozen=True)
class RepeatedFailure:
    """Why a sweep stopped by itself: these trials failed in the same way, the last one so."""

    numbers: tuple[int, ...]
    failure: Failure

    @property
    def cause(self) -> str:
        """In one line."""
        *others, last = map(str, self.numbers)
        who = f"trials {', '.join(others)} and {last}" if others else f"trial {last}"
        alike = " in the same way" if others else ""
        where = f" ({self.failure.place})" if self.failure.place else ""
        return f"{who} failed{alike}: {self.failure.reason}{where}"


class RepeatedFailureDetector:
    """Notices that trial after trial fails in the same way.

    Args:
        limit: How many in a row are too many; 0 for no limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers: dict[tuple[str, str], list[int]] = {}
        self.abort_reason: RepeatedFailure | None = None

    def failed(self, number: int, failure: Failure) -> None:
        """A trial failed."""
        if failure.kind in _PARAMETERS_DOING:
            return
        numbers = self._numbers.setdefault(failure.way, [])
        numbers.append(number)
        if len(numbers) == self._limit and self.abort_reason is None:
            self.abort_reason = RepeatedFailure(tuple(numbers), failure)

    def stopped(self, number: int, failure: Failure) -> None:
        """A trial could not go on, and neither could any other."""
        self.abort_reason = self.abort_reason or RepeatedFailure((number,), failure)

    def passed(self) -> None:
        """A trial got through: what failed before it is not wrong for all."""
        self._numbers.clear()


class CrashCounter:
    """Counts how often in a row a trial lost its process without having come further.

    A trial that commits a checkpoint between two losses may lose as many processes as it likes:
    every one brings it closer to its end. The first `UNCOUNTED_LOSSES` without progress are never
    held against it, whatever the user allows.

    Args:
        max_retries: How many more losses in a row a trial is tried again after.
    """

    def __init__(self, max_retries: int) -> None:
        self._allowed = UNCOUNTED_LOSSES + max_retries
        self._in_a_row: dict[int, int] = {}
        self._newest: dict[int, int] = {}

    def started(self, number: int, newest: int) -> None:
        """A trial begins, or begins again, at the checkpoint generation `newest`; 0: none."""
        self._newest.setdefault(number, newest)

    def lost(self, number: int, newest: int) -> bool:
        """A trial lost its process after it had committed generation `newest`.

        Returns:
            Whether it is tried again.
        """
        further = newest > self._newest.get(number, 0)
        self._newest[number] = newest
        self._in_a_row[number] = 0 if further else self._in_a_row.get(number, 0) + 1
        return self._in_a_row[number] <= self._allowed

    def in_a_row(self, number: int) -> int:
        """How often in a row it was lost by now."""
        return self._in_a_row.get(number, 0)
