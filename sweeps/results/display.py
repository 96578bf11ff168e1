"""How what was found is shown to people: tables and sentences for the terminal.

What must not live here: finding it (results, doctor), or a running sweep's own view (live).
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from sweeps.exits import NO_SUCCESS
from sweeps.formats import format_best, format_number
from sweeps.layout import SweepPaths, artifact_root, tracking_uri
from sweeps.results import display_front
from sweeps.results.display_front import cells, joined
from sweeps.results.grid import Grid, plain_table
from sweeps.results.sweep_view import STATES, SweepView
from sweeps.spec.spec import SweepSpec
from tracking.address import is_server

if TYPE_CHECKING:
    from sweeps.commands.doctor import Finding
    from sweeps.driver.control import Stopped
    from sweeps.engine.preflight import Facts
    from sweeps.results.sweep_view import Outcome

_STATE_STYLES = {
    "running": "cyan",
    "finished": "green",
    "complete": "green",
    "interrupted": "yellow",
    "failed": "red",
    "pruned": "dim",
}
_LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def _state(state: str) -> Text:
    return Text(state, style=_STATE_STYLES.get(state, ""))


def sweeps(found: Sequence[dict[str, Any]], root: Path) -> RenderableType:
    """The table of `sweep list`."""
    if not found:
        return Text(f"there are no sweeps below {root} yet; start one with: sweep run FILE")
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


def status(found: dict[str, Any], spec: SweepSpec) -> RenderableType:
    """The lines of `sweep status`."""
    counts = ", ".join(f"{found['trials'][s]} {s}" for s in STATES if found["trials"][s])
    lines: list[RenderableType] = [
        Text.assemble(
            (found["name"], "bold"),
            ": ",
            _state(found["state"]),
            f", {found['num_trials']} trials: {counts}",
        )
    ]
    if found["stopped_by"] is not None:
        lines.append(Text("{key} ended it: {why}".format(**found["stopped_by"])))
    if isinstance(found["best"], list):
        lines += display_front.lines(found["best"], spec.metrics)
    elif found["best"] is not None:
        lines.append(
            Text(
                f"best: trial {found['best']['number']} "
                f"with {format_number(found['best']['value'])}"
            )
        )
        lines.append(Text("      " + joined(found["best"]["params"])))
    if found["outbox_pending"]:
        waiting = f"{found['outbox_pending']} records are not delivered to the tracking store yet"
        if found["state"] != "running":
            waiting += f"; deliver them with: sweep sync {found['name']}"
        lines.append(Text(waiting))
    if found["outbox_refused"]:
        lines.append(Text(refused(found["outbox_refused"]), style="yellow"))
    if found["state"] == "interrupted":
        lines.append(Text(f"continue with: sweep resume {found['name']}"))
    return Group(*lines)


def refused(count: int) -> str:
    """How many records tracking lacks for good."""
    return (
        f"{count} records were refused by the tracking store and are not sent again; "
        "each is kept with the reason in the table `refused` of outbox/outbox.db"
    )


def trials(found: Sequence[dict[str, Any]], spec: SweepSpec) -> RenderableType:
    """The table of `sweep trials`."""
    keys = list(spec.space)
    short = [key.rsplit(".", 1)[-1] for key in keys]
    # What is the same for all is left out: most sweeps need no second attempt.
    attempts = any(one["attempts"] > 1 for one in found)
    reasons = any(one["reason"] for one in found)
    grid = Grid(
        ["trial", "state", *spec.metrics, "epoch", "step", *short]
        + ["attempts"] * attempts
        + ["reason"] * reasons,
        right={*spec.metrics, "epoch", "step", "attempts", *short},
    )
    for one in found:
        grid.rows.append(
            (
                str(one["number"]),
                _state(one["state"]),
                *cells(one["value"], spec),
                str(one["epoch"]),
                str(one["step"]),
                *(format_number(one["params"].get(key)) for key in keys),
                *([str(one["attempts"])] if attempts else []),
                *([one["reason"] or ""] if reasons else []),
            )
        )
    return grid


def trial(found: dict[str, Any], spec: SweepSpec) -> RenderableType:
    """The page of `sweep show`."""
    table = plain_table("", "")
    table.show_header = False
    for key in (
        "number",
        "state",
        "value",
        "epoch",
        "step",
        "attempts",
        "accumulation",
        "reason",
        "mlflow_run_id",
        "directory",
        "checkpoint",
        "best_checkpoint",
    ):
        if key == "value" and isinstance(found[key], list):
            for metric, text in zip(spec.metrics, cells(found[key], spec), strict=True):
                table.add_row(Text(metric, style="bold"), Text(text))
        elif found[key] is not None:
            table.add_row(Text(key, style="bold"), Text(format_number(found[key])))
    for key, value in found["params"].items():
        table.add_row(Text(key, style="bold"), format_number(value))
    for one in found["lineage"]:
        told = f"from trial {one['donor']}: {joined(one['params'])}"
        table.add_row(Text(f"after epoch {one['epoch']}", style="bold"), told)
    reports = plain_table("epoch", *spec.metrics, right=("epoch", *spec.metrics))
    for epoch, value in found["reports"].items():
        reports.add_row(str(epoch), *cells(value, spec))
    parts: list[RenderableType] = [table, Text(), reports]
    if found["traceback"]:
        parts += [Text(), Text(found["traceback"], style="red")]
    return Group(*parts)


def best(found: dict[str, Any], spec: SweepSpec, written: Sequence[Path]) -> RenderableType:
    """The lines of `sweep best`."""
    lines: list[RenderableType] = [
        Text(
            f"trial {found['number']}: {format_best(spec.metrics, found['value'])}",
            style="bold",
        ),
        Text(joined(found["params"])),
    ]
    if found["best_checkpoint"]:
        lines.append(Text(f"checkpoint: {found['best_checkpoint']}"))
    if "registered" in found:
        model, version = found["registered"]["model"], found["registered"]["version"]
        lines.append(Text(f"registered as {model}, version {version}: models:/{model}@best"))
    lines += [Text(f"wrote {path}") for path in written]
    return Group(*lines)


def comparison(found: dict[str, Any]) -> RenderableType:
    """The table of `sweep compare`: what differs from the best one stands out."""
    leaders, metric = found["leaders"], found["metric"]
    metrics = [metric] if isinstance(metric, str) else metric
    if not leaders:
        return Text("no trial has a value yet")
    several = len({one["sweep"] for one in leaders}) > 1
    short = [name.rsplit(".", 1)[-1] for name in found["differing"]]
    titles = [
        name if short.count(last) > 1 else last
        for name, last in zip(found["differing"], short, strict=True)
    ]
    numbers = (*metrics, "epoch", "attempts", "clipped")
    table = plain_table(
        *["sweep"] * several, "trial", "state", *numbers, *titles, right=(*numbers, *titles)
    )
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
                Text(format_number(one["params"].get(name)), style=_against(one, best, name))
                for name in found["differing"]
            ),
        )
    if not found["same"]:
        return table
    return Group(table, Text(f"the same for all: {joined(found['same'])}", style="dim"))


def _against(one: dict[str, Any], best: dict[str, Any], name: str) -> str:
    if one is best:
        return "bold"
    return "dim" if one["params"].get(name) == best["params"].get(name) else "bold cyan"


def pages(out: Console, found: dict[str, Any]) -> None:
    """The addresses of `sweep compare`, each on one line however long, to be copied."""
    for what, page in (
        ("compare in MLflow (while `sweep ui` runs)", found["mlflow_compare_page"]),
        ("their curves", found["mlflow_metric_page"]),
        ("what was searched, in charts", found["mlflow_charts_page"]),
    ):
        if page is not None:
            out.print(f"{what}: {page}", markup=False, highlight=False, soft_wrap=True)


def findings(found: Sequence[Finding]) -> RenderableType:
    """The table of `sweep doctor`."""
    table = plain_table("", "what", "found", "remedy")
    for one in found:
        table.add_row(
            Text(one.level, style=_LEVEL_STYLES[one.level]), one.what, one.detail, one.remedy or ""
        )
    return table


def watch(console: Console, look: Callable[[], SweepView], *, every: float = 2.0) -> None:
    """Show a sweep's status until it no longer runs."""
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            view = look()
            live.update(
                Group(status(view.status(), view.spec), Text(), trials(view.rows(), view.spec))
            )
            if not view.running:
                return
            time.sleep(every)


