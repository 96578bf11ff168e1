"""Parameters as people look at them: what of a configuration is recorded beside a run's metrics.

What must not live here: the configuration itself (`spec`), or who records it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainable.config import TrialConfig


def trial_parameters(config: TrialConfig, params: Mapping[str, Any]) -> dict[str, object]:
    """A trial's parameters: as searched below `space.`, and the whole resolved configuration."""
    return {**searched(params), **dict(flatten(config.model_dump(mode="json")))}


def searched(params: Mapping[str, Any]) -> dict[str, object]:
    """A trial's parameters as they were searched."""
    return {f"space.{key}": value for key, value in params.items()}


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of a nested mapping by dotted key."""
    leaves: list[tuple[str, Any]] = []
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            leaves += flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves
