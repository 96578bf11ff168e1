"""Compare all that is kept of a sweep with each other: spec, ledger, trials, outbox, local store.

Nothing is changed, and no server is asked. Of each trial: its record in the ledger, its curve,
its checkpoints and its other files. What must not live here: repairs (`reconcile`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sweeps.errors import LedgerError, RevisionError, SpecError, UserError
from sweeps.formatting import counted
from sweeps.ledger.over_seeds import alone
from sweeps.ledger.ranking import value_of
from sweeps.ledger.sqlite import database_damage
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import TRIAL_CONFIG, SweepPaths, tracking_uri
from sweeps.reconcile.reconcile import UnknownDirectory
from sweeps.recording.trial_config import read_config
from sweeps.run.store_comparison import Missing, MissingData, StoreComparison, stored_rows
from sweeps.spec.revisions import changes, read_revisions, read_spec
from sweeps.spec.spec import SweepSpec
from sweeps.stores import (
    OutsideRoot,
    addresses_outside,
    best_generation,
    check_no_copy,
    links_outside,
    tracker_at,
    trial_files,
)
from sweeps.view.sweep_view import SweepView, UnknownSweep
from tracking.outbox import SWEEP
from tracking.outbox_file import FILE_NAME as OUTBOX_FILE
from tracking.tracker import StoreUnreadable, choose_runs
from trainable.errors import StorageError
from trainable.store.manifest import Generation, describe_damage, read_manifest, read_state
from trainable.store.metrics_file import (
    FILE_NAME,
    LOGGED,
    NOTED,
    RESUMED,
    CurveDamaged,
    Row,
    read_logged,
    read_resumptions,
    read_rows,
)
from trainable.store.notes import EARLIER, TESTED, read_earlier, read_tested, tested_rows
from trainable.store.regular_files import LARGEST_TEXT, read_regular
from trainable.user_code.fingerprint import BUILT

_BATCH_SIZE = 50
_LARGEST = 1.7e308
"""MLflow stores infinity as the largest number."""


@dataclass(frozen=True)
class Verification:
    """What was compared, what contradicts, and what was not compared and why."""

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
    if damage := database_damage(paths.ledger):
        found.contradictions.append(_damaged_ledger(paths, damage))
    try:
        view = SweepView(paths)
        records = view.ledger.records()
    except LedgerError as error:
        if not damage:
            found.contradictions.append(Contradiction.of("ledger", error, paths.ledger))
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
        found.contradictions.append(Contradiction.of("sweep.yaml", view.damage, paths.spec))
    revisions = _revisions(paths)
    found.checked.append(
        f"{counted(len(revisions), 'revision')} of the spec" if revisions else "the spec"
    )
    for record in records:
        doing(f"comparing trial {record.number} of {len(records)}")
        found.contradictions.extend(TrialChecks(paths, view.spec, revisions, alone(record)).run())
    found.checked.append(
        f"{counted(len(records), 'trial')}: ledger, configuration, curve and checkpoints"
    )
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
        yield Contradiction.of("root", sentence)
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
        yield Contradiction.of("root", error)


def _outbox(view: SweepView, found: Verification) -> Iterator[Contradiction]:
    """Yield what is wrong with the queue of records for the tracking store."""
    file = view.paths.outbox / OUTBOX_FILE
    damage = view.delivered.damage or database_damage(file)
    if damage:
        remedy = f"move it aside and deliver again with: {view.paths.command('sync')}"
        yield Contradiction("outbox", damage, remedy, str(file))
    found.checked.append("the outbox")
    if view.delivered.refused:
        found.notes.append(
            "rejected by the tracking server for good: "
            f"{counted(view.delivered.refused, 'record')}"
        )
    if view.delivered.pending:
        deliver = view.paths.command("sync")
        found.notes.append(
            f"waiting for the tracking store: {counted(view.delivered.pending, 'record')}, so "
            f"only its runs and their states were compared; deliver with: {deliver}"
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
    if damage := database_damage(file):
        what = f"{tracking_uri(paths.root)} is damaged ({damage})"
        remedy = f"restore it from a backup, or move it away and send all again with: {command}"
        yield Contradiction("tracking store", what, remedy, str(file))
        return
    try:
        comparison = StoreComparison(paths, spec, tracker_at(None, paths.root))
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
        yield Contradiction.of("tracking store", error, file)
        return
    found.checked.append(f"{counted(1 + len(records), 'run')} in the tracking store")


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
                if key not in own and key in held and not _holds_value(held[key], value)
            ]
            if wrong:
                more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                what = f"the last value of trial {record.number}'s {wrong[0]}{more}"
                remedy = "delete the run in MLflow's trash for good, then send it again with: "
                yield Contradiction(
                    "tracking store", what, remedy + paths.command("sync", "--verify")
                )


def _holds_value(stored: float, value: float) -> bool:
    """Return whether a store has a value, which it may keep as the largest number."""
    if math.isnan(value) or math.isnan(stored):
        return math.isnan(value) and math.isnan(stored)
    if math.isinf(value):
        return abs(stored) >= _LARGEST and (stored > 0) is (value > 0)
    return stored == value


_BACKUP = "restore it from a backup"
_UNUSED = (
    "a resume sets it aside and uses an earlier checkpoint; restore it from a backup to keep it"
)
_FROM_CURVE = "restore the ledger or the curve from a backup; the trial itself wrote the curve"
T = TypeVar("T")


@dataclass(frozen=True)
class TrialChecks:
    """The checks of one trial, whose configuration was that of one of the spec's revisions."""

    paths: SweepPaths
    spec: SweepSpec
    revisions: Sequence[SweepSpec]
    record: TrialRecord

    def run(self) -> Iterator[Contradiction]:
        """Yield what is damaged or contradicts something else."""
        yield from self._config()
        rows = yield from self._readable(FILE_NAME, read_rows)
        if rows is not None:
            yield from self._curve(rows)
            yield from self._ledger(rows)
        yield from self._checkpoints(rows)
        yield from self._others(rows)

    @property
    def _directory(self) -> Path:
        return self.paths.trial(self.record.number)

    def _wrong(self, what: str, remedy: str, file: Path | str | None = None) -> Contradiction:
        named = str(self._directory / file) if file is not None else None
        return Contradiction(f"trial {self.record.number}", what, remedy, named)

    def _readable(
        self, name: str, read: Callable[[Path], T]
    ) -> Generator[Contradiction, None, T | None]:
        """Read a file of the trial; yield why it cannot be read, and return None then."""
        try:
            return read(self._directory)
        except ValueError as error:
            what, _, remedy = str(error).rpartition("; ")
            yield self._wrong(what or str(error), remedy if what else _BACKUP, name)
        except OSError as error:
            yield self._wrong(f"{name} cannot be read ({error.strerror})", _BACKUP, name)
        return None

    def _config(self) -> Iterator[Contradiction]:
        """Check that the configuration is the one of the trial's seed and parameters."""
        record, file = self.record, self._directory / TRIAL_CONFIG
        if not file.exists():
            if record.attempts:
                yield self._wrong(f"{file} is missing", _BACKUP, TRIAL_CONFIG)
            return
        try:
            config = read_config(file)
        except (OSError, ValueError) as error:
            line = " ".join(str(error).split())
            yield self._wrong(f"{file} cannot be read ({line})", _BACKUP, TRIAL_CONFIG)
            return
        if record.lineage:  # a population changes parameters while it trains
            return
        least: dict[str, tuple[str, str]] | None = None
        for spec in self.revisions:
            try:
                found = changes(config, spec.trial_config(record.seed, record.params))
            except SpecError:  # that revision has another space
                continue
            if least is None or len(found) < len(least):
                least = found
        if least:
            keys = ", ".join(
                f"{key} is {was}, not {should}" for key, (was, should) in least.items()
            )
            what = f"{file} is not the configuration of the ledger's parameters and seed: {keys}"
            yield self._wrong(what, _BACKUP, TRIAL_CONFIG)

    def _curve(self, rows: Sequence[Row]) -> Iterator[Contradiction]:
        """Check that the steps and the reports of the curve ascend."""
        file = self._directory / FILE_NAME
        # Each step has a row; a loop of one's own counts reports, and a population copies states.
        is_gapless = (self._directory / BUILT).exists() and not self.record.lineage
        for one, other in itertools.pairwise((0, *(row.step for row in rows))):
            if other < one or (is_gapless and other > one + 1):
                what = f"{file} has step {other} after step {one}"
                yield self._wrong(what, _BACKUP, FILE_NAME)
                break
        numbers = [number for number, _ in self._reports(rows)]
        if numbers != sorted(set(numbers)):
            what = f"{file} has its reports in the order {numbers}"
            yield self._wrong(what, _BACKUP, FILE_NAME)
        # A killed worker may leave part of a line; the next one removes it.
        complete = self.record.state == "complete" and file.exists()
        if complete and file.read_bytes()[-1:] not in (b"", b"\n"):
            yield self._wrong(f"{file} ends within a line", _BACKUP, FILE_NAME)

    def _reports(self, rows: Sequence[Row]) -> list[tuple[int, Row]]:
        word, wanted = self.spec.budget.report_word, {*self.spec.metrics}
        return [
            (int(row.metrics[word]), row) for row in rows if row.metrics.keys() >= {word, *wanted}
        ]

    def _ledger(self, rows: Sequence[Row]) -> Iterator[Contradiction]:
        """Check that the ledger has the reports of the curve, and the value that follows."""
        record, word, metric = self.record, self.spec.budget.report_word, self.spec.metrics[0]
        saved = dict(self._reports(rows))
        both = sorted(record.reports.keys() & saved.keys())
        for number in both:
            reported, kept = record.reports[number], saved[number].metrics[metric]
            if not _is_same(reported, kept):
                what = (
                    f"{metric} of {word} {number} is {reported!r} in the ledger, {kept!r} in the "
                    "curve"
                )
                yield self._wrong(what, self._remedy(saved[number].step), FILE_NAME)
        if record.state == "complete":
            yield from self._lacks(saved.keys() - record.reports.keys(), "the ledger", "the curve")
            yield from self._lacks(record.reports.keys() - saved.keys(), "the curve", "the ledger")
            if not record.reports:
                yield self._wrong("it is complete and has no report", _FROM_CURVE)
        if record.finished and record.reports:
            yield from self._last_report(saved)
        if len(self.spec.metrics) == 1 and record.finished:
            reports = {number: (value,) for number, value in record.reports.items()}
            minimize = self.spec.modes[0] == "min"
            found = value_of(reports, minimize=minimize, select=record.select) or (None,)
            if found[0] != record.value:
                what = f"its value is {record.value!r}, and its reports give {found[0]!r}"
                yield self._wrong(what, _FROM_CURVE)

    def _last_report(self, saved: dict[int, Row]) -> Iterator[Contradiction]:
        """Check that the ledger's last report is the one that it says."""
        record, word = self.record, self.spec.budget.report_word
        last = max(record.reports)
        if record.epoch != last:
            what = (
                f"its last {word} is {record.epoch} in the ledger, and its last report is {last}"
            )
            yield self._wrong(what, _FROM_CURVE)
        elif last in saved and saved[last].step != record.step:
            what = (
                f"{word} {last} ends at step {record.step} in the ledger, and at step "
                f"{saved[last].step} in the curve"
            )
            yield self._wrong(what, _FROM_CURVE, FILE_NAME)

    def _lacks(self, numbers: Collection[int], where: str, there: str) -> Iterator[Contradiction]:
        if numbers:
            word, named = self.spec.budget.report_word, ", ".join(map(str, sorted(numbers)))
            what = f"{where} lacks the reports of {word} {named}, which {there} has"
            yield self._wrong(what, _FROM_CURVE, FILE_NAME)

    def _remedy(self, step: int) -> str:
        """Return what to do about a report with two values."""
        try:
            resumed = [at for at in read_resumptions(self._directory) if at < step]
        except CurveDamaged:
            resumed = []
        if not resumed:
            return _FROM_CURVE
        return (
            f"the trial resumed from step {resumed[-1]} and may have trained this report twice; "
            "if its training is not deterministic, the ledger has the first of the two"
        )

    def _checkpoints(self, rows: Sequence[Row] | None) -> Iterator[Contradiction]:
        """Check the digests of all checkpoints, and that their values are those of the curve."""
        files = trial_files(self.paths, self.spec, self.record.number)
        sound: list[Generation] = []
        try:
            for name in files.names():
                found = read_manifest(files, name)
                if isinstance(found, str) or read_state(files, found) is None:
                    what = f"checkpoint {name} is damaged: {describe_damage(files, name)}"
                    yield self._wrong(what, _UNUSED, files.address(name))
                else:
                    sound.append(found)
        except StorageError as error:
            yield self._wrong(str(error), "try again when it answers", files.address(""))
            return
        by_step = {row.step: row.metrics for row in rows or ()}
        for one in sound if rows is not None else ():
            value = by_step.get(one.step, {}).get(one.metric)
            if one.value is not None and (value is None or not _is_same(one.value, value)):
                what = (
                    f"checkpoint {one.name} says that {one.metric} was {one.value!r}, and the "
                    f"curve has {'no value' if value is None else repr(value)} at step {one.step}"
                )
                yield self._wrong(what, _BACKUP, one.address)
        numbers = [one.number for one in sound]
        if len(set(numbers)) < len(numbers):
            names = ", ".join(one.name for one in sorted(sound, key=lambda one: one.number))
            yield self._wrong(f"two of its checkpoints have one number: {names}", _BACKUP)
        yield from self._best_checkpoint()

    def _best_checkpoint(self) -> Iterator[Contradiction]:
        """Check that there is a checkpoint of the value of a trial that saves checkpoints."""
        record = self.record
        saves = (self._directory / BUILT).exists()  # a loop of one's own may yield no state
        if saves and record.has_result and record.value is not None:
            found = best_generation(self.paths, self.spec, record)
            if isinstance(found, str):
                again = self.paths.command(
                    "audit", str(record.number), "--reproduce", "--dir", "DIR"
                )
                yield self._wrong(found, f"{_BACKUP}, or train it again with: {again}")

    def _others(self, rows: Sequence[Row] | None) -> Iterator[Contradiction]:
        """Check that the smaller files can be read."""
        resumed = yield from self._readable(RESUMED, read_resumptions)
        if resumed and (resumed != sorted(set(resumed)) or (rows and resumed[-1] > rows[-1].step)):
            what = f"{RESUMED} has the steps {resumed}, which do not ascend or lie after its curve"
            yield self._wrong(what, _BACKUP, RESUMED)
        yield from self._readable(LOGGED, read_logged)
        yield from self._readable(TESTED, read_tested)
        yield from self._readable(EARLIER, read_earlier)
        for name in (BUILT, NOTED):
            yield from self._readable(name, partial(_read_object, name=name))


def _read_object(directory: Path, *, name: str) -> None:
    """Read a file with a JSON object."""
    try:
        found = json.loads(read_regular(directory / name, LARGEST_TEXT))
    except (FileNotFoundError, NotADirectoryError):
        return
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{directory / name} is damaged ({error}); {_BACKUP}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{directory / name} is damaged (no JSON object); {_BACKUP}")


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


class Contradiction(NamedTuple):
    """Something that cannot be right, with its remedy, and the file that is wrong."""

    where: str
    what: str
    remedy: str
    file: str | None = None

    @classmethod
    def of(cls, where: str, message: object, file: Path | None = None) -> Contradiction:
        """Return what a message says whose last part is the remedy."""
        what, _, remedy = str(message).rpartition("; ")
        return cls(where, what, remedy, None if file is None else str(file))

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"
