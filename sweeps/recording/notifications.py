"""Which events of a sweep are notified, and the JSON that the webhook receives.

Each event has an id that a resumed driver computes again, so that the queue drops repeats. The
recorder calls `Notifier.ended` before it records an end: after a kill in between, a resume records
that end again. What must not live here: delivery (`tracking`), and the address.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from redaction.secrets import redact_clipped, redact_value
from sweeps.formatting import counted, joined
from sweeps.ledger.ranking import front, front_so_far
from sweeps.ledger.trials import TrialRecord, count_trials
from sweeps.paths import PROGRAM, SweepPaths
from sweeps.spec.spec import SweepSpec
from tracking.recorder import Status

if TYPE_CHECKING:  # it imports optuna, which takes half a second
    from sweeps.ledger.ledger import Ledger

Event = Literal["new_best", "trial_failed", "finished", "stopped", "failed"]
_LONGEST_REASON = 1000
"""Characters."""
_COMMANDS: dict[Event, str] = {
    "new_best": "show",
    "trial_failed": "show",
    "finished": "best",
    "stopped": "resume",
    "failed": "trials",
}
_EVENTS: dict[Status, Event] = {
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
    "INTERRUPTED": "stopped",
}
"""The event for each status of the sweep's own run."""


class Notifier:
    """Queues the events of a sweep."""

    def __init__(
        self,
        paths: SweepPaths,
        spec: SweepSpec,
        sweep_id: str,
        attempt: int,
        ledger: Ledger,
        queue: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._paths, self._spec, self._sweep_id = paths, spec, sweep_id
        self._attempt, self._ledger, self._queue = attempt, ledger, queue
        self._minimizes = [mode == "min" for mode in spec.modes]
        self._front = front(ledger.trials(), self._minimizes)

    def ended(self, trial: int | None, status: Status, tags: Mapping[str, str]) -> None:
        """Notify of the end of a trial, or of the sweep (None), as its run receives it."""
        if trial is None:
            self.sweep_ended(status, _reason(tags))
        elif status != "INTERRUPTED":
            self.trial_ended(trial)

    def trial_ended(self, number: int) -> None:
        """Notify that a trial failed, or that it is the best so far; else do nothing."""
        trial = self._ledger.trial(number)
        if trial.state == "failed":
            failures = len(trial.failed_attempts)  # a trial that runs again may fail again
            at = f"{number}" + f"-{failures}" * bool(failures)
            self._add("trial_failed", at, trial, f"trial {number} failed", trial.reason)
            return
        if self._spec.repeats.seeds > 1:  # the configuration has ended, or still has no result
            number = trial.search_number
            trial = self._ledger.trials()[number]
        # Of all trials, only those of the last front can be in the next one.
        before = [one for one in self._front if one.number != number]
        self._front = front([*before, trial], self._minimizes)
        # A trial that is only as good as the best one so far is no news.
        if number not in [one.number for one in self._front] or trial.values in [
            one.values for one in before
        ]:
            return
        # One that still trains may be better.
        unended = [one for one in self._ledger.trials() if not one.finished]
        if number not in [t.number for t in front_so_far([*unended, trial], self._minimizes)]:
            return
        value = ",".join(map(repr, trial.values))
        among = "is the best so far" if len(self._spec.metrics) == 1 else "joins the Pareto front"
        self._add("new_best", f"{number}-{value}", trial, f"trial {number} {among}")

    def sweep_ended(self, status: Status, reason: str | None) -> None:
        """Notify that the sweep finished, stopped or failed."""
        trials, spec = self._ledger.trials(), self._spec
        ended = sum(trial.finished for trial in trials)
        count = count_trials(spec.num_trials, trials, spec.repeats.seeds)
        event = _EVENTS[status]
        best = front_so_far(trials, self._minimizes)
        # A resume that finds nothing to do finishes the sweep again; that is no news.
        retries = sum(len(trial.failed_attempts) for trial in trials)
        at = f"{ended}" + f"-{retries}" * bool(retries)
        at = at if event == "finished" else f"{self._attempt}"
        counts = Counter(trial.state for trial in trials)
        self._add(
            event,
            at,
            best[0] if len(best) == 1 else None,
            f"{event} with {ended} of {counted(count, 'trial')}",
            reason,
            {state: counts[state] for state in ("complete", "pruned", "failed")},
        )

    def _add(
        self,
        event: Event,
        at: str,
        trial: TrialRecord | None,
        sentence: str,
        reason: str | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Queue an event."""
        key = f"{self._sweep_id}-{event}-{at}"
        reason = None if reason is None else redact_clipped(reason, _LONGEST_REASON)
        result = None if trial is None or trial.state == "failed" else trial.result
        params = _safe({} if trial is None else trial.best_params)
        words = [str(trial.number)] if trial and _COMMANDS[event] == "show" else []
        text = f"{self._spec.name}: {sentence}"
        if reason is not None:
            text += f": {reason}"
        if trial is not None and result is not None:
            text += ": " if event == "new_best" else f"; best is trial {trial.number}: "
            text += joined(dict(zip(self._spec.metrics, trial.values, strict=True)))
            text += f" ({joined(params)})" if params else ""
        body = {
            "id": key,
            "event": event,
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "sweep": self._spec.name,
            "sweep_id": self._sweep_id,
            "metric": self._spec.metric,
            "trial": None if trial is None else trial.number,
            "value": result,
            "params": None if trial is None else params,
            "trials": counts,
            "reason": reason,
            "command": self._paths.command(
                _COMMANDS[event], *words, program=PROGRAM, anywhere=True
            ),
            "text": text,
        }
        self._queue(key, body)


def _safe(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters as JSON can hold them, without secrets."""
    return {
        key: value if _is_json(value) else redact_value(key, str(value))
        for key, value in params.items()
    }


def _is_json(value: object) -> bool:
    return value is None or (isinstance(value, bool | int | float) and math.isfinite(value))


def _reason(tags: Mapping[str, str]) -> str | None:
    """Return why a sweep ended, from the tags of its run."""
    if "reason" in tags:
        return tags["reason"]
    stopped_by = tags.get("stopped_by")
    return f"stopped by {stopped_by}" if stopped_by else None
