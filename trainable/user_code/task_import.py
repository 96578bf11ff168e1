"""Import a user's code by name, in each process with the same arguments, paths, hashes and errors.

Each process that imports a task calls `prepare_process` (or `prepared`) first. What must not live
here: what a task is (`task.py`), and torch.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import inspect
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from trainable.errors import ConfigError
from trainable.store.private_files import keep_files_private

ARGUMENTS = ("sweep",)
"""`sys.argv` for a task: a program without arguments, so that no parser reads those of `sweep`."""
SAFE_PATH_VARIABLE, SAFE_PATH = "PYTHONSAFEPATH", "gradsweep"
"""The variable that the command line sets for its children: with any value, Python does not import
from the program's directory or the working directory. A value that the user set is another one,
and programs that a task starts inherit it."""
COMPILE_PATH_VARIABLE = "TORCH_CUSTOM_PYTHONPATH"
"""The PYTHONPATH of the processes in which torch compiles. Without it torch passes on `sys.path`
with the working directory, and Python runs a `sitecustomize.py` there."""


@functools.cache
def prepare_process() -> None:
    """Set `sys.argv` and `sys.path` for importing a task; once, because a task may change either.

    The working directory is the last entry of `sys.path`: its files can be imported, but never
    hide a module of Python or of an installed package.
    """
    keep_files_private()
    sys.path[:] = _import_path(sys.argv[0])
    sys.argv[:] = ARGUMENTS
    os.environ.setdefault(COMPILE_PATH_VARIABLE, os.pathsep.join(sys.path[:-1]))
    _unset_safe_path()


@contextmanager
def prepared() -> Iterator[None]:
    """Do the same as `prepare_process`, and undo it when the context ends."""
    arguments, path = list(sys.argv), list(sys.path)
    sys.path[:] = _import_path(sys.argv[0])
    sys.argv[:] = ARGUMENTS
    compile_path = os.environ.get(COMPILE_PATH_VARIABLE)
    os.environ.setdefault(COMPILE_PATH_VARIABLE, os.pathsep.join(sys.path[:-1]))
    ours = _unset_safe_path()
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = arguments, path
        if compile_path is None:
            os.environ.pop(COMPILE_PATH_VARIABLE, None)
        if ours:
            os.environ[SAFE_PATH_VARIABLE] = SAFE_PATH


def _unset_safe_path() -> bool:
    """Unset PYTHONSAFEPATH if `sweep` has set it, and return whether it had.

    Otherwise a program that a task starts could not import the files in its own directory.
    """
    ours = os.environ.get(SAFE_PATH_VARIABLE) == SAFE_PATH
    if ours:
        del os.environ[SAFE_PATH_VARIABLE]
    return ours


def _import_path(program: str) -> list[str]:
    here = os.getcwd()
    # Python's first entry is the program's directory, which differs between the processes.
    kept = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = os.path.dirname(program)
    left_out = {"", here, os.path.realpath(here)}
    left_out |= {own, os.path.realpath(own)} if own and own not in kept else set()
    found = [path for path in sys.path if path not in left_out]
    # Ray's workers have Ray's vendored packages first: put installed packages before them.
    vendored = [path for path in found if os.path.basename(path) == "thirdparty_files"]
    return [*(path for path in found if path not in vendored), *vendored, here]


def needs_hash_order() -> bool:
    """Return whether sets of strings have another order in this process than in its children.

    `sweep` sets PYTHONHASHSEED for its children, unless the user has set it. Python reads it only
    at its start.
    """
    return os.environ.get("PYTHONHASHSEED") == "0" and bool(sys.flags.hash_randomization)


def restart_in_hash_order() -> None:
    """Restart Python if this process has another hash order than its children.

    Not under a debugger, which would lose the process.
    """
    if needs_hash_order() and not _is_debugged():
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])


def check_hash_order() -> None:
    """Fail in a command that imports a task and has not called `restart_in_hash_order`."""
    assert not needs_hash_order() or _is_debugged(), (
        "the command has not called `restart_in_hash_order`"
    )


def _is_debugged() -> bool:
    return sys.gettrace() is not None or "pydevd" in sys.modules


@contextmanager
def no_exit(what: str, key: str) -> Iterator[None]:
    """Raise a `ConfigError` if the user's code would end the process.

    A real Ctrl-C stays a KeyboardInterrupt.
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
                f"{what} ended its process ({text}); a process that imports a task also trains "
                "it; raise an exception that says what is wrong, or move what ends a program "
                'below `if __name__ == "__main__":`',
                key=key,
            ) from error


