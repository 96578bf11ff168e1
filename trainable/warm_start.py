"""Warm start: a run resumes from the checkpoints of another run.

A run may take all generations of another run as its own; it then continues as that run would
have. Or it takes one generation and keeps a state of its own, as trials of PBT do. That generation
is hard-linked into `inherited/` beside the run's own checkpoints, or copied if the storage has no
links. When the run is opened, the two states are merged, until the run has saved a later state of
its own. What must not live here: the choice of the other run (`sweeps.population` and
`sweeps.reconciliation.finishing`), and torch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from trainable.checkpoint import CheckpointStore, Generation
from trainable.errors import CheckpointError
from trainable.storage.generations import MANIFEST, STATE, Files, RunFiles
from trainable.storage.local import LocalFiles

_DIRECTORY = "inherited"
_POSITION = "position"
_RANKS, _SUMS, _RANDOM = "ranks", "sums", "random"
_NOT_INHERITED = ("progress", _RANDOM, _POSITION, _RANKS)
"""The entries of a state that a run keeps from its own state."""
_BEST = ("best", "since_best")
"""The counters that it keeps of its own even if it has lost later checkpoints."""


def link_checkpoint_from_donor(generation: Generation, run: Path) -> None:
    """Let a run resume from a generation of another run. The run must not be in training.

    A process that is killed here leaves the run with the earlier inherited generation, or with
    both; the one with the later epoch is used.

    Raises:
        OSError: The generation does not exist any more, or the storage fails.
        WriterReplaced: Another process does the same.
    """
    files = _files(run)
    files.open()
    try:
        earlier = files.names()
        files.link(generation.path, files.unused(generation.step), generation.files)
        for name in earlier:
            files.remove(name)
    finally:
        files.close()


def copy_generations(source: Files, target: RunFiles) -> None:
    """Copy the valid generations of a run to another; a second call adds none.

    Neither run may be in training.

    Raises:
        OSError: A generation does not exist any more, or the storage fails.
        StorageError: An object store cannot be reached.
    """
    there = CheckpointStore(Path(), files=source).generations()
    target.open()
    try:
        known = {found.number for found in CheckpointStore(Path(), files=target).generations()}
        for generation in there:
            if generation.number not in known:
                _copy(generation, source, target)
    finally:
        target.close()


def _copy(generation: Generation, source: Files, target: RunFiles) -> None:
    name = target.unused(generation.step)
    if isinstance(target, LocalFiles):
        target.link(generation.path, name, generation.files)
        return
    begun = target.begin(name)
    for file in generation.contents:
        if file != STATE:
            content = source.read(generation.name, file)
            target.add_shard(begun, file, partial(_write_to, content))

    def write(file: BinaryIO) -> bytes:
        file.write(source.read(generation.name, STATE))
        return source.read(generation.name, MANIFEST)

    target.commit(name, write)


def _write_to(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def inherited(run: Path) -> Generation | None:
    """Return the generation that a run inherited last; None if it has none."""
    found = CheckpointStore(run, files=_files(run)).generations()
    return max(found, key=lambda generation: generation.epoch, default=None)


def with_inheritance(
    run: Path, own: dict[str, Any] | None, warnings: list[str]
) -> dict[str, Any] | None:
    """Return the state from which a run resumes: its own, or merged with the inherited one.

    A run that has inherited a state keeps its own counters, best value, random generators, and
    position in the data. Weights, optimizer, schedule and loss scale come from the other run.
    Once the run has saved a later state, it resumes from that.

    Args:
        run: Its directory.
        own: Its newest state; None when it never saved one.
        warnings: Gets a sentence if the inherited state is damaged; then `own` is returned.
    """
    generation = inherited(run)
    if generation is None or _position(own) > (generation.epoch, 0):
        return own
    try:
        state = CheckpointStore(run, files=_files(run)).load(generation)
    except CheckpointError as problem:
        warnings.append(f"the inherited checkpoint is not used: {problem}")
        return own
    if own is None:
        return state
    # The run's own state is older than the inherited one only if newer ones were damaged.
    latest = own if _position(own) == (generation.epoch, 0) else state
    own_best = {key: own["progress"][key] for key in _BEST if key in own["progress"]}
    progress = latest["progress"] | own_best
    learned = {key: value for key, value in state.items() if key not in _NOT_INHERITED}
    place = {key: latest[key] for key in (_POSITION,) if key in latest}  # where the counters are
    ranks = _merged_ranks(own.get(_RANKS, []), state.get(_RANKS, []), latest.get(_RANKS, []))
    return {**own, **learned, **place, **ranks, "progress": progress}


def _merged_ranks(
    own: list[dict[str, Any]], learned: list[dict[str, Any]], latest: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Merge what differs on the further ranks, as the rest of the state is merged."""
    if not own or not len(own) == len(learned) == len(latest):
        return {_RANKS: own} if own else {}
    counted = (_POSITION, _SUMS)
    return {
        _RANKS: [
            {**other, _RANDOM: mine[_RANDOM], **{key: now[key] for key in counted if key in now}}
            for mine, other, now in zip(own, learned, latest, strict=True)
        ]
    }


def _position(state: dict[str, Any] | None) -> tuple[int, int]:
    progress = {} if state is None else state["progress"]
    reports = progress.get("epoch", 0)  # earlier versions reported at each epoch, and only there
    return progress.get("reports", reports), progress.get(
        "since_report", progress.get("window", 0)
    )


def _files(run: Path) -> LocalFiles:
    return LocalFiles(run / _DIRECTORY)
