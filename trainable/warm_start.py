"""Inheritance: a run goes on with what another one has learned, as a member of a population does.

The other run's generation is linked into `inherited/` beside the run's own checkpoints; no byte of
it is copied where the storage can link. Whoever opens the run puts the two together, until the
run has saved a state of its own that lies beyond. What must not live here: who inherits from whom,
and torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainable.checkpoint import CheckpointStore, Generation
from trainable.errors import CheckpointError
from trainable.storage.local import LocalFiles

_ROOM = "inherited"
_ITS_OWN = ("progress", "random")
"""What of a state stays a run's own, whoever's loop it is."""


def link_checkpoint_from_donor(generation: Generation, run: Path) -> None:
    """Let the run in a directory go on from another one's generation. Nobody may work on it.

    Whoever dies here leaves the run with what it inherited before, or with both; the later epoch
    counts.

    Raises:
        OSError: The generation is gone, or the storage refuses.
        Fenced: Another process does the same.
    """
    files = _files(run)
    files.open()
    try:
        earlier = files.names()
        files.link(generation.path, files.unused(generation.step))
        for name in earlier:
            files.remove(name)
    finally:
        files.close()


def inherited(run: Path) -> Generation | None:
    """Return what the run in a directory inherited last; None: nothing."""
    found = CheckpointStore(run, files=_files(run)).generations()
    return max(found, key=lambda generation: generation.epoch, default=None)


def with_inheritance(
    run: Path, own: dict[str, Any] | None, warnings: list[str]
) -> dict[str, Any] | None:
    """Return the state from which a run goes on: its own, or the inherited one in its own place.

    A run that inherits keeps where it stands, its best value and its random generators; weights,
    optimizer, schedule and loss scale are the other run's. Only what it saved after that is its
    own again.

    Args:
        run: Its directory.
        own: Its newest state; None when it never saved one.
        warnings: Gets a sentence when what it inherited is damaged: it goes on as it was.
    """
    generation = inherited(run)
    if generation is None or _position(own) > (generation.epoch, 0):
        return own
    try:
        state = CheckpointStore(run, files=_files(run)).load(generation)
    except CheckpointError as problem:
        warnings.append(f"what was inherited is not used: {problem}")
        return own
    if own is None:
        return state
    # Older than what it inherits only where newer ones were damaged.
    place = own if _position(own) == (generation.epoch, 0) else state
    progress = place["progress"] | {"best": own["progress"]["best"]}
    learned = {key: value for key, value in state.items() if key not in _ITS_OWN}
    return {**own, **learned, "progress": progress}


def _position(state: dict[str, Any] | None) -> tuple[int, int]:
    progress = {} if state is None else state["progress"]
    return progress.get("epoch", 0), progress.get("window", 0)


def _files(run: Path) -> LocalFiles:
    return LocalFiles(run / _ROOM)
