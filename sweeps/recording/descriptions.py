"""Descriptions of runs, in Markdown: what a trial reached, with which parameters, why it ended.

MLflow's pages show the tag `mlflow.note.content` as a run's description. What must not live here:
when a description is written, and other tags (`tags`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redaction.escapes import printable
from sweeps.formatting import counted, format_best, format_parameter, titles
from sweeps.ledger.over_seeds import alone
from sweeps.ledger.trials import ENDINGS, TrialSummary, count_trials
from sweeps.paths import PROGRAM, SweepPaths
from sweeps.spec.spec import SweepSpec
from tracking.limits import clip_text

DESCRIPTION = "mlflow.note.content"
"""The tag with a run's description."""
_BREAK = "  \n"
"""Ends a line in Markdown. A list would be higher than what MLflow's page shows at first."""
_LONGEST_REASON = 1_000
"""Characters; the tag `reason` has more."""
_LONGEST_PARAM = 200
_MOST_PARAMS = 30


def describe_trial(record: TrialSummary, spec: SweepSpec, paths: SweepPaths, how: str) -> str:
    """Describe a trial that has ended."""
    record = alone(record)  # its run shows this training, whatever other seeds there are
    return _BREAK.join(
        [
            f"**{how.capitalize()}** {_length(record, spec)}{_value(record, spec)}.",
            *_line("Why it ended", _code(record.reason) if record.reason else None),
            *_line(_searched(record), _parameters(record.best_params)),
            *_line("Checkpoint", _checkpoint(record, spec, paths)),
        ]
    )


def describe_sweep(
    records: Sequence[TrialSummary],
    best: Sequence[TrialSummary],
    spec: SweepSpec,
    why: str | None = None,
) -> str:
    """Describe a sweep at the end of an attempt."""
    counts = Counter(record.state for record in records)
    ends = ", ".join(f"{counts[state]} {state}" for state in ENDINGS if counts[state])
    num_ended = sum(counts[state] for state in ENDINGS)
    count = count_trials(spec.num_trials, records, spec.repeats.seeds)
    lines = [
        f"**{num_ended} of {counted(count, 'trial')}** for the "
        f"{_code(spec.objective_description)}" + (f": {ends}." if ends else "."),
    ]
    if len(best) == 1:
        (one,) = best
        state = " (pruned)" if one.state == "pruned" else ""
        lines += _line("Best", f"trial {one.number}{state}{_value(one, spec)}")
        lines += _line("Its parameters", _parameters(one.best_params))
    elif best:
        numbers = ", ".join(str(number) for number in sorted(one.number for one in best))
        lines += _line("Pareto front", f"trials {numbers}")
    lines += _line("Why it ended", _code(why) if why else None)
    return _BREAK.join([*lines, *_line("Searched", _codes([*spec.space]))])


def _length(record: TrialSummary, spec: SweepSpec) -> str:
    word = spec.budget.report_word
    if not record.epoch:
        first = "the end of its first epoch" if word == "epoch" else "its first report"
        return f"before {first}"
    epochs = counted(record.epoch, word)
    if record.epoch >= spec.budget.reports:
        return f"after {epochs}"
    return f"after {epochs} of {spec.budget.reports}"


def _value(record: TrialSummary, spec: SweepSpec) -> str:
    if record.result is None:
        return ""
    shown = format_best(spec.metrics, record.result, final=spec.select == "final")
    if record.over_seeds is not None:
        return f", {_code(shown)} ({record.over_seeds.in_words()})"
    # Metrics have names of the user's choice.
    return f", {_code(shown)} at {spec.budget.report_word} {record.best_epoch}"


def _searched(record: TrialSummary) -> str:
    return "Searched, at this value" if record.lineage else "Searched"


def _parameters(params: Mapping[str, Any]) -> str:
    shown = zip(titles([*params], []), params, strict=True)
    return _codes([f"{title} {format_parameter(params, key)}" for title, key in shown])


def _checkpoint(record: TrialSummary, spec: SweepSpec, paths: SweepPaths) -> str | None:
    if record.best_step is None:
        return None
    at = f"{spec.budget.report_word} {record.best_epoch}, step {record.best_step}"
    if record.lacks_model:
        return at
    words = ("best", str(record.number), "--export", "DIR")
    command = paths.command(*words, program=PROGRAM)
    return f"{at}; export: {_code(command)}"


def _line(name: str, text: str | None) -> Iterable[str]:
    """Yield a line; nothing without a text."""
    if text:
        yield f"{name}: {text}"


def _codes(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - _MOST_PARAMS} more"] if len(texts) > _MOST_PARAMS else []
    return ", ".join([*(_code(text, _LONGEST_PARAM) for text in texts[:_MOST_PARAMS]), *more])


def _code(text: str, limit: int = _LONGEST_REASON) -> str:
    """Return a text as a code span, in which nothing is Markdown, HTML or a link."""
    text = clip_text(printable(text), limit)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{fence}{pad}{text}{pad}{fence}"
