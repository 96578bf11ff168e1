"""The parameters of a configuration that are recorded in a run.

What must not live here: the configuration itself (`spec`), and recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainable.config import TrialConfig


def trial_parameters(config: TrialConfig, params: Mapping[str, Any]) -> dict[str, object]:
    """Return a trial's searched parameters below `space.`, and its whole configuration."""
    return {**searched(params), **dict(flatten(config.model_dump(mode="json")))}


def searched(params: Mapping[str, Any]) -> dict[str, object]:
    """Return a trial's searched parameters, each below `space.`."""
    return {f"space.{key}": value for key, value in params.items()}


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the leaves of a nested mapping by dotted key."""
    leaves: list[tuple[str, Any]] = []
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            leaves += flatten(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves
