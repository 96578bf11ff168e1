"""Run one program of `fsync_model.py` repeatedly: to its end, up to each persisting call, and to a
simulated power loss at each of them.

What must not live here: what must hold afterwards.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.faults import Faults, Kind, Operation
from tests.chaos.power_loss import Disk, Fate
from tests.time_limits import scaled

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Remains:
    """What a program left when it was stopped.

    Attributes:
        directory: Where it worked.
        where: In words, where it was stopped.
        acknowledged: What it had said is done.
    """

    directory: Path
    where: str
    acknowledged: list[list[Any]]

    def said(self, verb: str) -> list[list[Any]]:
        """What follows this word in the acknowledgements that begin with it."""
        return [rest for first, *rest in self.acknowledged if first == verb]


class Stage:
    """A process that runs programs in forks of itself, below a directory that `faults` watch."""

    def __init__(self, faults: Faults, directory: Path) -> None:
        self.faults = faults
        self.directory = directory
        directory.mkdir()
        self._lines = directory.with_name("acknowledged")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.fsync_model"],
            cwd=ROOT,
            env={**os.environ, **faults.environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, directory: Path) -> tuple[bool, list[list[Any]]]:
        """Run a program.

        Returns:
            Whether it came to its end, and what it acknowledged, each with the number of
            operations before it.
        """
        self._lines.write_bytes(b"")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {directory} {self._lines}\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        assert code in (0, -signal.SIGKILL), f"{name} in {directory} ended with {code}"
        return code == 0, [json.loads(line) for line in self._lines.read_text().splitlines()]

    def close(self) -> None:
        self._process.communicate(timeout=scaled(60))


@dataclass
class CrashRuns:
    """One program and what is there before it.

    Attributes:
        stage: Where it runs.
        name: The program.
        template: What is there before.
    """

    stage: Stage
    name: str
    template: Path
    _num_runs: int = field(init=False, default=0)

    def whole(self) -> list[Operation]:
        """Run the program to its end; returns what it persisted, with contents."""
        return self._recorded()[0]

    def killed(self, *, every: int = 1) -> Iterator[Remains]:
        """Kill the program before each of its calls, and in the middle of each write.

        Args:
            every: Leave out all but each of this many.
        """
        operations = self.whole()
        for index, operation in list(enumerate(operations))[::every]:
            for torn in (False, True)[: 1 + (operation.kind is Kind.WRITE)]:
                directory = self._prepare()
                self.stage.faults.kill_before(index, torn=torn)
                finished, said = self.stage.run(self.name, directory)
                self.stage.faults.clear()
                where = f"killed {'within' if torn else 'before'} {operation}"
                assert not finished, f"not {where}"
                yield Remains(directory, where, [rest for _, *rest in said])
                shutil.rmtree(directory)

    def power_lost(self, fate: Fate, *, every: int = 1) -> Iterator[Remains]:
        """Lose the power before each call, and after the last one, with this fate for all that
        was not synced.

        Args:
            every: Leave out all but each of this many, and the end.
        """
        operations, acknowledged = self._recorded()
        disk = Disk(self.template)
        cuts = sorted({*range(0, len(operations), every), len(operations)})
        for index, until in itertools.pairwise([*cuts, len(operations)]):
            directory = self.stage.directory / f"after-{index}"
            disk.write(directory, fate)
            said = [rest for count, *rest in acknowledged if count <= index]
            yield Remains(directory, f"power lost before call {index}, {fate}", said)
            shutil.rmtree(directory)
            disk.apply(operations[index:until])

    def _prepare(self) -> Path:
        self._num_runs += 1
        directory = self.stage.directory / f"{self.template.parent.name}-{self._num_runs}"
        return Path(shutil.copytree(self.template, directory))

    def _recorded(self) -> tuple[list[Operation], list[list[Any]]]:
        directory = self._prepare()
        self.stage.faults.record(contents=True)
        finished, acknowledged = self.stage.run(self.name, directory)
        operations = self.stage.faults.operations()
        self.stage.faults.clear()
        assert finished
        return [_below(operation, directory.name + "/") for operation in operations], acknowledged


def _below(operation: Operation, prefix: str) -> Operation:
    """The same operation with paths relative to the program's own directory."""
    fields = {**vars(operation)}
    for key in ("path", "other"):
        fields[key] = (fields[key] + "/").removeprefix(prefix).rstrip("/")
    return Operation(**fields)