def outcome(out: Console, err: Console, result: Outcome, paths: SweepPaths) -> None:
    """How a sweep ended, and the command that comes next; on an abnormal end that is the last
    line.
    """
    name = paths.name
    several = len(result.metrics) > 1
    if several:
        display_front.outcome(out, result)
    elif result.best:
        (best,) = result.best
        out.print(
            f"best: trial {best.number} with {format_number(best.value)} "
            f"({joined(best.best_params)})",
            style="bold",
            highlight=False,
            soft_wrap=True,
        )
    if result.pending:
        err.print(
            f"{result.pending} records wait in the outbox; "
            f"deliver them with: {_command()} sync {name}{_where(paths)}",
            highlight=False,
            soft_wrap=True,
        )
    sweep, where = _command(), _where(paths)
    more = f"trials={result.num_trials * 2}"
    if result.stop is not None:
        more = result.stop.go_on
        sentence(out, f"{result.stop.key} ended the sweep: {result.stop.why}", style="")
    if result.exit_code == 0:
        for what, command in (
            ("compare in MLflow", f"ui {name}{where}"),
            ("all trials", f"trials {name}{where}"),
            ("take the best weights", f"best {name}{' --trial K' * several} --export DIR{where}"),
            *([("try more", f"resume {name} -s {more}{where}")] if result.grows else []),
        ):
            out.print(f"{what}: {sweep} {command}", highlight=False, soft_wrap=True)
        return
    if result.exit_code == NO_SUCCESS:
        cause = result.cause or "no trial succeeded"
        err.print(f"stopped: {cause}", style="red", markup=False, highlight=False, soft_wrap=True)
        look = f"trials {name}" if result.failed is None else f"show {name} {result.failed}"
        err.print(f"read more: {sweep} {look}{where}", highlight=False, soft_wrap=True)
        err.print("correct it, then continue with:", highlight=False)
        resume(err, paths, more="" if result.num_left else f" -s {more}")
    else:
        err.print(
            "interrupted; every trial continues from its last checkpoint with:", highlight=False
        )
        resume(err, paths)


