"""Compare all that is kept of a sweep with each other: spec, ledger, trials, outbox, local store.

Nothing is changed, and no server is asked. What must not live here: the checks of one trial
(`reconcile.trial_checks`), and repairs.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.errors import LedgerError, RevisionError, SpecError, UserError
from sweeps.ledger.over_seeds import alone
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import SweepPaths, tracking_uri
from sweeps.reconcile.reconcile import UnknownDirectory
from sweeps.reconcile.store_check import Missing, MissingData, stored_rows
from sweeps.reconcile.trial_checks import Contradiction, TrialChecks
from sweeps.run.store_comparison import StoreComparison
from sweeps.spec.revisions import read_revisions, read_spec
from sweeps.stores import OutsideRoot, addresses_outside, check_no_copy, links_outside, tracker_at
from sweeps.view.sweep_view import SweepView, UnknownSweep
from tracking.outbox import SWEEP
from tracking.outbox_file import FILE_NAME as OUTBOX_FILE
from tracking.tracker import StoreUnreadable, choose_runs
from trainable.errors import StorageError
from trainable.store.metrics_file import CurveDamaged, read_logged
from trainable.store.notes import tested_rows

_BATCH_SIZE = 50
_LARGEST = 1.7e308
"""MLflow stores infinity as the largest number."""


@dataclass(frozen=True)
class Verification:
    """What the comparison of a sweep's records has found.

    Attributes:
        contradictions: What is damaged or contradicts something else.
        checked: What was compared, in words.
        notes: What was not compared, and why, in sentences.
    """

    contradictions: list[Contradiction] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "is_sound": not self.contradictions,
            "contradictions": [one._asdict() for one in self.contradictions],
            "checked": self.checked,
            "notes": self.notes,
        }


def verify(paths: SweepPaths, doing: Callable[[str], object] = lambda _: None) -> Verification:
    """Compare all records of a sweep that no driver runs."""
    if not paths.exists():
        raise UnknownSweep(paths.name, paths.root)
    found = Verification()
    read_spec(paths.spec)  # without a spec, nothing else can be understood
    if damage := _database_damage(paths.ledger):
        found.contradictions.append(_damaged_ledger(paths, damage))
    try:
        view = SweepView(paths)
        records = view.ledger.records()
    except LedgerError as error:
        what, _, remedy = str(error).rpartition("; ")
        if not damage:
            found.contradictions.append(Contradiction("ledger", what, remedy, str(paths.ledger)))
        found.notes.append("trials and tracking were not compared: the ledger cannot be read")
        return found
    if view.running:
        raise UserError(
            f"a driver runs sweep '{paths.name}', and its files change; they are compared once "
            f"it has stopped; wait until then, or stop it with: {paths.command('stop')}"
        )
    _check(view, records, found, doing)
    return found


def _check(
    view: SweepView,
    records: list[TrialRecord],
    found: Verification,
    doing: Callable[[str], object],
) -> None:
    paths = view.paths
    if view.damage:
        what, _, remedy = view.damage.rpartition("; ")
        found.contradictions.append(Contradiction("sweep.yaml", what, remedy, str(paths.spec)))
    revisions = _revisions(paths)
    found.checked.append(
        f"{len(revisions)} revision{'s' * (len(revisions) != 1)} of the spec"
        if revisions
        else "the spec"
    )
    for record in records:
        doing(f"comparing trial {record.number} of {len(records)}")
        found.contradictions.extend(TrialChecks(paths, view.spec, revisions, alone(record)).run())
    found.checked.append(f"{len(records)} trials: ledger, configuration, curve and checkpoints")
    doing("comparing the outbox and the tracking store")
    readable = not any(one.where.startswith("trial ") for one in found.contradictions)
    if view.delivered.damage:
        found.notes.append(
            "what a resume would complete was not looked for: the outbox must be right first"
        )
    elif readable:
        found.contradictions.extend(_corrections(view))
    else:
        found.notes.append(
            "what a resume would complete was not looked for: a trial's files must be right first"
        )
    found.contradictions.extend(_outbox(view, found))
    found.contradictions.extend(_outside(view, found))
    if readable:
        found.contradictions.extend(_tracking(view, records, found))
    else:
        found.notes.append(
            "the tracking store was not compared: a trial's files must be right first"
        )


def _revisions(paths: SweepPaths) -> list[Any]:
    try:
        return list(read_revisions(paths.spec))
    except (SpecError, RevisionError, OSError):
        return []


def _damaged_ledger(paths: SweepPaths, damage: str) -> Contradiction:
    what = f"{paths.ledger} is damaged ({damage})"
    return Contradiction("ledger", what, "restore it from a backup", str(paths.ledger))


def _database_damage(file: Path) -> str | None:
    """Return what SQLite finds wrong in a database; None if there is none, or nothing is wrong."""
    if not file.is_file():
        return None
    try:
        address = f"{file.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as db:
            verdict = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
    except sqlite3.Error as error:
        return str(error)
    return None if verdict == "ok" else " ".join(verdict.split())


def _corrections(view: SweepView) -> Iterator[Contradiction]:
    """Yield what a resume would complete, and directories that belong to no trial."""
    try:
        corrections = view.corrections()
    except (CurveDamaged, StorageError) as error:
        yield Contradiction("trials", str(error), "restore the file from a backup")
        return
    for one in corrections:
        if isinstance(one, UnknownDirectory):
            yield Contradiction(
                "trials",
                str(one),
                "move it away",
                str(view.paths.trial(0).parent / one.directory),
            )
        else:
            where, _, what = str(one).rpartition(": ")
            remedy = f"complete it with: {view.paths.command('resume')}"
            yield Contradiction(where or "ledger", what, remedy)


def _outside(view: SweepView, found: Verification) -> Iterator[Contradiction]:
    """Yield what leads out of the root, so that it may belong to another one."""
    for sentence in links_outside(view.paths):
        what, _, remedy = sentence.rpartition("; ")
        yield Contradiction("root", what, remedy)
    tracker = tracker_at(view.spec.tracking.uri, view.paths.root)
    for former in tracker.correct_addresses(dry_run=True):
        found.notes.append(
            f"the root was at {former.parent}: MLflow has addresses of artifacts there, until "
            f"they are corrected by: {view.paths.command('sync')}"
        )
    if addresses := addresses_outside(view.paths, view.spec):
        yield Contradiction(
            "tracking store",
            f"{len(addresses)} addresses of artifacts are outside of {view.paths.root}, such as "
            f"{addresses[0]}",
            f"see what to do with: {view.paths.command('sync')}",
        )
    try:
        check_no_copy(view.paths, view.spec, view.ledger.run_from)
    except OutsideRoot as error:
        what, _, remedy = str(error).rpartition("; ")
        yield Contradiction("root", what, remedy)


def _outbox(view: SweepView, found: Verification) -> Iterator[Contradiction]:
    """Yield what is wrong with the queue of records for the tracking store."""
    file = view.paths.outbox / OUTBOX_FILE
    damage = view.delivered.damage or _database_damage(file)
    if damage:
        remedy = f"move it aside and deliver again with: {view.paths.command('sync')}"
        yield Contradiction("outbox", damage, remedy, str(file))
    found.checked.append("the outbox")
    if view.delivered.refused:
        found.notes.append(
            f"the tracking server has rejected {view.delivered.refused} records for good"
        )
    if view.delivered.pending:
        deliver = view.paths.command("sync")
        found.notes.append(
            f"{view.delivered.pending} records wait for the tracking store, so only its runs and "
            f"their states were compared; deliver them with: {deliver}"
        )


def _tracking(
    view: SweepView, records: list[TrialRecord], found: Verification
) -> Iterator[Contradiction]:
    """Yield what a tracking store on this machine has otherwise than the trials."""
    paths, spec, delivered = view.paths, view.spec, view.delivered
    command = paths.command("sync", "--verify")
    if spec.tracking.uri is not None:
        found.notes.append(
            f"the tracking server was not asked; compare it with the trials with: {command}"
        )
        return
    if delivered.sweep_run_id is None and not delivered.run_ids:
        found.notes.append("nothing was delivered to the tracking store yet")
        return
    file = paths.root / "mlflow.db"
    if damage := _database_damage(file):
        what = f"{tracking_uri(paths.root)} is damaged ({damage})"
        remedy = f"restore it from a backup, or move it away and send all again with: {command}"
        yield Contradiction("tracking store", what, remedy, str(file))
        return
    try:
        comparison = StoreComparison(
            paths, spec, delivered.tracked_sweep_status, tracker_at(None, paths.root)
        )
        runs = comparison.store.runs(comparison.sweep_id)
        counts = Counter(run.trial for run in runs if not run.deleted)
        for trial, count in sorted(counts.items()):
            if count > 1:
                whose = "the sweep" if trial == SWEEP else f"trial {trial}"
                what = f"{whose} has {count} runs, and one is known to the outbox"
                yield Contradiction("tracking store", what, "delete the others in MLflow")
        missing = comparison.missing_runs() if delivered.pending else comparison.all_missing()
        for one in missing:
            yield _missing(one, command)
        yield from _last_values(view, records, comparison)
    except StoreUnreadable as error:
        what, _, remedy = str(error).rpartition("; ")
        yield Contradiction("tracking store", what, remedy, str(file))
        return
    found.checked.append(f"{1 + len(records)} runs in the tracking store")


def _missing(one: MissingData, command: str) -> Contradiction:
    whose = "the sweep's own run" if one.trial is None else f"the run of trial {one.trial}"
    if one.is_gone:
        what = f"{whose} is missing"
    elif one.is_deleted:
        what = f"{whose} is in the trash"
    elif one.has_wrong_status:
        what = f"{whose} has another status than the trial"
    else:
        what = f"{whose} lacks {Missing.of([one])}"
    return Contradiction("tracking store", what, f"send it again with: {command}")


def _last_values(
    view: SweepView, records: list[TrialRecord], comparison: StoreComparison
) -> Iterator[Contradiction]:
    """Yield the metrics whose last value in the store is not the one of the curve."""
    paths, spec = view.paths, view.spec
    every = math.lcm(*comparison.densities)
    runs = choose_runs(comparison.store.runs(comparison.sweep_id), view.delivered.run_ids)
    ended = [one for one in records if one.finished and one.number in runs]
    for first in range(0, len(ended), _BATCH_SIZE):
        batch = ended[first : first + _BATCH_SIZE]
        data = comparison.store.data([runs[one.number].run_id for one in batch])
        for record in batch:
            directory = paths.trial(record.number)
            own = {key for _, row in read_logged(directory) for key in row.metrics}
            last: dict[str, float] = {}
            for row in (*stored_rows(paths, spec, record, every), *tested_rows(directory)):
                last |= row.metrics
            held = data[runs[record.number].run_id].last
            wrong = [
                f"{key} is {held[key]!r}, and {value!r} in the curve"
                for key, value in sorted(last.items())
                if key not in own and key in held and not _is_same(held[key], value)
            ]
            if wrong:
                more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                what = f"the last value of trial {record.number}'s {wrong[0]}{more}"
                remedy = "delete the run in MLflow's trash for good, then send it again with: "
                yield Contradiction(
                    "tracking store", what, remedy + paths.command("sync", "--verify")
                )


def _is_same(stored: float, value: float) -> bool:
    """Return whether a store has a value, which it may keep as the largest number."""
    if math.isnan(value) or math.isnan(stored):
        return math.isnan(value) and math.isnan(stored)
    if math.isinf(value):
        return abs(stored) >= _LARGEST and (stored > 0) is (value > 0)
    return stored == value
