"""FrozenBase: the part of a model that a checkpoint leaves out, because the task builds it again.

With `checkpoint.parameters: trained` a checkpoint has of the model's state dict only what requires
gradients or has changed since the task built it: adapters, a new head, unfrozen layers, running
statistics. Of the rest it has the digests. A resumed run builds the rest again, and is refused if
it is not the same. What must not live here: what else a checkpoint has (`train_state.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainable.errors import CheckpointError
from trainable.fingerprint import tensor_digest
from trainable.reachable import tensor_signature

_SHOWN = 3


class FrozenBase:
    """What of a model is as the task built it.

    At each save this reads every frozen tensor once, on its device: torch does not count all
    writes. It reads nothing in a step.
    """

    def __init__(self, model: nn.Module, files: Mapping[str, str]) -> None:
        self._model = model
        self._files = dict(files)
        self._built = {name: tensor_signature(value) for name, value in _frozen(model).items()}
        self._digests: dict[str, str] = {}

    def split(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the entries of a state dict to be saved, and the record of the others."""
        now = _frozen(self._model)
        same = {
            name: value
            for name, value in now.items()
            if name in state and self._built.get(name) == tensor_signature(value)
        }
        for name in same.keys() - self._digests.keys():
            self._digests[name] = tensor_digest(same[name])
        kept = {name: value for name, value in state.items() if name not in same}
        return kept, {
            "tensors": {name: self._digests[name] for name in same},
            "files": self._files,
        }


def completed(
    model: nn.Module, state: Mapping[str, Any], base: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a saved state dict with the entries that it left out, as the task has built them."""
    if base is None:
        return dict(state)
    found = {k: v for k, v in model.state_dict().items() if k in base["tensors"]}
    different = [
        name
        for name, digest in base["tensors"].items()
        if not isinstance(found.get(name), Tensor) or tensor_digest(found[name]) != digest
    ]
    if different:
        more = len(different) - _SHOWN
        listed = ", ".join([*different[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])
        files = ", ".join(f"{path} (sha256 {one[:12]}...)" for path, one in base["files"].items())
        raise CheckpointError(
            f"the checkpoint has only what was trained (checkpoint.parameters: trained), and the "
            f"task now builds another base than the one it was trained on: {listed}; "
            + (f"its files were {files}; " if files else "")
            + "restore the weights from which build_model() took it; a base that is drawn at "
            "random is another one for each seed and needs checkpoint.parameters: all"
        )
    return {**found, **state}


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict that require no gradients."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not is_lazy(value) and not value.requires_grad
    }
