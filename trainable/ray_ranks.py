"""The processes of a trial besides its first: Ray actors, one on each further bundle.

A `TuneTrial` is the first rank. It starts the others when it opens its first run, sends each an
order for every run, and keeps them for the next trial of its process. Ray ends them with it. Their
output is in the trial's directory, `trial.rank1.log`. A rank trains in lock-step with the first,
which alone reports, saves and decides. What must not live here: an import of Ray Tune, which takes
seconds and which these processes do not need; and how ranks exchange (`rank_group.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainable import rank_waits
from trainable.config import TrialConfig
from trainable.errors import RankLost
from trainable.lazy_imports import load_training
from trainable.memory import release_memory
from trainable.process_state import ProcessState
from trainable.raylet_watch import exit_with_raylet
from trainable.task_import import prepare_process
from trainable.trial_failure import failure_of
from trainable.trial_log import DescriptorOutput, TrialLog, rank_log

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankOrder:
    """What a rank trains.

    Attributes:
        config: A dumped `TrialConfig`.
        directory: The trial's directory.
        searched: The keys whose values the search suggests.
        threads: The number of CPU threads.
        memory_share: The rank's share of its GPU; 1 where it has a whole GPU, or none.
        timeout: Seconds for which a rank waits for the others in a step.
    """

    config: dict[str, Any]
    directory: Path
    searched: Collection[str]
    threads: int
    memory_share: float
    timeout: float


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended its run.

    Attributes:
        failure: As `trial_failure` describes it; None without one, or if another rank was lost.
        leftovers: What the trial changed in the process and could not be restored, in words.
    """

    failure: dict[str, Any] | None = None
    leftovers: list[str] = field(default_factory=list)


class RankProcess:
    """A Ray actor that trains one rank of a trial after the other."""

    _process: ProcessState | None = None
    _torch_state: Any = None

    def prepare(self, order: RankOrder, rank: int) -> tuple[str, str]:
        """Import what the trial needs, which may take minutes; return the node and its address."""
        exit_with_raylet()
        prepare_process()
        self._process = self._process or ProcessState()
        load_training()
        import torch

        from trainable.global_state import GlobalTorchState

        if torch.get_num_interop_threads() != order.threads:
            torch.set_num_interop_threads(order.threads)
        self._torch_state = self._torch_state or GlobalTorchState()
        with _logged(order, rank):
            import_task(order.config)
        return ray.get_runtime_context().get_node_id(), _address()

    def train(self, order: RankOrder, place: Any, rank: int, address: str) -> RankEnd:
        """Train one rank of a run to the end of the run.

        Args:
            order: What to train.
            place: Where the ranks meet.
            rank: This rank's number.
            address: The address of this rank's machine, of those that the others can reach.
        """
        end = RankEnd()
        with _logged(order, rank):
            try:
                self._follow(order, place, rank, address)
            except RankLost as error:
                print(error)  # the first rank finds out which one was lost
            except BaseException as error:  # of the user's code, sys.exit() too: reported
                traceback.print_exc()
                end = RankEnd(failure_of(error))
                release_memory()
        return replace(end, leftovers=self._restore())

    def _follow(self, order: RankOrder, place: Any, rank: int, address: str) -> None:
        from trainable.ranks_follow import follow

        follow(
            TrialConfig.model_validate(order.config),
            order.directory,
            place,
            rank,
            searched=order.searched,
            threads=order.threads,
            memory_share=order.memory_share,
            own_address=address,
            accept_workers=True,  # the driver has checked that it may
        )

    def _restore(self) -> list[str]:
        """Restore the process for the next trial; return what is left of this one."""
        assert self._process is not None
        leftovers = self._process.end_children()
        self._torch_state.restore()
        return leftovers + self._process.restore()


class OtherRanks:
    """The other ranks of the trials of this process, which is their first rank.

    Args:
        process: The class of their actors.
    """

    def __init__(self, process: type[RankProcess] = RankProcess) -> None:
        self._process = process
        self._actors: dict[int, Any] = {}
        self._runs: dict[int, Any] = {}

    def join(self, order: RankOrder, bundles: Sequence[dict[str, float]]) -> Any:
        """Have the other ranks begin a run, and return this process' `Ranks` for it.

        Processes that do not live yet are started, and all import the task first: only the
        meeting has a time limit.

        Args:
            order: What the trial trains.
            bundles: The resources of each rank.

        Raises:
            RankLost: A process of a rank has ended, or a rank did not come in time.
        """
        self.leave()
        size = len(bundles)
        kept = set(self._actors)
        for rank in range(1, size):
            if rank not in kept:
                self._actors[rank] = self._start(rank, bundles[rank])
        waiting = {rank: self._actors[rank].prepare.remote(order, rank) for rank in range(1, size)}
        import_task(order.config)  # meanwhile
        nodes = {}
        for rank, ref in waiting.items():
            try:
                nodes[rank] = self._answer(rank, ref)
            except RankLost:
                if rank not in kept:
                    raise
                # lost since the trial before: that is no loss of this one
                self._actors[rank] = self._start(rank, bundles[rank])
                again = self._actors[rank].prepare.remote(order, rank)
                nodes[rank] = self._answer(rank, again)
        here = ray.get_runtime_context().get_node_id()
        is_local = all(node == here for node, _ in nodes.values())
        address = _LOOPBACK if is_local else _address()

        from trainable.group_joining import GroupPlace, listen
        from trainable.precision import find_device
        from trainable.rank_group import RankGroup

        listening = listen(address)
        place = GroupPlace(
            address, listening.getsockname()[1], size, order.timeout, rank_waits.JOIN_SWEEP
        )
        self._runs = {
            rank: self._actors[rank].train.remote(
                order, place, rank, _LOOPBACK if is_local else nodes[rank][1]
            )
            for rank in range(1, size)
        }
        return RankGroup.join(
            place,
            0,
            device=find_device(None),
            listening=listening,
            has_lost=lambda: bool(ray.wait(list(self._runs.values()), timeout=0)[0]),
        )

    def cause(self, error: RankLost) -> RankLost | dict[str, Any]:
        """Return why a rank was lost: the failure of its code, or the loss with all that is known.

        Args:
            error: What this rank raised.
        """
        waiting = dict(self._runs)
        while waiting:
            ready, _ = ray.wait(list(waiting.values()), timeout=rank_waits.END)
            if not ready:
                break
            rank = next(rank for rank, run in waiting.items() if run == ready[0])
            run = waiting.pop(rank)
            try:
                end = ray.get(run)
            except RayError as lost:
                return _loss(rank, lost)
            if end.failure is not None:
                return {**end.failure, "reason": f"{end.failure['reason']} (rank {rank})"}
        for rank in waiting:
            return RankLost(f"rank {rank} did not answer, and was ended: {error}")
        return error

    def leave(self) -> list[str]:
        """Wait until the other ranks have ended their run; end the processes of those that do not.

        Returns:
            What the trial left behind in them, in words; such a process is ended, too.
        """
        left: list[str] = []
        runs, self._runs = self._runs, {}
        if runs:
            ray.wait(list(runs.values()), num_returns=len(runs), timeout=rank_waits.LEAVE)
        for rank, run in runs.items():
            try:
                end = ray.get(run, timeout=0)
                left += [f"{what} (rank {rank})" for what in end.leftovers]
                if not end.leftovers:
                    continue
            except RayError:  # it has ended, or did not leave in time
                pass
            self._end(rank)
        return left

    def close(self) -> None:
        """End the processes of all other ranks."""
        self._runs = {}
        for rank in list(self._actors):
            self._end(rank)

    def _start(self, rank: int, bundle: dict[str, float]) -> Any:
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
        try:
            return ray.get(ref)
        except RayActorError as lost:
            self._end(rank)
            raise _loss(rank, lost) from lost


@contextlib.contextmanager
def _logged(order: RankOrder, rank: int) -> Iterator[None]:
    """Write what the process prints into the rank's log."""
    try:
        log = TrialLog(order.directory / rank_log(rank))
    except OSError:  # opening the run fails, too, and the first rank reports the reason
        log = TrialLog(os.devnull)
    faulthandler.enable(log.fileno())
    output = DescriptorOutput()
    try:
        with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                yield
            finally:
                output.copy_to(log)
    finally:
        with contextlib.suppress(ValueError, OSError, RuntimeError):  # stderr may be missing
            faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]


def _address() -> str:
    """Return the address of this node, as the others of a cluster reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def import_task(config: dict[str, Any]) -> None:
    """Import the module of a trial's task; opening the run reports an error that happens here."""
    module, found, _ = str(config["task"]["name"]).partition(":")
    if found:
        with contextlib.suppress(BaseException):  # raised again when the run opens
            importlib.import_module(module)


def _loss(rank: int, lost: RayError) -> RankLost:
    """Return an error that says of a lost rank what Ray says of its actor."""
    error = RankLost(f"the process of rank {rank} was lost: {lost}")
    error.actor_id = getattr(lost, "actor_id", None)  # type: ignore[attr-defined]
    return error
