"""Which trials were evaluated on test data, and what their test values are worth.

A value on test data is unbiased only if nothing was chosen by it. What must not live here: the
evaluation (`trainable.evaluate_test`) and the file with the results (`trainable.store.notes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sweeps.ledger.trials import TrialSummary
from sweeps.view.sweep_view import SweepView
from trainable.store.notes import RecordedTest, latest_tested


def tested_trials(view: SweepView) -> dict[int, RecordedTest]:
    """Return the newest result of each trial that was evaluated on test data, by its number."""
    found = {one.number: latest_tested(view.paths.trial(one.number)) for one in view.records}
    return {number: result for number, result in found.items() if result is not None}


def selection_cautions(view: SweepView, record: TrialSummary, times: int) -> Iterator[str]:
    """Yield why the test value of a trial may be too good, in sentences."""
    front, by = view.ledger.front(), view.spec.objective_description
    others = [number for number in tested_trials(view) if number != record.number]
    if record.search_number not in [one.search_number for one in front]:
        best = f"{_trials([one.number for one in front])} by the {by}" if front else "none yet"
        yield (
            f"trial {record.number} is not the best trial ({best}); to choose a trial by its test "
            "value is selection on the test data, and the chosen value is too optimistic; "
            "report the test value of the trial that validation chose"
        )
    elif others:
        were = "was" if len(others) == 1 else "were"
        yield (
            f"{_trials(others)} of this sweep {were} tested, too; to choose among them by their "
            "test values is selection on the test data"
        )
    if times > 1:
        yield (
            f"this trial was evaluated on test data {times} times; what is changed because of a "
            "test value is chosen by the test data"
        )
    if view.num_left:
        left = f"{view.num_left} trial{'s' if view.num_left > 1 else ''}"
        yield (
            f"{left} of this sweep still have to end; the best trial may change, and "
            "each further test looks at the test data again; test when the sweep is finished"
        )


def _trials(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers))
    return f"trial {shown}" if len(numbers) == 1 else f"trials {shown}"
