"""TrialRun: one attempt of a trial in a process of its own, around `Trainer.events()`.

`train` runs in a fresh fork (`attempt_process.py`); for each `STEP` of the actor it trains up to
the next report. A run that fails *reports* its failure instead of raising it. What must not live
here: training, Ray (`adapters/ray.py`), or any knowledge of ledgers and tracking.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainable import rank_waits
from trainable.config import TrialConfig
from trainable.errors import OutOfMemory, RankLost, StorageError
from trainable.failures import failure_of
from trainable.memory import finer_accumulation
from trainable.process_start import load_training
from trainable.processes import attempt_process
from trainable.processes.rank_run import (
    gpu_share,
    import_task,
    logged,
    open_log,
    set_interop_threads,
)
from trainable.processes.trial_log import TRIAL_LOG, DescriptorOutput, TrialLog
from trainable.store.notes import add_earlier
from trainable.store.regular_files import make_directory
from trainable.watch import heartbeat

OBJECTIVE = "objective"
"""The result key of the value of the trial's first metric, whatever that metric is called."""
OBJECTIVES = "objectives"
"""The result key of the values of all metrics, if the trial has several."""
DONE = "done"
"""The result key of whether the trial has ended, as Ray Tune has it."""
POINTER = "pointer"
"""The result key of the newest checkpoint, where it is another one than before."""

LEFT_NODE = "left_node"
"""The result's `ending` of a trial that has saved because a node of it is to be taken away."""

STEP, CLOSE = "step", "close"
"""What the actor sends: train to the next report, or end the run."""
RESULT, LOST, CALL, RESTART = "result", "lost", "call", "restart"
"""What it receives: a result; that a rank was lost; a call of its `OtherRanks`, to be answered
with what the call returned, or raised; or what a fresh process is to have in its configuration."""

_PATIENCE_SECONDS = 3600.0
"""How long a run may take to close without a report. A last checkpoint may still be on its way to
an object store."""


def train(connection: Connection, config: dict[str, Any]) -> None:
    """Train a trial until it ends or is needed no longer; with `reuse`, the next one after it."""
    name, failed = str(config["config"]["task"]["name"]), None

    def load() -> bool:
        nonlocal failed
        log = make_log(config)
        with logged(log):
            if "heartbeat" in config:
                heartbeat.watch(config["heartbeat"], log)
            with heartbeat.at_work():
                failed = import_task(name)
            heartbeat.unwatch()
        return failed is None

    attempt_process.import_task(connection, name, load)
    while _train_one(TrialRun(config, partial(_call, connection), failed=failed), connection):
        if not config.get("reuse"):
            return
        try:
            config = connection.recv()
        except EOFError:  # the actor has ended
            return


def _train_one(run: TrialRun, connection: Connection) -> bool:
    """Train a trial as the actor asks for; return whether this process may train another one."""
    while connection.recv() == STEP:
        try:
            result = run.step()
        except RankLost as error:
            run.cleanup()
            connection.send((LOST, str(error)))
            return False
        except Restart as restart:
            run.cleanup()
            connection.send((RESTART, restart.changes))
            return False
        connection.send((RESULT, result))
        if result.get(DONE):
            run.cleanup()
            return True
    run.cleanup()
    connection.send((RESULT, {}))
    return True


def _call(connection: Connection, method: str, *arguments: Any) -> Any:
    """Have the actor call a method of its `OtherRanks`."""
    connection.send((CALL, method, *arguments))
    answer = connection.recv()
    if isinstance(answer, BaseException):
        raise answer
    return answer


class Restart(Exception):
    """The run has closed, to be opened by a fresh process with smaller micro-batches."""

    def __init__(self, changes: dict[str, Any]) -> None:
        super().__init__()
        self.changes = changes


