"""The one place where a training run meets Ray: `TuneTrial`, a class Trainable around
`Trainer.events()`.

One `step()` trains up to the next report boundary. Checkpoints are committed by the store; what
Ray persists is a pointer to a committed generation. A run that ends by an error *reports*
that end instead of raising it: the actor stays warm for the next trial, and Ray's retries
are left for what they are good at, a worker that was lost.

What must not live here: training, bookkeeping, or any knowledge of ledgers and tracking.
"""

from __future__ import annotations

import contextlib
import io
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ray import tune
from ray.tune.result import DONE, SHOULD_CHECKPOINT

from trainable.config import TrialConfig
from trainable.errors import CheckpointError, TrainingError

OBJECTIVE = "objective"
"""The result key that carries the value of the trial's metric, whatever the metric is called."""

Ending = Literal["finished", "failed", "interrupted"]

_POINTER = "pointer.json"


class TuneTrial(tune.Trainable):
    """One trial as a Ray actor.

    Its Tune configuration is a dict of: `number`, the trial's number; `directory`, where its
    files live; `config`, a dumped `TrialConfig`; `threads`, CPU threads to use; `drain`, a
    file whose existence asks the trial to checkpoint and end at its next step.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Open the run, resuming from its newest checkpoint; an error here is reported by the
        first `step`.
        """
        self._directory = Path(config["directory"])
        self._directory.mkdir(parents=True, exist_ok=True)
        self._metric = config["config"]["metric"]
        self._log = open(self._directory / "trial.log", "a", encoding="utf-8")  # noqa: SIM115  closed in cleanup
        self._trainer: Any = None
        self._checkpoint: Any = None
        self._failure: dict[str, Any] | None = None
        with self._reporting_failures(), self._logged():
            from trainable.build import (
                open_trainer,
            )  # imports torch: seconds that only workers pay

            drain = Path(config["drain"])
            self._trainer = open_trainer(
                TrialConfig.model_validate(config["config"]),
                self._directory,
                threads=config["threads"],
                memory_share=self._gpu_share(),
                interrupted=drain.exists,
            )
            self._events: Iterator[Any] = self._trainer.events()

    def step(self) -> dict[str, Any]:
        """Train up to the next report.

        Returns:
            `objective`, `epoch`, `step`, `metrics`, `rows` and `signals` of the report; at the end
            also `ending`, and for a failed one `reason` and `traceback`.
        """
        report = None
        with self._reporting_failures(), self._logged():
            if self._failure is None:
                report = next(self._events, None)
        if self._failure is not None:
            return self._failure
        if report is None:
            return {"ending": "interrupted", DONE: True}
        result = {
            OBJECTIVE: report.metrics[self._metric],
            "epoch": report.epoch,
            "step": report.step,
            "metrics": report.metrics,
            "rows": [tuple(row) for row in report.rows],
            "signals": report.signals,
            SHOULD_CHECKPOINT: report.checkpoint not in (None, self._checkpoint),
        }
        self._checkpoint = report.checkpoint
        if report.finished:
            result |= {"ending": "finished", DONE: True}
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Hand Ray a pointer to the newest committed generation."""
        pointer = self._checkpoint._asdict() if self._checkpoint else None
        (Path(checkpoint_dir) / _POINTER).write_text(json.dumps(pointer), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing to load: `setup` resumed from the newest generation, which is this pointer's or
        a later one.
        """

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Reuse this process for another trial."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Shut loaders down, wait for pending writes, close the log."""
        if self._trainer is not None:
            with self._logged():
                try:
                    self._trainer.close()
                except CheckpointError:
                    # Of a trial that was stopped: its end is told, its last save is not needed,
                    # and the next trial of this process must not die of it.
                    traceback.print_exc()
            self._trainer = None
        self._log.close()

    def _gpu_share(self) -> float:
        """The share of its GPU that this trial was given; 1 where it has all of it, or none."""
        resources = self.trial_resources
        share = resources.required_resources.get("GPU", 0.0) if resources is not None else 0.0
        return share if 0 < share < 1 else 1.0

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except (
            Exception
        ) as error:  # whatever the user's code raises is this trial's end, told by its next result
            kind = error.kind if isinstance(error, TrainingError) else "error"
            self._failure = {
                "ending": "failed",
                "reason": f"{kind}: {error}"
                if kind != "error"
                else f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
                DONE: True,
            }
            print(self._failure["traceback"], file=self._log, flush=True)

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self._log), contextlib.redirect_stderr(self._log):
            try:
                yield
            finally:
                with contextlib.suppress(io.UnsupportedOperation):
                    self._log.flush()
