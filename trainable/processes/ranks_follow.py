"""What each further rank of a trial does: it trains in lock-step with the first rank.

What must not live here: how its process starts (`local_ranks.py`, `ray_ranks.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    own_address: str | None = None,
    **options: Any,
) -> None:
    """Train as one of the further ranks of a trial, until the first rank ends the run.

    The options are those of `open_trainer`.
    Import the task before: the time-out of joining does not cover it.
    """
    target = find_device(options.get("device"))
    run_log(directory, writes=False)  # the task may log in its constructor
    with (
        closed_on_error(directory),
        RankGroup.join(place, rank, device=target, own_address=own_address) as ranks,
        open_trainer(config, directory, ranks=ranks, **options) as run,
    ):
        for _ in run.events():
            pass
