"""`TuneTrial`: a Tune class Trainable around `Trainer.events()`, the only adapter to Ray.

One `step()` trains up to the next report. The checkpoint store commits checkpoints; Ray persists
only a pointer to a committed generation. A run that fails *reports* its failure instead of raising
it. So the actor can train the next trial, and Ray retries only trials of lost workers.

What must not live here: training, recording, or any knowledge of ledgers and tracking.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from trainable import heartbeat, rank_waits
from trainable.config import TrialConfig
from trainable.earlier_configs import add_earlier
from trainable.errors import OutOfMemory, RankLost, StorageError
from trainable.lazy_imports import load_training, without_collection
from trainable.memory import finer_accumulation, release_memory
from trainable.process_state import ProcessState
from trainable.raylet_watch import exit_with_raylet
from trainable.storage.durable import make_directory
from trainable.task_import import prepare_process
from trainable.trial_failure import failure_of
from trainable.trial_log import TRIAL_LOG, DescriptorOutput, TrialLog

with without_collection():
    from ray import tune
    from ray.tune.result import DONE, SHOULD_CHECKPOINT

    from trainable.ray_ranks import OtherRanks, RankOrder, RankProcess

OBJECTIVE = "objective"
"""The result key of the value of the trial's first metric, whatever that metric is called."""
OBJECTIVES = "objectives"
"""The result key of the values of all metrics, if the trial has several."""

Ending = Literal["finished", "paused", "failed", "interrupted", "stopped"]

_POINTER = "pointer.json"
_PATIENCE_SECONDS = 3600.0
"""How long a process may take between two trials, where it has no heartbeat. A last checkpoint may
still be on its way to an object store."""


