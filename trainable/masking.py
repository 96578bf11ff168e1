"""What a user's code raises or prints, without secrets: it ends up in files that others read.

What must not live here: what may stand in a spec (`sweeps`), and what tracking is told
(`tracking`).
"""

from __future__ import annotations

import contextlib
import io
import os
import re

from trainable.regular_files import UNLIMITED, open_regular

HIDDEN = "[hidden]"

TRIAL_LOG = "trial.log"
"""What a trial printed, in its directory."""
MOST_LOG_BYTES = 10 << 20
_HEAD, _TAIL = 2 << 20, 4 << 20
_PIECE = 1 << 20
_CUT = re.compile(rb"\n\[about (\d+) bytes were cut here")

_SHORTEST = 6
"""Characters of a value that is looked for by itself: a shorter one would be found in words."""
_NAME = r"(?:[\w.-]*[_-])?(?:password|secret)|[\w.-]*[_-](?:token|key)"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^\s/?#'\"]+@")
_ASSIGNED = re.compile(
    rf"(?<![\w.-])(?P<name>{_NAME})(?P<between>['\"]?\s*[=:]\s*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s&;,'\"()\[\]{}]+)",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a variable or an argument of that name holds a secret, as `DB_PASSWORD` does."""
    return _SECRET_NAME.fullmatch(name) is not None


def mask_assigned(text: str) -> str:
    """Return `text` without the values that stand beside a secret's name: `API_KEY=X`."""
    return _ASSIGNED.sub(rf"\g<name>\g<between>{HIDDEN}", text)


def mask(text: str) -> str:
    """Return `text` without secrets, and with halves of characters as escapes: a name of a file
    that is no UTF-8 holds such, and neither a file nor a database takes them.

    Hidden are the userinfo of URLs, what stands beside a secret's name, and, wherever they stand,
    the values of this process' environment variables of such names.
    """
    values = {
        value for name, value in os.environ.items() if len(value) >= _SHORTEST and is_secret(name)
    }
    for value in sorted(values, key=len, reverse=True):  # one may be the beginning of another
        text = text.replace(value, HIDDEN)
    text = mask_assigned(_USERINFO.sub(f"{HIDDEN}@", text))
    return text.encode(errors="backslashreplace").decode()


class MaskedLog(io.TextIOWrapper):
    """A text file in UTF-8 to which nothing is written but what `mask` leaves, and which keeps the
    beginning and the end of what grows beyond `MOST_LOG_BYTES`.

    What a full disk refuses is missing from it: a log ends nobody's work.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        if path == os.devnull:  # where there is no room for a log
            number = os.open(path, flags)
        else:
            number = open_regular(path, flags, limit=UNLIMITED)  # one that has grown is cut
        super().__init__(os.fdopen(number, "ab"), encoding="utf-8")
        self._size = os.fstat(self.fileno()).st_size

    def write(self, text: str) -> int:
        masked = mask(text)
        with contextlib.suppress(OSError):
            for start in range(0, len(masked), _PIECE):
                self._size += super().write(masked[start : start + _PIECE])
                if self._size > MOST_LOG_BYTES:
                    self._cut()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()

    def reopened(self) -> MaskedLog:
        """Return the same log, where this one was closed."""
        return MaskedLog(self._path)

    def _cut(self) -> None:
        super().flush()
        number = self.fileno()
        size = os.fstat(number).st_size
        if size > MOST_LOG_BYTES:  # characters were counted
            with os.fdopen(open_regular(self._path, limit=UNLIMITED), "rb") as file:
                file.seek(_HEAD)
                mark = _CUT.match(file.read(200))
                file.seek(size - _TAIL)
                end = file.read()
            cut = size - _HEAD - _TAIL + (int(mark[1]) if mark else 0)
            os.ftruncate(number, _HEAD)
            said = f"a trial's log keeps its first {_HEAD >> 20} and its last {_TAIL >> 20} MiB"
            os.write(number, f"\n[about {cut} bytes were cut here: {said}]\n".encode() + end)
        self._size = os.fstat(number).st_size
