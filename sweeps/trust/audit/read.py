"""Read a sweep for the audit, and return the audit's cards with complete commands.

What must not live here: what the cards look at, and printing.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from sweeps.formatting import counted
from sweeps.ledger.trials import TrialSummary, of_search
from sweeps.paths import command_line
from sweeps.reconcile.stop_criteria import is_stopped_early
from sweeps.spec.space import is_number
from sweeps.trust.audit.card import Card
from sweeps.trust.audit.data import AuditData, AuditTrial, Clipping, Continue
from sweeps.trust.audit.registry import audit
from sweeps.trust.evidence import seed_values
from sweeps.trust.findings import findings_at_end, short_names
from sweeps.trust.importance import search_curves
from sweeps.trust.next_search import next_overrides
from sweeps.view.sweep_view import SweepView
from sweeps.view.usage import usage
from trainable.store.metrics_file import FILE_NAME
from trainable.store.regular_files import LARGEST_CURVE, LARGEST_TEXT, open_regular, read_regular
from trainable.user_code.fingerprint import BUILT

_CLIPPED = 5
"""The best trials whose gradients are looked at."""
_CLIP = "train.clip.max_norm"


@dataclass(frozen=True)
class Audit:
    """The cards of one sweep."""

    view: SweepView
    num_trials: int
    """The ended trials of the search."""
    cards: Sequence[Card]

    @property
    def warned(self) -> list[Card]:
        """The cards that warn."""
        return [card for card in self.cards if card.verdict == "warn"]

    @property
    def applicable(self) -> list[Card]:
        """The cards that can apply to this sweep."""
        return [card for card in self.cards if card.verdict != "does not apply"]

    @property
    def not_applicable(self) -> list[str]:
        """A line for each card that cannot apply to this sweep, with the reason."""
        others = [card for card in self.cards if card.verdict == "does not apply"]
        return [f"{card.id} does not apply: {card.evidence}" for card in others]

    def in_words(self) -> str:
        """Return how many cards warn, and from how many trials they are."""
        return (
            f"{len(self.warned)} of {counted(len(self.applicable), 'card')} warn, from "
            f"{counted(self.num_trials, 'ended trial')}"
        )

    def in_short(self) -> str:
        """Return the audit in one line."""
        count = f"{len(self.warned)} of {len(self.applicable)} warn"
        names = f" ({', '.join(card.id for card in self.warned)})" if self.warned else ""
        unknown = sum(card.verdict == "not enough data" for card in self.cards)
        missing = f", {unknown} without enough data" if unknown else ""
        return f"audit: {count}{names}{missing}"

    def command(self, card: Card) -> str | None:
        """Return the command of a card for a shell; None if it has none."""
        if card.command is None:
            return None
        paths, (first, *rest) = self.view.paths, card.command
        if self.view.spec.is_of_script and first != "trials":
            return None  # its script alone can train it
        if first == "init":  # the spec of a new sweep
            return command_line(paths.root, first, "--from", paths.name, *rest)
        return paths.command(first, *rest)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `sweep audit --json` prints."""
        return {
            "name": self.view.paths.name,
            "metric": self.view.spec.metrics[0],
            "num_trials": self.num_trials,
            "num_warnings": len(self.warned),
            "cards": [asdict(card) | {"command": self.command(card)} for card in self.cards],
        }


def audit_sweep(view: SweepView) -> Audit:
    """Return the audit of a sweep, which may be running."""
    data = audit_data(view)
    return Audit(view, len(data.trials), audit(data))


def audit_at_end(view: SweepView) -> Audit | None:
    """Return the audit of a sweep that has ended with a result; else None."""
    return audit_sweep(view) if view.state == "finished" else None


def status_with_audit(view: SweepView) -> dict[str, Any]:
    """Return the object that `sweep status --json` prints.

    `findings` and `audit` are None before the end.
    """
    found = audit_at_end(view)
    verdicts = found and {card.id: card.verdict for card in found.cards}
    findings = findings_at_end(view)
    return {
        **view.status(),
        "usage": usage(view).as_dict(),
        "findings": findings and findings.as_dict(),
        "audit": verdicts,
    }


def audit_data(view: SweepView) -> AuditData:
    """Return what the cards look at."""
    spec, curves = view.spec, search_curves(view)
    rule, reports = spec.early_stopping.rule, spec.budget.reports
    rungs = rule.rungs(reports)
    finished = {
        record.origin: record.value
        for record in view.records
        if record.role == "finish" and record.state == "complete"
    }
    ended = [record for record in of_search(view.records) if record.finished]
    trials = [
        AuditTrial(
            number=record.number,
            state=record.state,
            params=record.best_params,
            value=record.value,
            curve=curves[record.number],
            counts=record.has_result and record.feasible is not False,
            stopped_early=is_stopped_early(record),
            # The last bracket of HyperBand stops no trial, either.
            exempt=record.exempt
            or (bool(rungs) and rule.first_rung(record.place, reports) >= len(rungs)),
            finished_value=finished.get(record.number),
        )
        for record in ended
    ]
    data = AuditData(
        trials=trials,
        space=spec.space,
        metric=spec.metrics[0],
        minimize=view.ledger.minimize,
        reports=reports,
        word=spec.budget.report_word,
        seed_word=spec.repeats.word,
        rungs=rungs,
        can_exempt=not spec.is_of_script,
        reduction=getattr(rule, "reduction", 3),
        repeats=seed_values(view),
        tied=(view.series_result and view.series_result.best) or None,
        num_validation=_num_validation(view, ended),
        population=rule.is_population,
        select_final=spec.select == "final",
        constraints=spec.search.constraints,
        names=short_names(list(spec.space)),
        overrides=_continue(view),
    )
    return replace(data, trials=_with_clipping(view, data))


def _continue(view: SweepView) -> Continue:
    if view.state != "finished":
        return lambda _regions, _bounds: ()
    return lambda regions, bounds: next_overrides(view, regions, bounds)


def _num_validation(view: SweepView, ended: Sequence[TrialSummary]) -> int | None:
    """Return how many samples an evaluation has, by the files of the first trial that tell it."""
    budget, size = view.spec.budget, None
    for record in ended[:_CLIPPED]:
        size = read_num_validation(view.paths.trial(record.number))
        if size is not None:
            break
    if size is None or budget.val_batches is None:
        return size
    return min(size, budget.val_batches * view.spec.train.batch_size)


def _with_clipping(view: SweepView, data: AuditData) -> list[AuditTrial]:
    """Return the trials, with the clipping of the best ones."""
    looked = {trial.number for trial in data.ranked[:_CLIPPED]}
    found = []
    for trial in data.trials:
        if trial.number in looked:
            norm = trial.params.get(_CLIP, view.spec.train.clip.max_norm)
            norm = norm if is_number(norm) else None
            steps = view.records[trial.number].step
            directory = view.paths.trial(trial.number)
            trial = replace(trial, clipping=read_clipping(directory, norm, steps))
        found.append(trial)
    return found


_WHOLE = 8 << 20
"""A longer file is read in parts: a long training has gigabytes of rows."""
_PARTS, _PART = 64, 64 << 10
_SHARE = re.compile(rb'"train/clip_fraction": ([0-9.e+-]+)')
_NORM = re.compile(rb'"train/grad_norm": ([0-9.e+-]+)')
_LENGTH, _TENSOR = "val: its length", "val: tensor 0"


def read_clipping(directory: Path, max_norm: float | None, steps: int) -> Clipping | None:
    """Return how often a trial's gradients were clipped; None if it logged no share of steps."""
    try:
        text = _rows(directory / FILE_NAME)
    except OSError:
        return None
    shares, norms = _numbers(_SHARE, text), _numbers(_NORM, text)
    if not shares:
        return None
    usual = quantiles(norms, n=10)[-1] if len(norms) > 10 else None
    return Clipping(max_norm, fmean(shares), steps, usual)


def read_num_validation(directory: Path) -> int | None:
    """Return how many validation samples a trial's data had; None if that is unknown."""
    try:
        found = json.loads(read_regular(directory / BUILT, LARGEST_TEXT))
        size = found[_LENGTH] if _LENGTH in found else found[_TENSOR][1][0]
    except (OSError, ValueError, RecursionError, KeyError, TypeError, IndexError):
        # A stream of samples has no length, and a custom loop tells none.
        return None
    return size if isinstance(size, int) and size > 0 else None


def _rows(path: Path) -> bytes:
    """Return the rows of a run, or of a longer file whole rows from evenly spaced parts."""
    with open(open_regular(path, limit=LARGEST_CURVE), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE:
            return file.read()
        parts = []
        for index in range(_PARTS):
            file.seek(index * (size - _PART) // (_PARTS - 1))
            parts.append(b"".join(file.read(_PART).splitlines(keepends=True)[1:-1]))
        return b"".join(parts)


def _numbers(pattern: re.Pattern[bytes], text: bytes) -> list[float]:
    found = []
    for match in pattern.finditer(text):
        try:
            value = float(match[1])
        except ValueError:
            continue
        if math.isfinite(value):
            found.append(value)
    return found
