"""Output of the commands that only read a sweep: tables and lines for the terminal.

What must not live here: finding their content (`view`), the display of a running sweep
(`run_console`), and the messages of other commands (`messages`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.style import Style
from rich.text import Text

from sweeps.cli import messages
from sweeps.cli.plain_console import TextTable, line, plain_table, redraws
from sweeps.formatting import (
    counted,
    format_best,
    format_cells,
    format_duration,
    format_number,
    format_parameter,
    format_reason,
    format_time,
    format_value,
    joined,
    titles,
)
from sweeps.ledger.attributes import ORIGIN_COLUMNS
from sweeps.ledger.ranking import closest
from sweeps.paths import command_line
from sweeps.spec.spec import SweepSpec
from sweeps.trust.findings import findings_at_end, health_sentences
from sweeps.view.outcome import infeasible_sentence
from sweeps.view.sweep_progress import (
    TrialRow,
    best_name,
    best_of,
    in_order,
    is_feasible,
    metrics_beside,
    row_of,
    seconds_left,
)
from sweeps.view.sweep_view import STATES, SweepView
from sweeps.view.usage import usage_at_end
from trainable.store.notes import latest_tested

if TYPE_CHECKING:
    from sweeps.run.doctor import Finding
    from sweeps.trust.audit.read import Audit
    from sweeps.trust.findings import Findings

_STATE_STYLES = {
    "finished": "green",
    "running": "cyan",
    "complete": "green",
    "pruned": "dim",
    "failed": "red",
    "interrupted": "yellow",
}
_LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def _state(state: str) -> Text:
    return Text(state, style=_STATE_STYLES.get(state, ""))


def sweeps(found: Sequence[dict[str, Any]], root: Path) -> RenderableType:
    """Return the table of `sweep list`."""
    if not found:
        start = command_line(root, "run", "FILE")
        return line(f"there are no sweeps below {root} yet; start one with: {start}")
    table = plain_table(
        "sweep", "state", "done", "trials", "best", right=("done", "trials", "best")
    )
    for one in found:
        done = sum(one["trials"][state] for state in ("complete", "pruned", "failed"))
        best = one["best"]
        table.add_row(
            one["name"],
            _state(one["state"]),
            str(done),
            str(one["num_trials"]),
            f"front of {len(best)}"
            if isinstance(best, list) and best
            else format_number(best["value"] if best else None),
        )
    return table


def status(
    found: dict[str, Any],
    view: SweepView,
    findings: Findings | None = None,
    audit: Audit | None = None,
) -> RenderableType:
    """Return the lines of `sweep status`; `found` is what its `--json` prints."""
    spec, paths = view.spec, view.paths
    counts = view.counts_in_words(found["trials"])
    lines: list[RenderableType] = [
        Text.assemble(
            (found["name"], "bold"),
            ": ",
            _state(found["state"]),
            f", {counted(found['num_trials'], 'trial')}: {counts}",
        )
    ]
    if (of := found["configurations"]) is not None:
        words = {"waiting": "not started"}  # one with a trial is running
        each = ", ".join(f"{of[s]} {words.get(s, s)}" for s in STATES if of[s])
        every = counted(spec.repeats.seeds, spec.repeats.word)
        lines.append(Text(f"{counted(spec.num_trials, 'configuration')} of {every}: {each}"))
    outcome = None if view.running else view.outcome()
    failure = outcome.failure if outcome is not None else None
    if failure is not None:
        who = "it stopped itself" if failure.is_aborted else "stopped"
        lines.append(Text(f"{who}: {failure.cause}", style="red"))
    if view.stop is not None:
        lines.append(Text(f"{view.stop.key} ended it: {view.stop.why}"))
    if isinstance(found["best"], list):
        lines += messages.front_lines(found["best"], spec.metrics)
    elif found["best"] is not None:
        record = view.record(found["best"]["number"])
        lines.append(
            Text(
                f"{record.best_word}: trial {record.number} with {spec.metrics[0]} "
                f"{format_number(found['best']['value'])}"
            )
        )
        lines.append(Text("      " + joined(found["best"]["params"])))
        if record.over_seeds is not None:
            lines.append(Text(f"      {record.over_seeds.in_words()}"))
        weights = view.weights_of(record)
        if (tested := latest_tested(paths.trial(weights.number))) is not None:
            lines.append(Text(f"      on test data: {joined(tested.metrics)}"))
        if record.state == "pruned":
            lines.append(Text(f"it was stopped early: {record.reason or 'pruned'}"))
            if command := view.finish_command(record):
                lines.append(line(f"train it to its end: {command}"))
    elif failure is None and (near := closest(view.records)) is not None:
        lines.append(Text(infeasible_sentence(near), style="yellow"))
    if (used := usage_at_end(view)) is not None:
        lines += map(Text, used.sentences())
    lines += map(Text, messages.found_lines(findings))
    if findings is None:  # else they are among these
        lines += [Text(f"- {one}", style="yellow") for one in health_sentences(view.records)]
    if audit is not None:
        lines.append(line(f"{audit.in_short()}; see {paths.command('audit')}"))
    if findings is not None and findings.overrides and failure is None:
        changes = [word for change in findings.overrides for word in ("-s", change)]
        lines.append(line(f"{findings.next_label}: {paths.command('resume', *changes)}"))
    if found["outbox_pending"]:
        pending = counted(found["outbox_pending"], "record")
        waiting = f"not delivered to the tracking store yet: {pending}"
        if found["state"] != "running":
            waiting += f"; deliver them with: {paths.command('sync')}"
        lines.append(line(waiting))
    if found["outbox_held"]:
        lines.append(Text(found["outbox_held"], style="yellow"))
    if found["outbox_refused"]:
        lines.append(Text(refused(found["outbox_refused"]), style="yellow"))
    if view.spec.is_of_script and found["state"] in ("interrupted", "failed"):
        lines.append(line(view.resume_hint()))
    elif outcome is not None and failure is not None:
        lines += map(line, messages.after_failure(outcome, failure, paths))
    elif found["state"] == "interrupted":
        lines.append(line(f"continue with: {paths.command('resume')}"))
    return Group(*lines)


def refused(count: int) -> str:
    """Return the message about records that the tracking store rejected for good."""
    return (
        f"refused by the tracking store, and not sent again: {counted(count, 'record')}; each is "
        "kept with the reason in the table `refused` of outbox/outbox.db"
    )


def trials(found: Sequence[dict[str, Any]], spec: SweepSpec) -> RenderableType:
    """Return the table of `sweep trials`."""
    keys = list(spec.space)
    # A column is left out if it says nothing: most sweeps need no second attempt.
    attempts = any(one["attempts"] > 1 for one in found)
    reasons = any(one["reason"] for one in found)
    timed = any(one["duration"] is not None for one in found)
    again = {r: c for r, c in ORIGIN_COLUMNS.items() if any(one["role"] == r for one in found)}
    common = any(one["role"] in again and one["seed_index"] is not None for one in found)
    seeds, limited = spec.repeats.seeds > 1, bool(spec.constraints)
    word = spec.budget.report_word
    first = ["trial", "state", *spec.metrics, *["feasible"] * limited]
    first += [*["+-", f"{spec.repeats.word}s"] * seeds, word, "step"]
    first += ["duration"] * timed
    last = ["attempts"] * attempts + [*again.values()] + ["seed"] * common + ["reason"] * reasons
    short = titles(keys, [*first, *last])
    beside = ["duration"] * timed + ["step"] + ["attempts"] * attempts
    grid = TextTable(
        [*first, *short, *last],
        right={
            *(*spec.metrics, "+-", word, "step", "duration", "attempts"),
            *(*again.values(), "seed", *short),
        },
        optional=[*short, *beside],
        prose="reason",
    )
    for one in found:
        grid.rows.append(
            (
                str(one["number"]),
                _state(one["state"]),
                *format_cells(one["value"], spec.metrics),
                *[_FEASIBLE[one["feasible"]]] * limited,
                *(_seed_cells(one) if seeds else []),
                str(one["epoch"]),
                str(one["step"]),
                *([format_duration(one["duration"])] if timed else []),
                *(format_parameter(one["params"], key) for key in keys),
                *([str(one["attempts"])] if attempts else []),
                *(format_number(one["origin"] if one["role"] == r else None) for r in again),
                *([format_number(one["seed_index"] if one["role"] in again else None)] * common),
                *([format_reason(one["reason"] or "")] if reasons else []),
            )
        )
    return grid


_FEASIBLE = {True: "yes", False: "no", None: "-"}


def _seed_cells(found: dict[str, Any]) -> list[str]:
    """Return the standard error and the number of seeds, or which trial this one repeats."""
    if (one := found["over_seeds"]) is None:
        return ["", f"{found['role']} {found['origin']}"]
    return [format_number(one["standard_error"]), f"{one['num_values']} of {one['seeds']}"]


def over_seeds(found: dict[str, Any], spec: SweepSpec) -> str | None:
    """Return in words of what the value of a trial is, if its configuration has several seeds."""
    one = found["over_seeds"]
    if one is None:
        return None
    of = f" of {one['seeds']}" * (one["num_values"] < one["seeds"])
    error = one["standard_error"]
    more = "" if error is None else f", standard error {format_number(error)}"
    return f"{one['value']} of {one['num_values']}{of} {spec.repeats.word}s{more}"


def trial(found: dict[str, Any], spec: SweepSpec) -> RenderableType:
    """Return the page of `sweep show`."""
    table = plain_table("", "")
    table.show_header = False
    word = spec.budget.report_word
    for key in (
        "number",
        "state",
        "value",
        "epoch",
        "step",
        "attempts",
        "accumulation",
        "workers",
        "finishes",
        "reason",
        "mlflow_run_id",
        "directory",
        "checkpoint",
        "best_checkpoint",
    ):
        if key == "value" and isinstance(found[key], list):
            for metric, text in zip(
                spec.metrics, format_cells(found[key], spec.metrics), strict=True
            ):
                table.add_row(Text(metric, style="bold"), Text(text))
        elif found[key] is not None:
            title = word if key == "epoch" else key
            table.add_row(Text(title, style="bold"), Text(format_number(found[key])))
    if found["role"] in ORIGIN_COLUMNS and found["seed_index"] is not None:
        origin = ORIGIN_COLUMNS[found["role"]]
        table.add_row(Text(origin, style="bold"), Text(str(found["origin"])))
        table.add_row(Text("seed", style="bold"), Text(str(found["seed_index"])))
    if found["role"] == "repeat":
        which = f"{found['seed_index']} of trial {found['origin']}"
        table.add_row(Text(spec.repeats.word, style="bold"), Text(which))
    if (words := over_seeds(found, spec)) is not None:
        table.add_row(Text("value is", style="bold"), Text(words))
    if found["feasible"] is not None:
        table.add_row(Text("feasible", style="bold"), Text(_feasible(found)))
    for key, value in (found["test"] or {}).items():
        table.add_row(Text(key, style="bold"), Text(format_number(value)))
    if found["from_priors"]:
        table.add_row(Text("drawn", style="bold"), Text("around the priors"))
    gpu = {key: f"{value:.0f} (median)" for key, value in (found["gpu_use"] or {}).items()}
    for key, text in {**_exemption(found), **_times(found), **gpu}.items():
        table.add_row(Text(key, style="bold"), text)
    for key, value in found["params"].items():
        table.add_row(Text(key, style="bold"), format_value(value))
    for one in found["lineage"]:
        origin = f"from trial {one['donor']}: {joined(one['params'])}"
        table.add_row(Text(f"after {word} {one['epoch']}", style="bold"), origin)
    for title, sentences in (("health", "health"), ("interrupted", "lost_workers")):
        for sentence in found[sentences]:
            table.add_row(Text(title, style="bold"), Text(sentence))
    for one in found["failed_attempts"]:
        name = f"attempt {one['attempt']} failed"
        how = f"again from {word} {one['continued_at']}" if one["continued_at"] else "begun again"
        changed = one["changes"] or "no change of code or configuration"
        table.add_row(Text(name, style="bold"), Text(f"{one['reason']} ({how}; {changed})"))
    reports = plain_table(word, *spec.metrics, right=(word, *spec.metrics))
    for epoch, value in found["reports"].items():
        reports.add_row(str(epoch), *format_cells(value, spec.metrics))
    parts: list[RenderableType] = [table, Text(), reports]
    if found["traceback"]:
        # Indented, to set it apart from this program's own lines.
        parts += [Text(), Text(indent(found["traceback"], "  "), style="red")]
    return Group(*parts)


def _feasible(found: dict[str, Any]) -> str:
    """Return whether a trial is feasible, and by how much it misses which limits."""
    missed = (f"{m} by {format_number(by)}" for m, by in found["violations"].items())
    return "yes" if found["feasible"] else f"no: it misses the limit of {', '.join(missed)}"


def _exemption(found: dict[str, Any]) -> dict[str, str]:
    """Return that a trial is exempt from early stopping, and where it would have been stopped."""
    if not found["exempt"]:
        return {}
    reason = found["would_stop_reason"]
    return {"exempt": f"would have been stopped by {reason}" if reason else "from early stopping"}


def _times(found: dict[str, Any]) -> dict[str, str]:
    """Return when a trial started and ended, and for how long workers trained it."""
    start, end, trained = found["started_at"], found["ended_at"], found["duration"]
    times = {"started": start, "ended": end}
    lines = {name: format_time(time) for name, time in times.items() if time is not None}
    if trained is None:
        return lines
    lines["duration"] = format_duration(trained)
    if start is not None and end is not None:
        whole = (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
        if whole > 1.05 * trained + 2.0:  # it waited at a rung, or for a resume
            lines["duration"] += f" of training, {format_duration(whole)} from start to end"
    return lines


def best(
    found: dict[str, Any],
    spec: SweepSpec,
    written: Sequence[Path],
    lost: str | None,
    finish: str | None = None,
) -> RenderableType:
    """Return the lines of `sweep best`."""
    in_search = format_best(spec.metrics, found["value"], final=spec.select == "final")
    leader = found.get("confirmation")
    value = in_search
    if leader is not None and leader["mean"] is not None:
        seeds = counted(len(leader["values"]), "seed")
        value = (
            f"{spec.metrics[0]} {format_number(leader['mean'])}, its mean over {seeds} of the "
            f"confirmation ({in_search} in the search)"
        )
    lines: list[RenderableType] = [
        Text(f"trial {found['number']}: {value}", style="bold"),
        Text(joined(found["params"])),
        *([Text(words)] if (words := over_seeds(found, spec)) is not None else []),
        *([Text(f"on test data: {joined(found['test'])}")] if found["test"] else []),
        *([Text(leader["said"])] if leader is not None else []),
    ]
    if found["state"] == "pruned":
        lines.append(Text(f"stopped early: {found['reason'] or 'pruned'}"))
    if finish is not None:
        lines.append(line(f"train it to its end: {finish}"))
    if found["best_checkpoint"]:
        lines.append(Text(f"checkpoint: {found['best_checkpoint']}"))
        if found["over_seeds"] is not None:
            which = f"it is that of the {spec.repeats.word} whose value is closest to this one"
            lines.append(Text(which))
    if lost is not None:
        lines.append(Text(f"no weights to export: {lost}", style="yellow"))
    if "registered" in found:
        model, version = found["registered"]["model"], found["registered"]["version"]
        lines.append(Text(f"registered as {model}, version {version}: models:/{model}@best"))
    lines += [Text(f"wrote {path}") for path in written]
    return Group(*lines)


def comparison(found: dict[str, Any], specs: Sequence[SweepSpec]) -> RenderableType:
    """Return the table of `sweep compare`; values that differ from the best trial's are bold."""
    leaders, metric = found["leaders"], found["metric"]
    metrics = [metric] if isinstance(metric, str) else metric
    if not leaders:
        return Text("no trial has a value yet")
    several = len({one["sweep"] for one in leaders}) > 1
    words = {spec.budget.report_word for spec in specs}
    word = "report" if "report" in words else "epoch"
    numbers = (*metrics, word, "attempts", "clipped")
    first = [*["sweep"] * several, "trial", "state", *numbers]
    short = titles(found["differing"], first)
    table = plain_table(*first, *short, right=(*numbers, *short))
    best = leaders[0]
    for one in leaders:
        clipped = one["clip_fraction"]
        table.add_row(
            *[one["sweep"]] * several,
            str(one["number"]),
            _state(one["state"]),
            *map(format_number, one["value"] if len(metrics) > 1 else [one["value"]]),
            str(one["epoch"]),
            str(one["attempts"]),
            "-" if clipped is None else f"{clipped:.0%}",
            *(
                Text(format_parameter(one["params"], name), style=_against(one, best, name))
                for name in found["differing"]
            ),
        )
    if not found["same"]:
        return table
    return Group(table, Text(f"the same for all: {joined(found['same'])}", style="dim"))


