"""Configure, start and stop Ray on one machine.

Ray runs the trials and keeps no state that must last. What must not live here: what a trial means
(`driver`), and a cluster that runs already (`cluster`).
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
)  # results are small and checkpoints bypass Ray; Ray's default takes 30 % of memory

_SETTINGS = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # Ray would rebuild the environment in every worker
    "RAY_USAGE_STATS_ENABLED": "0",
    # trials that request no GPU see none, instead of all training on the first one
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # the progress display prints
    # workers that Ray starts in advance are never used: trials have a runtime environment
    "RAY_prestart_worker_first_driver": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a task's relative paths start at the user's directory
    # the recorder records; CSV, JSON and TensorBoard copies cost time and disk
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial's last result has no metric
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the driver handles signals
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # no process reads Tune's own experiment state
}

_alive: dict[str, IO[str]] = {}
"""By token, the locked file that proves that the driver is alive, while its Ray runs."""


class NoRay(OSError):
    """Ray could not be started."""


def set_ray_env() -> None:
    """Set the environment variables that Ray and Tune read in the driver, local or cluster."""
    os.environ.update(_SETTINGS)


def configure(token: str) -> None:
    """Set the environment variables of a local Ray and its workers; must precede its start.

    Args:
        token: The driver's token, which tags its processes.
    """
    set_ray_env()
    # Ray accepts every client with this token, and stores a token of its own in a file that other
    # users may read. Set once for each process, because Ray keeps the first token that it reads.
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
    """Run a local Ray while the context is open; signals are handled while it starts.

    Args:
        token: As for `start`.
        machine: As for `start`.
        concurrency: As for `start`.
        interruption: Says how much time the trials have; without any, Ray is killed.
        hidden_env: As for `start`.

    Raises:
        NoRay: Ray could not be started.
    """
    ours = True
    try:
        ours = start(token, machine, concurrency=concurrency, hidden_env=hidden_env)
        yield
    finally:
        if ours and interruption.trial_grace_remaining <= 0:
            kill_children(token)  # a clean shutdown takes seconds that the grace period lacks
        if ours:
            stop(token)


def start(
    token: str, machine: Machine, *, concurrency: int, hidden_env: Iterable[str] = ()
) -> bool:
    """Start a local Ray, unless this process has one already.

    Args:
        token: The driver's token.
        machine: The CPUs and GPUs that Ray may use.
        concurrency: How many trials may wait for an actor at once.
        hidden_env: Environment variables that are empty in workers.

    Returns:
        Whether this call started Ray; the caller then stops it.

    Raises:
        NoRay: Ray could not be started.
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
        # One level below the driver's directory: Ray makes its own writable for every user.
        "_temp_dir": str(scratch_directory(token) / "ray"),
        "_node_ip_address": "127.0.0.1",  # see `sweeps/__init__.py`
    }
    with warnings.catch_warnings(), preserve_signal_handlers(), patch_ray_node():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            # `trainable.task_import` makes a user's task module importable in a worker.
            ray.init(**options, job_config=_job())
        except Exception as error:  # Ray documents no narrower type, such as for its timeouts
            if found := shortages():
                raise NoRay(f"Ray could not be started: {'; '.join(found)}") from error
            raise NoRay(
                f"Ray could not be started: {error}; its processes must come up within 30 s, for "
                "which the machine is short of memory or of time; free some, then resume"
            ) from error
    return True


def _job() -> Any:
    """Return a Ray job that adds no directory of the driver to its workers' `sys.path`.

    Ray puts these directories first, so a user's `queue.py` would shadow Python's.
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
    """Keep this process' SIGTERM handler and standard output while Ray starts.

    Ray's Python handler raises SystemExit wherever the process is, also where Python can only
    print and drop the exception. The handler of Ray's C++ library calls the driver's, and aborts
    the process three seconds later.

    SIGHUP is blocked, and Ray's processes inherit the mask: like Ctrl-C, a closed terminal must
    not end workers before trials have saved. Ray's thread that prints the raylet's messages about
    lost workers is disabled, because a trial's reason describes them.
    """
    from ray._private import utils, worker

    alarm = signal.getitimer(signal.ITIMER_REAL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # children inherit it
    with (
        _replaced(utils, "set_sigterm_handler", lambda _: None),
        _replaced(worker, "listen_error_messages", lambda *_: None),
    ):
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            if not any(alarm):  # otherwise the alarm is not Ray's
                signal.alarm(0)


@contextmanager
def patch_ray_node() -> Iterator[None]:
    """Skip processes of a Ray node that no sweep uses and that Ray has no option for.

    These are the API server, for whose start Ray waits, the log monitor, the autoscaler's monitor,
    and the agent's reports for a dashboard. Workers start by way of the fork server, if one runs.
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
    """Disable two costs of Tune, and correct four of its behaviours.

    Disabled:
    - Tune writes its state, which holds all trials, each time that one of them saves.
    - Tune counts which callbacks are used, for statistics that are off, and imports MLflow for it.

    Corrected:
    - Tune takes an error of the driver in a callback for the loss of that trial's worker.
    - Tune kills a worker that is starting when a warm one becomes free for its trial. If trials
      are shorter than a worker's start, few workers ever come up. Here the next trial gets the
      warm one.
    - Tune takes the loss of a worker that it resets for the next trial for a failure of that
      trial, which has not begun. Tune handles this loss twice, and restores the trial only once.
    - Tune reads a trial's error from the path to which it copies the error later.
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
            raise  # the error being handled; `exception` holds only its text
        if trial in controller._resetting_trials:
            controller._resetting_trials.discard(trial)
            if trial.status == Trial.PENDING:  # its worker is alive, and its reset failed
                controller._set_trial_status(trial, Trial.RUNNING)
                controller._unstage_trial_with_resources(trial)
        elif trial.status == Trial.PENDING and trial not in controller._trial_to_actor:
            return  # the second notice of the same loss
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
        """Return the oldest waiting trial, as Tune does; trials without a worker come first."""
        controller = wrapped._tune_controller
        oldest = without = None
        left = len(controller._pending_trials)
        for trial in reversed(controller._trials):  # most have ended, and stand first
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
    """Set the variables and log levels that Tune reads when it starts.

    Args:
        concurrency: How many trials may wait for an actor at once; Tune's default starts them one
            by one.
    """
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(concurrency)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Tune logs its own stack for each lost worker; the trial's reason describes the loss. Tune
    # also logs errors when it copies its unused state while it renames a part of it.
    for name in ("tune_controller", "experiment_state"):
        logging.getLogger(f"ray.tune.execution.{name}").setLevel(logging.CRITICAL)


def stop(token: str) -> None:
    """Stop this process' Ray, end its remaining processes and remove its files."""
    import ray

    ray.shutdown()
    end_orphans(token)
    if alive := _alive.pop(token, None):
        alive.close()
