"""The variables, documented or not, that configure Ray and Tune, and the names of Tune's loggers.

What must not live here: an import of Ray, which reads a few of them when it is imported, and
addresses and tokens of a cluster.
"""

from __future__ import annotations

import logging
import os

_LISTEN_ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

_AT_IMPORT = {
    # Without this, Ray replaces 127.0.0.1 with the machine's network address, and all of Ray's
    # servers listen on every network.
    _LISTEN_ON_LOOPBACK: "0",
    # Without this, Ray's messages (such as about a lost worker) may reach a file or a pipe after
    # the driver's last line.
    "RAY_FLUSH_DRIVER_LOGS": "1",
}

_DRIVER = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # Ray would rebuild the environment in every worker
    "RAY_USAGE_STATS_ENABLED": "0",
    # trials that request no GPU see none, instead of all training on the first one
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # the progress display prints
    # workers that Ray starts in advance are never used: trials have a runtime environment
    "RAY_prestart_worker_first_driver": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # a task that watches a node ends with the node
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a task's relative paths start at the user's directory
    # the recorder records; CSV, JSON and TensorBoard copies cost time and disk
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a failed trial's last result has no metric
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # the driver handles signals
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # no process reads Tune's own experiment state
}

CLUSTER_WORKERS = {
    name: _DRIVER[name]
    for name in ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",)  # a local Ray's workers inherit it
}
"""The variables that workers of a running cluster receive with their runtime environment."""

_UPLOAD_IGNORED_FILES = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"


def set_import_env() -> None:
    """Set the variables that Ray reads when it is imported."""
    os.environ.update(_AT_IMPORT)


def set_ray_env() -> None:
    """Set the variables that Ray and Tune read in the driver, with a local Ray or a cluster."""
    os.environ.update(_DRIVER)


def set_cluster_env(*, loopback: bool) -> None:
    """Set the variables of a driver that connects to a running cluster."""
    set_ray_env()
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"  # the driver prints its own message
    # If a driver's node is gone and the process with this id has ended, Ray exits the driver
    # without a message. With the driver's own id, Ray raises an error instead.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    if not loopback:  # this Ray listens on the interface that the cluster uses
        os.environ.pop(_LISTEN_ON_LOOPBACK, None)


def configure_tune(concurrency: int) -> None:
    """Set the variable and the log levels that Tune reads when it starts."""
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(concurrency)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Tune logs its own stack for each lost worker; the trial's reason describes the loss. Tune
    # also logs errors when it copies its unused state while it renames a part of it.
    for name in ("tune_controller", "experiment_state"):
        logging.getLogger(f"ray.tune.execution.{name}").setLevel(logging.CRITICAL)


def obeys_gitignore() -> bool:
    """Return whether Ray excludes the files that `.gitignore` names from an upload."""
    return os.environ.get(_UPLOAD_IGNORED_FILES) != "1"
