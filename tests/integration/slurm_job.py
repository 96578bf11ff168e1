"""A Slurm job on two nodes that are both this machine, without Slurm.

What must not live here: what must be true of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.time_limits import scaled

SCRIPT = Path(__file__).parents[2] / "docker" / "slurm" / "sweep.sbatch"

SLURM = {
    "scontrol": "printf 'node-a\\nnode-b\\n'",
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
}
"""Slurm's own commands: a step is run here."""

TOLD = {
    "hostname": "echo '10.0.0.7 10.1.0.7'",
    "ray": '[ "$1" = health-check ] || exec sleep 60',
    # what it waits for in truth: both nodes
    "python": "until [ $(grep -c '^ray start' \"$LOG\") = 2 ]; do sleep 0.05; done",
    "sweep": "trap 'exit 143' TERM; while [ -n \"$SLOW\" ]; do sleep 0.1; done; exit 3",
}
"""Commands that start nothing."""


class Job:
    """The job; each command that stands in for another tells how it was called.

    Args:
        directory: Where its storage root and the stand-ins lie.
        stand_ins: Their bodies in bash, by name; what is not among them is the real one.
        environment: More variables.
    """

    def __init__(
        self,
        directory: Path,
        stand_ins: Mapping[str, str] = SLURM | TOLD,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.root, self._log, tools = (directory / n for n in ("runs", "log", "tools"))
        tools.mkdir()
        for name, body in stand_ins.items():
            tool = tools / name
            tool.write_text(f'#!/bin/bash\necho "{name} $*" >> "$LOG"\n{body}\n')
            tool.chmod(0o755)
        self._environment = {
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(directory),
            "LOG": str(self._log),
            "SWEEP_ROOT": str(self.root),
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NODELIST": "node-[a-b]",
            **(environment or {}),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start the script; both its outputs are pipes."""
        return subprocess.Popen(
            [SCRIPT, *words],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, seconds: float = 30) -> tuple[int, str, str]:
        """Returns the exit status, and what was said on both outputs."""
        with self.start(*words) as running:
            out, err = running.communicate(timeout=scaled(seconds))
        return running.returncode, out, err

    def calls(self, name: str) -> list[str]:
        """How a command was called, in order."""
        written = self._log.read_text().splitlines() if self._log.exists() else []
        return [line for line in written if line.split()[0] == name]

    def told(self) -> str:
        """How all commands were called."""
        return self._log.read_text()
