"""Messages of the commands that change a sweep: before the start, at the end, the next command.

The last line of an abnormal end is the command that continues. What must not live here: tables
(`render`), and deciding how a sweep ended (`sweep_status`).
"""

from __future__ import annotations

import shlex
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, Group, RenderableType

from sweeps.commands import pareto
from sweeps.commands.plain_console import PlainConsole, line
from sweeps.config.metric_direction import direction_warnings
from sweeps.exit_codes import NO_SUCCESS
from sweeps.formatting import format_number, joined
from sweeps.paths import SweepPaths, program_name
from sweeps.results.observer import ShutdownNotices

if TYPE_CHECKING:
    from sweeps.commands.sync import SyncResult
    from sweeps.config.spec import SweepSpec
    from sweeps.driver.stop_requests import StopResult
    from sweeps.engine.sweep_plan import SweepPlan
    from sweeps.engine.task_check import TaskFacts
    from sweeps.results.sweep_status import SweepOutcome


def outcome(out: Console, err: Console, result: SweepOutcome, paths: SweepPaths) -> None:
    """Print how a sweep ended and the next command, which is the last line of an abnormal end."""

    def sweep(command: str, *more: str) -> str:
        return paths.command(command, *more, program=program_name())

    several = len(result.metrics) > 1
    if several:
        pareto.outcome(out, result)
    elif result.best:
        (best,) = result.best
        out.print(
            f"best: trial {best.number} with {format_number(best.value)} "
            f"({joined(best.best_params)})",
            style="bold",
            soft_wrap=True,
        )
        if best.state == "pruned":
            out.print(f"it was stopped early: {best.reason or 'pruned'}", soft_wrap=True)
    if result.pending:
        err.print(
            f"{result.pending} records wait in the outbox; deliver them with: {sweep('sync')}",
            soft_wrap=True,
        )
    if result.pending_weights:
        message = (
            f"the best weights are not published: {result.pending_weights}; publish them with:"
        )
        sentence(err, message, style="yellow")
        resume(err, paths)
    if result.lost_weights:
        message = f"there are no best weights to export: {result.lost_weights}"
        sentence(err, message, style="yellow")
    grows = result.max_trials > result.num_trials
    more: tuple[str, ...] = (f"trials={result.max_trials}",)
    if result.stop is not None:
        more = result.stop.continue_overrides
        sentence(out, f"{result.stop.key} ended the sweep: {result.stop.why}", style="")
    changes = [word for change in more for word in ("-s", change)]
    if result.exit_code == 0:
        choose = ("--trial", "K") if several else ()
        take = sweep("best", *choose, "--export", "DIR")
        for what, command in (
            ("compare in MLflow", sweep("ui")),
            ("read what was found", sweep("report")),
            ("all trials", sweep("trials")),
            *([] if result.lost_weights else [("export the best weights", take)]),
            *([("try more", sweep("resume", *changes))] if grows else []),
        ):
            out.print(f"{what}: {command}", soft_wrap=True)
        return
    if result.exit_code == NO_SUCCESS:
        cause = result.cause or "no trial succeeded"
        err.print(f"stopped: {cause}", style="red", soft_wrap=True)
        look = sweep("trials") if result.failed is None else sweep("show", str(result.failed))
        err.print(f"read more: {look}", soft_wrap=True)
        if result.needs_new_sweep or not (result.num_left or grows):
            err.print("correct it, then start a new sweep with:")
            err.print(
                shlex.join((program_name(), "run", "FILE", "--name", "NAME")), soft_wrap=True
            )
            return
        err.print("correct it, then continue with:")
        resume(err, paths, *(() if result.num_left else changes))
    else:
        err.print("interrupted; every trial continues from its last checkpoint with:")
        resume(err, paths)


def sentence(err: Console, message: str, *, style: str) -> None:
    """Print a message without wrapping it."""
    err.print(message, style=style, soft_wrap=True)


def task_facts(console: Console, facts: TaskFacts) -> None:
    """Print what a run would be, in numbers, and warnings about probable mistakes."""
    for fact in facts.lines():
        sentence(console, f"  {fact}", style="")
    for caution in (*facts.cautions, *facts.checked):
        sentence(console, caution, style="yellow")


def not_checked(spec: SweepSpec) -> list[str]:
    """Return the keys that `sweep check` cannot check: it has no root and connects to nothing."""
    outside = {
        "search.warm_start": spec.search.warm_start,
        "tracking.uri": spec.tracking.uri,
        "storage.ledger": spec.storage.ledger,
        "storage.checkpoints": spec.storage.checkpoints,
    }
    return [key for key, value in outside.items() if value]


def plan(console: Console, spec: SweepSpec, sweep_plan: SweepPlan) -> None:
    """Print what a new sweep will take, and warnings about it."""
    sentence(console, f"  {sweep_plan.in_one_line()}", style="")
    for warning in (*direction_warnings(spec), *sweep_plan.warnings()):
        sentence(console, warning, style="yellow")


def resume(err: Console, paths: SweepPaths, *more: str) -> None:
    """Print the command that continues a sweep."""
    command = paths.command("resume", *more, program=program_name())
    err.print(command + _cluster(), soft_wrap=True)


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

    def cluster_lost(self, paths: SweepPaths, cause: str) -> None:
        """Print the last lines of a driver whose Ray cluster is lost."""
        err = PlainConsole(stderr=True)
        err.show_cursor()  # as above
        sentence(
            err,
            f"\nstopped: the Ray cluster is lost: {cause}; what was saved is complete; when a "
            "cluster is available again, continue with:",
            style="red",
        )
        resume(err, paths)


def cluster_unanswered(file: TextIO, message: str) -> None:
    """Print why a cluster cannot be used, as the last line of this process.

    Args:
        file: Standard error, which Ray may have redirected meanwhile.
        message: The message, with the remedy.
    """
    err = PlainConsole(file=file)
    err.show_cursor()
    sentence(err, f"\n{message}", style="red")


def stopped(result: StopResult, paths: SweepPaths) -> RenderableType:
    """The lines of `sweep stop`."""
    lines: list[RenderableType] = [line(result.message)]
    if result.trial is None and result.state == "interrupted":
        command = paths.command("resume", program=program_name())
        lines.append(line(f"continue with: {command}"))
    return Group(*lines)


def synced(done: SyncResult, paths: SweepPaths, *, verified: bool) -> RenderableType:
    """The lines of `sweep sync`."""
    made = f"drew the figures of {done.drawn} trials; " if done.drawn else ""
    lines = [f"{made}delivered {done.delivered} records; {done.left} wait"]
    command = paths.command("sync", "--verify", program=program_name())
    if verified and not done.left and not done.missing:
        lines.append(f"compared {done.num_runs} runs: nothing is missing in the tracking store")
    elif verified and not done.left and not done.still_missing:
        lines.append(f"missing in the tracking store, and sent again: {done.missing}")
    elif verified:
        lines.append(
            f"missing in the tracking store: {done.missing}; still missing: "
            f"{done.still_missing or 'not compared, as records wait'}; try again with: {command}"
        )
    elif done.missing:
        lines += done.missing.sentences(done.num_runs, command)
    return Group(*map(line, lines))


def interrupted(err: Console, paths: SweepPaths) -> None:
    """Print the last lines after a signal during the shutdown of a sweep."""
    err.print("interrupted; what was saved is complete; continue with:")
    resume(err, paths)


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
