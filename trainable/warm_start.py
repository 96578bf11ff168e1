"""Warm start: a run resumes from the checkpoints of another run.

A run may take all generations of another run as its own, and continues as that run would have. Or
it takes one generation and keeps a state of its own, as trials of PBT do. That generation is
hard-linked into `inherited/` beside the run's own checkpoints, or copied if the storage has no
links. When the run is opened, the two states are merged, until the run has saved a later state of
its own. What must not live here: the choice of the other run (`sweeps.search.pbt_exploit`,
`sweeps.reconcile.finishing`), and torch.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from trainable.checkpoint import CheckpointStore, Generation, check_owner
from trainable.config import TrialConfig
from trainable.errors import CheckpointError
from trainable.store.generations import MANIFEST, STATE, Files, RunFiles
from trainable.store.local import LocalFiles
from trainable.store.objects import files_at

_DIRECTORY = "inherited"
_POSITION = "position"
_RANKS, _SUMS, _LOOP = "ranks", "sums", "loop"
_EPOCH_START = "epoch_start"
_NOT_INHERITED = ("progress", "random", _POSITION, _EPOCH_START, _RANKS, _SUMS)
"""The entries of a state that a run keeps from its own state."""
_COUNTED = (_POSITION, _EPOCH_START, _SUMS)
"""Those that belong to its counters."""
_TAKEN_BY_NEW = ("objects", "task", _POSITION, _EPOCH_START)
"""What a rank that a state has nothing of takes from the first one."""
_BEST = ("best", "since_best")
"""The counters that it keeps of its own even if it has lost later checkpoints."""


def link_checkpoint_from_donor(generation: Generation, run: Path) -> None:
    """Let a run resume from a generation of another run. The run must not be in training.

    A process that is killed here leaves the run with the earlier inherited generation, or with
    both; the one with the later epoch is used.
    """
    check_owner(generation.address)
    files = _files(run)
    files.open()
    try:
        earlier = files.names()
        files.link(generation.path, files.unused(generation.step), generation.files)
        for name in earlier:
            files.remove(name)
    finally:
        files.close()


def copy_generations(source: Files, target: RunFiles, up_to: int | None = None) -> None:
    """Copy the valid generations of a run to another; a second call adds none.

    Neither run may be in training.

    Args:
        source: The generations of the other run.
        target: Those of this run.
        up_to: The number of the last generation that is copied; None: all are.
    """
    check_owner(source.address(""))
    there = CheckpointStore(Path(), files=source).generations()
    target.open()
    try:
        known = {found.number for found in CheckpointStore(Path(), files=target).generations()}
        for generation in there:
            if generation.number not in known and (up_to is None or generation.number <= up_to):
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

    The run keeps its own counters, best value, random generators, and position in the data.
    Weights, optimizer, schedule and loss scale come from the other run. So does all that a custom
    loop yields. Each further rank takes what it had there; where the other run had fewer, the rest
    take what a new rank takes.
    """
    generation = inherited(run)
    if generation is None or _position(own) > (generation.epoch, 0):
        return own
    check_owner(generation.address)
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
    of_ranks = []
    for rank in range(len(own.get(_RANKS, []))):
        mine, other, now = (_part(one, rank) for one in (own, state, latest))
        of_ranks.append(other if _LOOP in own else _merged(mine, other, now))
    further = {_RANKS: of_ranks} if of_ranks else {}
    return {**_merged(own, state, latest), **further, "progress": progress}


def open_store(
    config: TrialConfig,
    directory: Path,
    files: RunFiles,
    restore: Path | str | None,
    *,
    in_shards: bool = False,
) -> tuple[CheckpointStore, dict[str, Any] | None]:
    """Open a run's checkpoints for writing; return them and the state to start from."""
    store = CheckpointStore(
        directory, config.checkpoint, metric=config.metrics[0], mode=config.modes[0], files=files
    )
    with store.closed_on_error():
        if restore is None:
            own = store.resume(in_shards=in_shards)
            return store, with_inheritance(directory, own, store.set_aside)
        check_owner(str(restore))
        return store, CheckpointStore(directory, files=files_at(str(restore))).load(restore)


def _merged(
    own: dict[str, Any], learned: dict[str, Any], latest: dict[str, Any]
) -> dict[str, Any]:
    """Return a state, or a further rank's part of one, with what another run has learned."""
    taken = {key: value for key, value in learned.items() if key not in _NOT_INHERITED}
    return {**own, **taken, **{key: latest[key] for key in _COUNTED if key in latest}}


def _part(state: dict[str, Any], rank: int) -> Any:
    """Return what a state has of a further rank; else what a new rank takes.

    Of a custom loop, which yields these parts, that is nothing, and else what the first rank has.
    """
    of_ranks = state.get(_RANKS, [])
    if rank < len(of_ranks):
        return of_ranks[rank]
    if _LOOP in state:
        return None
    return {_SUMS: {}, **{key: state[key] for key in _TAKEN_BY_NEW if key in state}}


def _position(state: dict[str, Any] | None) -> tuple[int, int]:
    progress = {} if state is None else state["progress"]
    # a custom loop counts epochs alone, and reports at each
    return progress.get("reports", progress.get("epoch", 0)), progress.get("since_report", 0)


def _files(run: Path) -> LocalFiles:
    return LocalFiles(run / _DIRECTORY)