class TuneTrial(tune.Trainable):
    """One trial as a Ray actor.

    Its Tune configuration is a dict with these keys:

    - `number`: the trial's number.
    - `directory`: the trial's directory.
    - `params`: the suggested values by key.
    - `checkpoints`: the address of its checkpoints; None: they are in `directory`.
    - `config`: a dumped `TrialConfig`.
    - `pause_at_epoch`: the epoch after which the trial saves and pauses, or None.
    - `threads`: the number of CPU threads.
    - `drain`, `stop`: files. When one exists, the trial saves and ends after its next step; it
      may be resumed after `drain`, and not after `stop`.
    - `halve_batch`: whether a trial that runs out of memory resumes with smaller micro-batches.
    - `report_buffer_seconds`: how long reports are collected before Tune receives them; 0 where a
      stopping rule decides after each one.
    - `heartbeat`: the file to which the run's progress is written.
    - `rank_timeout`: for how many seconds a rank waits for the others in a step.

    A trial of several ranks has one bundle of resources for each. This process is the first rank.
    """

    rank_process: type[RankProcess] = RankProcess
    """The class of the actors that train the other ranks."""
    _others: OtherRanks | None = None
    """The processes of the other ranks, which are kept for the next trial."""

    _torch_state: Any = None
    """Torch's global state before this process' first trial; None before torch is loaded."""
    _process: Any = None
    """The state of the process before its first trial."""

    def setup(self, config: dict[str, Any]) -> None:
        """Prepare the process for a trial; the first `step` reports an error that happens here.

        This method does not open the run; the first `step` does. Tune may set up an actor and then
        give the trial to a reused one. If both opened the run, only the later one could write.
        """
        with _exit_when_late():
            self._set_up(config)

    def _set_up(self, config: dict[str, Any]) -> None:
        exit_with_raylet()
        prepare_process()
        self._process = self._process or ProcessState()
        self._leftovers: list[str] = []
        self._directory = Path(config["directory"])
        try:
            # Only the driver makes the parent directory: a node without it lacks the shared files.
            if self._directory.parent.is_dir():
                make_directory(self._directory)
            self._log = TrialLog(self._directory / TRIAL_LOG)
        except OSError:  # opening the run fails, too, and reports the reason
            self._log = TrialLog(os.devnull)
        self._output = DescriptorOutput()
        faulthandler.enable(self._log.fileno())  # writes a traceback on a fatal signal
        if "heartbeat" in config:
            heartbeat.watch(config["heartbeat"], self._log)
        self._trainer: Any = None
        self._events: Iterator[Any] = iter(())
        self._checkpoint: Any = None
        self._failure: dict[str, Any] | None = None
        self._ranks: Any = None
        self._lost: RankLost | None = None
        self._drain, self._stop = config["drain"], config["stop"]
        self._address: str | None = config.get("checkpoints")
        self._threads, self._halve_batch = config["threads"], config["halve_batch"]
        self._pause_at_epoch: int | None = config.get("pause_at_epoch")
        self._searched = tuple(config.get("params", ()))
        self._rank_timeout: float = config.get("rank_timeout", rank_waits.STEP)
        self._report_buffer_seconds: float = config.get("report_buffer_seconds", 0.0)
        self._batch_was_split = False
        self._set_aside: list[str] = []
        self._resolved: dict[str, str] = {}
        with self._reporting_failures(), self._logged():
            self._config = TrialConfig.model_validate(config["config"])
            load_training()
            import torch

            from trainable.global_state import GlobalTorchState

            # torch allows this once per process; all trials of a process have as many threads
            if torch.get_num_interop_threads() != self._threads:
                torch.set_num_interop_threads(self._threads)
            self._torch_state = self._torch_state or GlobalTorchState()

    def step(self) -> dict[str, Any]:
        """Train up to the next report; the first call opens the run at its newest checkpoint.

        With `report_buffer_seconds`, train for that long and return all reports at once.

        Returns:
            A dict with the keys `objective`, `epoch`, `step`, `metrics`, `rows` and `signals` of
            the last report, and where they apply:

            - `earlier`: the same keys of each report before the last one.
            - `ending`: how the trial ended; in its last result only.
            - `failure`: `kind`, `reason`, `traceback` and `place` of a failure; for a storage
              error also `errno`, `system` (the operating system's message) and `host`.
            - `saved`: whether a checkpoint holds everything trained.
            - `accumulation`: the value in use, once it differs from the configuration's.
            - `resolved`: device, precision and, if not one, the number of ranks; in the first
              result after the run was opened.
            - `set_aside`: damaged checkpoints and what is used instead, in sentences.
            - `noted`: `params` and `tags` that the user's code logged since the last result.
        """
        with heartbeat.at_work():
            return self._train_to_report()

    def _train_to_report(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._report_buffer_seconds
        *earlier, report = self._next_reports(deadline)
        while self._is_out_of_memory() and self._split_batch():
            *more, report = self._next_reports(deadline)
            earlier += more
        if self._lost is not None:  # Tune starts the trial again, as if this process were lost
            if self._others is not None:
                self._others.close()
            self._close_run()
            raise self._lost
        result = self._result(report)
        if earlier:
            result["earlier"] = [self._report_dict(one) for one in earlier]
        if result.get(DONE):
            # do not delay this: the process may be idle while others need the run's memory
            self._close_run()
        return result

    def _result(self, report: Any) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if noted := self._take_values():
            result["noted"] = noted
        if self._set_aside:
            result["set_aside"], self._set_aside = self._set_aside, []
        if self._resolved:
            result["resolved"], self._resolved = self._resolved, {}
        if self._batch_was_split:
            result["accumulation"] = self._config.train.accumulation
        if self._failure is not None:
            return result | {"ending": "failed", "failure": self._failure, DONE: True}
        if report is None:
            stopped = os.path.exists(self._stop)
            return result | {"ending": "stopped" if stopped else "interrupted", DONE: True}
        result |= self._report_dict(report)
        result[SHOULD_CHECKPOINT] = report.checkpoint not in (None, self._checkpoint)
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
            "rows": [tuple(row) for row in report.rows],
            "signals": report.signals,
            **({} if report.lacks_model is None else {"lacks_model": report.lacks_model}),
        }

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a pointer to the newest committed generation into the directory for Ray."""
        pointer = self._checkpoint._asdict() if self._checkpoint else None
        (Path(checkpoint_dir) / _POINTER).write_text(json.dumps(pointer), encoding="utf-8")

    def restore(self, checkpoint_path: Any) -> None:
        """Read the pointer as Ray does, in time."""
        with _exit_when_late():
            super().restore(checkpoint_path)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Do nothing: the run opens its newest generation, which is this pointer's or later."""

    def reset(self, new_config: dict[str, Any], storage: Any = None) -> bool:
        """Reuse this process for another trial; exit if the last trial left state behind.

        After an exit, Ray starts the new trial in a new process; the trial had not begun yet.
        """
        try:
            self.cleanup()  # first: Ray's own code needs, for example, the working directory
            if not self._leftovers:
                return bool(super().reset(new_config, storage))  # type: ignore[no-untyped-call]
        except BaseException:  # a process that a task has broken must not train another trial
            with contextlib.suppress(Exception):  # it may be unable to write
                traceback.print_exc()
        os._exit(0)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Reuse this process for another trial."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """End the run, restore the process-wide state that the task changed, close the log."""
        with _exit_when_late():  # an object of the task may block as it is deleted
            self._clean_up()

    def _clean_up(self) -> None:
        self._close_run()
        if self._torch_state is not None:
            self._torch_state.restore()
        heartbeat.unwatch()
        self._leftovers += self._process.restore()
        if self._leftovers:
            print(
                "no other trial is trained in this process; the trial has changed it: "
                f"{', '.join(self._leftovers)}",
                file=self._log,
            )
        with contextlib.suppress(ValueError, OSError, RuntimeError):  # stderr may be missing
            faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]
        self._output.copy_to(self._log)
        self._log.close()

    def _close_run(self) -> None:
        """Shut loaders down, wait for pending writes and the other ranks, release memory."""
        if self._torch_state is not None:  # else torch was never loaded
            from trainable.logged import close_run

            close_run(self._directory)
        if self._trainer is not None:
            with self._logged():
                try:
                    self._trainer.close()
                except BaseException:
                    # The trial's end is already reported. Neither a failed last save nor an error
                    # in the user's clean-up may fail the next trial of this process.
                    traceback.print_exc()
                finally:
                    self._trainer, self._events = None, iter(())
        self._leave_ranks()
        self._leftovers += self._process.end_children()  # they may hold GPU memory
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
        heartbeat.beat(heartbeat.OPENING)  # again, where it goes on with smaller micro-batches
        run_log(self._directory)  # before the task is built: it may log in its constructor
        self._ranks = self._join_ranks()
        self._trainer = open_trainer(
            self._config,
            self._directory,
            checkpoints=self._address,
            searched=self._searched,
            threads=self._threads,
            memory_share=self._gpu_share(),
            until=self._pause_at_epoch,
            should_stop=self._is_stop_requested,
            ranks=self._ranks,
            accept_workers=True,  # the driver has checked that it may
        )
        self._resolved = self._trainer.resolved | self._trainer.workers(self._config.workers)
        self._set_aside += self._trainer.store.set_aside
        for sentence in self._trainer.store.set_aside:
            print(sentence)
        if self._trainer.resumed_at and (saved := self._trainer.store.generations()):
            print(f"resumes at step {saved[-1].step}, from its newest checkpoint")
        self._events = self._trainer.events()

    def _join_ranks(self) -> Any:
        """Return the ranks of the trial, after the others have begun to open the run."""
        from trainable.ranks import Ranks

        if self._config.workers == 1:
            return Ranks()
        order = RankOrder(
            config=self._config.model_dump(mode="json"),
            directory=self._directory,
            searched=self._searched,
            threads=self._threads,
            memory_share=self._gpu_share(),
            timeout=self._rank_timeout,
        )
        self._others = self._others or OtherRanks(self.rank_process)
        resources = self.trial_resources
        assert resources is not None
        return self._others.join(order, resources.bundles)

    def _leave_ranks(self, error: BaseException | None = None) -> None:
        """Leave the other ranks, which end the run, too."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close(error)
        if self._others is not None:
            for what in self._others.leave():
                print(f"a process is replaced; the trial has changed it: {what}", file=self._log)

    def _is_stop_requested(self) -> bool:
        # Called after every step: the two checks take 1.4 µs, less than one call of pathlib.
        return os.access(self._drain, os.F_OK) or os.access(self._stop, os.F_OK)

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

    def _split_batch(self) -> bool:
        """Reopen the run with smaller micro-batches; return False where that is not possible.

        It is not possible without `halve_batch`, with one sample at a time, in a custom
        loop, or with a stream that gives batches: a step would have more of them, as large.
        """
        from trainable.loop import Trainer
        from trainable.streams import StreamPlan

        accumulation = finer_accumulation(self._config.train, self._config.workers)
        if not (self._halve_batch and accumulation and isinstance(self._trainer, Trainer)):
            return False
        plan = self._trainer.plans[0]
        if isinstance(plan, StreamPlan) and plan.batched:
            return False
        before = self._config
        train = self._config.train.model_copy(update={"accumulation": accumulation})
        self._config = self._config.model_copy(update={"train": train})
        self._failure, self._batch_was_split = None, True
        with self._reporting_failures(), self._logged():
            # The ranks write a sharded checkpoint together: it fails with the rank that did.
            with contextlib.suppress(OutOfMemory):
                self._trainer.close()
            self._trainer, self._events = None, iter(())
            self._leave_ranks()
            release_memory()
            self._open()
            add_earlier(self._directory, self._trainer.resumed_at, before)
            print(
                f"out of memory: resumes from step {self._trainer.resumed_at} with {accumulation} "
                f"micro-batches of {train.micro_batch_size} samples"
            )
        return True

    def _gpu_share(self) -> float:
        """Return this rank's share of its GPU; 1 where it has a whole GPU, or none."""
        resources = self.trial_resources
        share = resources.bundles[0].get("GPU", 0.0) if resources is not None else 0.0
        return share if 0 < share < 1 else 1.0

    @contextlib.contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except RankLost as error:
            heartbeat.beat("step")  # the driver must not end this process meanwhile
            cause = self._others.cause(error) if self._others is not None else error
            if isinstance(cause, RankLost):
                self._lost = cause
                print(cause, file=self._log, flush=True)
            else:
                self._failure = cause
                print(cause["traceback"], file=self._log, flush=True)
        # Whatever the user's code raises ends this trial, and its next result reports it. That
        # includes SystemExit and KeyboardInterrupt: user code must not end the worker process.
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
    """End this process, with the stacks of its threads, if the block takes too long.

    Ray and Tune would wait for it forever. A thread of Python could not run while another one
    holds the interpreter lock; this one needs no lock.
    """
    faulthandler.dump_traceback_later(_PATIENCE_SECONDS, exit=True, file=2)  # standard error
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
