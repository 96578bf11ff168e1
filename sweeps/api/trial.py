"""One trial of a sweep, for reading.

What must not live here: DataFrames (`view.tables`), and whole sweeps (`sweep`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.api.command import run_command
from sweeps.artifacts import export
from sweeps.run.task_code import checked_config
from sweeps.spec.space import configured
from sweeps.view.sweep_view import SweepView, feasibility
from sweeps.view.tables import best_metrics, curves_frame
from trainable.config import TrialConfig
from trainable.store.notes import read_tested

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from sweeps.ledger.trials import TrialSummary
    from trainable.task import Task


class Trial:
    """One trial as its sweep's ledger and its own files had it when it was read.

    Examples:
        >>> trial = Sweep.open("digits").best
        >>> trial.params, trial.value
        >>> model = trial.load_model()

    Attributes:
        number: The trial's number, from 0.
        state: `waiting`, `running`, `complete`, `pruned` or `failed`.
        params: The searched parameters of the report that is its value, by dotted key.
        value: The sweep's metric at its best report, or at its last one if the sweep has
            `select: final`; None before the first report. With `repeats`, that of the
            configuration over its seeds, whose first seed this trial then is; `checkpoint`,
            `load_model`, `export` and `test` take the seed whose value is closest to it.
        feasible: Whether its values satisfy the sweep's `constraints`; None without constraints.
        violations: By how much it misses which of them, by metric.
        standard_error: That of `value` over seeds; None without several seeds.
        epochs: How many epochs it has trained.
        reason: Why it was stopped or failed, in a sentence; None otherwise.
        directory: Its directory: checkpoints, metrics, log and configuration.
        run_id: Its run in MLflow; None until it has been delivered.
    """

    def __init__(self, view: SweepView, record: TrialSummary) -> None:
        self._view, self._record = view, record
        self.number: int = record.number
        self.state: str = view.trial_state(record)
        self.params: dict[str, Any] = configured(view.spec.space, record.best_params)
        self.value: float | None = record.value
        judgement = feasibility(record)
        self.feasible: bool | None = judgement["feasible"]
        self.violations: dict[str, float] = judgement["violations"]
        seeds = record.over_seeds
        self.standard_error: float | None = None if seeds is None else seeds.standard_error
        self.epochs: int = record.epoch
        self.reason: str | None = record.reason
        self.directory: Path = view.paths.trial(record.number)
        self.run_id: str | None = view.delivered.run_ids.get(record.number)

    def __repr__(self) -> str:
        return f"Trial({self.number}, {self.state}, value={self.value}, params={self.params})"

    def _repr_html_(self) -> str:
        """Return the trial as a table, for a notebook."""
        import pandas as pd

        found = {"state": self.state, "value": self.value, "epochs": self.epochs, **self.params}
        if self.reason is not None:
            found["reason"] = self.reason
        return str(pd.Series(found, name=f"trial {self.number}").to_frame().to_html(border=0))

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics of the report that is its value, and those on test data if it was tested.

        Empty before the first report.

        Examples:
            >>> Sweep.open("digits").best.metrics["val/accuracy"]
        """
        return best_metrics(self._view, self.number)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration with which it trained, all defaults included.

        Examples:
            >>> Sweep.open("digits").best.config["train"]["optimizer"]
        """
        return self._view.config(self._record)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of its task, or of the function that its sweep calls.

        Examples:
            >>> Sweep.open("digits").best.arguments["width"]
        """
        return {key: value for key, value in self.config["task"].items() if key != "name"}

    @property
    def checkpoint(self) -> str:
        """The checkpoint of its value: a directory, or the prefix of an object store.

        Examples:
            >>> Sweep.open("digits").best.checkpoint

        Raises:
            NoBest: It is lost, or the trial never saved one.
        """
        return self._view.checkpoint(self._record)

    def curve(self, metric: str | None = None) -> pd.Series[float]:
        """Return one metric by optimizer step; default: the sweep's metric.

        Examples:
            >>> Sweep.open("digits").best.curve("train/grad_norm").max()

        Raises:
            CurveDamaged: The trial's metrics cannot be read.
        """
        name = metric or self._view.spec.metrics[0]
        frame = curves_frame(self._view, [self.number], [name])
        return frame.set_index("step")["value"].rename(name)

    def test(self, *, again: bool = False, accept_changes: bool = False) -> dict[str, float]:
        """Evaluate the checkpoint of its value on the task's test data.

        The metrics are recorded beside the trial and on its run in MLflow. A second call returns
        what is recorded. It runs in a child process.

        Examples:
            >>> Sweep.open("digits").best.test()
            {'test/loss': 0.0312, 'test/accuracy': 0.989}

        Args:
            again: Evaluate also if it was tested before.
            accept_changes: Evaluate although the task's model or data have changed since.

        Returns:
            The metrics, each with the prefix `test/`.

        Raises:
            SweepCommandError: The task has no test data, the trial has not ended, the checkpoint
                is lost, or a driver runs the sweep.
        """
        paths = self._view.paths
        number = self._weights.number
        words = ["audit", paths.name, str(number), "--test", "--root", str(paths.root)]
        flags = ["--again"] * again + ["--accept-changes"] * accept_changes
        run_command([*words, *flags])
        return read_tested(paths.trial(number))[-1].metrics

    def load_model(self) -> nn.Module:
        """Return its model with the weights of its value, in evaluation mode, on the CPU.

        The task's code is imported and builds the model, so its module must be importable here.

        Examples:
            >>> import torch
            >>> model = Sweep.open("digits").best.load_model()
            >>> model(torch.zeros(1, 64)).argmax()

        Raises:
            NoBest: The checkpoint is lost, or the trial never saved one.
            StoreUntrusted: The sweep belongs to another user.
            TrainingError: The checkpoint or the task cannot be used, or the task is a custom loop.
        """
        from trainable.export import load_trained

        parts, _ = load_trained(self._resolved(), self.checkpoint)
        parts.train.close()
        parts.val.close()
        return parts.model

    def load_task(self) -> Task:
        """Return its task, made with this trial's arguments.

        Examples:
            >>> data = Sweep.open("digits").best.load_task().build_data()

        Raises:
            StoreUntrusted: The sweep belongs to another user.
            TrainingError: The task cannot be used, or it is a custom loop.
        """
        from trainable.find_task import load_task

        task = self._resolved().task
        return load_task(task.name, task.arguments)

    def export(self, directory: str | Path) -> list[Path]:
        """Write the weights of its value (safetensors), its configuration and its model card.

        Examples:
            >>> Sweep.open("digits").best.export("winner")

        Args:
            directory: A new or empty directory.

        Returns:
            The files written.

        Raises:
            NoBest: The checkpoint is lost, or the trial never saved one.
            FileExistsError: The directory is not empty.
        """
        return export.export(self._view, Path(directory), self._weights.number)

    @property
    def _weights(self) -> TrialSummary:
        return self._view.weights_of(self._record)

    def _resolved(self) -> TrialConfig:
        return checked_config(self._view, self._weights)
