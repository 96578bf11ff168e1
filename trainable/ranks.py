"""The ranks of a trial: the processes that train one model together, in lock-step.

`Ranks` is a trial of one process, in which every method returns what it is given. `RankGroup` is
one of several processes. Rank 0, the first rank, alone reports, saves and decides. Every rank
calls the same methods in the same order; each such call is a collective operation.
Nothing that comes from another process is unpickled: states are read as checkpoints are, and all
else is numbers and JSON. What must not live here: how a step is taken (`step.py`), and how the
processes start (`local_ranks.py`, `ray_ranks.py`).
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trainable.errors import RankLost, TaskError, TrainingError
from trainable.gradient_sums import GradientSums, by_kind
from trainable.group_sockets import GroupSockets
from trainable.rank_errors import as_error, as_note
from trainable.snapshot import parse_state, snapshot, write_state

Scalar = float | Tensor

_WITHOUT_END = timedelta(days=365)
_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|[Tt]imed out")
"""How torch words the errors of collective operations whose other ranks are gone."""
_END = object()
_FAILED = "failed"
"""The key of the group's store under which a rank that fails says why, before it leaves."""


@dataclass(frozen=True)
class GroupPlace:
    """Where the ranks of a trial meet.

    Attributes:
        address: The address of the first rank, at which it alone listens; 127.0.0.1 if all ranks
            are on one machine.
        port: Its port.
        size: The number of ranks.
        timeout: Seconds for which a rank waits for the others in a step.
        join_timeout: Seconds for which a rank waits until all have joined, and have opened the run
            and begun its first report.
    """

    address: str
    port: int
    size: int
    timeout: float = 300.0
    join_timeout: float = 120.0


