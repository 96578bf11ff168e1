"""What a rank does while the first one waits in the making of a group; see `test_rank_groups`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from trainable.group_joining import GroupPlace
from trainable.parallel import collectives
from trainable.parallel.rank_group import RankGroup

MAKING = ("beside", "group_of_model", "leave_default_group")


def end_early(rank: int, place: Any, cases: Sequence[Sequence[tuple[str, Any]]]) -> None:
    """Join one group after the other as its rank 1, and do in each what the case says.

    Args:
        rank: Takes the cases of this process.
        place: Not used: each case has its own.
        cases: Of each process: names and places.
    """
    del place
    for name, where in cases[rank - 1]:
        if name == "exit":
            os._exit(9)
        try:
            with RankGroup.join(GroupPlace(**where), 1) as ranks:
                _act(name, ranks)
        except ValueError:
            continue


def _act(name: str, ranks: RankGroup) -> None:
    way, _, method = name.partition(" ")
    if way == "raise":
        raise ValueError("bad sample 17")
    if way == "exit":
        os._exit(9)
    if way == "within":
        collectives.further_group = _exit
    getattr(ranks, method)()
    ranks.next_report()  # comes to no further operation


def _exit(*_: Any) -> NoReturn:
    os._exit(9)
