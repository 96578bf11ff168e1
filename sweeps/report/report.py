"""The report of a sweep: one HTML page without external files.

    python -m sweeps.report.report ROOT NAME TARGET

writes it. It is a program of its own because Plotly and Optuna would stay in the driver's memory.
What must not live here: the page's HTML (`page`), and data that are neither from the ledger nor
from the trials' metrics.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import optuna
import plotly.graph_objects as go

from sweeps.errors import LedgerError
from sweeps.formatting import (
    format_cells,
    format_duration,
    format_number,
    format_parameter,
    format_reason,
    format_result,
    joined,
)
from sweeps.paths import SweepPaths
from sweeps.report.data import NotEnough, SweepData, read_sweep
from sweeps.report.figures import figures
from sweeps.report.page import PageSection, escape, page, table
from sweeps.trust.audit.read import audit_sweep
from sweeps.trust.evaluation import tested_trials
from sweeps.trust.findings import find
from sweeps.view.compare import compare
from sweeps.view.sweep_view import STATES, SweepView
from sweeps.view.usage import usage
from trainable.errors import StorageError
from trainable.failures import exit_with
from trainable.process_start import without_collection
from trainable.store.regular_files import replace_regular

_LEADERS = 10
_NO_VALUE = "<p class=missing>No trial has a value yet.</p>"


def write_report(paths: SweepPaths, target: Path) -> None:
    """Write a sweep's report."""
    optuna.logging.set_verbosity(
        optuna.logging.ERROR
    )  # else Optuna logs each trial that a figure leaves out
    sweep = read_sweep(paths)
    drawn, left_out = _draw(sweep)
    measured = [*_trained_again(sweep), *_tested(sweep)]
    words = [_found(sweep), audit_section(sweep.view), _leaders(sweep), *measured]
    sections = [*words, *drawn, _failures(sweep), *left_out]
    text = page(sweep.spec.name, _summary(sweep), sections)
    try:
        replace_regular(target, text.encode())
    except OSError as error:
        elsewhere = paths.command("report", "--output", "FILE")
        raise OSError(
            f"{target} cannot be written ({error.strerror}); the page has {len(text.encode())} "
            f"bytes; free disk space, or write it elsewhere: {elsewhere}"
        ) from error


def _trained_again(sweep: SweepData) -> Iterator[PageSection]:
    """Yield what a series of extra trials says."""
    found = sweep.view.series_result
    if found is not None:
        items = "".join(f"<li>{escape(one)}</li>\n" for one in found.sentences)
        body = f"<ul>{items}</ul>{table(found.columns, found.rows)}"
        yield PageSection(found.title, found.about, body)


def _draw(sweep: SweepData) -> tuple[list[PageSection], list[PageSection]]:
    """Return the figures that can be drawn, and a section that names the others, if any."""
    drawn, missing = [], []
    for figure in figures(sweep.spec):
        try:
            body = _as_html(figure.draw(sweep))
        except NotEnough as why:
            missing.append(f"{figure.question} {figure.title}: {why}.")
            continue
        sentence = f"{figure.sentence} {figure.note(sweep)}".rstrip()
        drawn.append(PageSection(figure.title, sentence, body, figure.question))
    if not missing:
        return drawn, []
    items = "".join(f"<li class=missing>{escape(one)}</li>\n" for one in missing)
    return drawn, [PageSection("Not drawn", "", f"<ul>{items}</ul>")]


def _as_html(drawn: go.Figure) -> str:
    drawn.update_layout(
        template="plotly_white", title=None, margin={"t": drawn.layout.margin.t or 30}
    )
    drawn.update_xaxes(exponentformat="none")  # 0.0001, not 100µ
    drawn.update_yaxes(exponentformat="none")
    # Few and full numbers on logarithmic axes: else Plotly writes 2 for 0.02.
    drawn.update_xaxes(tickformat="~g", nticks=4, selector={"type": "log"})
    drawn.update_yaxes(tickformat="~g", nticks=6, selector={"type": "log"})
    config = {"responsive": True, "displaylogo": False}
    body = drawn.to_html(full_html=False, include_plotlyjs=False, config=config)
    return f"<div class=wide>{body}</div>"


# -- words and tables -----------------------------------------------------------------------------


def _summary(sweep: SweepData) -> list[str]:
    spec, counts = sweep.spec, Counter(sweep.states.values())
    by_state = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    early, budget = spec.early_stopping.scheduler, spec.budget.reports
    # A resume may have changed the budget, or early stopping may have stopped all trials earlier.
    longest = max((record.epoch for record in sweep.view.records), default=0) or budget
    word = spec.budget.report_word
    over = f"{budget} {word}s"
    if longest != budget:
        over = f"{longest} {word}s at most (the budget is {budget})"
    lines = [
        f"{len(sweep.view.records)} of {sweep.view.num_trials} trials: {by_state or 'none yet'}",
        f"{spec.objective_description} over {over}; sampler {spec.search.sampler}; "
        f"early stopping {early}",
    ]
    for best in sweep.view.ledger.front():
        result = format_result(spec.metrics, best.result)
        lines.append(f"best: trial {best.number} with {result} ({joined(best.best_params)})")
    lines += usage(sweep.view).sentences()
    return [*lines, f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"]


def _found(sweep: SweepData) -> PageSection:
    """Return what was found, and the command that continues a finished sweep."""
    findings = find(sweep.view)
    if not findings.sentences:
        return PageSection("Findings", "", _NO_VALUE)
    items = "".join(f"<li>{escape(one.sentence)}</li>\n" for one in findings.sentences)
    body = f"<ul>{items}</ul>"
    if findings.overrides:
        changes = [word for change in findings.overrides for word in ("-s", change)]
        label = "Try next, in a better space:" if findings.changes_space else "Try more:"
        command = escape(sweep.view.paths.command("resume", *changes))
        body += f"<p>{label}</p><pre>{command}</pre>"
    return PageSection("Findings", "", body)


def audit_section(view: SweepView) -> PageSection:
    """Return the cards as a table, and the commands of those that warn."""
    found = audit_sweep(view)
    rows = [
        [card.verdict, card.question, card.evidence, card.remedy or "-"] for card in found.cards
    ]
    classes = [
        {"pass": "pass", "warn": "warn"}.get(card.verdict, "unknown") for card in found.cards
    ]
    body = table(["verdict", "question", "evidence", "remedy"], rows, classes)
    commands = dict.fromkeys(found.command(card) for card in found.warned)
    shown = "\n".join(command for command in commands if command is not None)
    if shown:
        body += f"<p>Commands for the cards that warn:</p><pre>{escape(shown)}</pre>"
    sentence = (
        f"Whether the result can be trusted, from {found.num_trials} ended trials: "
        f"{len(found.warned)} of {len(found.cards)} cards warn."
    )
    return PageSection("Audit", sentence, body)


def _leaders(sweep: SweepData) -> PageSection:
    found = compare([sweep.view], top=_LEADERS)
    keys = list(sweep.spec.space)
    rows = [
        [
            str(one["number"]),
            one["state"],
            *format_cells(one["value"], sweep.spec.metrics),
            str(one["epoch"]),
            str(one["attempts"]),
            format_duration(one["duration"]),
            "-" if one["clip_fraction"] is None else f"{one['clip_fraction']:.0%}",
            *(format_parameter(one["params"], key) for key in keys),
        ]
        for one in found["leaders"]
    ]
    word = sweep.spec.budget.report_word
    heads = ["trial", "state", *sweep.spec.metrics, word, "attempts", "duration", "clipped"]
    heads += [sweep.names.get(key, key) for key in keys]
    which = "the best value that a checkpoint has, also of a trial that was stopped early"
    if sweep.spec.select == "final":
        which = "the last value of a trial that trained to its end"
    sentence = f"At most {_LEADERS} of the best trials, by {which}."
    return PageSection("Leaders", sentence, table(heads, rows) if rows else _NO_VALUE)


def _tested(sweep: SweepData) -> Iterator[PageSection]:
    """Yield the values on test data, if any trial was tested."""
    found = tested_trials(sweep.view)
    if not found:
        return
    names = list(dict.fromkeys(name for one in found.values() for name in one.metrics))
    best = {record.number for record in sweep.view.ledger.front()}
    rows = [
        [
            str(number),
            "yes" if number in best else "no",
            *format_cells(sweep.view.record(number).result, sweep.spec.metrics),
            *(format_number(one.metrics.get(name)) for name in names),
            str(one.epoch),
            f"{one.num_samples:,}",
        ]
        for number, one in found.items()
    ]
    heads = [
        "trial",
        "best",
        *sweep.spec.metrics,
        *names,
        sweep.spec.budget.report_word,
        "samples",
    ]
    sentence = (
        "Checkpoints evaluated by sweep audit --test on samples that no trial used. Only the "
        "values of the trial that validation chose are unbiased."
    )
    yield PageSection("Test data", sentence, table(heads, rows))


def _failures(sweep: SweepData) -> PageSection:
    failed = [record for record in sweep.view.records if record.state == "failed"]
    if not failed:
        return PageSection("Failures", "No trial failed.", "")
    rows = [
        [
            str(record.number),
            format_reason(record.reason or "no reason was given"),
            str(record.epoch),
            str(record.step),
            joined({sweep.names[key]: value for key, value in record.params.items()}),
        ]
        for record in failed
    ]
    count = f"{len(failed)} trials" if len(failed) > 1 else "1 trial"
    sentence = f"{count} failed; sweep show NAME TRIAL prints the traceback of one."
    heads = ["trial", "reason", sweep.spec.budget.report_word, "step", "parameters"]
    return PageSection("Failures", sentence, table(heads, rows))


def _hide_matplotlib() -> None:
    """Prevent the import of Matplotlib."""
    # Optuna's figures for Plotly import it if they can: a tenth of the program's time.
    sys.modules.setdefault("matplotlib", None)  # type: ignore[arg-type]  # typeshed knows no None


def main(arguments: Sequence[str]) -> None:
    """Write a report; see the module's docstring."""
    _hide_matplotlib()
    root, name, target = arguments
    try:
        write_report(SweepPaths(Path(root), name), Path(target))
    except (ValueError, OSError, LedgerError, StorageError) as problem:
        exit_with(problem)


if __name__ == "__main__":
    with without_collection():
        main(sys.argv[1:])
