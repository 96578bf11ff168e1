"""Ray, the engine: how it is set up, started and stopped on one machine.

It runs what is asked of it and remembers nothing that must last. What must not live here: trials
or anything they mean, and a cluster that runs already (`cluster`).
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from sweeps.engine import fork_server
from sweeps.engine.process_cleanup import (
    claim_scratch,
    end_orphans,
    kill_children,
    scratch_directory,
    tag_child_processes,
)
from sweeps.engine.resources import Machine
from sweeps.engine.signals import Interruption
from sweeps.engine.system_limits import shortages

_OBJECT_STORE_BYTES = (
    100 * 2**20
)  # results are small and checkpoints go past Ray; its default takes 30 % of memory

_SETTINGS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # it would rebuild the environment in every worker
    "RAY_USAGE_STATS_ENABLED": "0",
    # trials that ask for no GPU see none, instead of all training on the first one
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # what is printed is the view's
    # none of those that Ray starts in advance is ever used: trials bring their own environment
    "RAY_prestart_worker_first_driver": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a task's relative paths mean what they meant to the user
    # the recorder records; CSV, JSON and TensorBoard copies only cost
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial's last result has no metric
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # signals are the driver's
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # Tune's own experiment state is never read again
}

_alive: dict[str, IO[str]] = {}
"""What says that this driver lives, by token, while its Ray runs."""


class NoRay(OSError):
    """Ray could not be started."""


def set_ray_env() -> None:
    """Set the environment that Ray and Tune read in this process, wherever trials run."""
    os.environ.update(_SETTINGS)


def configure(token: str) -> None:
    """Set the environment that a local Ray and its workers read; must precede its start.

    Args:
        token: The driver's token, by which its processes are found again.
    """
    set_ray_env()
    # Ray takes orders from who knows this; its own would lie in a file that others may read. One
    # for the process, because Ray keeps the first that it has seen.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    tag_child_processes(token)


@contextmanager
def running(
    token: str,
    machine: Machine,
    *,
    concurrency: int,
    interruption: Interruption,
    hidden_env: Iterable[str] = (),
) -> Iterator[None]:
    """A local Ray for as long as the context is open; a signal while it starts is heard.

    See `start` for the arguments.
    """
    ours = True
    try:
        ours = start(token, machine, concurrency=concurrency, hidden_env=hidden_env)
        yield
    finally:
        if ours and interruption.trial_grace_remaining <= 0:
            kill_children(token)  # politeness takes seconds that are no longer there
        if ours:
            stop(token)


def start(
    token: str, machine: Machine, *, concurrency: int, hidden_env: Iterable[str] = ()
) -> bool:
    """Start a local Ray, unless this process has one already.

    Args:
        token: The driver's token.
        machine: What Ray may use.
        concurrency: How many trials may wait for an actor at once.
        hidden_env: Environment variables that workers get empty.

    Returns:
        Whether it was started here, and so is ours to stop.

    Raises:
        NoRay: It did not come up.
    """
    configure_tune(concurrency)
    import ray

    if ray.is_initialized():
        return False
    try:
        _alive[token] = claim_scratch(token)
    except OSError as error:
        if found := shortages():
            raise NoRay(f"Ray could not be started: {'; '.join(found)}") from error
        raise
    withheld = {name: "" for name in hidden_env if name in os.environ}
    options: dict[str, Any] = {
        "address": "local",  # whatever RAY_ADDRESS says
        "num_cpus": machine.cpus,
        "num_gpus": len(machine.gpus),
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "runtime_env": {"env_vars": withheld} if withheld else None,
        # One level below ours: Ray lets everybody write to its own.
        "_temp_dir": str(scratch_directory(token) / "ray"),
        "_node_ip_address": "127.0.0.1",  # see `sweeps/__init__.py`
    }
    with warnings.catch_warnings(), preserve_signal_handlers(), patch_ray_node():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            # A worker finds a user's task module by itself, see `trainable.task_import`.
            ray.init(**options, job_config=_job())
        except Exception as error:  # of no narrower kind, on a machine too busy for its patience
            if found := shortages():
                raise NoRay(f"Ray could not be started: {'; '.join(found)}") from error
            raise NoRay(
                f"Ray could not be started: {error}; its processes must come up within 30 s, for "
                "which the machine is short of memory or of time; free some, then resume"
            ) from error
    return True


def _job() -> Any:
    """A Ray job whose workers get no directory of the driver's on their path: Ray puts them first,
    where a user's `queue.py` is imported in the place of Python's.
    """
    from ray.job_config import JobConfig

    kind: Any = JobConfig

    class Job(kind):  # type: ignore[misc]
        def _serialize(self) -> Any:
            self._py_driver_sys_path.clear()
            return super()._serialize()

    return Job()


@contextmanager
def preserve_signal_handlers() -> Iterator[None]:
    """Keep this process' answer to SIGTERM while Ray starts. Ray's own in Python raises SystemExit
    wherever the process just is, also where Python can only print and forget it; the one below, in
    its library, calls ours, and aborts the process three seconds later. What Ray starts does not
    hear of a terminal's end, as it does not of Ctrl-C: a trial is to save first. And keep its
    standard output: Ray prints there what a raylet says of lost workers, which a trial's reason
    says for people.
    """
    from ray._private import utils, worker

    alarm = signal.getitimer(signal.ITIMER_REAL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # which children inherit
    with (
        _replaced(utils, "set_sigterm_handler", lambda _: None),
        _replaced(worker, "listen_error_messages", lambda *_: None),
    ):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            if not any(alarm):  # else it is somebody else's
                signal.alarm(0)


@contextmanager
def patch_ray_node() -> Iterator[None]:
    """Leave out what Ray starts with a node of its own and nobody here asks, for which it has no
    option: an API server, whose start it waits for, two processes that watch its logs and a
    cluster that could grow, and what the node's agent would tell a dashboard. Its workers are
    forked where somebody serves forks.
    """
    from ray._private import parameter, services, utils

    complete: Any = parameter.RayParams
    node = functools.partial(
        complete,
        no_monitor=True,
        include_log_monitor=False,
        setup_worker_path=str(fork_server.WORKER_START),
    )
    with (
        _replaced(parameter, "RayParams", node),
        _replaced(services, "start_api_server", lambda *_, **__: ("", None)),
        _replaced(utils, "get_dashboard_dependency_error", lambda: ImportError("not asked for")),
    ):
        yield


@contextmanager
def patch_tune() -> Iterator[None]:
    """Leave out what Tune does for nobody here: to write down its state, which holds all trials,
    each time that one of them saves, for it keeps each trial's newest pointer only; and to count
    which of its callbacks are used, for statistics that are off, for which it imports MLflow.
    And what harms: to take an error of the driver, met while a trial's end is told, for the loss
    of that trial's worker; and to end a worker that is starting when its trial could have a warm
    one, so that where trials are shorter than a start few workers ever come up. The warm one goes
    to the next trial. And to take a worker that is lost while it is got ready for its next trial
    for a failure of that trial, which has not begun: it is told of it twice, and only once makes
    good for it. And to look for a trial's error where it is copied to later.
    """
    from ray import cloudpickle
    from ray.air._internal import usage
    from ray.tune.error import _TuneStopTrialError
    from ray.tune.execution import experiment_state
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import FIFOScheduler  # every scheduler of ours is one

    manager: Any = experiment_state._ExperimentCheckpointManager
    count_failure: Any = TuneController._process_trial_failure
    take_warm_worker: Any = TuneController._maybe_reuse_cached_actor

    def end_with_it(controller: Any, trial: Any, exception: Any) -> None:
        if isinstance(exception, _TuneStopTrialError):
            raise  # the error itself, which is being handled; this one is only its text
        if trial in controller._resetting_trials:
            controller._resetting_trials.discard(trial)
            if trial.status == Trial.PENDING:  # its worker is there, and could not do it
                controller._set_trial_status(trial, Trial.RUNNING)
                controller._unstage_trial_with_resources(trial)
        elif trial.status == Trial.PENDING and trial not in controller._trial_to_actor:
            return  # told for the second time
        count_failure(controller, trial, exception)

    def newest_error(trial: Any) -> Any:
        path = trial.pickled_error_file
        if path is None or not os.path.exists(path):
            return None
        with open(path, "rb") as file:
            return cloudpickle.load(file)

    def has_worker(controller: Any, trial: Any) -> bool:
        worker = controller._trial_to_actor.get(trial)
        return worker is not None and controller._actor_manager.is_actor_started(worker)

    def choose(_: Any, wrapped: Any) -> Any:
        """The oldest trial that waits, as Tune does, if possible one that no worker starts for."""
        controller = wrapped._tune_controller
        oldest = without = None
        left = len(controller._pending_trials)
        for trial in reversed(controller._trials):  # most have ended, and are at the beginning
            if not left:
                break
            if trial in controller._pending_trials:
                left -= 1
                oldest = trial
                without = without if has_worker(controller, trial) else trial
        return without or oldest

    def take(controller: Any, trial: Any) -> bool:
        others = controller._pending_trials
        if has_worker(controller, trial) and not all(has_worker(controller, o) for o in others):
            return False
        return bool(take_warm_worker(controller, trial))

    with (
        _replaced(usage, "tag_callbacks", lambda _: False),
        _replaced(manager, "on_trial_checkpoint", lambda *_: None),
        _replaced(TuneController, "_process_trial_failure", end_with_it),
        _replaced(TuneController, "_maybe_reuse_cached_actor", take),
        _replaced(FIFOScheduler, "choose_trial_to_run", choose),
        _replaced(Trial, "get_pickled_error", newest_error),
    ):
        yield


@contextmanager
def _replaced(module: Any, name: str, instead: Any) -> Iterator[None]:
    theirs = getattr(module, name)
    setattr(module, name, instead)
    try:
        yield
    finally:
        setattr(module, name, theirs)


def configure_tune(concurrency: int) -> None:
    """Set what Tune reads when a session begins.

    Args:
        concurrency: How many trials may wait for an actor at once; Tune's own default starts them
            one by one.
    """
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(concurrency)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Of a lost worker Tune prints its own stack; the trial's reason says what happened. Its own
    # state, which nobody reads, it sometimes copies while it renames a part of it.
    for name in ("tune_controller", "experiment_state"):
        logging.getLogger(f"ray.tune.execution.{name}").setLevel(logging.CRITICAL)


def stop(token: str) -> None:
    """Stop this process' Ray, and see to it that nothing of it remains."""
    import ray

    ray.shutdown()
    end_orphans(token)
    if alive := _alive.pop(token, None):
        alive.close()
