"""Messages of the commands that change a sweep: before the start, at the end, the next command.

The last line of an abnormal end is the command that continues. The end of a sweep with several
metrics is its Pareto front. What must not live here: tables of trials (`render`), and how a sweep
ended (`view.outcome`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from sweeps.cli.plain_console import PlainConsole, line, plain_table
from sweeps.errors import NO_SUCCESS
from sweeps.formatting import (
    counted,
    format_best,
    format_cells,
    format_number,
    format_parameter,
    joined,
    titles,
)
from sweeps.paths import SweepPaths, command_line, program_name
from sweeps.view.observer import ShutdownNotices

if TYPE_CHECKING:
    from sweeps.engine.sweep_plan import SweepPlan
    from sweeps.engine.task_check import TaskFacts
    from sweeps.run.stop_requests import StopResult
    from sweeps.run.sync import SyncResult
    from sweeps.spec.document import Document
    from sweeps.spec.spec import SweepSpec
    from sweeps.trust.findings import Findings
    from sweeps.view.outcome import SweepFailure, SweepOutcome
    from tracking.notifications import Undelivered


_UNDELIVERED = "tracking does not have all of it yet; deliver the rest with"


def outcome(
    out: Console,
    err: Console,
    result: SweepOutcome,
    paths: SweepPaths,
    findings: Findings | None = None,
) -> None:
    """Print how a sweep ended, and as the last line of an abnormal end the next command."""

    sweep = paths.command
    several = len(result.metrics) > 1
    if several:
        front_outcome(out, result)
    elif result.best:
        (best,) = result.best
        value = f"{result.metrics[0]} {format_number(best.value)}"
        if best.over_seeds is not None:
            value += f", {best.over_seeds.in_words()}"
        found = f"{best.best_word}: trial {best.number} with {value} ({joined(best.best_params)})"
        paragraph(out, found, style="bold")
        if best.state == "pruned":
            paragraph(out, f"it was stopped early: {best.reason or 'pruned'}")
        if result.can_finish:
            finish = sweep("resume", str(best.number), "--finish")
            out.print(f"train it to its end: {finish}", soft_wrap=True)
    for one in found_lines(findings):
        paragraph(out, one)
    waiting, failure = result.waiting, result.failure
    if waiting.records:
        err.print(f"{_UNDELIVERED}: {sweep('sync')}", soft_wrap=True)
    if waiting.notifications:
        sentence(
            err, f"{notifications(waiting.notifications)}; deliver with: {sweep('sync')}", style=""
        )
    if waiting.weights:
        message = (
            f"the best weights are not published: {waiting.weights}; when the store "
            "answers again, publish them with:"
        )
        sentence(err, message, style="yellow")
        resume(err, paths)
    if result.lost_weights:
        message = f"there are no best weights to export: {result.lost_weights}"
        sentence(err, message, style="yellow")
    if result.stop is not None:
        sentence(out, f"{result.stop.key} ended the sweep: {result.stop.why}", style="")
    if result.exit_code == 0:
        choose = ("TRIAL",) if several else ()
        take = sweep("best", *choose, "--export", "DIR")
        for what, command in (
            ("open its page, and MLflow", sweep("ui")),
            ("read what was found", sweep("report")),
            ("all trials", sweep("trials")),
            *(
                [("run the failed trials again, after a fix", sweep("resume", "--retry"))]
                if result.num_retryable
                else []
            ),
            *([] if result.lost_weights else [("export the best weights", take)]),
            *(
                [
                    (
                        findings.next_label if findings else "try more",
                        sweep("resume", *_changes(result, findings)),
                    )
                ]
                if result.grows
                else []
            ),
        ):
            out.print(f"{what}: {command}", soft_wrap=True)
        return
    if failure is not None and (result.exit_code == NO_SUCCESS or failure.is_aborted):
        paragraph(err, f"stopped: {failure.cause}", style="red")
        for text in after_failure(result, failure, paths):
            err.print(text, soft_wrap=True)
    else:
        err.print("interrupted; every trial continues from its last checkpoint with:")
        resume(err, paths)


def found_lines(findings: Findings | None) -> list[str]:
    """Return what was found, one sentence a line."""
    return [f"- {one.sentence}" for one in (findings.sentences if findings else ())]


def after_failure(result: SweepOutcome, failure: SweepFailure, paths: SweepPaths) -> list[str]:
    """Return what to read, what to change, and then the command that continues, as the last line.

    A resume without a change would fail in the same way.
    """
    look = ("trials",) if failure.trial is None else ("show", str(failure.trial))
    lines = [f"read more: {paths.command(*look)}"]
    if not result.needs_new_sweep and result.num_retryable and failure.is_of_the_task:
        again = paths.command("resume", "--retry") + _cluster()
        then = "then run the failed trials again and continue with:"
        return [*lines, f"{failure.remedy}, {then}", again]
    if result.needs_new_sweep or not (result.num_left or result.grows):
        start = command_line(paths.root, "run", "FILE", "--name", "NAME")
        return [*lines, f"{failure.remedy}, then start a new sweep with:", start]
    more = () if result.num_left else _more_trials(result)
    command = paths.command("resume", *more) + _cluster()
    return [*lines, f"{failure.remedy}, then continue with:", command]


def _changes(result: SweepOutcome, findings: Findings | None) -> list[str]:
    """Return the options of the resume that is recommended: a better space, or more trials."""
    if findings is None or not findings.changes_space:
        return _more_trials(result)
    return [word for change in findings.overrides for word in ("-s", change)]


def _more_trials(result: SweepOutcome) -> list[str]:
    """Return the options of a resume that runs more trials."""
    more = (
        (f"trials={result.max_trials}",) if result.stop is None else result.stop.continue_overrides
    )
    return [word for change in more for word in ("-s", change)]


def sentence(err: Console, message: str, *, style: str) -> None:
    """Print a message without wrapping it."""
    err.print(message, style=style, soft_wrap=True)


def choices(console: Console, document: Document) -> None:
    """Print what `auto` took and why, if the spec has it."""
    if document.choices:
        from sweeps.spec.automatic import sentence as what_auto_took

        paragraph(console, what_auto_took(document.choices))


def notifications(left: Undelivered) -> str:
    """Return how many notifications wait, and why."""
    wait = "1 notification waits" if left.waiting == 1 else f"{left.waiting} notifications wait"
    return f"{wait} for the webhook" + (f" ({left.reason})" if left.reason else "")


def paragraph(console: Console, text: str, *, style: str = "") -> None:
    """Print text that has no command to copy; a terminal's lines break between words."""
    console.print(text, style=style, soft_wrap=not console.is_terminal)


