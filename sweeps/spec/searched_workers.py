"""The search over `resources.workers`: how many workers (ranks) each trial has.

It is the only searched key that is neither below `train.` nor below `task.`. What must not live
here: how many trials the machine holds (`engine.resources`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sweeps.errors import Issue, LocatedIssue
from sweeps.spec.error_messages import key_path
from sweeps.spec.space import Distribution

if TYPE_CHECKING:
    from sweeps.spec.sections import ResourcesConfig

WORKERS = "resources.workers"
_NEEDS_TWO = (
    ("sharding", "fsdp", "sharding: fsdp cuts a model among several ranks"),
    ("sync_batch_norm", True, "sync_batch_norm: true is for several ranks"),
)
"""Keys of `train` whose value fits only trials of several ranks, and what the value does."""


def config_path(key: str) -> tuple[str, ...]:
    """Return where the configuration of a trial has a searched key."""
    return ("workers",) if key == WORKERS else key_path(key)


def workers_of(resources: ResourcesConfig, params: Mapping[str, Any]) -> int:
    """Return how many workers a trial has: its own number, or that of all trials."""
    return int(params.get(WORKERS, resources.workers))


def searched_workers(
    resources: ResourcesConfig, space: Mapping[str, Distribution]
) -> tuple[int, int] | None:
    """Return the fewest and the most workers of a trial; None if the number is not searched."""
    searched = space.get(WORKERS)
    if searched is None:
        return None
    numbers = [int(value) for _, value in searched.boundary_values()]
    if searched.when:  # a trial may lack the parameter
        numbers.append(resources.workers)
    return min(numbers), max(numbers)


def does_not_fit(number: int, workers: int, capacity: int, remedy: str) -> LocatedIssue:
    """Return the issue of a trial that has more workers than run at once here."""
    return LocatedIssue(
        f"trial {number}",
        WORKERS,
        f"it has {workers} workers, and {capacity} run here at once; a trial starts when all of "
        f"its workers fit; {remedy}",
    )


def workers_faults(
    data: Mapping[str, Any], space: Mapping[str, Distribution | None]
) -> Iterator[Issue]:
    """Refuse a searched number of one worker where the file needs several."""
    searched, train = space.get(WORKERS), data.get("train")
    if searched is None or not isinstance(train, dict):
        return
    for index, number in searched.boundary_values():
        if number != 1:
            continue
        for key, value, does in _NEEDS_TWO:
            if train.get(key) == value and f"train.{key}" not in space:
                at = () if index is None else (index,)
                yield Issue(
                    ("space", WORKERS, searched.name, *at),
                    f"1 is a single rank, and train.{does}; search numbers from 2, or search "
                    f"train.{key}, too, with a condition on {WORKERS}",
                )
