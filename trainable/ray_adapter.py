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
import faulthandler
import functools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import psutil

from redaction.secrets import redact
from trainable import heartbeat
from trainable.config import TrialConfig
from trainable.errors import OutOfMemory, StorageError, TrainingError
from trainable.exception_text import reason_of, traceback_of
from trainable.lazy_imports import load_training, without_collection
from trainable.memory import finer_accumulation, is_out_of_memory, release_memory
from trainable.process_state import ProcessState
from trainable.storage.durable import make_directory
from trainable.task_import import prepare_process
from trainable.trial_log import TRIAL_LOG, TrialLog

with without_collection():
    import ray
    from ray import tune
    from ray.tune.result import DONE, SHOULD_CHECKPOINT

OBJECTIVE = "objective"
"""The result key that carries the value of the trial's (first) metric, whatever it is called."""

Ending = Literal["finished", "paused", "failed", "interrupted", "stopped"]

_POINTER = "pointer.json"
_LOOK_SECONDS, _RAY_SECONDS = 2.0, 10.0
"""How often a worker looks for its raylet, and how long Ray then has to end the worker itself."""


class TuneTrial(tune.Trainable):
    """One trial as a Ray actor.

    Its Tune configuration is a dict of: `number`, the trial's number; `directory`, where its
    files live; `params`, its values by searched key; `checkpoints`, where its checkpoints lie
    when not there; `config`, a dumped `TrialConfig`; `until`, the epoch at which it saves and
    pauses, or None; `threads`, CPU threads to use; `drain` and `stop`, files whose existence asks
    the trial to checkpoint and end at its next step, to be continued or for good; `halve_batch`,
    whether it goes on with smaller micro-batches when the memory does not suffice; `together`,
    for how many seconds reports are gathered before they are told, 0 where somebody decides after
    each one; `heartbeat`, the file to which the run's progress is written.
    """

    _switches: Any = None
    """How torch stood before this process' first trial; None where it was not loaded yet."""
    _process: Any = None
    """The same of the process itself."""

    def setup(self, config: dict[str, Any]) -> None:
        """Get ready; an error here is reported by the first `step`.

        The run itself is opened there, not here: Tune sets an actor up for a trial and may then
        drop it for a warm one that has become free, and of two that open one run only the
        later may write.
        """
        _end_with_raylet()
        prepare_process()
        self._process = self._process or ProcessState()
        self._left: list[str] = []
        self._directory = Path(config["directory"])
        try:
            # Its parents are made where the sweep is: a node that lacks them does not see it.
            if self._directory.parent.is_dir():
                make_directory(self._directory)
            self._log = TrialLog(self._directory / TRIAL_LOG)
        except OSError:  # the run, which needs the directory, says why
            self._log = TrialLog(os.devnull)
        faulthandler.enable(self._log.fileno())  # of a fatal signal nothing else says where it was
        if "heartbeat" in config:
            heartbeat.watch(config["heartbeat"], self._log)
        self._trainer: Any = None
        self._events: Iterator[Any] = iter(())
        self._checkpoint: Any = None
        self._failure: dict[str, Any] | None = None
        self._drain, self._stop = config["drain"], config["stop"]
        self._address: str | None = config.get("checkpoints")
        self._threads, self._halve_batch = config["threads"], config["halve_batch"]
        self._until: int | None = config.get("until")
        self._searched = tuple(config.get("params", ()))
        self._together: float = config.get("together", 0.0)
        self.accumulation_note = False
        self._set_aside: list[str] = []
        self._resolved: dict[str, str] = {}
        with self._reporting_failures(), self._logged():
            self._config = TrialConfig.model_validate(config["config"])
            load_training()
            import torch

            from trainable.global_state import GlobalTorchState

            # once in a process, all of whose trials have as many; the others are set with the run
            if torch.get_num_interop_threads() != self._threads:
                torch.set_num_interop_threads(self._threads)
            self._switches = self._switches or GlobalTorchState()

    def step(self) -> dict[str, Any]:
        """Train up to the next report, or to the last one of a moment; the first time, open the
        run at its newest checkpoint.

        Returns:
            `objective`, `epoch`, `step`, `metrics`, `rows` and `signals` of the report, and the
            same of each one before it in `earlier`; at the end also `ending`, and for a failed one
            `failure`: `kind`, `reason`, `traceback`, `place`, and of a storage that refused also
            `errno`, `system` (what the system said) and `host`; `saved`: whether a checkpoint has
            all that was trained.
            `accumulation`, once it is no longer what the trial was given.
            In the first result after the run was opened, `resolved`: its device and precision; and
            `set_aside`: what was found damaged, and what is used instead. `noted`: `params` and
            `tags` that the user's code logged since.
        """
        with heartbeat.at_work():
            return self._train_to_report()

    def _train_to_report(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._together
        *earlier, report = self._next_reports(deadline)
        while self._is_out_of_memory() and self._split_batch():
            *more, report = self._next_reports(deadline)
            earlier += more
        result = self._result(report)
        if earlier:
            result["earlier"] = [self._told(one) for one in earlier]
        if result.get(DONE):
            # this process may wait for its next trial while others need what the run holds
            self._close_run()
        return result

    def _result(self, report: Any) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if noted := self._take_notes():
            result["noted"] = noted
        if self._set_aside:
            result["set_aside"], self._set_aside = self._set_aside, []
        if self._resolved:
            result["resolved"], self._resolved = self._resolved, {}
        if self.accumulation_note:
            result["accumulation"] = self._config.train.accumulation
        if self._failure is not None:
            return result | {"ending": "failed", "failure": self._failure, DONE: True}
        if report is None:
            stopped = os.path.exists(self._stop)
            return result | {"ending": "stopped" if stopped else "interrupted", DONE: True}
        result |= self._told(report)
        result[SHOULD_CHECKPOINT] = report.checkpoint not in (None, self._checkpoint)
        self._checkpoint = report.checkpoint
        if report.finished:
            paused = self._until and self._until <= report.epoch < self._config.budget.epochs
            saved = report.checkpoint is not None and report.checkpoint.step == report.step
            result |= {"ending": "paused" if paused else "finished", "saved": saved, DONE: True}
        return result

    def _take_notes(self) -> dict[str, dict[str, str]]:
        from trainable.logged import current_run

        run = current_run()
        return run[0].take_notes() if run is not None else {}

    def _told(self, report: Any) -> dict[str, Any]:
        return {
            OBJECTIVE: report.metrics[self._config.metrics[0]],
            "epoch": report.epoch,
            "step": report.step,
            "metrics": report.metrics,
            "rows": [tuple(row) for row in report.rows],
            "signals": report.signals,
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Hand Ray a pointer to the newest committed generation."""
        pointer = self._checkpoint._asdict() if self._checkpoint else None
        (Path(checkpoint_dir) / _POINTER).write_text(json.dumps(pointer), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Nothing to load: the run is opened at its newest generation, which is this pointer's or
        a later one.
        """

    def reset(self, new_config: dict[str, Any], storage: Any = None) -> bool:
        """Reuse this process for another trial, or end it where something is left of the last one:
        the other trial has not begun, and starts in another process.
        """
        try:
            self.cleanup()  # first: Ray asks for the working directory, for one
            if not self._left:
                return bool(super().reset(new_config, storage))  # type: ignore[no-untyped-call]
        except BaseException:  # whatever a task has broken must not meet the next one
            traceback.print_exc()
        os._exit(0)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Reuse this process for another trial."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """End the run if it has not ended, undo what the task changed for the whole process, and
        close the log.
        """
        self._close_run()
        if self._switches is not None:
            self._switches.restore()
        heartbeat.unwatch()
        self._left += self._process.restore()
        if self._left:
            print(
                "no other trial is trained in this process, which is not what it was: "
                f"{', '.join(self._left)}",
                file=self._log,
            )
        with contextlib.suppress(ValueError, OSError, RuntimeError):  # there may be none
            faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]
        self._log.close()

    def _close_run(self) -> None:
        """Shut loaders down, wait for pending writes, give memory back."""
        if self._switches is not None:  # else nothing was loaded
            from trainable.logged import close_run

            close_run(self._directory)
        if self._trainer is not None:
            with self._logged():
                try:
                    self._trainer.close()
                except BaseException:
                    # Of a trial that was stopped: its end is told, its last save is not needed,
                    # and the next trial of this process must not die of it, nor of what the
                    # user's code raises when it is closed.
                    traceback.print_exc()
                finally:
                    self._trainer, self._events = None, iter(())
        self._left += self._process.end_children()  # they may hold what others need, as of a GPU
        if self._failure is not None:
            release_memory()

    def _open(self) -> None:
        from trainable.build import open_trainer
        from trainable.logged import run_log

        try:
            os.stat(self._directory.parent)
        except OSError as problem:
            raise StorageError(
                f"{self._directory.parent} is not seen on {socket.gethostname()} "
                f"({problem.strerror}); every node sees a sweep's files, also one that joins "
                "later; mount them there, or take the node out, then resume"
            ) from problem
        run_log(self._directory)  # what a task logs while it is built is the run's, too
        self._trainer = open_trainer(
            self._config,
            self._directory,
            checkpoints=self._address,
            searched=self._searched,
            threads=self._threads,
            memory_share=self._gpu_share(),
            until=self._until,
            interrupted=self._is_asked_to_end,
        )
        self._resolved = self._trainer.resolved
        self._set_aside += self._trainer.store.set_aside
        for sentence in self._trainer.store.set_aside:
            print(sentence)
        self._events = self._trainer.events()

    def _is_asked_to_end(self) -> bool:
        # After every step: both together take less (1.4 µs) than one of pathlib's calls.
        return os.access(self._drain, os.F_OK) or os.access(self._stop, os.F_OK)

    def _next_reports(self, deadline: float) -> list[Any]:
        """The reports until the deadline, at least one; the last one is None when no more come."""
        reports = [self._next_report()]
        while (last := reports[-1]) and not last.finished and time.monotonic() < deadline:
            reports.append(self._next_report())
        return reports

    def _next_report(self) -> Any:
        with self._reporting_failures(), self._logged():
            if self._failure is not None:
                return None
            if self._trainer is None and not self._is_asked_to_end():
                self._open()
            return next(self._events, None)
        return None

    def _is_out_of_memory(self) -> bool:
        return self._failure is not None and self._failure["kind"] == OutOfMemory.kind

    def _split_batch(self) -> bool:
        """Open the run again with smaller micro-batches; False when that is not to be done, or
        cannot be: not below one sample, nor in a loop that is not ours.
        """
        from trainable.loop import Trainer

        accumulation = finer_accumulation(self._config.train)
        if not (self._halve_batch and accumulation and isinstance(self._trainer, Trainer)):
            return False
        train = self._config.train.model_copy(update={"accumulation": accumulation})
        self._config = self._config.model_copy(update={"train": train})
        self._failure, self.accumulation_note = None, True
        with self._reporting_failures(), self._logged():
            self._trainer.close()
            self._trainer, self._events = None, iter(())
            release_memory()
            self._open()
            print(
                f"out of memory: goes on from step {self._trainer.resumed_at} with {accumulation} "
                f"micro-batches of {train.micro_batch_size} samples"
            )
        return True

    def _gpu_share(self) -> float:
        """The share of its GPU that this trial was given; 1 where it has all of it, or none."""
        resources = self.trial_resources
        share = resources.required_resources.get("GPU", 0.0) if resources is not None else 0.0
        return share if 0 < share < 1 else 1.0

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        # Whatever the user's code raises is this trial's end, told by its next result; also when
        # it means to end the process, which is not its own (SystemExit, KeyboardInterrupt).
        except BaseException as error:
            if isinstance(error, TrainingError):
                kind = error.kind
            else:
                kind = OutOfMemory.kind if is_out_of_memory(error) else "error"
            where = traceback.extract_tb(error.__traceback__)[-1]
            self._failure = {
                "kind": kind,
                "reason": reason_of(error, kind),
                "traceback": traceback_of(error),
                "place": f"{where.filename}:{where.lineno}",
            }
            if isinstance(error, StorageError) and isinstance(error.__cause__, OSError):
                self._failure |= _said_by_the_system(error.__cause__)
            print(self._failure["traceback"], file=self._log, flush=True)

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self._log), contextlib.redirect_stderr(self._log):
            try:
                yield
            finally:
                try:
                    self._log.flush()
                except ValueError:  # the task has closed its standard output
                    self._log = self._log.reopened()
                    faulthandler.enable(self._log.fileno())


def _said_by_the_system(problem: OSError) -> dict[str, Any]:
    """What tells a limit of this process from a storage that fails everybody."""
    number, host = problem.errno, socket.gethostname()
    return {"errno": number, "system": redact(str(problem)), "host": host}


@functools.cache
def _end_with_raylet() -> None:
    """End this process some seconds after its raylet has, if Ray does not.

    On a node that had been cut off it did not: a worker lived on for minutes, and with it what it
    held of a GPU.
    """
    if not (ray.is_initialized() and ray.get_runtime_context().get_actor_id()):
        return  # no worker of Ray's
    raylet = psutil.Process(int(os.environ["RAY_RAYLET_PID"]))  # not always its parent

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while raylet.is_running() and raylet.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_LOOK_SECONDS)
        time.sleep(_RAY_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="raylet", daemon=True).start()
