"""How a trial is run: what its parameters do not fix, and what is recorded of its configuration.

Workers, `sweep train NAME TRIAL` and `sweep audit --test` use these functions, so that a trial
trained again is the same run. What must not live here: the configuration by parameters
(`spec.SweepSpec.trial_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from trainable import rank_waits
from trainable.config import TrialConfig


class TrialSeed(NamedTuple):
    """What the seed of a trial is derived from, besides the seed of the sweep.

    Configurations that are trained again share the same few seeds, so that they can be compared in
    pairs.
    """

    purpose: str
    """`trial` for a seed of its own, else the role of the trials that have the common seed."""
    number: int
    """The trial's number, or the position of a common seed, from 0."""
    split: bool = False
    """Whether the common seed also decides the task's argument `split_seed`."""

    @property
    def decides_data(self) -> bool:
        """Whether the common seed also decides the order of the data."""
        return self.purpose not in ("trial", "repeat")


def num_threads(cpu: float) -> int:
    """Return the number of CPU threads of a trial."""
    return max(1, int(cpu))


def rank_timeout(step_timeout: float | Literal["off"] | None) -> float:
    """Return for how many seconds a rank of a trial waits for the others in a step."""
    if step_timeout is None:
        return rank_waits.STEP
    return rank_waits.WITHOUT_END if step_timeout == "off" else step_timeout


def with_accumulation(config: TrialConfig, stored: int | None) -> TrialConfig:
    """Return the configuration with smaller micro-batches, where the trial ran out of memory."""
    train = config.train
    if stored is None or stored <= train.accumulation or train.batch_size % stored:
        return config
    train = train.model_copy(update={"accumulation": stored})
    return config.model_copy(update={"train": train})


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
