"""What each further rank of a trial does: it trains in lock-step with the first rank.

What must not live here: how its process starts (`local_ranks.py`, `ray_ranks.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.group_joining import GroupPlace
from trainable.logged import closed_on_error, run_log
from trainable.parallel.rank_group import RankGroup
from trainable.precision import find_device


def follow(
    config: TrialConfig,
    directory: Path,
    place: GroupPlace,
    rank: int,
    *,
    searched: Collection[str] = (),
    device: str | None = None,
    threads: int | None = None,
    memory_share: float = 1.0,
    own_address: str | None = None,
    accept_workers: bool = False,
) -> None:
    """Train as one of the further ranks of a trial, until the first rank ends the run.

    Import the task before: the time-out of joining does not cover it.
    """
    target = find_device(device)
    run_log(directory, writes=False)  # the task may log in its constructor
    with (
        closed_on_error(directory),
        RankGroup.join(place, rank, device=target, own_address=own_address) as ranks,
    ):
        run = open_trainer(
            config,
            directory,
            searched=searched,
            device=device,
            threads=threads,
            memory_share=memory_share,
            ranks=ranks,
            accept_workers=accept_workers,
        )
        with run:
            for _ in run.events():
                pass
