"""What a tracking store has lost, or holds of others, asked before a sweep is run or resumed.

What must not live here: telling a store again what it lost (`driver.opening`, `commands.sync`).
"""

from __future__ import annotations

import contextlib

from rich.console import Console

from sweeps.commands import messages
from sweeps.config.spec import SweepSpec
from sweeps.engine.process_cleanup import untagged_env
from sweeps.paths import SweepPaths
from sweeps.reconciliation.store_check import lost_runs
from sweeps.results.sweep_status import SweepStatus
from sweeps.tracker import find_tracker
from tracking.stored_runs import StoreUnreadable


def find_loss(view: SweepStatus, err: Console, *, offline: bool) -> bool:
    """Whether the store has lost runs of a sweep that is at its end, so that a resume has them
    told again. A store that does not answer is named.

    Raises:
        TrackingUnusable: The store is damaged.
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
        messages.sentence(err, str(error), style="yellow")
        return False
    return bool(found)


def name_other_sweeps(paths: SweepPaths, spec: SweepSpec, err: Console) -> None:
    """Say which runs lie in the experiment of a new sweep already."""
    tracker = find_tracker(paths, spec)
    with contextlib.suppress(StoreUnreadable):  # it is not what was asked for
        if others := tracker.other_sweeps(spec.name):
            ids = ", ".join(f"{one} ({count} runs)" for one, count in others.items())
            messages.sentence(
                err,
                f"the tracking store has runs of earlier sweeps named '{spec.name}', which are "
                "none of this one's; their tag gradsweep.sweep_id tells them apart: "
                f"{ids}; {paths.command('ui')} shows the runs of this sweep alone",
                style="yellow",
            )
