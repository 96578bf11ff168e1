"""Turn exceptions that would silently end a loop or a process into errors of the task.

A `StopIteration` from a data set would end the loop over its windows as if all of them had come.
`KeyboardInterrupt` and `SystemExit` would end the process.
What must not live here: errors that torch raises (`step.translate_torch_errors`).
"""

from __future__ import annotations

import dis
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from trainable.errors import TaskError
from trainable.group_joining import hidden_group

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def data_code(what: str) -> Iterator[None]:
    """Run the code of a task's data, as `task_code` does, and as on the only rank of a trial.

    The ranks divide what it gives. Libraries that ask torch would divide it once more.
    """
    with hidden_group(), task_code(what):
        yield


@contextmanager
def task_code(what: str = "") -> Iterator[None]:
    """Run a task's code; an exception that would end the loop or process becomes a `TaskError`.

    Do not put a `yield` inside: a generator that is closed receives `GeneratorExit` there.
    """
    try:
        yield
    except (StopIteration, StopAsyncIteration) as problem:
        raise _as_task_error(problem, what) from problem
    except Exception:
        raise
    except BaseException as problem:
        if _is_from_signal(problem):
            raise
        raise _as_task_error(problem, what) from problem


def _as_task_error(problem: BaseException, what: str) -> TaskError:
    *_, frame = traceback.extract_tb(problem.__traceback__)
    said = f"{type(problem).__name__}{f' ({problem})' if str(problem) else ''}"
    if what:
        remedy = (
            "return each item that the length promises, and raise an error such as RuntimeError "
            "where that fails"
        )
    elif isinstance(problem, (StopIteration, StopAsyncIteration)):
        remedy = "give next() a default, as in next(iterator, None), or make a new iterator"
    else:
        remedy = (
            "the budget and early stopping end a trial; remove the call, or raise an error such "
            "as RuntimeError, which fails this trial alone"
        )
    return TaskError(
        f"{f'{what}: ' if what else ''}{said} was raised at {frame.filename}:{frame.lineno} in "
        f"{frame.name}(); a task must not raise what ends a loop or a process; {remedy}"
    )


def _is_from_signal(problem: BaseException) -> bool:
    """Whether a signal caused an exception, in its handler or between two instructions.

    Python's own SIGINT handler has no frame: the innermost frame is then at the interrupted
    instruction. If code raised the exception, that frame is at a `raise` instruction.
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
