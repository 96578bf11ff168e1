"""Compare the tracking store with a sweep before it is run or resumed.

What must not live here: sending lost runs again (`run.session`, `run.sync`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from sweeps.engine.process_cleanup import untagged_env
from sweeps.paths import SweepPaths
from sweeps.reconcile.store_check import lost_runs
from sweeps.spec.spec import SweepSpec
from sweeps.stores import find_tracker
from sweeps.view.sweep_view import SweepView
from tracking.tracker import StoreUnreadable


def has_lost_runs(view: SweepView, warn: Callable[[str], None], *, offline: bool) -> bool:
    """Whether the store has lost runs of a finished sweep, which a resume then sends again.

    Warns if the store does not answer.
    """
    if offline:
        return False
    find_tracker(view.paths, view.spec).probe(known=True)
    try:
        found = lost_runs(
            view.paths,
            view.spec,
            view.ledger.records(),
            view.ledger.sweep_id,
            untagged_env(),
        )
    except StoreUnreadable as error:
        warn(str(error))
        return False
    return bool(found)


def warn_of_other_sweeps(paths: SweepPaths, spec: SweepSpec, warn: Callable[[str], None]) -> None:
    """Warn that the experiment of a new sweep has runs of other sweeps."""
    tracker = find_tracker(paths, spec)
    with contextlib.suppress(StoreUnreadable):  # the sweep can run without this warning
        if others := tracker.other_sweeps(spec.name):
            ids = ", ".join(f"{one} ({count} runs)" for one, count in others.items())
            warn(
                f"the tracking store has runs of earlier sweeps named '{spec.name}'; the tag "
                f"gradsweep.sweep_id tells sweeps apart: {ids}; {paths.command('ui')} shows only "
                "the runs of this sweep"
            )
