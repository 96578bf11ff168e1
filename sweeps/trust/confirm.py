"""Train a sweep's leaders again under common seeds, until it is known which of them is the best.

What must not live here: running the trials (`driver`), which trials are needed
(`reconcile.confirmation`), and what the result says (`trust.confirmation`).
"""

from __future__ import annotations

from dataclasses import replace

from sweeps.errors import UserError
from sweeps.reconcile.confirmation import (
    LEAST_SEEDS,
    LEAST_TOP,
    ConfirmOptions,
    follow,
    make_request,
)
from sweeps.reconcile.extra_training import ExtraTraining
from sweeps.run.launch import attempt, read_again
from sweeps.run.prepared import RunDisplay, RunOptions
from sweeps.view.outcome import SweepOutcome
from sweeps.view.sweep_view import SweepView

_LEAST_UNTIL = 0.5
_MOST_SEEDS = 100


def confirm(
    view: SweepView,
    display: RunDisplay,
    *,
    top: int | None = None,
    seeds: int | None = None,
    until: float | None = None,
    options: RunOptions,
) -> SweepOutcome | None:
    """Confirm the leaders of a sweep; an interrupted confirmation resumes."""
    check_numbers(top, seeds, until)
    spec, document = read_again(view, say=display.warn)
    before = view.ledger.confirm_request
    asked = ConfirmOptions(top=top, seeds=seeds, until=until)
    # Whether the task takes the seed of its split is known once it is loaded.
    known = replace(asked, split=before is not None and before.split)
    request = make_request(view.paths, spec, view.records, before, known)
    if before is not None:
        found = follow(before, view.records, minimize=view.ledger.minimize)
        same = replace(request, failures_from=before.failures_from) == before
        if same and found.is_decided and not found.failed:
            return None
    with document.attach_locations():
        options = replace(options, extra=ExtraTraining(confirm=asked))
        return attempt(view.paths, spec, display, options, new=False)


def check_numbers(top: int | None, seeds: int | None, until: float | None) -> None:
    """Check the numbers of a request."""
    if top is not None and top < LEAST_TOP:
        raise UserError(
            f"--top {top}: one trial cannot be compared with itself; a confirmation compares "
            f"{LEAST_TOP} or more; write --top {LEAST_TOP}"
        )
    if seeds is not None and seeds < LEAST_SEEDS:
        raise UserError(
            f"--seeds {seeds}: one value has no spread; the noise over seeds is known from "
            f"{LEAST_SEEDS} or more; write --seeds 5"
        )
    if seeds is not None and seeds > _MOST_SEEDS:
        raise UserError(
            f"--seeds {seeds}: so many seeds tell no more than a few dozen; at most {_MOST_SEEDS} "
            "are raced; write --seeds 20"
        )
    if until is not None and not _LEAST_UNTIL <= until < 1:
        raise UserError(
            f"--until {until:g}: it is the probability of being the best at which the race ends, "
            f"from {_LEAST_UNTIL:g} to below 1; write --until 0.95"
        )
