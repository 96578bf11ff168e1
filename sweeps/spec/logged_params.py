"""The parameters and seeds of a configuration that are recorded in a run.

What must not live here: the configuration itself (`spec`), and recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainable.config import TrialConfig

_SEED_TAGS = {"seed": "gradsweep.seed", "data_seed": "gradsweep.data_seed"}


class RunStart(NamedTuple):
    """What a trial's run receives when the trial starts."""

    params: Mapping[str, object]
    tags: dict[str, str]


def run_start(config: TrialConfig, params: Mapping[str, Any]) -> RunStart:
    """Return a trial's parameters, each under its dotted key, and its seeds as tags.

    The seeds of any two trials differ, so as parameters they would lead each comparison.
    """
    data = config.model_dump(mode="json")
    data.pop("workers", None)  # a resume may change it, and a parameter stays; the runs have a tag
    seeds = {tag: data.pop(key) for key, tag in _SEED_TAGS.items()}
    tags = {tag: str(seed) for tag, seed in seeds.items() if seed is not None}
    return RunStart({**params, **dict(flatten(data))}, tags)


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a nested mapping by dotted key."""
    leaves: list[tuple[str, Any]] = []
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            leaves += flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves
