"""SyncedBuffers: the buffers that the ranks of a trial copy from the first one, and their shapes.

The ranks copy the buffers of all types in a few messages, whose lengths follow from the shapes. A
shape that differs from rank to rank would end the processes inside the operation. So a rank
compares its shapes with those that all have, and they agree on a change before they copy.
What must not live here: the copy itself (`rank_group.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from trainable.errors import TaskError

_REMEDY = (
    "the ranks of a trial copy the buffers of the state dict from the first one, and each sees "
    "its own samples; let its shape not depend on the samples, write persistent=False if each "
    "rank may have its own, or write resources.workers: 1"
)


class SyncedBuffers:
    """The buffers of a model's state dict on one rank.

    Args:
        model: The model; all ranks have the same shapes now.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._places = [
            (f"{path}.{name}".lstrip("."), module._buffers, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._agreed = self._shapes()

    def tensors(self) -> list[Tensor]:
        """Return those that are there.

        Raises:
            TaskError: A shape is not the one on which the ranks have agreed.
        """
        if self.have_changed():
            name, before, now = next(
                (place[0], before, now)
                for place, before, now in zip(
                    self._places, self._agreed, self._shapes(), strict=True
                )
                if before != now
            )
            raise TaskError(
                f"the buffer {name} has had the shape {_text(before)}, and has {_text(now)} since "
                f"a hook or an evaluation; {_REMEDY}"
            )
        found = [owner.get(name) for _, owner, name in self._places]
        return [buffer for buffer in found if buffer is not None]

    def have_changed(self) -> bool:
        """Return whether a shape is not the one on which the ranks have agreed."""
        return self._shapes() != self._agreed

    def note(self) -> list[Any]:
        """Return the shapes as plain data, for `agree`."""
        return [None if shape is None else list(shape) for shape in self._shapes()]

    def agree(self, notes: Sequence[list[Any]]) -> None:
        """Take new shapes, those of `note` on each rank.

        Raises:
            TaskError: They differ.
        """
        first, *others = notes
        for rank, other in enumerate(others, 1):
            for (path, *_), before, now in zip(self._places, first, other, strict=True):
                if before != now:
                    raise TaskError(
                        f"the buffer {path} has the shape {_text(now)} on rank {rank}, and "
                        f"{_text(before)} on rank 0; {_REMEDY}"
                    )
        self._agreed = self._shapes()

    def _shapes(self) -> list[Any]:
        found = [owner.get(name) for _, owner, name in self._places]
        return [None if buffer is None else buffer.shape for buffer in found]


def _text(shape: Sequence[int] | None) -> str:
    return "none" if shape is None else str(tuple(shape))