def differences(found: dict[str, Any], spec: SweepSpec) -> RenderableType:
    """Return the table of `sweep show --diff`."""
    first, second = (f"trial {number}" for number in found["trials"])
    grid = TextTable(["", first, second], right={first, second})
    cells = [format_cells(value, spec.metrics) for value in found["values"]]
    for index, metric in enumerate(spec.metrics):
        grid.rows.append((metric, *(one[index] for one in cells)))
    for name, values in found["differing"].items():
        shown = (
            "-" if name in absent else format_value(value)
            for value, absent in zip(values, found["absent"], strict=True)
        )
        grid.rows.append((name, *shown))
    if found["differing"]:
        return grid
    return Group(grid, Text("their parameters are the same", style="dim"))


def _against(one: dict[str, Any], best: dict[str, Any], name: str) -> str:
    if one is best:
        return "bold"
    return "dim" if one["params"].get(name) == best["params"].get(name) else "bold cyan"


def pages(out: Console, found: dict[str, Any]) -> None:
    """Print the pages of `sweep compare`: words that lead to them in a terminal, else URLs."""
    links = {
        "charts": found["mlflow_charts_page"],
        "side by side": found["mlflow_compare_page"],
        "curves": found["mlflow_metric_page"],
    }
    known = {what: page for what, page in links.items() if page is not None}
    if known and redraws(out):
        words = [Text(what, Style(underline=True, link=page)) for what, page in known.items()]
        out.print(Text.assemble("MLflow, while `sweep ui` runs: ", Text(" · ").join(words)))
        return
    for what, page in known.items():
        out.print(f"{what} in MLflow, while `sweep ui` runs: {page}", soft_wrap=True)


