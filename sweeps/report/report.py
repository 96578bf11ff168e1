"""The report of a sweep: one HTML page without external files.

    python -m sweeps.report.report ROOT NAME TARGET

writes it. It is a program of its own because Plotly and Optuna would stay in the driver's memory.
The page's styles are in `page.css`. `page.js` draws the figures, sorts and filters tables, and
updates the page while `sweep ui` serves it. What must not live here: data that are neither from
the ledger nor from the trials' metrics.
"""

from __future__ import annotations

import html
import math
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from redaction.escapes import visible
from sweeps.errors import LedgerError
from sweeps.formatting import (
    counted,
    format_cells,
    format_duration,
    format_number,
    format_parameter,
    format_reason,
    joined,
)
from sweeps.ledger.ranking import closest
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.report.data import NotEnough, SweepData, read_sweep
from sweeps.report.figures import figures
from sweeps.spec.space import configured, is_number
from sweeps.trust.audit.read import Audit, audit_sweep
from sweeps.trust.evaluation import tested_trials
from sweeps.trust.findings import Findings, find
from sweeps.view.compare import leaders
from sweeps.view.mlflow_pages import page_of, page_of_trial
from sweeps.view.outcome import infeasible_sentence
from sweeps.view.sweep_view import STATES, SweepView
from sweeps.view.usage import usage
from trainable.errors import StorageError
from trainable.failures import exit_with
from trainable.process_start import without_collection
from trainable.store.regular_files import replace_regular

_MOST_TRIALS = 2000
"""The most rows of the table: a browser sorts and filters so many at once."""
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}"
)
"""The browser loads nothing from elsewhere, and runs no script but those of the page itself, even
if a name or a reason contains HTML. Plotly compiles its drawing of lines."""

_FILTER = (
    '<input placeholder="filter, for example: state=complete lr&lt;0.01" aria-label="filter">'
    "<output></output>"
)
_LONG = 24  # cells with more characters are wrapped
_NO_VALUE = "<p class=missing>No trial has a value yet.</p>"


def write_report(paths: SweepPaths, target: Path) -> None:
    """Write a sweep's report."""
    text = draw_page(paths)
    try:
        replace_regular(target, text.encode())
    except OSError as error:
        elsewhere = paths.command("report", "--output", "FILE")
        raise OSError(
            f"{target} cannot be written ({error.strerror}); the page has {len(text.encode())} "
            f"bytes; free disk space, or write it elsewhere: {elsewhere}"
        ) from error


def draw_page(paths: SweepPaths, mlflow: str | None = None) -> str:
    """Return a sweep's page; `mlflow` is the address of the MLflow server of a live one."""
    optuna.logging.set_verbosity(
        optuna.logging.ERROR
    )  # else Optuna logs each trial that a figure leaves out
    sweep = read_sweep(paths)
    audit = audit_sweep(sweep.view)
    drawn, left_out = _draw(sweep)
    measured = [*_trained_again(sweep), *_tested(sweep)]
    words = [_found(sweep, audit), _trials(sweep, mlflow), *measured]
    sections = [*words, *drawn, audit_section(audit), _failures(sweep), *left_out]
    return page(_header(sweep, audit, mlflow), sections)


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
    for one in figures(sweep.spec):
        try:
            body = _as_html(one.draw(sweep))
        except NotEnough as why:
            missing.append(f"{one.question} {one.title}: {why}.")
            continue
        sentence = f"{one.sentence} {one.note(sweep)}".rstrip()
        drawn.append(PageSection(one.title, sentence, body, one.question))
    if not missing:
        return drawn, []
    items = "".join(f"<li class=missing>{escape(one)}</li>\n" for one in missing)
    return drawn, [PageSection("Not drawn", "", f"<ul>{items}</ul>")]


