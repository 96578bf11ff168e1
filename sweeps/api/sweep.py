"""A sweep from Python: write it, run it, watch it, read it, draw it, compare it with others.

What must not live here: how a sweep runs (`sweep run`, in a child process), and what is printed.
"""

from __future__ import annotations

import contextlib
import html
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from sweeps.api.command import SweepCommandError, in_notebook, read_command, run_command
from sweeps.api.light import FULL_DOOR, Asked, LightSweep
from sweeps.api.objective import Objective, Report, light_keys
from sweeps.api.sweep_file import SweepKeys, override_texts, short_form, sweep_file
from sweeps.api.trial import Trial
from sweeps.artifacts import export
from sweeps.errors import LedgerError, LocatedIssue, RevisionError, SpecError, UserError
from sweeps.formatting import counted
from sweeps.paths import SweepPaths, resolve_root
from sweeps.run.stop_requests import stop
from sweeps.spec.automatic import AutoChoice
from sweeps.spec.automatic import sentence as what_auto_took
from sweeps.spec.spec import SweepSpec, load_with_positions, parse_with_positions
from sweeps.trust.audit.read import audit_sweep, status_with_audit
from sweeps.trust.confirm import confirmed_trial, find_confirmation
from sweeps.trust.findings import find
from sweeps.view.compare import compare as compare_views
from sweeps.view.sweep_progress import ended_line
from sweeps.view.sweep_view import SweepView, UnknownSweep
from sweeps.view.tables import curves_frame, leaders_frame, trials_frame, write_tables

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    import plotly.graph_objects as go