class _ParserError(SystemExit):
    """An error of argparse, raised instead of printing the usage."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


@contextmanager
def _parser_errors() -> Iterator[None]:
    original = argparse.ArgumentParser.error

    def error(_: argparse.ArgumentParser, message: str) -> NoReturn:
        raise _ParserError(message)

    parser: Any = argparse.ArgumentParser
    parser.error = error
    try:
        yield
    finally:
        parser.error = original


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Record the SIGINTs that arrive while the context is open, and pass them to their handler."""
    received: list[int] = []
    original = signal.getsignal(signal.SIGINT)
    if not callable(original) or threading.current_thread() is not threading.main_thread():
        yield received
        return

    def record(number: int, frame: Any) -> Any:
        received.append(number)
        return original(number, frame)

    signal.signal(signal.SIGINT, record)
    try:
        yield received
    finally:
        if signal.getsignal(signal.SIGINT) is record:  # else the user's code has set its own
            signal.signal(signal.SIGINT, original)


def import_module(name: str, module_name: str, key: str) -> ModuleType:
    """Import the module of a task, an optimizer or a schedule."""
    keep_caches_reachable()
    try:
        with no_exit(f"{name!r}: the module {module_name!r}, while it was imported,", key):
            return importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as problem:  # a user's module may fail in any way while it is imported
        raise ConfigError(
            f"{name!r}: the module {module_name!r} could not be imported "
            f"({type(problem).__name__}: {problem}); the part before the colon must be importable "
            "from where you start; correct the module or its name",
            key=key,
        ) from problem


def import_own(name: str, key: str) -> Any:
    """Return what `package.module:Name` names."""
    module_name, _, inside = name.partition(":")
    module = import_module(name, module_name, key)
    if not hasattr(module, inside):
        known = [one for one in vars(module) if not one.startswith("_")]
        raise ConfigError(
            f"{name!r}: the module {module_name!r} was imported, but it has no {inside!r}"
            f"{nearest(inside, known)}; name a class or a function that is there",
            key=key,
        )
    return getattr(module, inside)


BUILT_IN = {
    "char_lm": "trainable.tasks.char_lm:CharLm",
    "digits": "trainable.tasks.digits:Digits",
    "fashion_mnist": "trainable.tasks.fashion_mnist:FashionMnist",
    "spiral": "trainable.tasks.spiral:Spiral",
}


SCRIPT = "(script)"
"""Stands for the module of a function that a script or a notebook sweeps in its own process."""


def resolve_task_name(name: str) -> tuple[str, str]:
    """Return the module of a task and the class name in it."""
    module, colon, inside = BUILT_IN.get(name, name).partition(":")
    if module == SCRIPT:
        raise ConfigError(
            f"{inside!r} is a function of a script or a notebook, which alone can run it; to go "
            "on with the sweep, run that again; for this command, write the training as a loop in "
            'a module, and start a sweep with it: see the guide "Your own loop"',
            key="task.name",
        )
    if not colon or not module or not inside:
        raise ConfigError(
            f"{name!r} is not a built-in task{nearest(name, BUILT_IN)}; built in are "
            f"{', '.join(BUILT_IN)}; write one of these, or your own as package.module:ClassName",
            key="task.name",
        )
    return module, inside


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the most similar known word, or ""."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


_SHOWN = 3


def listed(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join([*names[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


_OURS = frozenset({"trainable", "sweeps", "tracking", "redaction"})


@functools.cache
def is_users_module(name: str) -> bool:
    """Whether a module is the user's code, and not of an installed package."""
    top = name.partition(".")[0]
    if not name or top in _OURS or top in sys.stdlib_module_names:
        return False
    if top in ("__main__", "__mp_main__"):  # a script's variables, and a notebook's
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return False
    where = Path(file)
    paths = (sysconfig.get_path(one) for one in ("stdlib", "platstdlib", "purelib", "platlib"))
    return "site-packages" not in where.parts and not any(
        where.is_relative_to(path) for path in paths
    )


def _key_of_call(
    arguments: tuple[Any, ...], named: dict[str, Any], typed: bool
) -> tuple[object, ...]:
    """Return the key of a call in a cache; that of `functools` keeps a hash of its own process."""
    types = tuple(map(type, (*arguments, *named.values()))) if typed else ()
    return arguments, tuple(named.items()), types


def keep_caches_reachable() -> None:
    """Let `functools.lru_cache` of the user's functions be Python's own implementation in Python.

    That in C keeps its entries where no code can reach them. A call costs a microsecond more.
    Call it before the user's modules are imported.
    """
    in_c: Any = functools.lru_cache
    if hasattr(in_c, "__wrapped__"):
        return  # it is ours already
    wanted = ("lru_cache", "_lru_cache_wrapper")
    tree = ast.parse(inspect.getsource(functools))
    found = [one for one in tree.body if getattr(one, "name", "") in wanted]
    namespace: dict[str, Any] = vars(functools) | {"_make_key": _key_of_call}
    exec(compile(ast.Module(found, []), functools.__file__, "exec"), namespace)
    in_python = namespace["lru_cache"]

    @functools.wraps(in_c)
    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        if callable(maxsize):  # without parentheses
            return lru_cache()(maxsize)

        def decorate(function: Any) -> Any:
            own = is_users_module(getattr(function, "__module__", None) or "")
            return (in_python if own else in_c)(maxsize, typed)(function)

        return decorate

    functools.lru_cache = lru_cache