def _as_html(drawn: go.Figure) -> str:
    drawn.update_layout(
        template="plotly_white",
        title=None,
        margin={"t": drawn.layout.margin.t or 30, "b": 50, "l": 60, "r": 40},
        legend={"orientation": "h", "y": 1.01, "yanchor": "bottom"},
        uirevision="kept",  # an update of the page keeps what a reader selected
    )
    drawn.update_xaxes(exponentformat="none")  # 0.0001, not 100µ
    drawn.update_yaxes(exponentformat="none")
    # Few and full numbers on logarithmic axes: else Plotly writes 2 for 0.02.
    drawn.update_xaxes(tickformat="~g", nticks=4, selector={"type": "log"})
    drawn.update_yaxes(tickformat="~g", nticks=6, selector={"type": "log"})
    return figure(drawn)


# -- words and tables -----------------------------------------------------------------------------


def _header(sweep: SweepData, audit: Audit, mlflow: str | None) -> Header:
    spec, counts = sweep.spec, Counter(sweep.states.values())
    by_state = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    early, budget = spec.early_stopping.scheduler, spec.budget.reports
    # A resume may have changed the budget, or early stopping may have stopped all trials earlier.
    longest = max((record.epoch for record in sweep.view.records), default=0) or budget
    word = spec.budget.report_word
    over = counted(budget, word)
    if longest != budget:
        over = f"{counted(longest, word)} at most (the budget is {budget})"
    answer = [
        f"{best.best_word}: trial {best.number} with {_result(sweep, best)}"
        for best in sweep.view.best_so_far()
    ]
    if (near := closest(sweep.view.records)) is not None:
        answer = [infeasible_sentence(near)]
    facts = [
        f"{len(sweep.view.records)} of {counted(sweep.view.num_trials, 'trial')}: "
        f"{by_state or 'none yet'}; {spec.objective_description} over {over}; "
        f"sampler {spec.search.sampler}; early stopping {early}",
        *usage(sweep.view).sentences(),
        f"{audit.in_short()}; written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    ]
    page_of_runs = None if mlflow is None else page_of(mlflow, sweep.view)
    return Header(spec.name, sweep.view.state, answer, facts, page_of_runs)


def _result(sweep: SweepData, record: TrialSummary) -> str:
    values = format_cells(record.result, sweep.spec.metrics)
    params = {sweep.names[key]: value for key, value in record.best_params.items()}
    return f"{joined(dict(zip(sweep.spec.metrics, values, strict=True)))} ({joined(params)})"


def _found(sweep: SweepData, audit: Audit) -> PageSection:
    """Return what was found, and the commands for what can be done next."""
    findings = find(sweep.view)
    items = "".join(f"<li>{escape(one.sentence)}</li>\n" for one in findings.sentences)
    commands = "".join(command_line(*one) for one in _commands(sweep.view, findings, audit))
    return PageSection("Findings", "", f"{f'<ul>{items}</ul>' if items else _NO_VALUE}{commands}")


def _commands(view: SweepView, findings: Findings, audit: Audit) -> Iterator[tuple[str, str]]:
    """Yield what can be done with a sweep in its state, and the command that does it."""
    command = view.paths.command
    if view.running:
        yield "stop; a resume continues", command("stop")
        return
    if view.spec.is_of_script:
        return  # running the script again continues it
    if view.state == "interrupted" and view.abort is None:
        yield "continue", command("resume")
    elif view.state != "finished":
        yield "how to continue", command("status")
    for best in view.best_so_far():
        if (finish := view.finish_command(best)) is not None:
            yield f"train trial {best.number} to its end", finish
    if view.state == "finished":
        if findings.overrides:
            changes = [word for change in findings.overrides for word in ("-s", change)]
            yield findings.next_label, command("resume", *changes)
        for card in audit.cards:  # what is not known yet, where one command finds it out
            if card.verdict == "not enough data" and (found := audit.command(card)) is not None:
                yield card.remedy or card.id, found
        choose = ("TRIAL",) if view.several else ()
        yield "export the best weights", command("best", *choose, "--export", "DIR")


def audit_section(found: Audit) -> PageSection:
    """Return the cards as a table, and the commands of those that warn."""
    rows = [
        [card.verdict, card.question, card.evidence, card.remedy or "-"]
        for card in found.applicable
    ]
    classes = [
        {"pass": "pass", "warn": "warn"}.get(card.verdict, "unknown") for card in found.applicable
    ]
    body = table(["verdict", "question", "evidence", "remedy"], rows, classes)
    body += "".join(f"<p>{escape(one)}</p>" for one in found.not_applicable)
    remedies = {found.command(card): card.remedy or card.id for card in found.warned}
    body += "".join(command_line(r, command) for command, r in remedies.items() if command)
    sentence = f"Whether the result can be trusted: {found.in_words()}."
    return PageSection("Audit", sentence, body)


def _trials(sweep: SweepData, mlflow: str | None) -> PageSection:
    """Return the table of trials: the best first, those without a value last."""
    view, keys = sweep.view, list(sweep.spec.space)
    order = {one.number: n for n, one in enumerate(leaders(view, len(view.records)))}
    records = sorted(view.records, key=lambda one: order.get(one.number, len(order)))
    best = {record.number for record in view.best_so_far()}
    rows = [_trial_row(sweep, record, keys, mlflow) for record in records[:_MOST_TRIALS]]
    classes = [
        f"{sweep.states[one.number]}{' best' if one.number in best else ''}" for one in records
    ]
    limited = bool(sweep.spec.constraints)
    heads = ["trial", "state", *sweep.spec.metrics, *["feasible"] * limited]
    heads += [sweep.spec.budget.report_word]
    heads += ["attempts", "duration", *(sweep.names.get(key, key) for key in keys), "reason"]
    which = "the best value that a checkpoint has, also of a trial that was stopped early"
    if sweep.spec.select == "final":
        which = "the last value of a trial that trained to its end"
    count = f"the first {_MOST_TRIALS:,}" if len(records) > _MOST_TRIALS else "all"
    count += f" of {counted(len(records), 'trial')}"
    sentence = f"By {which}; {count}. A click on a column sorts by it."
    body = table(heads, rows, classes[:_MOST_TRIALS], sortable=True) if rows else _NO_VALUE
    return PageSection("Trials", sentence, body)


def _trial_row(
    sweep: SweepData, record: TrialSummary, keys: Sequence[str], mlflow: str | None
) -> list[str | Cell]:
    result = record.result
    values = result if isinstance(result, list) else [result] * len(sweep.spec.metrics)
    params = configured(sweep.spec.space, record.best_params)
    run = None if mlflow is None else page_of_trial(mlflow, sweep.view, record.number)
    return [
        Cell(str(record.number), record.number, run),
        sweep.states[record.number],
        *map(_number, values),
        *([_feasible(record)] if record.limits else []),
        _number(record.epoch),
        _number(record.attempts),
        Cell(format_duration(record.seconds), record.seconds),
        *(_parameter(params, key) for key in keys),
        record.reason or "-",
    ]


def _feasible(record: TrialSummary) -> str:
    if record.feasible is None:
        return "-"
    return "yes" if record.feasible else f"no: {record.missed}"


def _number(value: float | None) -> Cell:
    return Cell(format_number(value), value)


def _parameter(params: Mapping[str, Any], key: str) -> Cell:
    value = params.get(key)
    return Cell(format_parameter(params, key), value if is_number(value) else None)


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
    count = counted(len(failed), "trial")
    sentence = f"{count} failed; sweep show NAME TRIAL prints the traceback of one."
    heads = ["trial", "reason", sweep.spec.budget.report_word, "step", "parameters"]
    return PageSection("Failures", sentence, table(heads, rows))


# -- HTML -----------------------------------------------------------------------------------------


class PageSection(NamedTuple):
    """One part of the page."""

    title: str
    """The name of the link to it."""
    sentence: str
    """An explanation, as plain text."""
    body: str
    """HTML."""
    question: str = ""
    """The heading, if it is not the title."""


class Cell(NamedTuple):
    """A cell of a table that is more than its text."""

    text: str
    value: float | None = None
    """The number by which the table is sorted and filtered."""
    link: str | None = None


class Header(NamedTuple):
    """The top of the page."""

    title: str
    state: str
    answer: Sequence[str]
    """The result, one line for each best trial."""
    facts: Sequence[str]
    mlflow: str | None = None
    """The address of MLflow's page; None in a file, which cannot know it and is not live."""


def escape(text: str) -> str:
    """Return a text for HTML, with control characters as visible escapes."""
    return html.escape(visible(text))


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    classes: Sequence[str] = (),
    *,
    sortable: bool = False,
) -> str:
    """Return an HTML table; `classes` are those of its rows, if they have any.

    A sortable table has a field for a filter above it.
    """
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join(
        f"<tr class='{kind}'>{''.join(map(_cell, row))}</tr>\n"
        for row, kind in zip_longest(rows, classes, fillvalue="")
    )
    parts = f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>"
    if sortable:
        return f"{_FILTER}<div class=wide><table class=sortable>{parts}</table></div>"
    return f"<div class=wide><table>{parts}</table></div>"


