"""Run each training in its own processes, of which one dies, and which others resume.

    python -m tests.chaos.processes      forks a child for each rank of each line of its input,
                                         and answers with their exit statuses

Starting Python with torch takes seconds, a fork of a process that has imported it milliseconds.
The process that forks trains nothing itself: its children start as a new one would, and share
nothing with each other but the disk and, as the ranks of a run, their group. What must not live
here: runs (`killed_runs.py`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from tests.chaos.kill_cases import Case
from tests.chaos.killed_runs import differences, ending, open_case, train
from tests.time_limits import scaled
from trainable.errors import RankLost
from trainable.group_joining import GroupPlace, listen
from trainable.parallel.rank_group import RankGroup
from trainable.ranks import ALONE, Ranks

ENDED, DEAD, FAILED, LOST = 0, 1, 2, 3
"""Exit statuses: `LOST` of a rank that has lost another one."""
_RANK_SECONDS = 60.0
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

    def run(self, case: Case, directory: Path, *, dies: bool = False) -> list[int]:
        """Train a case, or go on with it, in new processes; return each rank's exit status.

        Args:
            case: What is trained.
            directory: The run's; how a rank ended is in its `ending-0.pt`.
            dies: Whether the victim dies where the case says.
        """
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        request = {"case": case, "directory": str(directory), "dies": dies}
        print(json.dumps(request), file=self._parent.stdin, flush=True)
        statuses: list[int] = json.loads(self._parent.stdout.readline())
        return statuses

    def ends_alike(self, case: Case, root: Path) -> dict[str, int]:
        """Assert that a run that died ends, bit for bit, like one that did not.

        Returns:
            Steps taken (`step`) and skipped (`skipped`) when the second process began, and skipped
            in the end (`skipped_at_last`).
        """
        assert self.run(case, root / "whole") == [ENDED] * case.workers
        dead = DEAD if case.death == "exit" else -signal.SIGKILL
        statuses = self.run(case, root / "cut", dies=True)
        assert statuses == [dead if r == case.victim else LOST for r in range(case.workers)]
        assert not list((root / "cut").glob("ending-*"))
        assert self.run(case, root / "cut") == [ENDED] * case.workers
        for rank in reversed(range(case.workers)):
            whole, resumed = (_ending(root / name, rank) for name in ("whole", "cut"))
            assert whole.pop("began")["step"] == 0
            began: dict[str, int] = resumed.pop("began")
            # an epoch's last window has no sample for the last of three ranks
            assert (rank == 0) <= len(resumed["seen"]) <= len(whole["seen"])
            whole["seen"] = whole["seen"][len(whole["seen"]) - len(resumed["seen"]) :]
            assert differences(whole, resumed) == [], f"rank {rank}"
            if rank:
                first = _ending(root / "whole", 0)["parameters"]
                assert differences(first, whole["parameters"]) == [], f"rank {rank} trains apart"
        last = whole["state"]["progress"]
        assert len(whole["state"].get("ranks", [])) == case.workers - 1
        # a report before any step is taken, because fp16 skips all of them, has a row of its own
        steps = [step for step, _ in resumed["curve"] if step > 0]
        assert steps == list(range(1, last["step"] + 1))
        return began | {"skipped_at_last": last["skipped"]}


def _ending(directory: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(directory / f"ending-{rank}.pt", weights_only=True)
    return found


def _train(case: Case, directory: Path, ranks: Ranks, kill: Callable[[], None] | None) -> None:
    """What a child does: nothing that it inherited decides how the run ends."""
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(os.getpid())
    trainer, task = open_case(case, directory, kill, ranks)
    progress = trainer.state.progress
    began = {name: getattr(progress, name) for name in ("step", "skipped")}
    with trainer:
        train(case, trainer, kill, ranks.rank)
        found: dict[str, Any] = ending(trainer, task, directory)
        torch.save({"began": began, **found}, directory / f"ending-{ranks.rank}.pt")


def _fork_ranks(case: Case, directory: Path, *, dies: bool) -> list[int]:
    """Fork a child for each rank, the first one last: it may have to kill one of the others."""
    listening = place = None
    if case.workers > 1:
        listening = listen()
        address, port = listening.getsockname()
        place = GroupPlace(address, port, case.workers, timeout=scaled(_RANK_SECONDS))
    children: dict[int, int] = {}
    for rank in reversed(range(case.workers)):
        child = os.fork()
        if child == 0:
            try:
                victim = children.get(case.victim, os.getpid())
                kill = _killing(case, victim) if dies else None
                _train(case, directory, _join(place, rank, listening), kill)
                os._exit(ENDED)
            except RankLost:
                os._exit(LOST)
            except BaseException:  # the loop of the requests belongs to the parent alone
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(FAILED)
        children[rank] = child
    if listening is not None:
        listening.close()
    ends = {rank: os.waitpid(child, 0)[1] for rank, child in children.items()}
    return [os.waitstatus_to_exitcode(ends[rank]) for rank in range(case.workers)]


def _join(place: GroupPlace | None, rank: int, listening: socket.socket | None) -> Ranks:
    if place is None or listening is None:
        return ALONE
    if rank:
        listening.close()
    return RankGroup.join(place, rank, listening=None if rank else listening)


def _killing(case: Case, victim: int) -> Callable[[], None]:
    def kill() -> None:
        if case.death == "exit":
            os._exit(DEAD)
        os.kill(victim, signal.SIGKILL)

    return kill


def main() -> None:
    """Fork children for each request, one request after the other."""
    # Imports what every first optimizer of a process imports (three seconds), before the forks.
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        case, directory = Case(*request["case"]), Path(request["directory"])
        print(json.dumps(_fork_ranks(case, directory, dies=request["dies"])), flush=True)


if __name__ == "__main__":
    main()