class Sweep:
    """A sweep: what it searches, and once it has run, what it found.

    Its keywords are the keys of a sweep file (see the reference of the sweep file), with the same
    rules and the same messages. `task` may also be an imported class.

    Instead of a task, a sweep may have a function of this script or notebook. Its trials run in
    this process, one after another, and the space has the function's arguments.

    Examples:
        >>> sweep = Sweep(
        ...     name="digits", task="digits", metric="val/loss", mode="min", trials=8,
        ...     budget={"epochs": 5},
        ...     space={"train.optimizer.lr": {"loguniform": [1e-4, 1e-1]}},
        ... )
        >>> sweep.run().best.params
        >>> def train(lr, warmup):
        ...     return (lr - 0.01) ** 2 + warmup
        >>> space = {"lr": {"loguniform": [1e-4, 1e-1]}, "warmup": range(3)}
        >>> Sweep(train, space, mode="min", trials=4).run().best.arguments

    Args:
        objective: A function of the searched values. It returns a number or a dict of metrics, or
            yields such a report after each epoch, with `budget={"epochs": ...}`.
        space: What is searched: the function's arguments, or the keys of a task's sweep. A value
            is a distribution in the form of a sweep file, a list of choices, a `range`, or a
            distribution of Optuna.
        root: The directory of all sweeps; default: `$SWEEP_ROOT`, or `./runs`.
        keys: The keys of the sweep file. With a function, `name` is its name and `metric` is
            `value` by default.

    Raises:
        SpecError: A key is unknown or a value is wrong; the message lists all problems.
        UserError: The task's class is defined in the notebook itself, or the function cannot take
            the values of the space.
    """

    paths: SweepPaths
    _light: LightSweep | None = None

    def __init__(
        self,
        objective: Objective | None = None,
        space: Mapping[str, Any] | None = None,
        *,
        root: str | Path | None = None,
        **keys: Unpack[SweepKeys],
    ) -> None:
        given: dict[str, Any] = dict(keys)
        short = {key: short_form(value) for key, value in (space or {}).items()}
        light = objective is not None or ("task" not in keys and _has_arguments(short))
        if light:
            given = light_keys(objective, short, keys)
        elif space is not None:
            given["space"] = short
        drawn = 0 if light else None  # otherwise `sweep run` checks what comes with it
        try:
            spec, document = parse_with_positions(sweep_file(given), "Sweep(...)", drawn=drawn)
        except SpecError as error:  # a caller has not seen the text in which it has its place
            issues = [LocatedIssue("Sweep(...)", one.key, one.message) for one in error.problems]
            raise SpecError(issues) from None
        self._begin(root, spec, text=sweep_file(given), choices=document.choices)
        self._light = LightSweep(self.paths, spec, objective) if light else None

    def _begin(
        self,
        root: str | Path | None,
        spec: SweepSpec,
        *,
        text: str | None = None,
        file: Path | None = None,
        overrides: tuple[str, ...] = (),
        choices: Sequence[AutoChoice] = (),
    ) -> None:
        self._spec, self._text, self._file, self._overrides = spec, text, file, overrides
        self._choices = choices
        self.paths = SweepPaths(resolve_root(None if root is None else Path(root)), spec.name)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        root: str | Path | None = None,
    ) -> Sweep:
        """Read a sweep file.

        Examples:
            >>> sweep = Sweep.from_file("sweep.yaml", {"trials": 8})

        Args:
            path: The YAML file.
            overrides: Values by dotted key, as `-s KEY=VALUE` gives them: `{"trials": 8}`.
            root: The directory of all sweeps.

        Raises:
            SpecError: The file cannot be read or is wrong; the message lists all problems.
        """
        settings = override_texts(overrides)
        sweep = cls.__new__(cls)
        spec, document = load_with_positions(Path(path), settings)
        sweep._begin(root, spec, file=Path(path), overrides=settings, choices=document.choices)
        return sweep

    @classmethod
    def open(cls, name: str, *, root: str | Path | None = None) -> Sweep:
        """Open a sweep that has begun, running or not.

        Examples:
            >>> sweep = Sweep.open("digits")
            >>> sweep.name, sweep.status["state"]

        Raises:
            UnknownSweep: There is no such sweep below the root.
        """
        view = SweepView.open(name, root)
        sweep = cls.__new__(cls)
        sweep._begin(view.paths.root, view.spec)
        return sweep

    def __repr__(self) -> str:
        state = self._view().state if self.paths.exists() else "not started"
        return f"Sweep({self.name!r}, {state}, root={str(self.paths.root)!r})"

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.paths.name

    def to_yaml(self) -> str:
        """Return the equivalent sweep file, all defaults written out.

        Examples:
            >>> from pathlib import Path
            >>> Path("same.yaml").write_text(Sweep.open("digits").to_yaml())
        """
        return self._spec.to_yaml()

    def check(self, *, hours: float | None = None, thorough: bool = False) -> dict[str, Any]:
        """Check the sweep and its task, and say what it would take, without starting anything.

        Examples:
            >>> checked = Sweep.from_file("sweep.yaml").check(hours=8)
            >>> checked["plan"]["trials"], checked["options"], checked["warnings"]

        Args:
            hours: Find how many trials end within so many hours.
            thorough: Check the task's whole contract; builds the task several times.

        Returns:
            The object of `sweep check --json`: the plan by measured steps, and warnings.

        Raises:
            SweepCommandError: Something is wrong; exit code 2.
        """
        words = [*([] if hours is None else ["--hours", str(hours)]), *flags_of(thorough=thorough)]
        with self._written() as arguments:
            found: dict[str, Any] = read_command(["check", *arguments, *words, "--json"])
            return found

    def run(self, *, offline: bool = False) -> Sweep:
        """Run the sweep to its end, in a child process; returns the sweep, to be read.

        A terminal shows the live table, a notebook a progress bar and the best trials so far, and
        what `auto` took. An interrupt drains the trials and raises KeyboardInterrupt; `resume`
        continues. If this process is killed, the driver is killed, too, and `resume` continues
        from the newest checkpoints.

        A function is called in this process instead. Running its script again continues the
        sweep: a trial that was running starts again, with the same parameters.

        Examples:
            >>> Sweep.from_file("sweep.yaml").run().trials()

        Args:
            offline: Contact no tracking server; everything stays in the outbox.

        Raises:
            SweepCommandError: The sweep exists already, the task is wrong, or no trial succeeded.
            KeyboardInterrupt: It was interrupted.
        """
        note = what_auto_took(self._choices) if self._choices else ""
        if self._light is not None:
            with progress_bar(self.paths, self._spec, note or FULL_DOOR, always=True) as look:
                error = self._light.run(look)
            if error is not None:
                raise error
            return self
        with self._written() as arguments:
            self._drive("run", *arguments, *self._root(), *flags_of(offline=offline), note=note)
        return self

    def ask(self) -> Asked | None:
        """Begin the next trial of a sweep without a task, to be run by the caller.

        The sweep's lock is held until no trial is left. A trial whose result is never told is
        returned again, first, by the next process that asks.

        Examples:
            >>> by_hand = Sweep(name="by_hand", space={"lr": [0.1, 0.01]}, mode="min", trials=2)
            >>> while (trial := by_hand.ask()) is not None:
            ...     by_hand.tell(trial, trial.params["lr"] ** 2)

        Returns:
            The trial's number and values; None if the sweep has all its trials, or stops.

        Raises:
            UserError: The sweep has a task.
            SearchChanged: A sweep of this name exists, with other keys.
            SweepLockedError: Another process runs the sweep.
        """
        return self._function().ask()

    def tell(
        self, trial: Asked | int, result: Report | None = None, *, failure: str | None = None
    ) -> None:
        """Store the result of a trial that `ask` has returned.

        Examples:
            >>> told = Sweep(name="told", space={"lr": [0.1, 0.01]}, mode="min", trials=2)
            >>> if (trial := told.ask()) is not None:
            ...     told.tell(trial, failure="out of memory")

        Args:
            trial: The trial, or its number.
            result: Its value, or several metrics by name; NaN and infinity fail the trial.
            failure: Why it has no result.

        Raises:
            UserError: The trial is not running, or the result is no number.
        """
        number = trial.number if isinstance(trial, Asked) else trial
        self._function().tell(number, result, failure)

    def _function(self) -> LightSweep:
        if self._light is None:
            raise UserError(
                f"sweep '{self.name}' has a task, whose trials run() starts; ask() and tell() are "
                "for a sweep of your own function; leave `task` out, and name the function's "
                "arguments in the space"
            )
        return self._light

    def resume(
        self,
        overrides: Mapping[str, Any] | None = None,
        *,
        finish: Sequence[int] = (),
        accept_changes: bool = False,
        offline: bool = False,
    ) -> Sweep:
        """Go on with the sweep after an interruption, or add trials to it.

        Examples:
            >>> Sweep.open("digits").resume({"trials": 40})

        Args:
            overrides: Changed values by dotted key, such as `{"trials": 40}`.
            finish: Numbers of pruned trials to train to their end, or of complete ones to train
                to the end of a longer budget.
            accept_changes: Resume although code, data or the meaning of values has changed.
            offline: Contact no tracking server; everything stays in the outbox.

        Raises:
            SweepCommandError: There is no such sweep, a change is refused, or no trial succeeded.
            KeyboardInterrupt: It was interrupted.
        """
        chosen = [*map(str, finish), *["--finish"] * bool(finish)]
        flags = flags_of(accept_changes=accept_changes, offline=offline)
        return self._continue("resume", overrides, *chosen, *flags)

    def confirm(
        self,
        *,
        top: int | None = None,
        seeds: int | None = None,
        until: float | None = None,
        accept_changes: bool = False,
        offline: bool = False,
    ) -> dict[str, Any]:
        """Train the best trials again under common seeds, until it is known which is the best.

        Examples:
            >>> Sweep.open("digits").confirm(top=3)["winner"]

        Args:
            top: How many of the best trials; None: as the last time, or 5.
            seeds: Under how many seeds at most; None: as the last time, or 5.
            until: End when a trial is the best with this probability; None: as the last time,
                or 0.95.
            accept_changes: Confirm although code or data has changed.
            offline: Contact no tracking server; everything stays in the outbox.

        Returns:
            The object of `sweep confirm --json`.

        Raises:
            SweepCommandError: The leaders cannot be compared, or no run succeeded.
            KeyboardInterrupt: It was interrupted; `confirm` continues it.
        """
        chosen = {"--top": top, "--seeds": seeds, "--until": until}
        words = [
            w for key, value in chosen.items() if value is not None for w in (key, str(value))
        ]
        flags = flags_of(accept_changes=accept_changes, offline=offline)
        self._drive("confirm", self.name, *words, *flags, *self._root())
        return self.confirmation or {}

    def retry(
        self,
        trials: Sequence[int] = (),
        *,
        fresh: bool = False,
        overrides: Mapping[str, Any] | None = None,
        accept_changes: bool = False,
        offline: bool = False,
    ) -> Sweep:
        """Run failed trials again after a fix, under the same numbers, and continue the sweep.

        Examples:
            >>> Sweep.open("digits").retry()

        Args:
            trials: Their numbers; empty: all that failed.
            fresh: Start at step 0, not at their newest checkpoints.
            overrides: Changed values by dotted key.
            accept_changes: Continue although other trials were trained with other code or data.
            offline: Contact no tracking server; everything stays in the outbox.

        Raises:
            SweepCommandError: A trial has not failed, a change is refused, or no trial succeeded.
            KeyboardInterrupt: It was interrupted.
        """
        flags = flags_of(retry=True, fresh=fresh, accept_changes=accept_changes, offline=offline)
        return self._continue("resume", overrides, *map(str, trials), *flags)

    def stop(self) -> None:
        """Ask the running sweep to stop, and wait until it has; its trials save their state first.

        Examples:
            >>> Sweep.open("digits").stop()

        Raises:
            UnknownSweep: The sweep has not begun.
            NotRunningError: It does not run here.
            TimeoutError: It has not stopped after two minutes.
        """
        stopped = stop(self._view())
        if not stopped.done:
            raise TimeoutError(stopped.message)

    def _continue(self, command: str, overrides: Mapping[str, Any] | None, *words: str) -> Sweep:
        changed = (f"-s{setting}" for setting in override_texts(overrides))
        self._drive(command, self.name, *changed, *words, *self._root())
        self._spec = SweepView(self.paths).spec
        return self

    def _drive(self, *arguments: str, note: str = "") -> None:
        with progress_bar(self.paths, self._spec, note) as look:
            run_command([*arguments], look)

    def _root(self) -> list[str]:
        return ["--root", str(self.paths.root)]

    def _written(self) -> AbstractContextManager[list[str]]:
        return written_file(self.name, self._file, self._overrides, self._text)

    def _view(self) -> SweepView:
        try:
            return SweepView(self.paths)
        except UnknownSweep as error:
            if self._text is not None or self._file is not None:  # else it was opened by its name
                error.add_note("this sweep has not begun; start it with run()")
            raise

    @property
    def status(self) -> dict[str, Any]:
        """The sweep's state now: the object of `sweep status --json`.

        Examples:
            >>> status = Sweep.open("digits").status
            >>> status["trials"], status["findings"]

        Raises:
            UnknownSweep: The sweep has not begun.
        """
        return status_with_audit(self._view())

    def audit(self) -> dict[str, Any]:
        """Check whether the result can be trusted: the object of `sweep audit --json`.

        Each of its `cards` has an `id`, a `verdict` (`pass`, `warn`, `not enough data` or
        `does not apply`), the `evidence` in a sentence, and the numbers as `figure`.

        Examples:
            >>> cards = Sweep.open("digits").audit()["cards"]
            >>> [card["id"] for card in cards if card["verdict"] == "warn"]

        Raises:
            UnknownSweep: The sweep has not begun.
        """
        return audit_sweep(self._view()).as_dict()

    def trials(self) -> pd.DataFrame:
        """Return one row for each trial, by its number.

        Columns: `state`; each searched parameter by its dotted key; each reported metric as it was
        at the report that is the trial's value; the metrics of tested trials on test data; with
        `constraints` whether it is `feasible`; `best_epoch` and `best_step` of that report;
        `epochs` and `steps` trained; `started_at`, `ended_at` and the `seconds` that workers
        trained it; `attempts`; `finishes`, the pruned trial that it trains to its end; `confirms`,
        the leader that it trains again; `reason`; `run_id`. With `repeats` each row is one seed:
        `configuration`, the number of the first; `seed_index`; and at the first seed `over_seeds`,
        the value of the configuration, with its `standard_error` and from how many seeds it is,
        `num_seeds`.

        Examples:
            >>> frame = Sweep.open("digits").trials()
            >>> frame.sort_values("val/loss").head(3)

        Raises:
            UnknownSweep: The sweep has not begun.
        """
        return trials_frame(self._view())

    def curves(self, *metrics: str) -> pd.DataFrame:
        """Return the curves of all trials in long form: `trial`, `metric`, `step`, `value`.

        Examples:
            >>> curves = Sweep.open("digits").curves("val/loss", "train/grad_norm")
            >>> losses = curves[curves.metric == "val/loss"]
            >>> losses.pivot(index="step", columns="trial", values="value")

        Args:
            metrics: Such as `"val/loss", "train/grad_norm"`; default: the sweep's metrics.

        Raises:
            UnknownSweep: The sweep has not begun.
            CurveDamaged: A trial's metrics cannot be read.
        """
        view = self._view()
        names = metrics or view.spec.metrics
        return curves_frame(view, range(len(view.records)), list(dict.fromkeys(names)))

    @property
    def best(self) -> Trial:
        """The best trial; see the concepts page on what best means.

        Examples:
            >>> best = Sweep.open("digits").best
            >>> best.number, best.value, best.params

        Raises:
            NoBest: No trial has a result yet.
            NoChoice: The sweep has several metrics, and several trials are on the Pareto front.
            UnknownSweep: The sweep has not begun.
        """
        view = self._view()
        return Trial(view, view.select_trial(None))

    @property
    def best_confirmed(self) -> Trial:
        """The winner of the last `confirm`.

        Examples:
            >>> Sweep.open("digits").best_confirmed.params

        Raises:
            NoBest: No trial is confirmed.
            UnknownSweep: The sweep has not begun.
        """
        view = self._view()
        return Trial(view, confirmed_trial(view))

    @property
    def confirmation(self) -> dict[str, Any] | None:
        """What the last `confirm` found: the object of `sweep confirm --json`; None without one.

        Examples:
            >>> found = Sweep.open("digits").confirmation
            >>> found["winner"], found["sentences"]

        Raises:
            UnknownSweep: The sweep has not begun.
        """
        found = find_confirmation(self._view())
        return None if found is None else found.as_dict()

    @property
    def front(self) -> list[Trial]:
        """The best trial in a list; with several metrics, the trials of the Pareto front.

        Examples:
            >>> [trial.params for trial in Sweep.open("digits").front]

        Raises:
            NoBest: No trial has a result yet.
            UnknownSweep: The sweep has not begun.
        """
        view = self._view()
        return [Trial(view, record) for record in view.front()]

    def trial(self, number: int) -> Trial:
        """Return one trial.

        Examples:
            >>> trial = Sweep.open("digits").trial(2)
            >>> trial.state, trial.reason

        Raises:
            UnknownTrial: There is no trial of that number.
            UnknownSweep: The sweep has not begun.
        """
        view = self._view()
        return Trial(view, view.record(number))

    @property
    def figures(self) -> Figures:
        """The report's figures, for a notebook; see `Figures`."""
        return Figures(self.paths)

    @property
    def findings(self) -> list[str]:
        """What was found so far, a sentence each: those of `sweep status` and of the report.

        Examples:
            >>> for sentence in Sweep.open("digits").findings:
            ...     print(sentence)

        Raises:
            UnknownSweep: The sweep has not begun.
        """
        return [one.sentence for one in find(self._view()).sentences]

    def report(self, file: str | Path | None = None) -> Path:
        """Write the page with all figures, as `sweep report` does, and return its file.

        Examples:
            >>> Sweep.open("digits").report("digits.html")

        Args:
            file: The file to write; default: `NAME-report.html` in the working directory.

        Raises:
            NoReport: It could not be drawn.
            UnknownSweep: The sweep has not begun.
        """
        return export.report(self._view(), Path(file or f"{self.name}-report.html"))

    def compare(self, *others: Sweep, top: int = 5) -> Comparison:
        """Compare the best trials of this sweep, and of others; see `sweeps.compare`.

        Examples:
            >>> Sweep.open("digits").compare(Sweep.open("wider"), top=3).leaders
        """
        return compare(self, *others, top=top)

    def export(
        self, directory: str | Path, *, kind: Literal["csv", "parquet"] = "csv"
    ) -> list[Path]:
        """Write the trials and the curves as tables, as `sweep report --csv` does.

        Examples:
            >>> Sweep.open("digits").export("tables", kind="parquet")

        Args:
            directory: A new or existing directory.
            kind: The format of the tables.

        Returns:
            The files written.

        Raises:
            UnknownSweep: The sweep has not begun.
        """
        if kind not in ("csv", "parquet"):
            raise UserError(f"kind is {kind!r}; tables are csv or parquet; write one of them")
        return write_tables(self._view(), Path(directory), kind)

    def _repr_html_(self) -> str:
        """Return the state and the best trials, for a notebook."""
        if not self.paths.exists():
            return f"<p>{html.escape(repr(self))}</p>"
        view = self._view()
        status = view.status()
        counts = view.counts_in_words(status["trials"])
        said = (
            f"{self.name}: {status['state']}, {counted(status['num_trials'], 'trial')}: {counts}"
        )
        return f"<p>{html.escape(said)}</p>{self.compare()._repr_html_()}"

    @property
    def study(self) -> optuna.Study:
        """The sweep's trials as an Optuna study in memory, for `optuna.visualization`.

        It is a copy: what is changed in it changes nothing in the sweep.

        Examples:
            >>> import optuna
            >>> optuna.visualization.plot_optimization_history(Sweep.open("digits").study)

        Raises:
            UnknownSweep: The sweep has not begun.
        """
        from sweeps.report.figures import copy_study  # loads Optuna

        return copy_study(self._view())