def task_facts(console: Console, facts: TaskFacts) -> None:
    """Print what a run would be, in numbers, and warnings about probable mistakes."""
    for fact in facts.lines():
        paragraph(console, f"  {fact}")
    for caution in (*facts.cautions, *facts.checked):
        paragraph(console, caution, style="yellow")


def plan(console: Console, spec: SweepSpec, sweep_plan: SweepPlan) -> None:
    """Print what a new sweep will take, and warnings about it."""
    sentence(console, f"  {sweep_plan.in_one_line()}", style="")
    if sweep_plan.defaults:
        sentence(console, f"  defaults: {joined(sweep_plan.defaults)}", style="")
    for warning in (*spec.direction_warnings(), *sweep_plan.warnings()):
        sentence(console, warning, style="yellow")


def resume(err: Console, paths: SweepPaths, *more: str, command: str = "resume") -> None:
    """Print the command that continues a sweep."""
    words = paths.command(command, *more)
    err.print(words + _cluster(), soft_wrap=True)


class ConsoleNotices(ShutdownNotices):
    """Prints the messages of a driver that shuts down early on standard error."""

    def stopping(self, grace: float) -> None:
        """Print that trials save and end, and what another signal does."""
        print(
            f"\nstopping: trials save at their next step and end, within {grace:g} s; "
            "another Ctrl-C exits immediately",
            file=sys.stderr,
            flush=True,
        )

    def exited_immediately(self, paths: SweepPaths) -> None:
        """Print the last lines of a driver that a second signal ended."""
        err = PlainConsole(stderr=True)
        err.show_cursor()  # the live table may have hidden it
        err.print("\nexited immediately; what was saved is complete; continue with:")
        resume(err, paths)

    def ray_lost(self, paths: SweepPaths, cause: str) -> None:
        """Print the last lines of a driver that has lost its local Ray or its cluster."""
        err = PlainConsole(stderr=True)
        err.show_cursor()  # as above
        message = f"\nstopped: {cause}; what was saved is complete; continue with:"
        sentence(err, message, style="red")
        resume(err, paths)


def cluster_unanswered(file: TextIO, message: str) -> None:
    """Print why a cluster cannot be used, to what was standard error, as the last line."""
    err = PlainConsole(file=file)
    err.show_cursor()
    sentence(err, f"\n{message}", style="red")


def stopped(result: StopResult, paths: SweepPaths) -> RenderableType:
    """The lines of `sweep stop`."""
    lines: list[RenderableType] = [line(result.message)]
    if result.trial is None and result.state == "interrupted":
        command = paths.command("resume")
        lines.append(line(f"continue with: {command}"))
    return Group(*lines)