def sentence(err: Console, message: str, *, style: str) -> None:
    """What the user is told, as it stands."""
    err.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


def task_facts(console: Console, facts: Facts) -> None:
    """What a run would be, in numbers, and what of it is probably not meant."""
    for line in facts.lines():
        sentence(console, f"  {line}", style="")
    for caution in facts.cautions:
        sentence(console, caution, style="yellow")


def resume(err: Console, paths: SweepPaths, more: str = "") -> None:
    """The command that continues a sweep; the last line of an abnormal end."""
    line = f"{_command()} resume {paths.name}{more}{_where(paths)}{_cluster()}"
    err.print(line, markup=False, highlight=False, soft_wrap=True)


def left_at_once(paths: SweepPaths) -> None:
    """The last lines of a driver that waits for nothing any more."""
    err = Console(stderr=True)
    err.show_cursor()  # the live table may have hidden it
    err.print("\nleft at once; what was saved is whole; continue with:", highlight=False)
    resume(err, paths)


def cluster_lost(paths: SweepPaths, cause: str) -> None:
    """The last lines of a driver whose Ray cluster is gone."""
    err = Console(stderr=True)
    err.show_cursor()  # as above
    sentence(
        err,
        f"\nstopped: the Ray cluster is lost: {cause}; what was saved is whole; once a cluster is "
        "there again, continue with:",
        style="red",
    )
    resume(err, paths)


def stopped(result: Stopped, paths: SweepPaths) -> RenderableType:
    """The lines of `sweep stop`."""
    lines: list[RenderableType] = [Text(result.message)]
    if result.trial is None and result.state == "interrupted":
        lines.append(Text(f"continue with: {_command()} resume {paths.name}{_where(paths)}"))
    return Group(*lines)


def nothing_started(err: Console) -> None:
    """The last lines when a signal came before the sweep was taken up."""
    err.print("interrupted before anything was started; start again with:", highlight=False)
    err.print(f"{_command()} {shlex.join(sys.argv[1:])}", highlight=False, soft_wrap=True)


def _where(paths: SweepPaths) -> str:
    return "" if paths.root == Path("runs").absolute() else f" --root {paths.root}"


def _cluster() -> str:
    """The cluster's address, if this command was given one; who has it in RAY_ADDRESS keeps it."""
    for option, value in pairwise([*sys.argv, ""]):
        if option == "--address":
            return f" --address {value}"
        if option.startswith("--address="):
            return f" {option}"
    return ""


def _command() -> str:
    """How this program is called from here: by its name, or else by its path."""
    called, found = Path(sys.argv[0]), shutil.which("sweep")
    if not called.exists() or (found and called.samefile(found)):
        return "sweep"
    return os.path.relpath(called)


def serve(
    console: Console, root: Path, view: SweepView | None, *, port: int, open_browser: bool
) -> None:
    """Run the MLflow UI until Ctrl-C, on the runs page of a sweep when one is named.

    A tracking server has its pages already: the sweep's is opened there, and nothing is started.
    """
    from sweeps.places import check_place
    from tracking.ui import start_server

    uri = (view.spec.tracking.uri if view else None) or tracking_uri(root)
    if is_server(uri):
        _open(console, _page(uri, view), open_browser=open_browser)
        return
    check_place(root, "--root")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # or the server would outlive this one
    with console.status("starting the MLflow UI (20 to 60 seconds)"):
        server = start_server(uri, artifact_root(root), port=port)
    try:
        console.print("Ctrl-C ends it", highlight=False)
        _open(console, _page(server.url, view), open_browser=open_browser)
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()


def _page(base: str, view: SweepView | None) -> str:
    """The page of a sweep's runs below a server's address; all of them without a sweep."""
    from sweeps.recording.tags import leaders_view
    from tracking.ui import runs_page

    if view is None or view.delivered.experiment_id is None:
        return base
    leaders = leaders_view(view.spec)
    return runs_page(
        base,
        view.delivered.experiment_id,
        order_by_metric=f"best/{view.spec.metrics[0]}",
        ascending=view.spec.modes[0] == "min",
        view_key=leaders.key if leaders.tag in view.delivered.experiment_tags else None,
    )


def _open(console: Console, page: str, *, open_browser: bool) -> None:
    console.print(page, highlight=False, soft_wrap=True)
    if open_browser:
        webbrowser.open(page)
