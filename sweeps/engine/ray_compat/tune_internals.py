"""Private parts of Ray Tune: its controller, its trials, and the environment of its actors.

What must not live here: what an event of a trial means (`run.tune_callbacks`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

from sweeps.engine.ray_compat import replaced

_RELEASED = (
    "config",
    "_Trial__unresolved_config",
    "evaluated_params",
    "experiment_tag",
)
"""Attributes that hold the configuration of an ended trial, and that Tune no longer reads."""


@contextmanager
def patch_tune(leaving: Set[str] = frozenset()) -> Iterator[None]:
    """Disable two costs of Tune, and correct five of its behaviours.

    `leaving` has the ids of nodes that are about to be taken away, and may grow.
    """
    from ray.air._internal import usage
    from ray.tune.execution import experiment_state
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import FIFOScheduler  # every scheduler of ours is one

    manager: Any = experiment_state._ExperimentCheckpointManager
    count_failure: Any = TuneController._process_trial_failure
    take_warm_worker: Any = TuneController._maybe_reuse_cached_actor

    def process_failure(controller: Any, trial: Any, exception: Any) -> None:
        if not _is_handled(controller, trial, exception):
            count_failure(controller, trial, exception)

    def reuse_worker(controller: Any, trial: Any) -> bool:
        return _may_take_warm_worker(controller, trial) and bool(
            take_warm_worker(controller, trial)
        )

    def choose_trial(_: Any, wrapped: Any) -> Any:
        controller = wrapped._tune_controller
        if leaving:
            _end_unstarted_workers(controller, leaving)
        return _choose_trial(controller)

    with (
        # imports MLflow, for statistics that are off
        replaced(usage, "tag_callbacks", lambda _: False),
        # writes the state of all trials each time that one saves
        replaced(manager, "on_trial_checkpoint", lambda *_: None),
        # treats errors of callbacks as lost workers, and counts a loss in a reset twice
        # (as a failure of the next trial, which has not begun, and restores that only once)
        replaced(TuneController, "_process_trial_failure", process_failure),
        # kills a worker that is starting when its trial could have a warm one
        # (so that few workers ever start where a trial takes less time than the start of one)
        replaced(TuneController, "_maybe_reuse_cached_actor", reuse_worker),
        # lets a trial with a starting worker have the warm one before a trial without any, and
        # waits without end for a worker on a node on which Ray starts none any more
        replaced(FIFOScheduler, "choose_trial_to_run", choose_trial),
        # reads a file that does not exist yet
        replaced(Trial, "get_pickled_error", _read_error),
    ):
        yield


def _is_handled(controller: Any, trial: Any, exception: Any) -> bool:
    """Prepare Tune's own handling of a trial's failure; return whether nothing is to handle."""
    from ray.tune.error import _TuneStopTrialError
    from ray.tune.experiment import Trial

    if isinstance(exception, _TuneStopTrialError):
        raise  # the error being handled; `exception` holds only its text
    if trial in controller._resetting_trials:
        controller._resetting_trials.discard(trial)
        if trial.status == Trial.PENDING:  # its worker is alive, and its reset failed
            controller._set_trial_status(trial, Trial.RUNNING)
            controller._unstage_trial_with_resources(trial)
        return False
    # otherwise the second notice of the same loss
    return trial.status == Trial.PENDING and trial not in controller._trial_to_actor


def _has_worker(controller: Any, trial: Any) -> bool:
    """Return whether a worker has started for a trial."""
    worker = controller._trial_to_actor.get(trial)
    return worker is not None and controller._actor_manager.is_actor_started(worker)


def _may_take_warm_worker(controller: Any, trial: Any) -> bool:
    """Return whether a trial may take a warm worker.

    Not one whose own worker has started, while a waiting trial of as many ranks has none.
    """
    if not _has_worker(controller, trial):
        return True
    resources = trial.placement_group_factory
    return all(
        _has_worker(controller, other)
        for other in controller._pending_trials
        if other.placement_group_factory == resources
    )


def _end_unstarted_workers(controller: Any, leaving: Set[str]) -> None:
    """Kill the workers that are placed on one of these nodes and have not started.

    Tune then places their trials again.
    """
    import ray

    workers = controller._actor_manager._live_actors_to_ray_actors_resources
    for worker, (actor, resources) in list(workers.items()):
        if worker in controller._started_actors:
            continue
        group = ray.util.placement_group_table(resources.placement_group)
        if not leaving.isdisjoint(group["bundles_to_node_id"].values()):
            ray.kill(actor)


def _choose_trial(controller: Any) -> Any:
    """Return the oldest waiting trial, as Tune does; trials without a worker come first."""
    oldest = without = None
    left = len(controller._pending_trials)
    for trial in reversed(controller._trials):  # most trials have ended, and come first
        if not left:
            break
        if trial in controller._pending_trials:
            left -= 1
            oldest = trial
            without = without if _has_worker(controller, trial) else trial
    return without or oldest


def _read_error(trial: Any) -> Any:
    from ray import cloudpickle

    path = trial.pickled_error_file
    if path is None or not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return cloudpickle.load(file)


def withhold_env(is_secret: Callable[[str], bool]) -> None:
    """Make Tune pass no secret variable of the driver to its actors.

    Tune writes the values into Ray's logs and command lines; workers inherit the variables anyway.
    """
    from ray.tune.execution.class_cache import ENV_VARS_TO_PROPAGATE

    ENV_VARS_TO_PROPAGATE.difference_update([*filter(is_secret, ENV_VARS_TO_PROPAGATE)])


def release_trial(trial: Any) -> None:
    """Release the memory of a trial that has ended, except for its number.

    Tune keeps all of it for the whole sweep, but does not read it after the trial's end.
    """
    from ray.tune.experiment import Trial

    empty = Trial(trial.trainable_name, config={"number": trial.config["number"]}, stub=True)
    for attribute in _RELEASED:
        setattr(trial, attribute, getattr(empty, attribute))
    trial.run_metadata = empty.run_metadata  # its metrics
    trial._default_result_or_future = None  # its last result


def end_at_next_loss(trial: Any) -> None:
    """Make Tune stop retrying a trial; callbacks have no public way to end a trial."""
    trial.max_failures = 0


def worker_error(trial: Any) -> Any:
    """Return Ray's error about a trial's lost worker; None without one."""
    return trial.get_pickled_error()
