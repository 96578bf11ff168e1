"""Choose the tracker for an address.

A new tracker needs a class in a module of its own, and a line here. What must not live here: what
a tracker does.
"""

from __future__ import annotations

from pathlib import Path

from tracking.mlflow_tracker import MlflowTracker
from tracking.tracker import Tracker

TRACKERS: list[type[Tracker]] = [
    MlflowTracker,
]
"""All trackers. The first that handles an address is chosen, else the last."""


def choose_tracker(uri: str, artifact_root: Path | None = None) -> Tracker:
    """Return the tracker for an address.

    If none handles the address, the last one is returned: its `check_address` raises the reason.

    Args:
        uri: The address.
        artifact_root: The artifact location of a new experiment; None: the service chooses it.
    """
    kind = next((one for one in TRACKERS if one.handles(uri)), TRACKERS[-1])
    return kind(uri, artifact_root)