def _cell(cell: str | Cell) -> str:
    text, value, link = cell if isinstance(cell, Cell) else Cell(cell)
    kind = " class=long" if len(text) > _LONG else ""
    number = f' data-value="{value!r}"' if value is not None and math.isfinite(value) else ""
    shown = escape(text) if link is None else f'<a href="{escape(link)}">{escape(text)}</a>'
    return f"<td{kind}{number}>{shown}</td>"


def command_line(label: str, command: str) -> str:
    """Return a command that can be copied."""
    return (
        f"<div class=command><span>{escape(label)}</span><code>{escape(command)}</code>"
        "<button class=copy>copy</button></div>\n"
    )


def figure(drawn: go.Figure) -> str:
    """Return a figure, which the page's script draws."""
    # else the text could end the element that holds it
    data = str(drawn.to_json()).replace("<", "\\u003c")
    return (
        "<div class='wide figure'><div class=plot></div>"
        f"<script type='application/json'>{data}</script></div>"
    )


def page(header: Header, sections: Sequence[PageSection]) -> str:
    """Return the page."""
    body = "\n".join(
        f'<section id="{_anchor(s.title)}"><h2>{escape(s.question or s.title)}</h2>'
        f"{f'<p>{escape(s.sentence)}</p>' if s.sentence else ''}\n{s.body}</section>"
        for s in sections
    )
    nonce = secrets.token_urlsafe(16)
    policy = _POLICY.format(nonce=nonce, connect="'none'" if header.mlflow is None else "'self'")
    style, script = (
        Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js")
    )
    scripts = "".join(
        f"<script nonce={nonce}>{one}</script>\n" for one in (get_plotlyjs(), script)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(header.title)}</title><style>{style}</style>\n{scripts}</head>\n"
        f"<body>{_header_html(header, sections)}\n<main>{body}</main></body></html>\n"
    )


def _header_html(header: Header, sections: Sequence[PageSection]) -> str:
    # With blanks between the links, so that the browser can wrap them.
    links = " ".join(f'<a href="#{_anchor(s.title)}">{escape(s.title)}</a>' for s in sections)
    live = ""
    if header.mlflow is not None:
        links = f'<a class=mlflow href="{escape(header.mlflow)}">MLflow</a> {links}'
        live = "<span class=live>live</span>"
    answer = "".join(f"<p class=best>{escape(one)}</p>" for one in header.answer)
    facts = "".join(f"<p>{escape(one)}</p>" for one in header.facts)
    return (
        f"<header><h1>{escape(header.title)}</h1>"
        f"<span class='state {header.state}'>{header.state}</span>{live}"
        f"{answer}{facts}<nav>{links}</nav></header>"
    )


def _anchor(title: str) -> str:
    return escape(title.lower().replace(" ", "-"))


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