def findings(found: Sequence[Finding]) -> RenderableType:
    """Return the table of `sweep doctor`."""
    table = plain_table("", "what", "found", "remedy")
    for one in found:
        table.add_row(
            Text(one.level, style=_LEVEL_STYLES[one.level]), one.what, one.detail, one.remedy or ""
        )
    return table


def watch(console: Console, look: Callable[[], SweepView], *, every: float = 2.0) -> None:
    """Show a sweep's status until no driver runs it any more.

    If the console cannot redraw in place, the status is printed whenever a trial's state or the
    best trial changes.
    """
    table = Live(console=console, refresh_per_second=4, transient=True)
    printed = None
    with table if redraws(console) else nullcontext() as live:
        while True:
            view = look()
            now = view.status()
            found = status(now, view, findings_at_end(view))
            if not view.running:
                break
            if live is not None:
                live.update(_running(console, view, found))
            if live is None and (changed := (now["trials"], now["best"])) != printed:
                console.print(found, crop=False)
                printed = changed
            time.sleep(every)
    if redraws(console):
        more = line(f"all trials: {view.paths.command('trials')}")
        console.print(Group(_trials_that_fit(view, console.size.height - 4), more))
        console.print(found, crop=False)
    else:
        console.print(Group(found, Text(), trials(view.rows(), view.spec)), crop=False)


def _running(console: Console, view: SweepView, found: RenderableType) -> RenderableType:
    """Return the status of a running sweep, with as many trials as fit on the terminal."""
    last = [f"ran {format_duration(view.ledger.seconds)}"]
    if (left := seconds_left(view)) is not None:
        last.append(f"about {format_duration(left)} left")
    summary = Group(found, Text(" · ".join(last)), Text())
    # Rich keeps the last line free.
    height = console.size.height - len(console.render_lines(summary, console.options)) - 1
    return Group(summary, _trials_that_fit(view, height))


def _trials_that_fit(view: SweepView, height: int) -> RenderableType:
    """Return the table of a sweep's trials with at most so many lines."""
    if not view.records:
        return Group()
    spec = view.spec
    rows = [row_of(record, spec, view.trial_state(record)) for record in view.records]
    for record, row in zip(view.records, rows, strict=True):
        row.changed = record.finish_order
    durations = {row.number: row.seconds for row in rows}
    return trial_table(rows, spec, durations, height=height, live=False)


_NUMBER_WIDTH = 9
"""The usual width of a number; narrower columns would jump when values change."""
_MIN_ROWS = 2


def trial_table(
    rows: Sequence[TrialRow],
    spec: SweepSpec,
    durations: Mapping[int, float | None],
    *,
    height: int,
    live: bool,
) -> RenderableType:
    """Return the table of the trials and columns that fit, and a line about the others.

    The two have at most `height` lines. If `live`, rows have the last values, beside the best.
    """
    best = best_of(rows, spec)
    shown = _fitting(in_order(rows, best), best, height)
    values = {name: name for name in spec.metrics} | ({"best": best_name(spec)} if live else {})
    # Where the learning rate is searched, the applied one says little.
    rates = ["lr"] * ("train.optimizer.lr" not in spec.space) + ["grad_norm"] if live else []
    first = ["trial", "state", *["feasible"] * bool(spec.constraints), spec.budget.report_word]
    beside = {name: name for row in rows for name in metrics_beside(row.metrics, spec)}
    params = titles(list(spec.space), [*first, *values, *beside, *rates, "time"])
    optional, more = [*params, *spec.metrics[1:], *beside, *rates], len(rows) - len(shown)
    columns = [*first, *values, *beside, *params, *rates, "time"]
    table = TextTable(
        columns,
        right={*columns} - {"trial", "state", "feasible"},
        optional=optional,
        note=f"+ {counted(more, 'more trial')}" if more else "",
    )
    for row in shown:
        cells = [
            str(row.number),
            row.state,
            *[_FEASIBLE[is_feasible([row], spec)]] * bool(spec.constraints),
            f"{row.epoch}/{spec.budget.reports}",
            *(format_number(row.metrics.get(name)) for name in [*values.values(), *beside]),
            *(format_parameter(row.params, key) for key in spec.space),
            *(format_number(row.metrics.get(f"train/{name}")) for name in rates),
            format_duration(durations[row.number]),
        ]
        style = "bold" if row is best else ""
        padded = [
            Text(cell.rjust(_NUMBER_WIDTH) if name in optional else cell, style)
            for name, cell in zip(columns, cells, strict=True)
        ]
        padded[1].style = f"{style} {_STATE_STYLES.get(row.state, '')}".strip()
        table.rows.append(padded)
    return table


def _fitting(rows: list[TrialRow], best: TrialRow | None, height: int) -> list[TrialRow]:
    """Return the first rows that fit below a header and above a line; the best one is kept."""
    room = max(height - 2, _MIN_ROWS)
    if len(rows) <= room:
        return rows
    if best is None or best in rows[:room]:
        return rows[:room]
    return [*rows[: room - 1], best]
