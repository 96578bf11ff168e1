"""Exceptions that end loops, generators and processes in silence, when a task raises one of them.

`StopIteration` out of a data set ends the loop over its windows as if all of them had come;
`KeyboardInterrupt` and `SystemExit` end a process. Raised by a task they are errors of the task.
What must not live here: errors that torch raises (`step.known_errors`).
"""

from __future__ import annotations

import dis
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from trainable.errors import TaskError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def task_code(what: str = "") -> Iterator[None]:
    """Run a task's code: an exception that would end our loop or process becomes a `TaskError`.

    Never enter it around a `yield`: a generator that is closed receives `GeneratorExit` there.

    Args:
        what: What the code was to give, such as `window 5 of 10`; begins the message.

    Raises:
        TaskError: The code raised StopIteration, StopAsyncIteration, or anything that is no
            `Exception`. The interrupt of a signal, such as Ctrl-C, leaves as it is.
    """
    try:
        yield
    except (StopIteration, StopAsyncIteration) as problem:
        raise _as_task_error(problem, what) from problem
    except Exception:
        raise
    except BaseException as problem:
        if _comes_from_a_signal(problem):
            raise
        raise _as_task_error(problem, what) from problem


def _as_task_error(problem: BaseException, what: str) -> TaskError:
    *_, frame = traceback.extract_tb(problem.__traceback__)
    said = f"{type(problem).__name__}{f' ({problem})' if str(problem) else ''}"
    return TaskError(
        f"{f'{what}: ' if what else ''}{said} was raised at {frame.filename}:{frame.lineno} in "
        f"{frame.name}(); a task must not let out what ends a loop or a process; give every item "
        "that the length promises, and raise an error such as RuntimeError where that fails"
    )


def _comes_from_a_signal(problem: BaseException) -> bool:
    """Whether a signal raised it: in its handler, or between two instructions of any code.

    Python's own handler of SIGINT has no frame. The innermost frame then stands at the instruction
    that was interrupted; where code raises by itself it stands at its `raise`.
    """
    innermost = _innermost(problem.__traceback__)
    if innermost is None:
        return True
    handlers = (getattr(signal.getsignal(number), "__code__", None) for number in _SIGNALS)
    if innermost.tb_frame.f_code in handlers:
        return True
    if not isinstance(problem, KeyboardInterrupt):
        return False
    code = innermost.tb_frame.f_code.co_code
    return dis.opname[code[innermost.tb_lasti]] != "RAISE_VARARGS"


def _innermost(frame: TracebackType | None) -> TracebackType | None:
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame
