"""Collectives: the collective operations of a trial's ranks, and why one of them fails.

An operation ends in one of three ways: all ranks have come, one has failed and has said why, or
one is lost. What must not live here: what ranks exchange (`rank_group.py`), and how they join
(`group_joining.py`).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as _c10d

from trainable import rank_waits
from trainable.errors import RankLost, TrainingError
from trainable.failures import as_error, as_note
from trainable.group_joining import (
    JoinedGroup,
    end_default_group,
    further_group,
    interface_of,
    replace_default_group,
)

_WITHOUT_END = timedelta(seconds=rank_waits.WITHOUT_END)
_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|[Tt]imed out")
"""How torch words the errors of collective operations whose other ranks are gone."""
_FAILED = "failed"
"""The key of the group's store under which a rank that fails says why, before it leaves."""


class Collectives:
    """The collective operations of one rank."""

    def __init__(self, joined: JoinedGroup) -> None:
        self._joined = joined
        self.place = joined.place
        self.rank, self.size = joined.rank, joined.place.size
        self.direct = joined.direct
        """Whether the group's backend takes tensors of this rank's device."""
        group: Any = dist.group.WORLD
        self._group = group
        self._further: list[Any] = []
        self._of_model: Any = None
        self._sockets = GroupSockets()
        step = timedelta(seconds=joined.place.timeout)
        self._set_timeout(max(step, timedelta(seconds=joined.place.join_timeout)))

    # The operations. Each raises RankLost if another rank has ended or did not come in time, and
    # another TrainingError if a rank has failed.

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks; the same bits on every rank."""
        options = self._options("AllreduceOptions")
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        with self._on_host(flat) as sent:
            self._run(lambda: self._group.allreduce([sent], options))

    def gather(self, tensor: Tensor, seconds: float | None = None) -> list[Tensor]:
        """Return the tensor of each rank: of one length, on a device that the backend takes."""
        options = self._options("AllgatherOptions", seconds)
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([found], [tensor], options))
        return found

    def gather_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor of each rank, along a new first dimension, on the tensor's device.

        Unless gradients are off, those of the result are added up over the ranks as they are made.
        """
        gathered: Tensor = _Gathered.apply(tensor, self)
        return gathered

    def broadcast(self, tensor: Tensor, seconds: float | None = None) -> None:
        """Replace a tensor by that of the first rank."""
        options = self._options("BroadcastOptions", seconds)
        options.rootRank = 0
        with self._on_host(tensor) as sent:
            self._run(lambda: self._group.broadcast([sent], options))

    def send_to_first(self, tensor: Tensor) -> None:
        """Send a tensor to the first rank, which calls `receive`."""
        self._run(lambda: self._group.send([tensor], 0, 0))

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Replace a tensor by that of a rank."""
        self._run(lambda: self._group.recv([tensor], rank, 0))

    def _gather_bits(self, tensor: Tensor) -> Tensor:
        # device synchronisation, where ranks share one device
        sent = tensor if self.direct else tensor.cpu()
        bits = sent.contiguous().reshape(-1).view(torch.uint8)  # of whatever type
        rows = self.gather(bits) if len(bits) else [bits] * self.size
        found = torch.stack([row.view(tensor.dtype) for row in rows])
        return found.reshape(self.size, *tensor.shape).to(tensor.device)

    # Groups. Making one does not notice that another rank has failed or ended, so `RankGroup` has
    # all ranks meet before.

    def end_joining(self) -> None:
        """Wait for the others no longer than in a step from now on."""
        self._set_timeout(timedelta(seconds=self.place.timeout))

    def beside(self) -> Collectives:
        """Return the same ranks in a second group, for another thread of each."""
        other = copy.copy(self)
        other._timeout = _WITHOUT_END
        with self._sockets.collected():
            other._group = further_group(self._joined, "gloo")
        self._further.append(other._group)
        return other

    def group_of_model(self) -> dist.ProcessGroup:
        """Return a group for the collective operations inside a sharded model."""
        with self._sockets.collected():
            self._of_model = further_group(self._joined)
        self._further.append(self._of_model)
        self._of_model.set_timeout(self._timeout)
        return cast("dist.ProcessGroup", self._of_model)

    def leave_default_group(self) -> None:
        """End torch's default group, and talk over another one from now on: on the CPU."""
        self._group, self.direct = replace_default_group(self._joined), False

    @property
    def interface(self) -> str | None:
        """The network interface by which the other ranks reach this one."""
        return interface_of(self._joined.own_address)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group, and say why; the operations of the others raise from now on."""
        group: Any = self._group
        self._group = None
        if group is None:
            return
        if isinstance(error, Exception) and not isinstance(error, RankLost):
            self.tell_failure(error)
        if dist.group.WORLD is group:
            for one in (*self._further, group):
                with contextlib.suppress(RuntimeError):
                    one.abort()
            self._sockets.shut_down()
            end_default_group()

    # Failures

    def tell_failure(self, error: Exception) -> None:
        """Tell the other ranks why this one fails, unless one has failed before."""
        with contextlib.suppress(RuntimeError):  # the first rank may have ended
            note = json.dumps(as_note(error, self.rank))
            self._joined.store.compare_set(_FAILED, "", note)

    def count_failure(self) -> int:
        """Count a failure of the trial's ranks; return how many there are, 0 if unknown."""
        try:
            return int(self._joined.store.add(f"{_FAILED}/number", 1))
        except RuntimeError:  # the first rank, which keeps the store, has ended
            return 0

    def failure(self, seconds: float = 0.0) -> TrainingError | None:
        """Return why another rank has failed; wait for it so long."""
        store = self._joined.store
        try:
            if seconds:
                with contextlib.suppress(RuntimeError):
                    store.wait([_FAILED], timedelta(seconds=seconds))
            if not store.check([_FAILED]):
                return None
            note = json.loads(store.get(_FAILED))
        except (RuntimeError, ValueError):  # the first rank, which keeps the store, has ended
            return None
        return as_error(note) if note["rank"] != self.rank else None

    def cause_of(self, error: Exception) -> Exception:
        """Return the cause of an error: that of another rank, if an operation has failed."""
        is_of_group = isinstance(error, RuntimeError) and _LOST.search(str(error))
        return self._failure_or_loss(str(error)) if is_of_group else error

    def _failure_or_loss(self, reason: str) -> TrainingError:
        """Return why a collective operation failed: another rank has failed, or is lost."""
        return self.failure() or RankLost(
            f"rank {self.rank} waited for the other {self.size - 1} ranks of its trial, and one "
            f"was lost ({reason.splitlines()[0]}); its process has ended, its machine is gone, or "
            f"it did not come within {self._timeout.total_seconds():g} s; the trial is retried "
            "from its newest checkpoint"
        )

    def _run(self, start: Callable[[], Any]) -> None:
        """Begin an operation, and wait for its end."""
        if self._group is None:
            raise RankLost(f"rank {self.rank} has left the group of its trial")
        try:
            start().wait()
        except RuntimeError as problem:
            reason = str(problem)
        else:
            return
        # Not `from problem`: its frames hold the operation, and as long as anything does, the
        # sockets stay open when this rank leaves, and the next rank waits in vain.
        raise self._failure_or_loss(reason)

    @contextlib.contextmanager
    def _on_host(self, tensor: Tensor) -> Iterator[Tensor]:
        """Give the tensor, or a copy in host memory if the backend needs one."""
        if tensor.device.type == "cpu" or self.direct:
            yield tensor
            return
        sent = tensor.cpu()  # device synchronisation: ranks that share one device
        yield sent
        tensor.copy_(sent)

    def _options(self, name: str, seconds: float | None = None) -> Any:
        options = getattr(_c10d, name)()
        options.timeout = self._timeout if seconds is None else timedelta(seconds=seconds)
        return options

    def _set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for group in (self._group, self._of_model):
            if group is not None:
                group.set_timeout(timeout)


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks; each rank's gradient is the sum of what reaches its part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, collectives: Collectives) -> Tensor:
        ctx.collectives = collectives
        return collectives._gather_bits(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        collectives: Collectives = ctx.collectives
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        collectives.add_up(total)
        return total[collectives.rank], None


class GroupSockets:
    """The sockets that this process opens within a `with` block, in which it makes a group."""

    def __init__(self) -> None:
        self._opened: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the sockets that are opened within the context."""
        before = _sockets()
        yield
        self._opened |= _sockets() - before

    def shut_down(self) -> None:
        """Shut the sockets down that are still open; the other ranks notice it at once."""
        for number, inode in self._opened:
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino != inode:
                    continue  # closed since, and the number has been given to another file
                with socket.socket(fileno=os.dup(number)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        # Not for reading: gloo would end this process with an exception.
                        found.shutdown(socket.SHUT_WR)
        self._opened.clear()


def _sockets() -> set[tuple[int, int]]:
    """Return the numbers and inodes of all open sockets; none where the system lists no files."""
    found = set()
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(number)
                if stat.S_ISSOCK(status.st_mode):
                    found.add((number, status.st_ino))
    return found
