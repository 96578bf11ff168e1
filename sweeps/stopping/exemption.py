"""The key `early_stopping.exempt`: a random share of trials that no rule stops.

The trials that a rule lets live are the ones that looked good early. Only trials that were spared
at random show how often the rule stops a trial that would have become good. What must not live
here: where a rule would have stopped such a trial (`schedulers`).
"""

from __future__ import annotations

from trainable.seeding import derive_seed

_SEEDS = 2.0**63


def is_exempt(share: float, seed: int, place: int) -> bool:
    """Return whether a new trial is exempt; the same after each resume."""
    return derive_seed(seed, "exempt", place) < share * _SEEDS
