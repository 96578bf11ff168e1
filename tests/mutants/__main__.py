"""Break the code in the places that `table.toml` names, and say which breaks the tests see.

    python -m tests.mutants [WORD ...]    the mutations whose part or name has one of the words

Each mutation is made in a copy of the tree, one at a time. Its tests run there in a fork of a
process that has imported the heavy libraries, so that a mutation takes seconds. Before that, all
these tests must pass in the unchanged copy. The exit code is 1 if fewer than 90 % of the mutations
are killed, or if one of them does not apply. What must not live here: tests, and mutations.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_COPY = "MUTANTS_IN_COPY"
"""A variable of the process that works in the copy."""
_TABLE = Path(__file__).with_name("table.toml")
_LEAST = 0.9
_SECONDS = 120
"""A mutation whose tests take longer is killed: the unchanged tests take a few seconds."""
_PYTEST = ("-x", "-q", "-m", "not chaos", "-p", "no:cacheprovider", "--hypothesis-seed=0")
_PASSED, _RAN_NONE = 0, (2, 4, 5)
"""Exit codes of pytest; with a mutation that cannot be imported it runs none."""

Verdict = Literal["killed", "survived", "not applicable"]


@dataclass(frozen=True)
class Mutation:
    """A change of one place of the code, and the tests that must fail with it."""

    part: str
    name: str
    file: str
    old: str
    new: str
    tests: str
    """Files or node ids of tests, separated by blanks."""

    @property
    def title(self) -> str:
        """Return part and name."""
        return f"{self.part}: {self.name}"

    def apply_to(self, text: str) -> str:
        """Return the mutated text."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has the text {count} times, and not once: {self.old}")
        return text.replace(self.old, self.new)


def read_table() -> list[Mutation]:
    """Return all mutations."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return [Mutation(part=part, **entry) for part, entries in table.items() for entry in entries]


def _copy_tree(target: Path) -> None:
    """Copy what git tracks, or would."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if os.path.isfile(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, target / name)


def _run_in_copy(words: Sequence[str]) -> int:
    """Run this module in a copy of the tree."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as copy:
        _copy_tree(Path(copy))
        environment = {**os.environ, _COPY: "1", "PYTHONPATH": copy}
        command = [sys.executable, "-m", "tests.mutants", *words]
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


def _import_libraries() -> None:
    """Import what takes long and what no mutation changes; a fork has it at once."""
    import optuna  # noqa: F401
    import pydantic  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401


def _run_tests(tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run tests in a fork; return pytest's exit code, None after the time, and what it printed."""
    with tempfile.TemporaryFile() as output:
        if (child := os.fork()) == 0:
            os.setsid()  # so that all that the tests start ends with them
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 3
            try:
                import pytest

                code = int(pytest.main([*_PYTEST, *tests]))
            finally:
                sys.stdout.flush()
                os._exit(code)
        found = _wait_for(child, seconds)
        output.seek(0)
        return found, output.read().decode(errors="replace")


def _wait_for(child: int, seconds: float) -> int | None:
    """Return the exit code of a child, None after the time, and end what it has left."""
    deadline, status = time.monotonic() + seconds, None
    try:
        while status is None and time.monotonic() < deadline:
            time.sleep(0.05)
            ended, found = os.waitpid(child, os.WNOHANG)
            status = found if ended else None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
    return None if status is None else os.waitstatus_to_exitcode(status)


@contextmanager
def _mutated(mutation: Mutation, stamp: int) -> Iterator[None]:
    """Change the file while the body runs.

    Each version has a time of its own: Python compares times in seconds before it takes compiled
    code.
    """
    path = Path(mutation.file)
    text = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply_to(text), encoding="utf-8")
    os.utime(path, (stamp, stamp))
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, (stamp + 1, stamp + 1))


def _judge(mutation: Mutation, stamp: int) -> tuple[Verdict, str]:
    """Return what the tests said of a mutation, and why it does not apply."""
    try:
        with _mutated(mutation, stamp):
            code, output = _run_tests(mutation.tests.split(), _SECONDS)
    except (OSError, ValueError) as error:
        return "not applicable", str(error)
    if code in _RAN_NONE:
        return "not applicable", output
    return "survived" if code == _PASSED else "killed", ""


def _judge_all(mutations: Sequence[Mutation]) -> int:
    """Judge mutations in this directory, print the verdicts, and return the exit code."""
    _import_libraries()
    tests = sorted({test for one in mutations for test in one.tests.split()})
    code, output = _run_tests(tests, _SECONDS * len(mutations))
    if code != _PASSED:
        print(output, f"The tests do not pass in the unchanged tree (code {code}).", sep="\n")
        return 1
    verdicts: dict[Verdict, list[str]] = {"killed": [], "survived": [], "not applicable": []}
    for number, one in enumerate(mutations):
        started = time.monotonic()
        verdict, why = _judge(one, int(time.time()) + 2 * number)
        verdicts[verdict].append(one.title)
        print(f"{verdict:14} {time.monotonic() - started:5.1f} s  {one.title}", flush=True)
        if why:
            print(why)
    killed = len(verdicts["killed"])
    print(f"\n{killed} of {len(mutations)} mutations are killed ({killed / len(mutations):.0%})")
    for verdict in ("survived", "not applicable"):
        for title in verdicts[verdict]:
            print(f"{verdict}: {title}")
    return int(killed < _LEAST * len(mutations) or bool(verdicts["not applicable"]))


def main(words: Sequence[str]) -> int:
    """Judge the mutations that the words name; all without words."""
    chosen = [one for one in read_table() if not words or any(w in one.title for w in words)]
    if not chosen:
        print(f"No part or name has {' or '.join(words)}.")
        return 1
    return _judge_all(chosen) if _COPY in os.environ else _run_in_copy(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