class TrialRun:
    """One attempt of a trial."""

    def __init__(
        self,
        config: dict[str, Any],
        call: Callable[..., Any],
        *,
        failed: BaseException | None = None,
    ) -> None:
        self._directory = Path(config["directory"])
        self._log, self._output = make_log(config), DescriptorOutput()
        faulthandler.enable(self._log.fileno())  # writes a traceback on a fatal signal
        if "heartbeat" in config:
            heartbeat.watch(config["heartbeat"], self._log)
        self._trainer: Any = None
        self._events: Iterator[Any] = iter(())
        self._checkpoint: Any = None
        self._failure: dict[str, Any] | None = None
        self._ranks: Any = None
        self._has_others = False
        self._lost: RankLost | None = None
        self._call, self._failed = call, failed
        self._gpu_share = gpu_share(config)
        self._drain, self._stop = config["drain"], config["stop"]
        self._leaves: Sequence[str] = config.get("leaves", ())
        self._address: str | None = config.get("checkpoints")
        self._threads, self._halve_batch = config["threads"], config["halve_batch"]
        self._pause_at_epoch: int | None = config.get("pause_at_epoch")
        self._searched = tuple(config.get("params", ()))
        self._rank_timeout: float = config.get("rank_timeout", rank_waits.STEP)
        self._report_buffer_seconds: float = config.get("report_buffer_seconds", 0.0)
        self._split: dict[str, Any] | None = config.get("split")
        self._opened = False
        self._earlier: list[dict[str, Any]] = config.get("earlier", [])
        self._set_aside: list[str] = config.get("set_aside", [])
        self._resolved: dict[str, str] = {}
        with self._reporting_failures(), self._logged():
            self._config = TrialConfig.model_validate(config["config"])
            load_training()
            set_interop_threads(self._threads)

    def step(self) -> dict[str, Any]:
        """Train up to the next report; the first call opens the run at its newest checkpoint.

        With `report_buffer_seconds`, train for that long and return all reports at once.
        """
        with heartbeat.at_work():
            return self._train_to_report()

    def _train_to_report(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._report_buffer_seconds
        *reports, report = self._next_reports(deadline)
        earlier = self._earlier + [self._report_dict(one) for one in reports]
        self._earlier = []
        if self._is_out_of_memory() and (finer := self._finer_config()) is not None:
            before = self._config.model_dump(mode="json")
            self._close_run()
            kept = {"earlier": earlier, "set_aside": self._set_aside}
            raise Restart({"config": finer, "split": before, **kept})
        if self._lost is not None:
            self._close_run()
            raise self._lost
        result = self._result(report)
        if earlier:
            result["earlier"] = earlier
        if result.get(DONE):
            self._close_run()  # a last save is awaited, and the other ranks leave
        return result

    def _result(self, report: Any) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if noted := self._take_values():
            result["noted"] = noted
        if self._set_aside:
            result["set_aside"], self._set_aside = self._set_aside, []
        if self._resolved:
            result["resolved"], self._resolved = self._resolved, {}
        if self._split is not None and self._opened:
            result["accumulation"] = self._config.train.accumulation
        if self._failure is not None:
            return result | {"ending": "failed", "failure": self._failure, DONE: True}
        if report is None:
            endings = {self._stop: "stopped", self._drain: "interrupted"}
            found = (ending for file, ending in endings.items() if os.path.exists(file))
            return result | {"ending": next(found, LEFT_NODE), DONE: True}
        result |= self._report_dict(report)
        if report.checkpoint not in (None, self._checkpoint):
            result[POINTER] = report.checkpoint._asdict()
        self._checkpoint = report.checkpoint
        if report.finished:
            pause, last = self._pause_at_epoch, self._config.budget.reports
            paused = pause is not None and pause <= report.epoch < last
            paused = paused and not report.out_of_patience
            saved = report.checkpoint is not None and report.checkpoint.step == report.step
            result |= {"ending": "paused" if paused else "finished", "saved": saved, DONE: True}
        return result

    def _take_values(self) -> dict[str, dict[str, str]]:
        from trainable.logged import current_run

        run = current_run()
        return run[0].take_values() if run is not None else {}

    def _report_dict(self, report: Any) -> dict[str, Any]:
        values = tuple(report.metrics[metric] for metric in self._config.metrics)
        return {
            OBJECTIVE: values[0],
            **({OBJECTIVES: values} if len(values) > 1 else {}),
            "epoch": report.epoch,
            "step": report.step,
            "metrics": report.metrics,
            **({"signals": report.signals} if report.rows else {}),
            **({} if report.lacks_model is None else {"lacks_model": report.lacks_model}),
        }

    def cleanup(self) -> None:
        """End the run, and close the log and the heartbeat."""
        with _exit_when_late():  # an object of the task may block as it is deleted
            self._close_run()
            heartbeat.unwatch()
            faulthandler.disable()
            self._output.copy_to(self._log)
            self._log.close()

    def _close_run(self) -> None:
        """Shut loaders down, wait for pending writes and the other ranks."""
        from trainable.logged import close_run

        close_run(self._directory)
        if self._trainer is not None:
            with self._logged():
                try:
                    self._trainer.close()
                except BaseException:
                    # The trial's end is already reported. Neither a failed last save nor an error
                    # in the user's clean-up may change it.
                    traceback.print_exc()
                finally:
                    self._trainer, self._events = None, iter(())
        self._leave_ranks()

    def _open(self) -> None:
        from trainable.build import open_trainer
        from trainable.logged import run_log

        try:
            os.stat(self._directory.parent)
        except OSError as problem:
            raise StorageError(
                f"{self._directory.parent} is not seen on {socket.gethostname()} "
                f"({problem.strerror}); every node must see the sweep's files, also one that "
                "joins later; mount them there, or remove the node, then resume"
            ) from problem
        try:
            heartbeat.check()
        except OSError as problem:
            raise StorageError(
                f"{problem.filename} cannot be written ({problem.strerror}), so the driver would "
                "not see that the trial hangs; free space or correct the permissions, then resume"
            ) from problem
        if self._failed is not None:
            raise self._failed
        heartbeat.beat(heartbeat.OPENING)  # again, where it goes on with smaller micro-batches
        run_log(self._directory)  # before the task is built: it may log in its constructor
        self._ranks = self._join_ranks()
        self._trainer = open_trainer(
            self._config,
            self._directory,
            checkpoints=self._address,
            searched=self._searched,
            threads=self._threads,
            memory_share=self._gpu_share,
            until=self._pause_at_epoch,
            should_stop=self._is_stop_requested,
            ranks=self._ranks,
            accept_workers=True,  # the driver has checked that it may
        )
        self._resolved = self._trainer.resolved | self._trainer.workers(self._config.workers)
        self._opened = True
        self._set_aside += self._trainer.store.set_aside
        for sentence in self._trainer.store.set_aside:
            print(sentence)
        if self._trainer.resumed_at and (saved := self._trainer.store.generations()):
            print(f"resumes at step {saved[-1].step}, from its newest checkpoint")
        if self._split is not None:
            train = self._config.train
            before = TrialConfig.model_validate(self._split)
            add_earlier(self._directory, self._trainer.resumed_at, before)
            print(
                f"out of memory: resumes from step {self._trainer.resumed_at} with "
                f"{train.accumulation} micro-batches of {train.micro_batch_size} samples"
            )
        self._events = self._trainer.events()

    def _join_ranks(self) -> Any:
        """Return the ranks of the trial, after the others have begun to open the run."""
        from trainable.ranks import Ranks

        if self._config.workers == 1:
            return Ranks()
        from trainable.group_joining import GroupPlace, listen
        from trainable.parallel.rank_group import RankGroup
        from trainable.precision import find_device

        self._has_others = True
        address = self._call("prepare")
        listening = listen(address)
        port, size = listening.getsockname()[1], self._config.workers
        place = GroupPlace(address, port, size, self._rank_timeout, rank_waits.JOIN_SWEEP)
        self._call("train", place)
        return RankGroup.join(
            place,
            0,
            device=find_device(None),
            listening=listening,
            has_lost=lambda: bool(self._call("has_lost")),
        )

    def _leave_ranks(self) -> None:
        """Leave the other ranks, which end the run, too."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
        if self._has_others:
            self._has_others = False
            self._call("leave")

    def _is_stop_requested(self) -> bool:
        # Called after every step: a check takes 0.7 µs, less than one call of pathlib.
        return any(os.access(one, os.F_OK) for one in (self._drain, self._stop, *self._leaves))

    def _next_reports(self, deadline: float) -> list[Any]:
        """Return the reports up to the deadline, at least one; the last is None at the end."""
        reports = [self._next_report()]
        while (last := reports[-1]) and not last.finished and time.monotonic() < deadline:
            reports.append(self._next_report())
        return reports

    def _next_report(self) -> Any:
        with self._reporting_failures(), self._logged():
            if self._failure is not None:
                return None
            if self._trainer is None and not self._is_stop_requested():
                self._open()
            return next(self._events, None)
        return None

    def _is_out_of_memory(self) -> bool:
        return self._failure is not None and self._failure["kind"] == OutOfMemory.kind

    def _finer_config(self) -> dict[str, Any] | None:
        """Return the configuration with smaller micro-batches; None where that is not possible.

        It is not possible without `halve_batch`, with one sample at a time, in a custom
        loop, or with a stream that gives batches: a step would have more of them, as large.
        """
        from trainable.loop import Trainer
        from trainable.streams import StreamPlan

        accumulation = finer_accumulation(self._config.train, self._config.workers)
        if not (self._halve_batch and accumulation and isinstance(self._trainer, Trainer)):
            return None
        plan = self._trainer.plans[0]
        if isinstance(plan, StreamPlan) and plan.batched:
            return None
        train = self._config.train.model_copy(update={"accumulation": accumulation})
        return self._config.model_copy(update={"train": train}).model_dump(mode="json")

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except RankLost as error:
            heartbeat.beat("step")  # the driver must not end this process meanwhile
            cause = self._call("cause", str(error))
            if isinstance(cause, str):
                self._lost = RankLost(cause)
                print(cause, file=self._log, flush=True)
            else:
                self._failure = cause
                print(cause["traceback"], file=self._log, flush=True)
        # Whatever the user's code raises ends this trial, and its next result reports it. That
        # includes SystemExit and KeyboardInterrupt.
        except BaseException as error:
            self._failure = failure_of(error)
            if self._ranks is not None:  # the others learn why
                self._ranks.close(error)
            print(self._failure["traceback"], file=self._log, flush=True)

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self._log), contextlib.redirect_stderr(self._log):
            try:
                yield
            finally:
                try:
                    self._log.flush()
                    self._output.copy_to(self._log)
                except ValueError:  # the task has closed its standard output
                    self._log = self._log.reopened()
                    faulthandler.enable(self._log.fileno())


@contextlib.contextmanager
def _exit_when_late() -> Iterator[None]:
    """End this process, with the stacks of its threads, if the block takes too long."""
    # The actor would wait for it forever. A thread of Python could not run while another one
    # holds the interpreter lock; this one needs no lock.
    faulthandler.dump_traceback_later(_PATIENCE_SECONDS, exit=True, file=2)  # standard error
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def make_log(config: dict[str, Any]) -> TrialLog:
    """Open the log of a trial, and make the trial's directory for it."""
    directory = Path(config["directory"])
    with contextlib.suppress(OSError):  # opening the run fails, too, and reports the reason
        # Only the driver makes the parent directory: a node without it lacks the shared files.
        if directory.parent.is_dir():
            make_directory(directory)
    return open_log(directory / TRIAL_LOG)