def synced(done: SyncResult, paths: SweepPaths, *, verified: bool) -> RenderableType:
    """The lines of `sweep sync`."""
    made = f"drew the figures of {counted(done.drawn, 'trial')}; " if done.drawn else ""
    left = f"{done.left} wait{'s' * (done.left == 1)}"
    lines = [f"{made}delivered {counted(done.delivered, 'record')}; {left}"]
    command = paths.command("sync", "--verify")
    if verified and not done.left and not done.missing:
        lines.append(
            f"compared {counted(done.num_runs, 'run')}: nothing is missing in the tracking store"
        )
    elif verified and not done.left and not done.still_missing:
        lines.append(f"missing in the tracking store, and sent again: {done.missing}")
    elif verified:
        lines.append(
            f"missing in the tracking store: {done.missing}; still missing: "
            f"{done.still_missing or 'not compared, as records wait'}; try again with: {command}"
        )
    elif done.missing:
        lines += done.missing.sentences(done.num_runs, command)
    if done.undelivered:
        lines.append(notifications(done.undelivered))
    return Group(*map(line, lines))


def interrupted(err: Console, paths: SweepPaths, command: str = "resume") -> None:
    """Print the last lines after a signal during the shutdown of a sweep."""
    err.print("interrupted; what was saved is complete; continue with:")
    resume(err, paths, command=command)


def end_of_extra(err: Console, result: SweepOutcome, paths: SweepPaths, command: str) -> None:
    """Print how an attempt ended that ran extra trials alone, unless it ended well."""
    if result.waiting.records:
        sentence(err, f"{_UNDELIVERED}: {paths.command('sync')}", style="")
    if result.exit_code == 0:
        return
    if result.failure is not None:
        paragraph(err, f"stopped: {result.failure.cause}", style="red")
        sentence(err, f"{result.failure.remedy}, then continue with:", style="")
    else:
        err.print("interrupted; every trial continues from its last checkpoint with:")
    resume(err, paths, command=command)


def nothing_started(err: Console) -> None:
    """Print the last lines after a signal before the sweep was opened."""
    err.print("interrupted before anything was started; start again with:")
    err.print(shlex.join((program_name(), *sys.argv[1:])), soft_wrap=True)


def _cluster() -> str:
    """The `--address` option of this command; RAY_ADDRESS stays in the user's environment."""
    for option, value in pairwise([*sys.argv, ""]):
        if option == "--address":
            return f" --address {shlex.quote(value)}"
        if option.startswith("--address="):
            return f" {shlex.quote(option)}"
    return ""


def front_lines(
    front: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> list[RenderableType]:
    """Return the front for `sweep status`, two lines for each trial."""
    if not front:
        return []
    found: list[RenderableType] = [Text(_front_head(len(front)))]
    for one in front:
        found.append(Text(f"  trial {one['number']}: {format_best(metrics, one['value'])}"))
        found.append(Text("      " + joined(one["params"])))
    return found


def front_table(
    front: Sequence[dict[str, Any]], spec: SweepSpec, paths: SweepPaths, lost: str | None = None
) -> RenderableType:
    """Return the table of `sweep best` without TRIAL; `lost` is why no trial has weights."""
    first = ("trial", *spec.metrics, spec.budget.report_word)
    columns = (*first, *titles(list(spec.space), first))
    found = plain_table(*columns, right=columns[1:])
    for one in front:
        found.add_row(
            str(one["number"]),
            *format_cells(one["value"], spec.metrics),
            str(one["epoch"]),
            *(format_parameter(one["params"], key) for key in spec.space),
        )
    choose = paths.command("best", "TRIAL", "--export", "DIR")
    last = f"no weights to export: {lost}" if lost else f"export one of them: {choose}"
    return Group(Text(_front_head(len(front)), style="bold"), found, line(last))


def front_outcome(out: Console, result: SweepOutcome) -> None:
    """Print the front at the end of a sweep."""
    if result.best:
        out.print(_front_head(len(result.best)), style="bold", soft_wrap=True)
    for one in result.best:
        trial = f"  trial {one.number}: {format_best(result.metrics, one.values)}"
        out.print(f"{trial} ({joined(one.best_params)})", soft_wrap=True)


def _front_head(count: int) -> str:
    if count == 1:
        return "best: one trial, which no other beats in any metric"
    return (
        f"best: {count} trials on the Pareto front: none is better than another one in a metric "
        "without being worse in one"
    )
