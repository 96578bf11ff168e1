"""The process group of a custom loop on several ranks: torchrun's environment, and its failures.

A loop or its framework makes torch's default process group itself, from the variables that
torchrun sets. Each rank sees one device. So each is to the loop a node with one process, as with
`torchrun --nnodes=WORLD_SIZE --nproc-per-node=1`. The ranks decide over another group meanwhile:
operations of the two cannot meet each other, and its waits have no time-out.
What must not live here: when a loop yields, and what happens with it (`custom_loop.py`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import traceback
from typing import NoReturn

import torch
import torch.distributed as dist

from trainable import rank_waits
from trainable.errors import TrainingError
from trainable.failures import with_causes
from trainable.parallel.rank_group import RankGroup


class LoopGroup:
    """The environment of a loop on one of several ranks, until it is closed."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        ranks.leave_default_group()
        variables = _variables(ranks)
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        self._excepthook = sys.excepthook  # torch replaces it when the loop makes its group

    @property
    def is_used(self) -> bool:
        """Whether the loop, or its framework, has a process group now."""
        return dist.is_initialized()

    def fail(self, error: Exception) -> NoReturn:
        """Raise why the trial failed: this error, or the end of a rank that has caused it.

        A rank that waits for another one inside the loop, in an operation of the loop's own group,
        cannot be told anything. Its operation raises once the connections of the other one are
        closed. So a further rank lets go of all that the loop held, which has the group, too:
        a model that is trained by several processes refers to it, and to itself.
        """
        try:
            self._raise_cause(error)
        finally:
            if not self._ranks.is_first:
                _clear_variables(error)
                self.close()
                gc.collect()

    def _raise_cause(self, error: Exception) -> NoReturn:
        ranks, begun = self._ranks, time.monotonic()
        others = ranks.collectives
        is_first_failure = others.count_failure() == 1
        try:
            ranks.gather_plain(None, error, seconds=rank_waits.LOOP_PROBE)
        except TrainingError as problem:
            has_ended = time.monotonic() - begun < rank_waits.LOOP_PROBE  # else all processes live
            if problem is not error and has_ended:
                raise problem from error
        except Exception as problem:
            if problem is not error:
                raise
        if not is_first_failure and (cause := others.failure(rank_waits.LOOP_CAUSE)) is not None:
            raise cause from error
        others.tell_failure(error)
        raise error

    def close(self) -> None:
        """End the loop's process group, and restore the environment."""
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # another rank has ended
                dist.destroy_process_group()
        sys.excepthook = self._excepthook
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _clear_variables(error: BaseException) -> None:
    """Clear the variables of the functions in which an error was raised."""
    for one in with_causes(error):
        traceback.clear_frames(one.__traceback__)


def _variables(ranks: RankGroup) -> dict[str, str]:
    rank, size = str(ranks.rank), str(ranks.size)
    own = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": size,
        "NODE_RANK": rank,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": ranks.collectives.place.address,
        "MASTER_PORT": str(ranks.collectives.place.port),
        # The loop's group meets at the store that the trial has: no further port is opened.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "trial",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    if "OMP_NUM_THREADS" not in os.environ:  # Accelerate would choose another number
        own["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := ranks.collectives.interface):
        own["GLOO_SOCKET_IFNAME"] = name
    return own
