"""RankGroup: one of several ranks of a trial, and what it exchanges with the others.

Nothing that comes from another process is unpickled: states are read as checkpoints are, and all
else is numbers and JSON. All plain data and all failures are one kind of message, that of
`gather_plain`. What must not live here: how a step is taken (`step.py`), and the operations of
torch's process groups (`collectives.py`).
"""

from __future__ import annotations

import contextlib
import copy
import hmac
import io
import json
import socket
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from trainable import rank_waits
from trainable.errors import RankLost, TaskError
from trainable.failures import as_error, as_note, is_shared, mark_shared
from trainable.group_joining import GroupPlace, join_group, sees_group
from trainable.parallel.collectives import Collectives
from trainable.parallel.rank_checks import check_trained_alike
from trainable.ranks import ALONE, Decisions, Message, Ranks, Scalar, WindowSums
from trainable.store.snapshot import parse_state, snapshot, write_state

_FIRST_BYTES = 4096
"""Bytes of the first operation of a message; what is longer takes a second one."""
_SIGNATURE = 32
_WITHOUT = "N"
"""The letter of a parameter that neither requires nor has a gradient: see `_mark_of`."""


class RankGroup(Ranks):
    """One of several ranks. `join` makes one."""

    def __init__(self, collectives: Collectives) -> None:
        self.rank, self.size = collectives.rank, collectives.size
        self.collectives = collectives
        self._leaves_on_failure = False
        self._gradients: FlatGradients | None = None
        self._names: dict[int, str] = {}
        self._buffers: SyncedBuffers | None = None
        self._computes = False
        self._remedy_for_passes = ""

    @classmethod
    def join(
        cls,
        place: GroupPlace,
        rank: int,
        *,
        device: torch.device | None = None,
        listening: socket.socket | None = None,
        own_address: str | None = None,
        has_lost: Callable[[], bool] = lambda: False,
    ) -> RankGroup:
        """Join the ranks of a trial; returns once all have joined.

        Import the task first: `place.join_timeout` is for joining alone.
        """
        joined = join_group(
            place,
            rank,
            device=device or torch.device("cpu"),
            listening=listening,
            own_address=own_address or place.address,
            has_lost=has_lost,
        )
        ranks = cls(Collectives(joined))
        _Joined.ranks = weakref.ref(ranks)
        return ranks

    def exchange(
        self,
        compute: Callable[[], WindowSums],
        parameters: Sequence[Tensor],
        decide: Callable[[], Decisions],
        device: torch.device | None = None,
    ) -> tuple[WindowSums, Decisions | None]:
        """Compute this rank's part of a window; return the sums, and leave the summed gradients.

        One message has all numbers, failures and decisions; the sums of gradients follow. Loss and
        weight that stay on a device are added up there: no rank waits for its device.
        """
        stays = device is not None and self.collectives.direct
        with self.together() as message:
            with self._computing():
                loss, weight, passes = compute()
            marks = "".join(map(_mark_of, parameters))
            numbers = [0.0, 0.0] if stays else [float(loss), float(weight)]
            changed = self._buffers is not None and self._buffers.have_changed()
            message.own = [marks, changed, decide(), *numbers, passes]
        marks_of, changed_of, (decided, *_), *numbers_of = zip(*message.of_ranks, strict=True)
        check_trained_alike(parameters, self._names, marks_of)
        if any(changed_of):
            assert self._buffers is not None
            self._buffers.agree(self.gather_plain(self._buffers.shapes()))
        self._add_up_gradients(parameters, list(map("".join, zip(*marks_of, strict=True))))
        # not by sum(): newer Pythons add floats more exactly, to other bits
        sums = WindowSums(*(reduce(add, of_ranks) for of_ranks in numbers_of))
        if device is not None and stays:
            on_device = torch.stack([_on(device, loss), _on(device, weight)])
            self.collectives.add_up(on_device)
            kind = next((p.dtype for p in parameters), torch.float32)
            wide = on_device.to(torch.promote_types(kind, torch.float32))
            sums = WindowSums(wide[0], wide[1], sums.passes)
        return sums, Decisions(*decided)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        self._computes = True
        try:
            yield
        finally:
            self._computes = False

    def _add_up_gradients(self, parameters: Sequence[Tensor], marks: Sequence[str]) -> None:
        """Add up gradients over the ranks; `marks` has the letters of each parameter."""
        pairs = list(zip(parameters, marks, strict=True))
        summed = [p for p, own in pairs if own != _WITHOUT * self.size]
        if self._gradients is None or not self._gradients.fits(summed):
            self._gradients = None  # its memory is needed
            self._gradients = FlatGradients(summed)
        used = {id(p) for p, own in pairs if "g" in own.lower()}
        self._gradients.add_up(self.collectives.add_up, used)

    def gather_plain(
        self, value: Any, error: BaseException | None = None, *, seconds: float | None = None
    ) -> list[Any]:
        """Return the value of each rank, or raise on every rank if one of them has an error."""
        note = None if error is None else as_note(error, self.rank)
        content = json.dumps([note, value], separators=(",", ":")).encode()  # few bytes
        messages = [json.loads(part) for part in self._gather_bytes(content, seconds)]
        failed = next((note for note, _ in messages if note is not None), None)
        if failed is not None:
            raise mark_shared(error or as_error(failed))
        return [value for _, value in messages]

    @contextlib.contextmanager
    def together(self, *, seconds: float | None = None) -> Iterator[Message]:
        """Gather the values of all ranks at the end of the context."""
        message = Message()
        error: Exception | None = None
        try:
            yield message
        except RankLost:
            raise  # there is no group any more
        except Exception as problem:
            if is_shared(problem):
                raise
            error = problem
        if error is not None and self._leaves_on_failure:
            raise self._leave(error)
        message.of_ranks = self.gather_plain(message.own, error, seconds=seconds)

    def broadcast(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the first rank's state, with its tensors on the CPU; None if it has none."""
        content = self._signed(state) if self.is_first and state else b""
        length = self.agree(len(content))
        if not length:
            return None
        sent = _as_tensor(content) if self.is_first else torch.empty(length, dtype=torch.uint8)
        self.collectives.broadcast(sent)
        return state if self.is_first else self._verified(sent)

    def gather(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return the states of all ranks on the first rank, and None on the others."""
        content = b"" if self.is_first else self._signed(state)
        lengths = self.gather_plain(len(content))
        if not self.is_first:
            self.collectives.send_to_first(_as_tensor(content))
            return None
        states = [state]
        for rank in range(1, self.size):
            received = torch.empty(lengths[rank], dtype=torch.uint8)
            self.collectives.receive(received, rank)
            states.append(self._verified(received))
        return states

    @property
    def _key(self) -> bytes:
        return self.collectives.place.key.encode()

    def _signed(self, state: dict[str, Any]) -> bytes:
        file = io.BytesIO()
        write_state(snapshot(state), file)
        content = file.getvalue()
        return hmac.digest(self._key, content, "sha256") + content

    def _verified(self, received: Tensor) -> dict[str, Any]:
        """Return the state that another rank has sent, of which a part may be unpickled."""
        whole = received.numpy().tobytes()
        signature, content = whole[:_SIGNATURE], whole[_SIGNATURE:]
        expected = hmac.digest(self._key, content, "sha256")
        if not hmac.compare_digest(signature, expected):
            raise RankLost(
                "a state that came over the network is not signed by a rank of this trial; train "
                "several workers only in a network whose other users you trust"
            )
        return parse_state(content)

    def gather_tensor(self, tensor: Tensor, *, with_gradient: bool = False) -> Tensor:
        """Return the tensor of each rank, along a new first dimension.

        In a step, a rank that fails leaves from now on, since the others may wait here for it;
        and gradients are sent after the backward pass, which may have operations of its own.
        """
        if self._computes and self._remedy_for_passes:
            raise TaskError(
                f"the task gathers values of all {self.size} ranks within a step, and in some "
                "steps they would make different numbers of forward passes, so that some would "
                f"wait for the others; each step needs equal parts; {self._remedy_for_passes}"
            )
        if self._computes:
            self.leave_on_failure()
        found = self.gather_plain([list(tensor.shape), str(tensor.dtype)])
        if found != found[:1] * self.size:
            shown = ", ".join(f"{kind} {tuple(shape)}" for shape, kind in found)
            raise TaskError(
                f"the task gathers tensors of all {self.size} ranks, and they have different "
                f"shapes or types: {shown}; gather sums or counts, or let all have one shape, "
                f"with train.batch_size / train.accumulation a multiple of {self.size} and "
                "train.loader.drop_last: true"
            )
        with torch.set_grad_enabled(with_gradient and torch.is_grad_enabled()):
            return self.collectives.gather_tensor(tensor)

    def expect_unequal_passes(self, remedy: str) -> None:
        """Let `gather_tensor` fail in a step: ranks may make different numbers of passes."""
        self._remedy_for_passes = remedy

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks; the same bits on every rank."""
        self.collectives.add_up(tensor)

    def beside(self) -> RankGroup:
        """Return the same ranks in a second group, for another thread of each."""
        self._meet()
        other = copy.copy(self)
        other.collectives = self.collectives.beside()
        return other

    def group_of_model(self) -> Any:
        """Return a process group for the collective operations inside a sharded model."""
        self._meet()
        return self.collectives.group_of_model()

    def leave_default_group(self) -> None:
        """End torch's default group; the ranks exchange over another one from now on."""
        self._meet()
        self.collectives.leave_default_group()

    def name_parameters(self, model: nn.Module) -> None:
        """Call parameters in errors as this model does."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def leave_on_failure(self) -> None:
        """Let a rank that fails leave at once, and not tell the others at the next exchange."""
        self._leaves_on_failure = True

    @torch.no_grad()
    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's values into tensors that each rank has in the same order."""
        for same in by_kind(list(tensors)):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
            self.collectives.broadcast(flat.view(torch.uint8))  # the bits, of whatever type
            if not self.is_first:
                parts = torch.split(flat, [tensor.numel() for tensor in same])
                for tensor, part in zip(same, parts, strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))

    def sync_buffers(self, model: nn.Module) -> None:
        """Copy the first rank's buffers, those of the state dict, into the other ranks' model."""
        if self._buffers is None or self._buffers.model is not model:
            self._buffers = SyncedBuffers(model)
            self._buffers.agree(self.gather_plain(self._buffers.shapes()))
        self.copy_from_first(self._buffers.tensors())

    def next_report(self, *, go_on: bool = True) -> bool:
        """Wait until the first rank says whether the run continues, without a limit."""
        said = torch.tensor([float(go_on)])
        try:
            self.collectives.broadcast(said, rank_waits.WITHOUT_END)
        except RankLost:
            if self.is_first:
                raise
            return False
        self.collectives.end_joining()
        return bool(said)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group. The collective operations of the others raise from now on."""
        self.collectives.close(error)

    def _gather_bytes(self, content: bytes, seconds: float | None) -> list[bytes]:
        """Return the bytes of each rank: by one operation where all are few, else by two."""
        first = content[: _FIRST_BYTES - 8].ljust(_FIRST_BYTES - 8)
        framed = _as_tensor(len(content).to_bytes(8, "big") + first)
        parts = [row.numpy().tobytes() for row in self.collectives.gather(framed, seconds)]
        lengths = [int.from_bytes(part[:8], "big") for part in parts]
        parts = [part[8:] for part in parts]
        if (more := max(lengths) - len(first)) > 0:
            rest = _as_tensor(content[len(first) :].ljust(more))
            rows = self.collectives.gather(rest, seconds)
            parts = [p + row.numpy().tobytes() for p, row in zip(parts, rows, strict=True)]
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def _meet(self) -> None:
        """Wait until all ranks are about to make a group; raise if one has failed or ended."""
        self.gather_plain(None)

    def _leave(self, error: Exception) -> Exception:
        """Leave the group after an error inside a sharded model, and return its cause."""
        cause = self.collectives.cause_of(error)
        self.close(cause)
        return cause


class _Joined:
    """The group that this process has joined last."""

    ranks: weakref.ReferenceType[RankGroup] | None = None


def ranks_here() -> Ranks:
    """Return the ranks that run the task's present code together; `ALONE` if they are hidden."""
    joined = _Joined.ranks
    return (joined() if joined is not None and sees_group() else None) or ALONE


def _mark_of(parameter: Tensor) -> str:
    """Return what other ranks must know of a parameter, in one letter: 4,000 fit in a message.

    `g`: it has a gradient, `n`: it has none; a capital letter: it requires none.
    """
    if parameter.grad is None:
        return "n" if parameter.requires_grad else _WITHOUT
    if parameter.grad.layout is not torch.strided:
        raise TaskError(
            "the model has sparse gradients, which ranks cannot sum; build its embeddings without "
            "sparse=True, or train on one rank"
        )
    return "g" if parameter.requires_grad else "G"


def _on(device: torch.device, value: Scalar) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


_REMEDY = (
    "the ranks of a trial copy the buffers of the state dict from the first one, and each sees "
    "its own samples; let its shape not depend on the samples, write persistent=False if each "
    "rank may have its own, or write resources.workers: 1"
)


class SyncedBuffers:
    """The buffers of a model's state dict on one rank. All ranks have agreed on their shapes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._places = [
            (f"{path}.{name}".lstrip("."), module._buffers, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._agreed = self.shapes()

    def tensors(self) -> list[Tensor]:
        """Return those that are there."""
        for path, before, now in self._differing(self._agreed, self.shapes()):
            raise TaskError(
                f"the buffer {path} has had the shape {before}, and has {now} since a hook or an "
                f"evaluation; {_REMEDY}"
            )
        return [buffer for buffer in self._all() if buffer is not None]

    def have_changed(self) -> bool:
        """Return whether a shape is not the one on which the ranks have agreed."""
        return self.shapes() != self._agreed

    def shapes(self) -> list[list[int] | None]:
        """Return the shapes, for `agree`; None for a buffer that is not there."""
        return [None if buffer is None else list(buffer.shape) for buffer in self._all()]

    def agree(self, of_ranks: Sequence[list[list[int] | None]]) -> None:
        """Take new shapes, those of each rank."""
        self._agreed = of_ranks[0]
        for rank, shapes in enumerate(of_ranks):
            for path, first, own in self._differing(self._agreed, shapes):
                raise TaskError(
                    f"the buffer {path} has the shape {own} on rank {rank}, and {first} on rank "
                    f"0; {_REMEDY}"
                )

    def _all(self) -> list[Tensor | None]:
        return [owner.get(name) for _, owner, name in self._places]

    def _differing(self, one: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[str, ...]]:
        """Yield the path of each buffer of another shape, and both shapes, in words."""
        for (path, *_), before, now in zip(self._places, one, other, strict=True):
            if before != now:
                words = ("none" if shape is None else str(tuple(shape)) for shape in (before, now))
                yield path, *words


class FlatGradients:
    """The gradients of some parameters, added up over the ranks.

    All gradients of one type and device are one tensor, in the order of the parameters, and one
    operation adds it up. So each run, resumed or not, adds in the same order and has the same
    bits. Their memory is kept from step to step: it is large.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._numbers = list(map(id, parameters))
        self._flats = [_Flat(same) for same in by_kind(parameters)]

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether these are the parameters."""
        return self._numbers == list(map(id, parameters))

    @torch.no_grad()
    def add_up(self, add_up: Callable[[Tensor], None], used: Collection[int]) -> None:
        """Let each parameter have the sum of its gradients as its gradient.

        Args:
            add_up: Replaces a tensor by its sum over the ranks.
            used: The ids of the parameters that have a gradient on any rank.
        """
        for flat in self._flats:
            flat.fill()
            add_up(flat.values)
            for p, view in zip(flat.parameters, flat.views, strict=True):
                p.grad = view if id(p) in used else None


class _Flat:
    """The gradients of parameters of one type and device, in one tensor."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        first = parameters[0]
        self.values = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        parts = torch.split(self.values, sizes)
        self.views = [_shaped(part, p) for part, p in zip(parts, parameters, strict=True)]

    def fill(self) -> None:
        """Copy the gradients into the tensor, 0 where there is none."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if len(gradients) < len(self.parameters):
            self.values.zero_()
        pairs = zip(self.parameters, self.views, strict=True)
        if gradients:
            torch._foreach_copy_([view for p, view in pairs if p.grad is not None], gradients)


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups of one type and device, in their order."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a part of a flat tensor in the shape and the layout of a parameter."""
    strides = torch.empty_like(parameter, device="meta").stride()  # without gaps
    return part.as_strided(parameter.shape, strides, part.storage_offset())