def flags_of(**given: bool) -> list[str]:
    """Return the options of the command line that are given."""
    return [f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given]


def _has_arguments(space: Mapping[str, Any]) -> bool:
    """Return whether a space names arguments of a function, not keys of a sweep file."""
    return any("." not in str(key) for key in space)


@contextlib.contextmanager
def written_file(
    name: str, file: Path | None, overrides: Sequence[str], text: str | None
) -> Iterator[list[str]]:
    """Yield the arguments that name the file of a new sweep and its overrides.

    Args:
        name: The sweep's name.
        file: The file from which it was read; None: from none.
        overrides: Values that replace those of the file.
        text: What a file of it says, which exists until the end of the block; None: it has begun.

    Raises:
        UserError: The sweep has begun.
        SweepCommandError: The block raised it; a message does not name a file that is gone.
    """
    if file is not None:
        yield [str(file), *(f"-s{setting}" for setting in overrides)]
    elif text is not None:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, f"{name}.yaml")
            file.write_text(text, encoding="utf-8")
            try:
                yield [str(file)]
            except SweepCommandError as error:  # the caller does not know the file
                said = re.sub(rf"{re.escape(str(file))}(:\d+)*", "Sweep(...)", str(error))
                raise SweepCommandError(said, error.exit_code) from None
    else:
        raise UserError(
            f"sweep '{name}' was opened, and exists already; only a new sweep can be checked, "
            "planned and run; call resume() to go on with it"
        )


