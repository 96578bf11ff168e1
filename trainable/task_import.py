"""How a process imports a user's task: the same `sys.argv`, `sys.path` and errors in each of them.

Every process that imports a task calls `prepare_process` (or `prepared`) first: the child of
`sweep check`, `sweep train`, each Ray worker, and the child that registers a model. What must not
live here: what a task is (`task`), and which names are built in (`naming`).
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from trainable.errors import ConfigError

ARGUMENTS = ("sweep",)
"""`sys.argv` for a task: a program without arguments, so that no parser reads ours."""
SAFE_PATH_VARIABLE, SAFE_PATH = "PYTHONSAFEPATH", "gradsweep"
"""What the command line sets for all of its children, so that none of them imports from the
directory of its program or from the working directory; any value does. This one tells it from the
user's own, which programs that a task starts keep."""
COMPILE_PATH_VARIABLE = "TORCH_CUSTOM_PYTHONPATH"
"""The PYTHONPATH of the processes in which torch compiles. Without it torch passes on `sys.path`
with the working directory, and Python runs a `sitecustomize.py` there."""


@functools.cache
def prepare_process() -> None:
    """Set `sys.argv` and `sys.path` as each process has them that imports a task; once in a
    process, because a task may change either while it is imported.

    The working directory stands last in `sys.path`: a file in it is found under its own name, and
    never in the place of a module that Python or a package needs.
    """
    sys.path[:] = _import_path(sys.argv[0])
    sys.argv[:] = ARGUMENTS
    os.environ.setdefault(COMPILE_PATH_VARIABLE, os.pathsep.join(sys.path[:-1]))
    _take_back_safe_path()


@contextmanager
def prepared() -> Iterator[None]:
    """The same for as long as the context is open, in a process that has work of its own."""
    arguments, path = list(sys.argv), list(sys.path)
    sys.path[:] = _import_path(sys.argv[0])
    sys.argv[:] = ARGUMENTS
    compile_path = os.environ.get(COMPILE_PATH_VARIABLE)
    os.environ.setdefault(COMPILE_PATH_VARIABLE, os.pathsep.join(sys.path[:-1]))
    ours = _take_back_safe_path()
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = arguments, path
        if compile_path is None:
            os.environ.pop(COMPILE_PATH_VARIABLE, None)
        if ours:
            os.environ[SAFE_PATH_VARIABLE] = SAFE_PATH


def _take_back_safe_path() -> bool:
    """Have what a task starts find its neighbours, as `python prepare.py` does for its user;
    returns whether it would not have.
    """
    ours = os.environ.get(SAFE_PATH_VARIABLE) == SAFE_PATH
    if ours:
        del os.environ[SAFE_PATH_VARIABLE]
    return ours


def _import_path(program: str) -> list[str]:
    here = os.getcwd()
    # Python puts the directory of the program first, which differs between the processes.
    kept = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = os.path.dirname(program)
    left_out = {"", here, os.path.realpath(here)}
    left_out |= {own, os.path.realpath(own)} if own and own not in kept else set()
    found = [path for path in sys.path if path not in left_out]
    # What Ray brings of others stands first in its workers; there as elsewhere an installed
    # package comes first.
    vendored = [path for path in found if os.path.basename(path) == "thirdparty_files"]
    return [*(path for path in found if path not in vendored), *vendored, here]


@contextmanager
def no_exit(what: str, key: str) -> Iterator[None]:
    """Turn what would end the process, while the user's code runs, into a `ConfigError`.

    A real Ctrl-C stays a KeyboardInterrupt.

    Args:
        what: Whose code runs and when, such as "the task, while it was built,".
        key: What of the configuration it is about.

    Raises:
        ConfigError: The code raised SystemExit, KeyboardInterrupt or another BaseException.
    """
    with _interruptions() as received, _parser_errors():
        try:
            yield
        except Exception:
            raise
        except _ParserError as error:
            raise ConfigError(
                f"{what} parsed a command line with argparse, which refused it "
                f"({error.message}); a task gets no command line in any process that imports it; "
                "give each option a default and no `required`, or call parse_args() below "
                '`if __name__ == "__main__":`',
                key=key,
            ) from None
        except BaseException as error:
            if received:
                raise
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ConfigError(
                f"{what} ended its process ({text}); a process that imports a task goes on to "
                "train it; raise an exception that says what is wrong, or move what ends a "
                'program below `if __name__ == "__main__":`',
                key=key,
            ) from error


class _ParserError(SystemExit):
    """What argparse raises here in the place of printing its usage.

    Args:
        message: What argparse would have printed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


@contextmanager
def _parser_errors() -> Iterator[None]:
    theirs = argparse.ArgumentParser.error

    def error(_: argparse.ArgumentParser, message: str) -> NoReturn:
        raise _ParserError(message)

    parser: Any = argparse.ArgumentParser
    parser.error = error
    try:
        yield
    finally:
        parser.error = theirs


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """The SIGINTs that arrive while the context is open; what answers them still does."""
    received: list[int] = []
    theirs = signal.getsignal(signal.SIGINT)
    if not callable(theirs) or threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: Any) -> Any:
        received.append(number)
        return theirs(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # else the user's code has its own
            signal.signal(signal.SIGINT, theirs)
