"""Stop a running sweep, or end one trial for good.

What must not live here: requests to a driver (`driver.stop_requests`).
"""

from __future__ import annotations

from collections.abc import Callable

from sweeps.driver import stop_requests
from sweeps.driver.stop_requests import StopResult
from sweeps.results.sweep_status import SweepStatus


def stop(
    view: SweepStatus,
    *,
    trial: int | None = None,
    now: bool = False,
    seconds: float = 120.0,
    say: Callable[[str], None] = lambda _: None,
) -> StopResult:
    """Stop a running sweep, whose trials save and can resume; or end one trial.

    Args:
        view: The sweep.
        trial: End only this trial, which never resumes; the sweep need not run.
        now: The driver exits immediately; nothing is saved first.
        seconds: How long to wait until the sweep or trial ends.
        say: Receives a sentence about what this call waits for.

    Raises:
        NotRunningError: The sweep or trial does not run.
    """
    paths = view.paths
    if trial is None:
        return stop_requests.stop_sweep(paths, now=now, seconds=seconds, say=say)
    if now:
        raise stop_requests.NotRunningError(
            "--now and --trial exclude each other; a trial ends at its next step; "
            "leave one of them out"
        )
    try:
        return stop_requests.stop_trial(paths, trial, seconds=seconds, say=say)
    except stop_requests.NoDriverError:
        from sweeps.operations.end_trial import end_trial  # loads Optuna

        return end_trial(SweepStatus(paths), trial)