_ENDED = ("complete", "pruned", "failed")


@contextlib.contextmanager
def progress_bar(
    paths: SweepPaths, spec: SweepSpec, note: str = "", *, always: bool = False
) -> Iterator[Callable[[], None]]:
    """Yield a function that updates the bar, and in a notebook the best trials below it.

    Where neither a notebook nor a terminal shows a bar, each trial that ends has a line.

    Args:
        paths: The sweep's files.
        spec: The sweep.
        note: A line above the bar; empty: none.
        always: Also outside notebooks, where a command shows its own progress.
    """
    if not in_notebook() and not always:
        yield lambda: None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's advice to install ipywidgets
        from tqdm.auto import tqdm
    if note:
        tqdm.write(note, file=None if in_notebook() else sys.stderr)
    hidden = None if always else False  # None: where no terminal shows it
    with (
        tqdm(total=spec.max_runs, desc=paths.name, unit="trial", disable=hidden) as bar,
        _changing_html() as show,
    ):
        said = _ended(paths)

        def update() -> None:
            try:
                view = SweepView(paths)
                found = view.status()
                if found["best"] is not None:
                    show(_leaders([view], 5))
            except (ValueError, LedgerError, RevisionError, SpecError, OSError):
                return  # it has not begun, or is just being written
            if bar.disable:
                for line in _ended_since(view, said):
                    tqdm.write(line, file=sys.stderr)
                return
            bar.total = found["num_trials"]
            bar.n = sum(found["trials"][state] for state in _ENDED)
            if isinstance(best := found["best"], dict):
                bar.set_postfix_str(f"best {best['value']:.4g} (trial {best['number']})", False)
            bar.refresh()

        yield update
        update()


def _ended(paths: SweepPaths) -> set[int]:
    """Return which trials have ended before."""
    if not paths.exists():
        return set()
    return {one.number for one in SweepView(paths).records if one.finished}


def _ended_since(view: SweepView, said: set[int]) -> Iterator[str]:
    """Yield a line for each trial that has ended and is not in `said`, and add it there."""
    ended = [one for one in view.records if one.finished]
    for place, one in enumerate(sorted(ended, key=lambda one: one.finish_order), start=1):
        if one.number not in said:
            said.add(one.number)
            line = ended_line(view.spec, one.number, one.state, one.result, one.reason)
            yield f"{line} ({place}/{view.num_trials} trials)"


@contextlib.contextmanager
def _changing_html() -> Iterator[Callable[[Comparison], None]]:
    """Yield a function whose last argument a notebook shows, until the end of the block."""
    if not in_notebook():
        yield lambda _: None
        return
    from IPython import display

    cell: Any = display  # without types
    shown = cell.display(cell.HTML(""), display_id=True)
    try:
        yield lambda found: shown.update(cell.HTML(found._repr_html_()))
    finally:
        shown.update(cell.HTML(""))  # the cell's own result shows the sweep


class Figures:
    """The report's figures of one sweep, drawn anew at each call.

    Each raises NotEnough if there is too little data; its message says what is missing.

    Examples:
        >>> figures = Sweep.open("digits").figures
        >>> figures.history().update_layout(title="digits")
        >>> figures.curves().to_html()
    """

    def __init__(self, paths: SweepPaths) -> None:
        self._paths = paths

    def _repr_html_(self) -> str:
        """Return what there is to draw, for a notebook."""
        methods = {name: one.__doc__ for name, one in vars(Figures).items() if name[0] != "_"}
        rows = (
            f"<li><code>{name}()</code>: {html.escape(str(methods[name]))}" for name in methods
        )
        return f"<ul>{''.join(rows)}</ul>"

    def history(self) -> go.Figure:
        """Each trial's value in the order of their starts, and the best so far."""
        return self._draw("History")

    def curves(self) -> go.Figure:
        """The metric after each epoch, a line for each trial."""
        return self._draw("Learning curves")

    def importance(self) -> go.Figure:
        """How much of the value's variance each parameter explains (fANOVA)."""
        return self._draw("Importance")

    def slices(self) -> go.Figure:
        """The value against one parameter at a time."""
        return self._draw("Slices")

    def parallel(self) -> go.Figure:
        """A line for each trial, from its value to its parameters."""
        return self._draw("Parallel coordinates")

    def contours(self) -> go.Figure:
        """The value over two parameters at a time; needs 30 trials."""
        return self._draw("Contours")

    def survival(self) -> go.Figure:
        """How many trials reached each rung of early stopping."""
        return self._draw("Survival from rung to rung")

    def clipping(self) -> go.Figure:
        """The fraction of clipped steps over the maximum norm."""
        return self._draw("Clipping")

    def timeline(self) -> go.Figure:
        """Each trial from its start to its end."""
        return self._draw("Timeline")

    def pareto(self) -> go.Figure:
        """The trials by their metrics, of a sweep with two or three."""
        return self._draw("Pareto front")

    def _draw(self, title: str) -> go.Figure:
        from sweeps.report.figures import draw_figure  # loads Optuna and Plotly

        return draw_figure(self._paths, title)