def listen(address: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens at an address, on a free port, for the first rank's group."""
    return socket.create_server((address, 0), backlog=128)


class Ranks:
    """The ranks of a trial of one process."""

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reports, saves and decides."""
        return self.rank == 0

    def exchange(
        self,
        compute: Callable[[], tuple[Scalar, Scalar, int]],
        parameters: Sequence[Tensor],
        device: torch.device | None = None,
    ) -> tuple[Scalar, Scalar, int]:
        """Compute this rank's part of a step; return the sums, and leave the summed gradients.

        Args:
            compute: Runs the micro-batches; returns the loss, the weight and the number of
                backward passes. What it raises on one rank is raised on all of them.
            parameters: Their gradients are summed, in this order.
            device: Where loss and weight stay, without a synchronisation; None: they are floats.
        """
        del parameters, device
        return compute()

    def in_step(self, window: Iterable[Any]) -> Iterable[Any]:
        """Return the micro-batches of a window, for `compute` of `exchange`."""
        return window

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over the ranks; None where no rank has one."""

    def sum(self, values: Sequence[Scalar], error: BaseException | None = None) -> list[float]:
        """Return the sums over the ranks, in float64; raise if a rank has an error.

        Device synchronisation, where a value is on a device.
        """
        if error is not None:
            raise error
        return [float(value) for value in values]

    def together(
        self,
        error: BaseException | None,
        *,
        without_end: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Raise on every rank if one of them has an error.

        A rank with an error raises that one. The others raise an error of the same kind, with the
        rank's number, its message and its traceback.

        Args:
            error: The error of this rank.
            without_end: Wait for the other ranks however long they take.
            seconds: Wait for them so long; None: as in a step.
        """
        del without_end, seconds
        if error is not None:
            raise error

    @contextlib.contextmanager
    def failing_together(self, *, without_end: bool = False) -> Iterator[None]:
        """Raise at the end of the context on every rank if one of them raised within it."""
        del without_end
        yield

    def decide(self, numbers: Sequence[float]) -> Sequence[float]:
        """Return the numbers of the first rank."""
        return numbers

    def agree(self, value: Any) -> Any:
        """Return the first rank's value: plain data as JSON has it."""
        return value

    def gather_plain(self, value: Any) -> list[Any]:
        """Return the value of each rank: plain data as JSON has it."""
        return [value]

    def broadcast(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the first rank's state, with its tensors on the CPU; None if it has none."""
        return state

    def gather(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the states of all ranks on the first rank, and None on the others."""
        return [state]

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks; the same bits on every rank."""

    def leave_on_failure(self) -> None:
        """Let a rank that fails leave at once, and not tell the others at the next exchange.

        They may be in an operation inside a sharded model, where they cannot be told.
        """

    def beside(self) -> Ranks:
        """Return the same ranks in a second group, for another thread of each."""
        return self

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's values into tensors that each rank has in the same order."""

    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the first rank's buffers, those of the state dict, into the other ranks' model."""

    def wait_for_first(self) -> None:
        """Wait until the first rank comes here, however long it takes."""

    def next_report(self) -> bool:
        """Wait until the first rank trains on; return False if it was closed instead."""
        return True

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group. The collective operations of the others raise from now on.

        Args:
            error: Why this rank fails; the others raise an error of the same kind.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)


ALONE = Ranks()
"""The ranks of a trial of one process."""


class RankGroup(Ranks):
    """One of several ranks. `join` makes one.

    Args:
        place: Where the ranks meet.
        rank: This rank's number.
        store: The group's store.
        direct: Whether the group's backend takes tensors of this rank's device.
        own_address: The address of this rank's machine; None: that of the place.
    """

    def __init__(
        self,
        place: GroupPlace,
        rank: int,
        store: Store,
        *,
        direct: bool,
        own_address: str | None = None,
    ) -> None:
        self.rank, self.size, self.place = rank, place.size, place
        self.own_address = own_address or place.address
        self._store = store
        self._direct = direct
        group: Any = dist.group.WORLD
        self._group = group
        self._further: list[Any] = []
        self._sockets = GroupSockets()
        self._leaves_on_failure = False
        self._step_timeout = timedelta(seconds=place.timeout)
        self._set_timeout(max(self._step_timeout, timedelta(seconds=place.join_timeout)))
        self._gradients: GradientSums | None = None
        self._sends_early = False
        self._pending: list[Any] = []
        self._buffers: tuple[nn.Module, list[tuple[dict[str, Any], str]]] | None = None

    @classmethod
    def join(
        cls,
        place: GroupPlace,
        rank: int,
        *,
        device: torch.device | None = None,
        listening: socket.socket | None = None,
        own_address: str | None = None,
    ) -> RankGroup:
        """Join the ranks of a trial; returns once all have joined.

        Import the task first: `place.join_timeout` is for joining alone.

        Args:
            place: Where the ranks meet.
            rank: This rank's number.
            device: The rank's device; None: the CPU.
            listening: On the first rank, what `listen` returned.
            own_address: The address of this rank's machine; None: that of the place.

        Raises:
            RankLost: A rank did not join in time.
        """
        device = device or torch.device("cpu")
        patience = timedelta(seconds=place.join_timeout)
        fd = None if listening is None else listening.detach()
        try:
            store = TCPStore(
                place.address,
                place.port,
                is_master=rank == 0,
                timeout=patience,
                wait_for_workers=False,
                master_listen_fd=fd,
            )
            direct = _have_own_devices(store, rank, place.size, device)
            with _interface(own_address or place.address), _own_excepthook():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if device.type == "cuda" and direct else "gloo",
                    store=store,
                    rank=rank,
                    world_size=place.size,
                    timeout=patience,
                )
        except (RuntimeError, ValueError) as problem:
            raise RankLost(
                f"rank {rank} of {place.size} could not join the others at {place.address}:"
                f"{place.port} within {place.join_timeout:g} s ({problem}); a rank has ended, or "
                "its machine cannot be reached; the trial is retried"
            ) from problem
        return cls(place, rank, store, direct=direct, own_address=own_address)

    def exchange(
        self,
        compute: Callable[[], tuple[Scalar, Scalar, int]],
        parameters: Sequence[Tensor],
        device: torch.device | None = None,
    ) -> tuple[Scalar, Scalar, int]:
        """Compute this rank's part of a step; return the sums, and leave the summed gradients."""
        error: Exception | None = None
        loss: Scalar = 0.0
        weight: Scalar = 0.0
        passes = 0
        gradients = self._gradients_of(parameters)
        try:
            loss, weight, passes = compute()
            present = [_has_gradient(parameter) for parameter in parameters]
        except Exception as problem:
            error, present = problem, [False] * len(parameters)
        if error is not None and self._leaves_on_failure:
            raise self._left(error)
        gradients.send_rest()
        stays = device is not None and self._direct
        values = [0.0, 0.0] if stays else [float(loss), float(weight)]
        sums = self._sum_flagged([passes, gradients.is_stale, *values, *present], error)
        self._wait()
        if sums[1]:
            gradients.send_again()
            self._wait()
        gradients.give_back(parameters, [count > 0 for count in sums[4:]])
        if device is None or not stays:
            return sums[2], sums[3], int(sums[0])
        on_device = torch.stack([_on(device, loss), _on(device, weight)])
        self._all_reduce(on_device)
        kind = next((p.dtype for p in parameters), torch.float32)
        wide = torch.promote_types(kind, torch.float32)
        return on_device[0].to(wide), on_device[1].to(wide), int(sums[0])

    def in_step(self, window: Iterable[Any]) -> Iterator[Any]:
        """Yield the micro-batches of a window; send the gradients of the last as they are made."""
        batches = iter(window)
        batch = next(batches, _END)
        while batch is not _END:
            following = next(batches, _END)
            # Not in a sharded model, whose own operations come in between.
            early = self._sends_early and not self._leaves_on_failure
            if following is _END and self._gradients is not None and early:
                self._gradients.send_early()
            yield batch
            batch = following

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each gradient by its sum over the ranks; None where no rank has one."""
        gradients = self._gradients_of(parameters)
        counts = self.sum([_has_gradient(parameter) for parameter in parameters])
        gradients.send_rest()
        self._wait()
        gradients.give_back(parameters, [count > 0 for count in counts])

    def sum(self, values: Sequence[Scalar], error: BaseException | None = None) -> list[float]:
        """Return the sums over the ranks, in float64; raise if a rank has an error."""
        return self._sum_flagged([float(value) for value in values], error)

    def together(
        self,
        error: BaseException | None,
        *,
        without_end: bool = False,
        seconds: float | None = None,
    ) -> None:
        """Raise on every rank if one of them has an error."""
        limit = timedelta(seconds=seconds) if seconds is not None else None
        self._sum_flagged([], error, _WITHOUT_END if without_end else limit)

    @contextlib.contextmanager
    def failing_together(self, *, without_end: bool = False) -> Iterator[None]:
        """Raise at the end of the context on every rank if one of them raised within it."""
        try:
            yield
        except RankLost:
            raise  # there is no group any more
        except Exception as error:
            if self._leaves_on_failure:
                raise self._left(error) from None
            self.together(error, without_end=without_end)
        else:
            self.together(None, without_end=without_end)

    def decide(self, numbers: Sequence[float]) -> Sequence[float]:
        """Return the numbers of the first rank."""
        told = torch.tensor(numbers, dtype=torch.float64)
        self._broadcast(told)
        numbers = told.tolist()
        return [float(number) for number in numbers]

    def agree(self, value: Any) -> Any:
        """Return the first rank's value: plain data as JSON has it."""
        return json.loads(self._send_bytes(json.dumps(value).encode() if self.is_first else b""))

    def gather_plain(self, value: Any) -> list[Any]:
        """Return the value of each rank: plain data as JSON has it."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self._lengths(len(own))
        content = torch.zeros((self.size, max(sizes)), dtype=torch.uint8)
        content[self.rank, : len(own)] = own
        self._all_reduce(content)
        return [
            json.loads(part[:size].numpy().tobytes())
            for part, size in zip(content, sizes, strict=True)
        ]

    def broadcast(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the first rank's state, with its tensors on the CPU; None if it has none."""
        content = self._send_bytes(_as_bytes(state) if self.is_first and state else b"")
        if self.is_first:
            return state
        return parse_state(content) if content else None

    def gather(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the states of all ranks on the first rank, and None on the others."""
        content = b"" if self.is_first else _as_bytes(state)
        lengths = self._lengths(len(content))
        if not self.is_first:
            own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            self._run(lambda: self._group.send([own], 0, 0))
            return None
        states = [state]
        for rank in range(1, self.size):
            received = torch.empty(lengths[rank], dtype=torch.uint8)
            self._run(partial(self._group.recv, [received], rank, 0))
            states.append(parse_state(received.numpy().tobytes()))
        return states

    @property
    def is_direct(self) -> bool:
        """Whether the group's backend takes tensors of this rank's device."""
        return self._direct

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks; the same bits on every rank."""
        self._all_reduce(tensor)

    def beside(self) -> RankGroup:
        """Return the same ranks in a second group, for another thread of each."""
        other = copy.copy(self)
        other._timeout = _WITHOUT_END
        with self._sockets.collected():
            other._group = dist.new_group(backend="gloo", timeout=_WITHOUT_END)
        self._further.append(other._group)
        return other

    def leave_on_failure(self) -> None:
        """Let a rank that fails leave at once, and not tell the others at the next exchange."""
        self._leaves_on_failure = True

    def group_of_model(self) -> dist.ProcessGroup:
        """Return a group for the collective operations inside a sharded model."""
        with self._sockets.collected():
            group: Any = dist.new_group(timeout=self._timeout)
        self._further.append(group)
        return cast("dist.ProcessGroup", group)

    @torch.no_grad()
    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's values into tensors that each rank has in the same order."""
        for same in by_kind(list(tensors)):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            self._broadcast(flat.view(torch.uint8))  # the bits, of whatever type
            if not self.is_first:
                parts = torch.split(flat, [tensor.numel() for tensor in same])
                for tensor, part in zip(same, parts, strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))

    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the first rank's buffers, those of the state dict, into the other ranks' model."""
        if self._buffers is None or self._buffers[0] is not model:
            self._buffers = (
                model,
                [
                    (module._buffers, name)
                    for module in model.modules()
                    for name in module._buffers
                    if name not in module._non_persistent_buffers_set
                ],
            )
        found = [owner.get(name) for owner, name in self._buffers[1]]
        self.copy_from_first([buffer for buffer in found if buffer is not None])

    def wait_for_first(self) -> None:
        """Wait until the first rank comes here, however long it takes."""
        self._broadcast(torch.zeros(1, dtype=torch.float64), _WITHOUT_END)

    def next_report(self) -> bool:
        """Wait until the first rank trains on; return False if it was closed instead."""
        try:
            self.wait_for_first()
        except RankLost:
            if self.is_first:
                raise
            return False
        self._set_timeout(self._step_timeout)
        return True

    # For a loop of the user's, which has a group of its own (`loop_group.py`)

    @property
    def interface(self) -> str | None:
        """The network interface by which the other ranks reach this one."""
        return _interface_of(self.own_address)

    def leave_default_group(self) -> None:
        """End torch's default group, and talk over another one from now on: on the CPU.

        Raises:
            RankLost: Another rank is gone.
        """
        try:
            with _interface(self.own_address):
                store = PrefixStore("loop", self._store)
                limit = timedelta(seconds=self.place.join_timeout)
                group = dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        except RuntimeError as problem:
            raise RankLost(
                f"rank {self.rank} of {self.size} could not reach the others ({problem}); the "
                "trial is retried"
            ) from problem
        self._pending.clear()
        dist.destroy_process_group()
        self._group, self._direct = group, False

    def count_failure(self) -> int:
        """Count a failure of the trial's ranks; return how many there are, 0 if unknown."""
        try:
            return int(self._store.add(f"{_FAILED}/number", 1))
        except RuntimeError:  # the first rank, which keeps the store, has ended
            return 0

    def tell_failure(self, error: Exception) -> None:
        """Tell the other ranks why this one fails, unless one has failed before."""
        with contextlib.suppress(RuntimeError):  # the first rank may have ended
            self._store.compare_set(_FAILED, "", json.dumps(as_note(error, self.rank)))

    def failure(self, seconds: float) -> TrainingError | None:
        """Return why another rank has failed; wait for it so long."""
        with contextlib.suppress(RuntimeError):
            self._store.wait([_FAILED], timedelta(seconds=seconds))
        note = self._note_of_failure()
        return None if note is None else as_error(note)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group. The collective operations of the others raise from now on."""
        group: Any = self._group
        self._group = None
        if group is None:
            return
        self._pending.clear()
        if self._gradients is not None:
            self._gradients.close()
        if isinstance(error, Exception) and not isinstance(error, RankLost):
            self.tell_failure(error)
        if dist.group.WORLD is group:
            for one in (*self._further, group):
                with contextlib.suppress(RuntimeError):
                    one.abort()
            self._sockets.shut_down()
            dist.destroy_process_group()

    def _set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group.set_timeout(timeout)

    # The collective operations

    def _sum_flagged(
        self,
        values: Sequence[float],
        error: BaseException | None,
        timeout: timedelta | None = None,
    ) -> list[float]:
        numbers = torch.tensor([float(error is not None), *values], dtype=torch.float64)
        self._all_reduce(numbers, timeout)
        failed, *sums = numbers.tolist()
        if failed:
            self._raise_failure(error)
        return sums

    def _lengths(self, own: int) -> list[int]:
        """Return a length of each rank."""
        return [
            int(length)
            for length in self.sum([own if rank == self.rank else 0 for rank in range(self.size)])
        ]

    def _raise_failure(self, error: BaseException | None) -> None:
        """Raise this rank's error, or else that of the first rank that has one."""
        notes = self.gather_plain(None if error is None else as_note(error, self.rank))
        if error is not None:
            raise error
        raise as_error(next(note for note in notes if note is not None))

    def _gradients_of(self, parameters: Sequence[Tensor]) -> GradientSums:
        """Return the buckets of parameters, ready for a step."""
        if self._gradients is None or not self._gradients.fits(parameters):
            if self._gradients is not None:
                self._gradients.close()
            self._gradients = GradientSums(parameters, self._send)
            kinds = {p.device.type for p in parameters}
            self._sends_early = self._direct or kinds == {"cpu"}
        self._gradients.begin()
        return self._gradients

    def _send(self, flat: Tensor) -> None:
        """Begin to add up a tensor; `_wait` waits for the end."""
        if not (self._direct or flat.device.type == "cpu"):
            self._all_reduce(flat)
            return
        options = self._options("AllreduceOptions")
        flat = torch.view_as_real(flat) if flat.is_complex() else flat
        self._guarded(lambda: self._pending.append(self._group.allreduce([flat], options)))

    def _wait(self) -> None:
        """Wait for all tensors that were sent."""
        while self._pending:
            self._guarded(lambda: self._pending.pop(0).wait())

    def _all_reduce(self, tensor: Tensor, timeout: timedelta | None = None) -> None:
        options = self._options("AllreduceOptions", timeout)
        with self._on_host(tensor) as sent:
            self._run(lambda: self._group.allreduce([sent], options))

    def _broadcast(self, tensor: Tensor, timeout: timedelta | None = None) -> None:
        options = self._options("BroadcastOptions", timeout)
        options.rootRank = 0
        with self._on_host(tensor) as sent:
            self._run(lambda: self._group.broadcast([sent], options))

    def _send_bytes(self, content: bytes) -> bytes:
        """Return the bytes of the first rank."""
        (length,) = self.decide([len(content)])
        if not length:
            return b""
        sent = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if self.is_first
            else torch.empty(int(length), dtype=torch.uint8)
        )
        self._broadcast(sent)
        return content if self.is_first else sent.numpy().tobytes()

    @contextlib.contextmanager
    def _on_host(self, tensor: Tensor) -> Iterator[Tensor]:
        """Give the tensor, or a copy in host memory if the backend needs one."""
        if tensor.device.type == "cpu" or self._direct:
            yield tensor
            return
        sent = tensor.cpu()  # device synchronisation: ranks that share one device
        yield sent
        tensor.copy_(sent)

    def _options(self, name: str, timeout: timedelta | None = None) -> Any:
        options = getattr(dist, name)()
        options.timeout = timeout or self._timeout
        return options

    def _run(self, start: Callable[[], Any]) -> None:
        """Run a collective operation.

        Raises:
            RankLost: Another rank has left without a word, or did not come in time.
            TrainingError: Another rank has failed.
        """
        self._guarded(lambda: start().wait())

    def _guarded(self, call: Callable[[], Any]) -> None:
        """Call what begins a collective operation, or waits for one; raise as `_run` does."""
        if self._group is None:
            raise RankLost(f"rank {self.rank} has left the group of its trial")
        try:
            call()
        except RuntimeError as problem:
            reason = str(problem)
        else:
            return
        # Not `from problem`: its frames hold the operation, and as long as anything does, the
        # sockets stay open when this rank leaves, and the next rank waits in vain.
        raise self._cause_of(reason)

    def _cause_of(self, reason: str) -> TrainingError:
        """Return why a collective operation failed: another rank has failed, or is lost."""
        note = self._note_of_failure()
        if note is not None:
            return as_error(note)
        return RankLost(
            f"rank {self.rank} waited for the other {self.size - 1} ranks of its trial, and one "
            f"was lost ({reason.splitlines()[0]}); its process has ended, its machine is gone, or "
            f"it did not come within {self._timeout.total_seconds():g} s; the trial is retried "
            "from its newest checkpoint"
        )

    def _left(self, problem: Exception) -> Exception:
        """Leave the group after an error inside a sharded model, and return its cause."""
        is_of_group = isinstance(problem, RuntimeError) and _LOST.search(str(problem))
        cause = self._cause_of(str(problem)) if is_of_group else problem
        self.close(cause)
        return cause

    def _note_of_failure(self) -> dict[str, Any] | None:
        try:
            if not self._store.check([_FAILED]):
                return None
            note: dict[str, Any] = json.loads(self._store.get(_FAILED))
        except (RuntimeError, ValueError):  # the first rank, which keeps the store, has ended
            return None
        return note if note["rank"] != self.rank else None


def _has_gradient(parameter: Tensor) -> bool:
    """Return whether a parameter has a gradient.

    Raises:
        TaskError: It is a sparse one.
    """
    if parameter.grad is None:
        return False
    if parameter.grad.layout is not torch.strided:
        raise TaskError(
            "the model has sparse gradients, which ranks cannot sum; build its embeddings without "
            "sparse=True, or train on one rank"
        )
    return True


def _on(device: torch.device, value: Scalar) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def _as_bytes(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    write_state(snapshot(state), file)
    return file.getvalue()


def _have_own_devices(store: Store, rank: int, size: int, device: torch.device) -> bool:
    """Return whether no two ranks share a GPU, as NCCL requires; True on CPUs."""
    if device.type != "cuda":
        return True
    name = str(torch.cuda.get_device_properties(device).uuid)
    store.set(f"device/{rank}", name)
    names = [store.get(f"device/{other}").decode() for other in range(size)]
    return len(set(names)) == size


@contextlib.contextmanager
def _own_excepthook() -> Iterator[None]:
    """Keep this process' hook for uncaught exceptions: torch puts `[rank0]` before each line."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


@contextlib.contextmanager
def _interface(address: str) -> Iterator[None]:
    """Have gloo use the network interface with an address; it would take that of the host name."""
    name = _interface_of(address)
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before


def _interface_of(address: str) -> str | None:
    if address.startswith("127."):
        return "lo"
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    return None
