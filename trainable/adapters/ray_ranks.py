"""The processes of a trial besides its first: Ray actors, one on each further bundle.

The process of a `TuneTrial` is the first rank. The `TuneTrial` starts the other actors when its
first run opens, and keeps them for its next trial. Ray ends them with it. As it does, each of them
trains every run in a process of its own (`rank_run.py`), whose output is in the trial's directory,
`trial.rank1.log`. A rank trains in lock-step with the first, which alone reports, saves and
decides. What must not live here: an import of Ray Tune, which takes seconds and which these actors
do not need; and how ranks exchange (`rank_group.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainable import rank_waits
from trainable.errors import NodeLeaves, RankLost
from trainable.processes.attempt_process import AttemptProcess, template_command
from trainable.processes.rank_run import RankOrder
from trainable.user_code.task_import import prepare_process

_LOOPBACK = "127.0.0.1"


class RankProcess:
    """A Ray actor for one rank of a trial after the other; each run is a process of its own."""

    template_command = staticmethod(template_command)
    """Returns the command that starts the template of the processes."""
    before_trial: str | None = None
    """A function without arguments that a process calls first, `module:name`."""
    _process: AttemptProcess | None = None

    def prepare(self, order: RankOrder, rank: int) -> tuple[str, str]:
        """Import what the trial needs, which may take minutes; return the node and its address."""
        exit_with_raylet()
        prepare_process()
        if self._process is None or self._process.is_running:  # the last run was not joined
            self._process = AttemptProcess(self.template_command(), self.before_trial)
        self._process.begin("trainable.processes.rank_run:train", order, rank)
        self._process.receive()
        return ray.get_runtime_context().get_node_id(), _address()

    def train(self, place: Any, address: str) -> dict[str, Any] | None:
        """Train the prepared rank to the end of the run."""
        assert self._process is not None
        self._process.send((place, address))
        failure: dict[str, Any] | None = self._process.receive()
        return failure

    def end(self) -> None:
        """Wait until the process has ended, and all that it has started; before the next one."""
        assert self._process is not None
        self._process.end()


class OtherRanks:
    """The other ranks of the trials of this actor."""

    def __init__(self, process: type[RankProcess] = RankProcess) -> None:
        self._process = process
        self._actors: dict[int, Any] = {}
        self._begun: dict[int, Any] = {}
        self._runs: dict[int, Any] = {}
        self._addresses: dict[int, str] = {}
        self._leaves: Sequence[str] = ()
        """Files; while one exists, a node of the trial is about to be taken away."""

    def begin(self, config: Mapping[str, Any]) -> None:
        """Have the actors that live begin a trial with the first rank; `prepare` follows."""
        self.leave()
        self._order, self._bundles = RankOrder.of(config), config["bundles"]
        self._leaves = config.get("leaves", ())
        self._begun = {rank: self._prepare(rank) for rank in self._actors}

    def prepare(self) -> str:
        """Have the other ranks import the task, and return the address where the ranks meet.

        Actors that do not live yet are started, and all import the task first: only the meeting
        has a time limit.
        """
        waiting, self._begun = self._begun, {}
        kept = set(waiting)
        for rank in range(1, len(self._bundles)):
            if rank not in kept:
                self._actors[rank] = self._start(rank)
                waiting[rank] = self._prepare(rank)
        nodes = {}
        for rank, ref in waiting.items():
            try:
                nodes[rank] = self._answer(rank, ref)
            except RankLost:
                if rank not in kept:
                    raise
                # lost since the trial before: that is no loss of this one
                self._actors[rank] = self._start(rank)
                nodes[rank] = self._answer(rank, self._prepare(rank))
        here = ray.get_runtime_context().get_node_id()
        is_local = all(node == here for node, _ in nodes.values())
        self._addresses = {
            rank: _LOOPBACK if is_local else address for rank, (_, address) in nodes.items()
        }
        return _LOOPBACK if is_local else _address()

    def train(self, place: Any) -> None:
        """Have the prepared ranks begin the run, and join at a place."""
        self._runs = {
            rank: self._actors[rank].train.remote(place, address)
            for rank, address in self._addresses.items()
        }

    def has_lost(self) -> bool:
        """Return whether the run of a rank has ended."""
        return bool(ray.wait(list(self._runs.values()), timeout=0)[0])

    def cause(self, error: str) -> RankLost | dict[str, Any]:
        """Return why a rank was lost: its code's failure, or the loss with all that is known."""
        waiting = dict(self._runs)
        while waiting:
            ready, _ = ray.wait(list(waiting.values()), timeout=rank_waits.END)
            if not ready:
                break
            rank = next(rank for rank, run in waiting.items() if run == ready[0])
            run = waiting.pop(rank)
            try:
                failure = ray.get(run)
            except RayError as lost:
                return _loss(rank, lost)
            if failure is not None:
                return {**failure, "reason": f"{failure['reason']} (rank {rank})"}
        for rank in waiting:
            return RankLost(f"rank {rank} did not answer, and was ended: {error}")
        return RankLost(error)

    def leave(self) -> None:
        """Wait until the other ranks have ended their run; end the actors of those that do not.

        Their processes end while that of the first rank does.
        """
        runs, self._runs = self._runs, {}
        if runs:
            ray.wait(list(runs.values()), num_returns=len(runs), timeout=rank_waits.LEAVE)
        for rank, run in runs.items():
            try:
                ray.get(run, timeout=0)
            except RayError:  # it has ended, or did not leave in time
                self._end(rank)
            else:
                self._actors[rank].end.remote()

    def close(self) -> None:
        """End the processes of all other ranks."""
        self._runs, self._begun = {}, {}
        for rank in list(self._actors):
            self._end(rank)

    def _prepare(self, rank: int) -> Any:
        return self._actors[rank].prepare.remote(self._order, rank)

    def _start(self, rank: int) -> Any:
        bundle = self._bundles[rank]
        group = get_current_placement_group()
        assert group is not None, "Tune places a trial of several workers as a group"
        place = PlacementGroupSchedulingStrategy(group, rank)
        kind: Any = ray.remote(self._process)
        return kind.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=place,
        ).remote()

    def _end(self, rank: int) -> None:
        with contextlib.suppress(Exception):  # it has ended
            ray.kill(self._actors.pop(rank))

    def _answer(self, rank: int, ref: Any) -> Any:
        while not ray.wait([ref], timeout=_POLL_SECONDS)[0]:
            if any(map(os.path.exists, self._leaves)):  # Ray starts no process there any more
                raise RankLost(f"rank {rank} has not started: {NodeLeaves.text}")
        try:
            return ray.get(ref)
        except RayActorError as lost:
            self._end(rank)
            raise _loss(rank, lost) from lost


