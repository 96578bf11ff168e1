"""GradientSums: adds up the gradients of the ranks of a trial, in buckets of a fixed order.

A bucket has the gradients of some parameters of one type and device in one tensor. It is sent as
soon as the last backward pass of a step has made all of them, and all buckets before it are sent.
So sending overlaps with that pass. The last bucket is sent after the pass, on the CPU with some
numbers besides: each wait for the other ranks costs as much as a small step. Buckets and their
order depend on the parameters alone: each run, resumed or not, adds in the same order and has the
same bits. What must not live here: how a tensor is sent (`collectives.py`), and what the numbers
say (`rank_group.py`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainable.parallel.collectives import Collectives

BUCKET_BYTES = 8 << 20


class GradientSums:
    """The buckets of some parameters."""

    def __init__(
        self, parameters: Sequence[Tensor], collectives: Collectives, num_numbers: int
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._collectives = collectives
        # a backward pass makes the gradients of the last parameters first
        cut = list(_cut(self._parameters[::-1]))
        rank, size = collectives.rank, collectives.size
        carries = bool(cut) and can_carry(cut[-1][0])
        further = num_values(size, num_numbers, len(parameters)) if carries else 0
        self._buckets = [_Bucket(some, further if some is cut[-1] else 0) for some in cut]
        self._carried = (
            CarriedNumbers(self._buckets[-1].rest, rank, size, num_numbers) if carries else None
        )
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._hooks: list[RemovableHandle] = []
        if len(self._buckets) > 1:  # a single one is complete only after the whole pass
            this = weakref.ref(self)  # a cycle would keep the model in memory

            def made(parameter: Tensor) -> None:
                sums = this()
                if sums is not None:
                    sums._made(parameter)

            self._hooks = [
                p.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]
                for p in self._parameters
            ]
        self.begin()

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these parameters have these buckets."""
        now = [p for p in parameters if p.requires_grad]
        return len(now) == len(self._parameters) and all(map(_is, now, self._parameters))

    def begin(self) -> None:
        """Begin a step."""
        self._early, self._num_sent = False, 0
        self._newest: Tensor | None = None
        self._sent: list[tuple[Tensor, Tensor | None, int]] = []
        """The gradients that were sent early, with their parameters and versions."""
        for bucket in self._buckets:
            bucket.missing = {id(p) for p in bucket.parameters}

    def send_early(self) -> None:
        """Send each bucket but the last once complete: this is the step's last backward pass."""
        self._early = True

    def is_stale(self) -> bool:
        """Whether an inner backward pass or a hook has changed a gradient after it was sent."""
        return any(p.grad is not one or _version(one) != before for p, one, before in self._sent)

    def add_up(self, numbers: Sequence[float], flags: Sequence[bool]) -> list[float]:
        """Send the buckets that are not yet sent, and wait until all are added up."""
        if self._carried is not None:
            self._carried.write(numbers, flags)
        self._send_rest()
        if self._carried is not None:
            self._collectives.wait()
            return self._carried.read()
        sums = torch.tensor([*numbers, *flags], dtype=torch.float64)
        self._collectives.begin_to_add_up(sums)  # after the buckets: on each rank in this order
        self._collectives.wait()
        return sums.tolist()

    def add_up_again(self) -> None:
        """Send all buckets once more, and wait."""
        self._num_sent = 0
        self._send_rest()
        self._collectives.wait()

    def give_back(self, parameters: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Let each parameter have its sum as its gradient, and none where no rank has one."""
        given = {id(p) for p, some in zip(parameters, present, strict=True) if some}
        for bucket in self._buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                p.grad = view if id(p) in given else None

    def give_back_frozen(self, parameters: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Let parameters that were frozen within the step have their sums, as they will step."""
        given = {id(p) for p, some in zip(parameters, present, strict=True) if some}
        for bucket in self._buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                if id(p) in given and not p.requires_grad:
                    p.grad = view.clone()  # the bucket goes

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _made(self, parameter: Tensor) -> None:
        """Note that a backward pass has made a gradient.

        Later hooks of the parameter may still change it; all have run when the next one is made.
        """
        if not self._early:
            return
        made, self._newest = self._newest, parameter
        if made is None:
            return
        self._bucket_of[id(made)].missing.discard(id(made))
        last = len(self._buckets) - 1
        while self._num_sent < last and not self._buckets[self._num_sent].missing:
            parameters = self._buckets[self._num_sent].parameters
            self._sent += [(p, p.grad, _version(p.grad)) for p in parameters]
            self._send_next()

    def _send_rest(self) -> None:
        self._early = False
        self._newest = None
        self._sent.clear()  # else they would stay in memory beside the sums
        while self._num_sent < len(self._buckets):
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._num_sent]
        self._num_sent += 1
        bucket.fill()
        self._collectives.begin_to_add_up(bucket.flat)


