"""Check one trial: its ledger record, its curve, its checkpoints and its other files must agree.

Nothing is changed. What must not live here: the sweep as a whole (`trust.verification`), and
repairs (`reconcile`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from sweeps.errors import SpecError
from sweeps.ledger.ranking import value_of
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.recording.trial_config import read_config
from sweeps.spec.revisions import changes
from sweeps.spec.spec import SweepSpec
from sweeps.stores import best_generation, trial_files
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
from trainable.store.notes import EARLIER, TESTED, read_earlier, read_tested
from trainable.store.regular_files import LARGEST_TEXT, read_regular
from trainable.user_code.fingerprint import BUILT

_BACKUP = "restore it from a backup"
_UNUSED = (
    "a resume sets it aside and uses an earlier checkpoint; restore it from a backup to keep it"
)
_FROM_CURVE = "restore the ledger or the curve from a backup; the trial itself wrote the curve"
T = TypeVar("T")


@dataclass(frozen=True)
class TrialChecks:
    """The checks of one trial.

    Attributes:
        paths: The sweep's directory.
        spec: The sweep's newest spec.
        revisions: All its specs; the trial had the configuration of one of them.
        record: The ledger's record of the trial.
    """

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
                    "reproduce", "--trial", str(record.number), "--dir", "DIR"
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
    """Something that cannot be right.

    Attributes:
        where: The part of the sweep: `sweep.yaml`, `ledger`, `trial 3`, `outbox` or
            `tracking store`.
        what: What is wrong, in words.
        remedy: What the user should do.
        file: The file that is damaged, or one of two that contradict each other; None: none alone.
    """

    where: str
    what: str
    remedy: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"
