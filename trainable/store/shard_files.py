"""Write and read the shards of a checkpoint: the file of each rank with its parts of a state.

Each rank writes and syncs its own shard, and tells the first rank its length and sha256. The first
rank commits the checkpoint when all have: its manifest and its `state.pt` list the shards, so the
digest of `state.pt` stands for all of them. A shard is parsed only after its digest is verified.
What must not live here: how a state is taken apart (`sharded_state.py`), and when a run saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

from redaction.secrets import redact
from trainable.errors import CheckpointError, StorageError
from trainable.failures import as_system_error, as_system_note
from trainable.store.generations import STATE, Files, remedy, shard_name
from trainable.store.manifest import Generation, Shard, read_verified
from trainable.store.objects import files_at
from trainable.store.sharded_state import SHARDS, Parts, joined
from trainable.store.snapshot import parse_state, write_state

if TYPE_CHECKING:
    from trainable.ranks import Ranks


class ShardGroup:
    """The ranks of a trial when they save a sharded state; every rank calls its methods."""

    def __init__(self, files: Files | None, ranks: Ranks) -> None:
        self._files, self._ranks = files, ranks
        # The writing threads meet in a group of their own, while the steps go on in the other.
        self._beside = ranks.beside()

    def begin(self, name: Callable[[], str]) -> tuple[str, str]:
        """Return the name of a new checkpoint, and where its shards are written."""
        begun = None
        if self._files is not None:
            try:
                found = name()
                begun = [found, self._files.begin(found)]
            except OSError as problem:
                raise StorageError(
                    f"a checkpoint could not be begun at {self._files.address('')}: "
                    f"{redact(str(problem))}; earlier checkpoints are untouched; "
                    f"{remedy(problem, self._files.remedy)}, then resume"
                ) from problem
        agreed, place = self._ranks.agree(begun)
        return agreed, place

    def write(self, begun: str, parts: Parts) -> tuple[Shard, ...]:
        """Write this rank's shard, and return those of all ranks once all are durable."""
        written: list[Shard] = []

        def write(file: BinaryIO) -> None:
            written.append(Shard(*write_state(parts, file)))

        problem: OSError | None = None
        files: Files = self._files or files_at(begun)
        try:
            files.add_shard(begun, shard_name(self._ranks.rank), write)
        except OSError as error:
            problem = error
        notes = self._beside.gather_plain([written, as_system_note(problem)])
        if problem is not None:
            raise problem
        for rank, (_, note) in enumerate(notes):
            if failed := as_system_error(note, rank):
                raise failed
        return tuple(Shard(*shard) for (shard, *_), _ in notes)


def read_whole(
    files: Files, generation: Generation, content: bytes, *, in_shards: bool = False
) -> dict[str, Any]:
    """Return a generation's state, put together; or with where its shards are, for `Shards`."""
    state = parse_state(content, f"{generation.address}/{STATE}")
    if not generation.shards:
        return state
    state[SHARDS] = {"address": generation.address, "files": state[SHARDS]}
    return state if in_shards else joined(state, Shards(state, files).all())


class Shards:
    """The shards of a state that `read_whole` returned; any process may read them."""

    def __init__(self, state: dict[str, Any], files: Files | None = None) -> None:
        self._address: str = state[SHARDS]["address"]
        self._listed = [Shard(*shard) for shard in state[SHARDS]["files"]]
        self._files = files or files_at(self._address.rpartition("/")[0])

    def __len__(self) -> int:
        return len(self._listed)

    def all(self) -> list[Parts]:
        """Return the parts of all ranks."""
        return [self[rank] for rank in range(len(self))]

    def __getitem__(self, rank: int) -> Parts:
        name, expected = shard_name(rank), self._listed[rank].sha256
        where = self._address.rpartition("/")[2]
        content = read_verified(self._files, where, name, expected)
        if content is None:
            raise CheckpointError(
                f"{self._address}/{name} is missing, or does not have the sha256 {expected}; "
                "choose another checkpoint"
            )
        parts: Parts = parse_state(content, f"{self._address}/{name}")
        return parts