class _Bucket:
    """The gradients of some parameters in one tensor; a gradient becomes a view of it."""

    def __init__(self, parameters: list[Tensor], further: int = 0) -> None:
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        kind, device = parameters[0].dtype, parameters[0].device
        self.flat = torch.zeros(sum(sizes) + further, dtype=kind, device=device)
        *parts, self.rest = torch.split(self.flat, [*sizes, further])
        self.views = [_shaped(part, p) for part, p in zip(parts, parameters, strict=True)]
        self.missing: set[int] = set()

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the gradients into the tensor, 0 where there is none."""
        pairs = list(zip(self.views, (_dense(p.grad) for p in self.parameters), strict=True))
        there = [(view, gradient) for view, gradient in pairs if gradient is not None]
        if len(there) < len(pairs):
            torch._foreach_zero_([view for view, gradient in pairs if gradient is None])
        if there:
            torch._foreach_copy_([view for view, _ in there], [one for _, one in there])


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups of one type and device, in their order."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _cut(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters of each bucket."""
    for same in by_kind(parameters):
        bucket: list[Tensor] = []
        num_bytes = 0
        for p in same:
            bucket.append(p)
            num_bytes += p.numel() * p.element_size()
            if num_bytes >= BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
        if bucket:
            yield bucket


def _shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a part of a flat tensor in the shape and the layout of a parameter."""
    strides = torch.empty_like(parameter, device="meta").stride()  # without gaps
    return part.as_strided(parameter.shape, strides, part.storage_offset())


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient; None for a sparse one, which the exchange refuses."""
    return gradient if gradient is not None and gradient.layout is torch.strided else None


def _version(gradient: Tensor | None) -> int:
    """Return a number that each operation changes which writes to a gradient."""
    return 0 if gradient is None else gradient._version


def _is(one: Tensor, other: Tensor) -> bool:
    return one is other


_BYTES = 8
_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CarriedNumbers:
    """The place of the numbers at the end of a tensor that is summed over the ranks."""

    def __init__(self, values: Tensor, rank: int, size: int, num_numbers: int) -> None:
        self._rank = rank
        num_bytes = size * num_numbers * _BYTES
        self._places = values[:num_bytes].view(size, -1)
        self._counts = values[num_bytes:]

    def write(self, numbers: Sequence[float], flags: Sequence[bool]) -> None:
        """Write this rank's numbers, and its flags, of which the ranks that have each are counted.

        The tensor must be sent after that.
        """
        self._places.zero_()
        self._places[self._rank] = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)
        self._counts.copy_(torch.tensor(flags, dtype=self._counts.dtype))

    def read(self) -> list[float]:
        """Return the sums of the numbers, in float64 and in the order of the ranks, and counts."""
        of_ranks = self._places.to(torch.uint8).view(torch.float64)
        return [*functools.reduce(torch.add, of_ranks).tolist(), *self._counts.tolist()]


def can_carry(tensor: Tensor) -> bool:
    """Return whether numbers can travel with a tensor and be read without waiting for a device."""
    return tensor.device.type == "cpu" and tensor.dtype in _TYPES


def num_values(size: int, num_numbers: int, num_flags: int) -> int:
    """Return how many values the numbers and flags of all ranks take."""
    return size * num_numbers * _BYTES + num_flags
