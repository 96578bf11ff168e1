"""One program of `persisting.py`, run again and again: to its end, to each of its persisting
calls, and, without running it, to a power loss at each of them.

What must not live here: what must hold afterwards.
"""

from __future__ import annotations

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

from tests.chaos.faults import Faults, Operation
from tests.chaos.power import Disk, Fate

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Remains:
    """What a program left when it was stopped.

    Attributes:
        directory: Where it worked.
        where: In words, where it was stopped.
        finished: It came to its end.
        acknowledged: What it had said is done.
    """

    directory: Path
    where: str
    finished: bool
    acknowledged: list[list[Any]]

    def said(self, verb: str) -> list[list[Any]]:
        """What follows this word in the acknowledgements that begin with it."""
        return [rest for first, *rest in self.acknowledged if first == verb]


@dataclass
class Rehearsal:
    """A process that runs one program in forks of itself.

    Attributes:
        name: The program.
        faults: Watches `directory`.
        directory: Everything the program persists lies below.
        template: What is there before the program; nothing when None.
    """

    name: str
    faults: Faults
    directory: Path
    template: Path | None = None
    _process: subprocess.Popen[str] = field(init=False)
    _num_runs: int = field(init=False, default=0)

    def __enter__(self) -> Rehearsal:
        self.directory.mkdir(parents=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.persisting", self.name],
            cwd=ROOT,
            env={**os.environ, **self.faults.environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def whole(self) -> list[Operation]:
        """Run the program to its end; returns what it persisted, with contents."""
        return self._recorded()[0]

    def killed(self, *, torn: bool = False) -> Iterator[Remains]:
        """Kill the program before (or in the middle of) each of its calls, until it ends."""
        index = 0
        while True:
            directory = self._prepare()
            self.faults.kill_before(index, torn=torn)
            finished, said = self._run(directory)
            self.faults.clear()
            yield Remains(directory, f"killed at call {index}", finished, [a[1:] for a in said])
            if finished:
                return
            shutil.rmtree(directory)
            index += 1

    def power_lost(self, fate: Fate) -> Iterator[Remains]:
        """Lose the power before each call: yields what is left of what was not synced."""
        operations, acknowledged = self._recorded()
        disk = Disk(self.template)
        for index in range(len(operations) + 1):
            directory = self.directory / f"after-{index}"
            disk.write(directory, fate)
            said = [rest for count, *rest in acknowledged if count <= index]
            yield Remains(directory, f"power lost before call {index}, {fate}", False, said)
            shutil.rmtree(directory)
            disk.apply(operations[index : index + 1])

    def _prepare(self) -> Path:
        self._num_runs += 1
        directory = self.directory / str(self._num_runs)
        if self.template is None:
            directory.mkdir()
        else:
            shutil.copytree(self.template, directory)
        return directory

    def _recorded(self) -> tuple[list[Operation], list[list[Any]]]:
        directory = self._prepare()
        self.faults.record(contents=True)
        finished, acknowledged = self._run(directory)
        operations = self.faults.operations()
        self.faults.clear()
        assert finished
        return [_below(operation, directory.name + "/") for operation in operations], acknowledged

    def _run(self, directory: Path) -> tuple[bool, list[list[Any]]]:
        """Return whether it came to its end, and the lines it wrote."""
        lines = self.directory.with_name("acknowledged")
        lines.write_bytes(b"")
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self.name} {directory} {lines}\n")
        self._process.stdin.flush()
        code = int(self._answer())
        assert code in (0, -signal.SIGKILL), f"{self.name} in {directory} ended with {code}"
        return code == 0, [json.loads(line) for line in lines.read_text().splitlines()]

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _below(operation: Operation, prefix: str) -> Operation:
    """The same operation with paths relative to the program's own directory."""
    fields = {**vars(operation)}
    for key in ("path", "other"):
        fields[key] = (fields[key] + "/").removeprefix(prefix).rstrip("/")
    return Operation(**fields)
