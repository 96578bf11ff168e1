"""Run each training in its own process, which dies with os._exit(1) and is resumed by another.

    python -m tests.chaos.processes      forks a child for each line of its input, and answers
                                         with the child's exit status

Starting Python with torch takes seconds, a fork of a process that has imported it milliseconds.
The process that forks trains nothing itself: its children start as a new one would, and share
nothing with each other but the disk. What must not live here: runs (`killed_runs.py`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from tests.chaos.kill_cases import Case
from tests.chaos.killed_runs import differences, ending, open_case, train

ENDED, DEAD, FAILED = 0, 1, 2
_ROOT = Path(__file__).parents[2]
# A fork takes no threads along, so the process that forks must have none.
_NO_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Processes:
    """Runs cases, each in a process of its own, until it is closed."""

    def __enter__(self) -> Processes:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.processes"],
            cwd=_ROOT,
            env=os.environ | _NO_THREADS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._parent.stdin, self._parent.stdout):
            assert pipe is not None
            pipe.close()
        self._parent.wait()

    def run(self, case: Case, directory: Path, *, dies: bool = False) -> int:
        """Train a case, or go on with it, in a new process; return the exit status.

        Args:
            case: What is trained.
            directory: The run's; how it ended is in `ending.pt`.
            dies: Whether it dies where the case says.
        """
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        request = {"case": case, "directory": str(directory), "dies": dies}
        print(json.dumps(request), file=self._parent.stdin, flush=True)
        return int(self._parent.stdout.readline())

    def ends_alike(self, case: Case, root: Path) -> dict[str, int]:
        """Assert that a run that died ends, bit for bit, like one that did not.

        Returns:
            Steps taken (`step`) and skipped (`skipped`) when the second process began, and skipped
            in the end (`skipped_at_last`).
        """
        assert self.run(case, root / "whole") == ENDED
        assert self.run(case, root / "cut", dies=True) == DEAD
        assert not (root / "cut" / "ending.pt").exists()
        assert self.run(case, root / "cut") == ENDED
        whole, resumed = (
            torch.load(root / name / "ending.pt", weights_only=True) for name in ("whole", "cut")
        )
        assert whole.pop("began")["step"] == 0
        began: dict[str, int] = resumed.pop("began")
        assert 0 < len(resumed["seen"]) <= len(whole["seen"])
        whole["seen"] = whole["seen"][-len(resumed["seen"]) :]
        assert differences(whole, resumed) == []
        last = whole["state"]["progress"]
        # a report before any step is taken, because fp16 skips all of them, has a row of its own
        steps = [step for step, _ in resumed["curve"] if step > 0]
        assert steps == list(range(1, last["step"] + 1))
        return began | {"skipped_at_last": last["skipped"]}


def _train(case: Case, directory: Path, *, dies: bool) -> None:
    """What a child does: nothing that it inherited decides how the run ends."""
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(os.getpid())
    kill = _die if dies else None
    trainer, task = open_case(case, directory, kill)
    progress = trainer.state.progress
    began = {name: getattr(progress, name) for name in ("step", "skipped")}
    with trainer:
        train(case, trainer, kill)
        found: dict[str, Any] = ending(trainer, task, directory)
    torch.save({"began": began, **found}, directory / "ending.pt")


def _die() -> None:
    os._exit(DEAD)


def main() -> None:
    """Fork a child for each request, one after the other."""
    # Imports what every first optimizer of a process imports (three seconds), before the forks.
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                case, directory = Case(*request["case"]), Path(request["directory"])
                _train(case, directory, dies=request["dies"])
                os._exit(ENDED)
            except BaseException:  # the loop above belongs to the parent alone
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(FAILED)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