def nodes_of_trial(ranks: int) -> set[str]:
    """Return the ids of the nodes on which this actor and the other ranks of its trial run."""
    nodes = {ray.get_runtime_context().get_node_id()}
    if ranks > 1 and (group := get_current_placement_group()) is not None:
        nodes |= {*ray.util.placement_group_table(group)["bundles_to_node_id"].values()}
    return nodes


def _address() -> str:
    """Return the address of this node, as the others of a cluster reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _loss(rank: int, lost: RayError) -> RankLost:
    """Return an error that says of a lost rank what Ray says of its actor."""
    error = RankLost(f"the process of rank {rank} was lost: {lost}")
    error.actor_id = getattr(lost, "actor_id", None)  # type: ignore[attr-defined]
    return error


_POLL_SECONDS, _GRACE_SECONDS = 2.0, 10.0
"""How often a worker checks its raylet, and how long Ray then has to end the worker itself."""


@functools.cache
def exit_with_raylet() -> None:
    """Exit after the raylet of this process; do nothing in a process that is no Ray worker."""
    pid = os.environ.get("RAY_RAYLET_PID")  # not always the parent process
    if pid is None:
        return
    import psutil  # installed with Ray

    raylet = psutil.Process(int(pid))

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while raylet.is_running() and raylet.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_POLL_SECONDS)
        time.sleep(_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="raylet", daemon=True).start()