@dataclass(frozen=True)
class Comparison:
    """The best trials of several sweeps, and how they differ: what `sweep compare` prints.

    Attributes:
        leaders: One row for each of the best trials, the best first, by `sweep` and `trial`. The
            columns are `state`; the metrics by which the trials were chosen; with several metrics
            `pareto`, whether no other trial beats it; `epochs`, `attempts`, `seconds`,
            `clip_fraction` and `run_id`; and each parameter in which these trials differ, by its
            dotted key.
        same: The searched parameters in which they do not differ, with their values.
    """

    leaders: pd.DataFrame
    same: dict[str, Any]

    def _repr_html_(self) -> str:
        """Return the leaders as a table, for a notebook."""
        return str(self.leaders.to_html(border=0))


def compare(*sweeps: Sweep, top: int = 5) -> Comparison:
    """Compare the best trials of one or several sweeps that have the same metric.

    Examples:
        >>> from sweeps import Sweep, compare
        >>> found = compare(Sweep.open("digits"), Sweep.open("wider"), top=3)
        >>> found.leaders[["state", "val/loss", "train.optimizer.lr"]]
        >>> found.same

    Args:
        sweeps: The sweeps.
        top: How many of the best trials of each sweep.

    Raises:
        Incomparable: The sweeps do not have the same metric, mode and `select`.
        UnknownSweep: A sweep has not begun.
        ValueError: No sweep is given.
    """
    if not sweeps or top < 1:
        raise ValueError("compare() needs at least one sweep, and a `top` of at least 1")
    views = {sweep.paths.directory: SweepView(sweep.paths) for sweep in sweeps}
    return _leaders(list(views.values()), top)


def _leaders(views: Sequence[SweepView], top: int) -> Comparison:
    found = compare_views(views, top=top)
    return Comparison(leaders_frame(found), found["same"])
