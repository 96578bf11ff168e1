"""Evaluate one trial's best checkpoint on test data, and record the values.

First beside the trial, then with its run. A value is unbiased only if nothing was chosen by it;
the result says where that is in doubt. What must not live here: the evaluation
(`trainable.evaluate_test`), and the file with the results (`trainable.store.notes`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

from sweeps.engine.process_cleanup import end_orphans
from sweeps.engine.task_check import check_names
from sweeps.errors import UserError
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.recording.trial_config import load_trial_config
from sweeps.run.sync import queue_interruptions
from sweeps.run.task_code import as_a_trial, changed_code, enter_code_directory
from sweeps.spec.trial_run import num_threads, with_accumulation
from sweeps.stores import (
    best_generation,
    check_below_root,
    check_kept,
    check_no_copy,
    find_tracker,
    reach_tracking,
)
from sweeps.sweep_lock import SweepLock
from sweeps.view.sweep_view import NoBest, SweepView
from tracking.outbox_status import read_outbox
from tracking.recorder import set_target, sync
from tracking.tracker import StoreUnreadable, TrackingUnusable
from trainable.config import TrialConfig
from trainable.store.manifest import Generation
from trainable.store.notes import (
    RecordedTest,
    append_tested,
    latest_tested,
    read_tested,
    tested_rows,
)

_PATIENCE = 30.0
"""Seconds without a delivery after which the records are left to `sweep sync`."""


@dataclass(frozen=True)
class TrialTest:
    """The values of one trial on test data, the newest last."""

    record: TrialSummary
    results: list[RecordedTest]
    is_new: bool
    cautions: list[str]
    pending: int = 0
    undelivered: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        newest = self.results[-1]
        return {
            "trial": self.record.number,
            "value": self.record.result,
            **newest._asdict(),
            "is_new": self.is_new,
            "num_evaluations": len(self.results),
            "cautions": self.cautions,
            "pending": self.pending,
        }


def evaluate_trial(
    view: SweepView,
    number: int | None,
    *,
    again: bool,
    accept_changes: bool,
    offline: bool,
    doing: Callable[[str], object] = lambda _: None,
) -> TrialTest:
    """Evaluate a trial's best checkpoint on test data, unless that was done before."""
    record = view.select_weights(number)
    paths, directory = view.paths, view.paths.trial(record.number)
    if not record.finished:
        remedy = "wait until it has ended" if view.running else view.resume_hint()
        raise UserError(
            f"trial {record.number} has not ended, and its best checkpoint may change; only a "
            f"trial that has ended is tested; {remedy}"
        )
    before = read_tested(directory)
    if before and not again and not _lacks(paths, record.number):
        return _outcome(view, record, is_new=False)
    check_kept(paths, view.spec, view.spec)
    check_no_copy(paths, view.spec, view.ledger.run_from)
    check_below_root(paths, view.spec)
    enter_code_directory(view, doing)
    check_names(view.spec)
    if not offline:
        reach_tracking(paths, view.spec)  # refused before the evaluation
    with ExitStack() as stack:
        lock = SweepLock(paths.lock)
        lock.acquire()
        stack.callback(lock.release)
        if lock.previous is not None:
            end_orphans(lock.previous.token)
        before = read_tested(directory)  # another process may have tested it meanwhile
        is_new = again or not before
        changed: list[str] = []
        if is_new:
            generation = best_generation(paths, view.spec, record)
            if isinstance(generation, str):
                raise NoBest(generation)
            doing("evaluating on the test data")
            found = _evaluate(view, record, generation, accept_changes=accept_changes)
            # Refuses nothing: adding test data changes a file, and model and samples were
            # compared already.
            if files := changed_code(view):
                changed.append(
                    f"the task's code has changed since the sweep ran: {', '.join(files)}; the "
                    "test value is that of the present code"
                )
            lock.check()
            step = max([found.step, *(one.step + 1 for one in before)])
            append_tested(directory, found._replace(step=step))
        doing("delivering to the tracking store")
        undelivered = _deliver(paths, view, offline=offline)
    done = _outcome(SweepView(paths), record, is_new=is_new)
    return replace(done, cautions=[*changed, *done.cautions], undelivered=undelivered)


def _outcome(view: SweepView, record: TrialSummary, *, is_new: bool) -> TrialTest:
    results = read_tested(view.paths.trial(record.number))
    cautions = list(selection_cautions(view, record, len(results)))
    return TrialTest(record, results, is_new, cautions, view.delivered.pending)


def _lacks(paths: SweepPaths, number: int) -> bool:
    """Return whether values were recorded beside the trial, and not queued for its run."""
    return read_outbox(paths.outbox).lacks(number, tested_rows(paths.trial(number)))


def _evaluate(
    view: SweepView, record: TrialSummary, generation: Generation, *, accept_changes: bool
) -> RecordedTest:
    spec = view.spec
    config = TrialConfig.model_validate(load_trial_config(view.paths, spec, record))
    with ExitStack() as stack:
        stack.enter_context(as_a_trial(spec))
        from trainable.evaluate_test import evaluate_test

        # A task may print, and standard output is for the result.
        stack.enter_context(redirect_stdout(sys.stderr))
        return evaluate_test(
            with_accumulation(config, record.accumulation),
            generation,
            built=None if accept_changes else view.paths.trial(record.number),
            device="cpu" if spec.resources.gpu == 0 else None,
            threads=num_threads(spec.resources.cpu),
        )


def _deliver(paths: SweepPaths, view: SweepView, *, offline: bool) -> str | None:
    """Queue what tracking lacks and deliver it; return why the server cannot be used, if so.

    The caller holds the sweep's lock.
    """
    spec, fault = view.spec, None
    tracker = None if offline else find_tracker(paths, spec)
    if tracker is not None:
        try:
            tracker.probe(known=spec.tracking.uri is None)
            set_target(paths.outbox, tracker)
        except (TrackingUnusable, StoreUnreadable) as error:
            tracker, fault = None, str(error)
    queue_interruptions(paths, spec)  # the values on test data are among what tracking lacks
    if tracker is not None:
        place, sweep_id = (tracker.uri, tracker.artifact_root), view.ledger.sweep_id
        sync(*place, spec.name, sweep_id, paths.outbox, patience=_PATIENCE)
    return fault


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
