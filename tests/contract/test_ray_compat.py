"""What `sweeps.engine.ray_compat` relies on in Ray: private names, their signatures and meaning.

A failure names the private part and the module that uses it. Read it together with
`docs/internals/ray-compatibility.md`, which says what breaks without each part. `make newest` runs
this file with the newest Ray. What must not live here: what Gradsweep does with these parts, which
the integration tests show.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from sweeps.engine import worker_launcher
from sweeps.engine.ray_compat import environment, ray_internals, tune_internals
from sweeps.stopping.schedulers import StopperScheduler
from tests.integration.commandline import wait_until
from trainable.adapters.ray import TuneTrial

NODE = "sweeps/engine/ray_compat/ray_internals.py"
TUNE = "sweeps/engine/ray_compat/tune_internals.py"
VARIABLES = "sweeps/engine/ray_compat/environment.py"
LAUNCHER = "sweeps/engine/worker_launcher.py"
ADAPTER = "trainable/adapters/ray.py"
SCHEDULERS = "sweeps/stopping/schedulers.py"

CONTROLLER = "ray.tune.execution.tune_controller.TuneController"
PACKAGING = "ray._private.runtime_env.packaging"


class Part(NamedTuple):
    """A private part of Ray.

    Attributes:
        name: Its name, with the module.
        used_in: The file that uses it.
        parameters: Those that it is called or replaced with.
        exact: Whether they stand in this order, and no other one is required.
    """

    name: str
    used_in: str
    parameters: tuple[str, ...] | None = None
    exact: bool = True


PARTS = [
    Part("ray._private.utils.set_sigterm_handler", NODE, ("sigterm_handler",)),
    Part("ray._private.worker.listen_error_messages", NODE, ("worker", "threads_stopped")),
    Part(
        "ray._private.parameter.RayParams",
        NODE,
        ("no_monitor", "include_log_monitor", "setup_worker_path"),
        exact=False,
    ),
    Part("ray._private.services.start_api_server", NODE, ("include_dashboard",), exact=False),
    Part(
        "ray._private.services.start_ray_process", NODE, ("command", "process_type"), exact=False
    ),
    Part("ray._private.node.wait_for_persisted_port", NODE, ("timeout_ms",), exact=False),
    Part("ray._private.utils.get_dashboard_dependency_error", NODE, ()),
    Part("ray.job_config.JobConfig._serialize", NODE, ("self",)),
    Part("ray._private.worker._global_node", NODE),
    Part("ray._private.node.Node.raylet_socket_name", NODE),
    Part("ray._private.node.Node.get_logs_dir_path", NODE, ("self",)),
    Part("ray._private.state.actors", NODE, ("actor_id",)),
    Part("ray._raylet.GcsClient", NODE),
    Part("ray._private.state.state.get_draining_nodes", NODE, ()),
    Part("ray.core.generated.autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION", NODE),
    Part(f"{PACKAGING}._get_excludes", NODE, ("path", "excludes")),
    Part(
        f"{PACKAGING}._dir_travel",
        NODE,
        ("path", "excludes", "handler", "include_gitignore", "logger"),
    ),
    Part("ray.air._internal.usage.tag_callbacks", TUNE, ("callbacks",)),
    Part("ray.tune.error._TuneStopTrialError", TUNE),
    Part(
        "ray.tune.execution.experiment_state._ExperimentCheckpointManager.on_trial_checkpoint",
        TUNE,
        ("self", "trial"),
    ),
    Part(f"{CONTROLLER}._process_trial_failure", TUNE, ("self", "trial", "exception")),
    Part(f"{CONTROLLER}._maybe_reuse_cached_actor", TUNE, ("self", "trial")),
    Part(f"{CONTROLLER}._set_trial_status", TUNE, ("self", "trial", "status")),
    Part(f"{CONTROLLER}._unstage_trial_with_resources", TUNE, ("self", "trial")),
    Part(
        "ray.tune.schedulers.FIFOScheduler.choose_trial_to_run", TUNE, ("self", "tune_controller")
    ),
    Part("ray.tune.experiment.Trial.get_pickled_error", TUNE, ("self",)),
    Part("ray.tune.experiment.Trial.pickled_error_file", TUNE),
    Part("ray.tune.execution.class_cache.ENV_VARS_TO_PROPAGATE", TUNE),
    Part("ray.tune.trainable.trainable.Trainable.trial_resources", ADAPTER),
    Part("ray.tune.result.DONE", ADAPTER),
    Part("ray.tune.result.SHOULD_CHECKPOINT", ADAPTER),
]


@contextlib.contextmanager
def relied_on(name: str, used_in: str) -> Iterator[None]:
    """Fail with the name of the private part and of the file that uses it."""
    try:
        yield
    except Exception as error:
        import ray

        pytest.fail(
            f"{name} of Ray {ray.__version__} is not what {used_in} relies on: "
            f"{type(error).__name__}: {error}",
            pytrace=True,
        )


def _find(name: str) -> Any:
    """Return what a dotted name stands for."""
    import importlib

    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_private_part_exists_with_its_parameters(part: Part) -> None:
    with relied_on(part.name, part.used_in):
        found = _find(part.name)
        if part.parameters is None:
            return
        signature = inspect.signature(found).parameters
        assert {*part.parameters} <= signature.keys(), f"it has {[*signature]}"
        if part.exact:
            required = [name for name, each in signature.items() if each.default is each.empty]
            first = [*signature][: max(len(required), len(part.parameters))]
            assert first == [*part.parameters], f"it has {[*signature]}"


# What Ray reads when it is imported, from a process in which it is imported after `sweeps`.
IMPORTED = """
import json, sweeps, logging
from ray._private import ray_constants, services
from ray.tune.execution import experiment_state, tune_controller
print(json.dumps({
    "flush": ray_constants.RAY_FLUSH_DRIVER_LOGS,
    "loopback": services.resolve_ip_for_localhost("127.0.0.1"),
    "loggers": [tune_controller.logger.name, experiment_state.logger.name],
}))
"""


@pytest.fixture(scope="module")
def imported() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{VARIABLES} relies on what cannot be imported:\n{done.stderr}")
    return json.loads(done.stdout)


def test_what_ray_reads_when_it_is_imported(imported: Any) -> None:
    with relied_on("RAY_FLUSH_DRIVER_LOGS", VARIABLES):
        assert imported["flush"] is True
    with relied_on("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", VARIABLES):
        assert imported["loopback"] == "127.0.0.1"


def test_the_loggers_of_tune_have_these_names(imported: Any) -> None:
    with relied_on("ray.tune.execution.*.logger", VARIABLES):
        assert imported["loggers"] == [
            "ray.tune.execution.tune_controller",
            "ray.tune.execution.experiment_state",
        ]


def _set_variables() -> set[str]:
    """The names of all variables of Ray that `environment` sets."""
    before = dict(os.environ)
    try:
        for name in [name for name in os.environ if name.startswith(("RAY_", "TUNE_"))]:
            del os.environ[name]
        environment.set_import_env()
        environment.set_cluster_env(loopback=True)
        environment.configure_tune(1)
        return {name for name in os.environ if name.startswith(("RAY_", "TUNE_"))}
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_ray_reads_each_variable_that_is_set() -> None:
    import ray

    home = Path(ray.__file__).parent
    unknown = _set_variables() | {"RAY_RUNTIME_ENV_IGNORE_GITIGNORE"}
    assert len(unknown) > 12
    folders = ("_private", "_common", "air", "train", "tune", "dashboard")
    sources = [path for folder in folders for path in (home / folder).rglob("*.py")]
    for source in sources:
        text = source.read_text(encoding="utf-8", errors="replace")
        unknown = {name for name in unknown if f'"{name}"' not in text}
    for library in (home / "_raylet.so", home / "core/src/ray/raylet/raylet"):  # what C++ reads
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as m:
            unknown = {name for name in unknown if m.find(name.encode() + b"\0") < 0}
    with relied_on(", ".join(sorted(unknown)), VARIABLES):
        assert not unknown, "no file of Ray has these names"


def test_tune_reads_how_many_trials_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.tune.execution import tune_controller

    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "")
    with relied_on("TUNE_MAX_PENDING_TRIALS_PG", VARIABLES):
        environment.configure_tune(7)
        search: Any = None
        assert tune_controller._get_max_pending_trials(search) == 7


def test_a_job_adds_no_directory_to_the_path_of_workers() -> None:
    with relied_on("ray.job_config.JobConfig._py_driver_sys_path", NODE):
        from ray.job_config import JobConfig

        plain: Any = JobConfig()
        job = ray_internals.job_without_sys_path()
        for each in (plain, job):
            each._py_driver_sys_path.append("/somewhere")
        sent = _find("ray.core.generated.common_pb2.JobConfig")
        assert list(sent.FromString(plain._serialize()).py_driver_sys_path) == ["/somewhere"]
        assert list(sent.FromString(job._serialize()).py_driver_sys_path) == []


def test_the_launcher_reads_what_a_raylet_gives_it() -> None:
    with relied_on("the arguments of ray._private.workers.setup_worker", LAUNCHER):
        from ray._private.workers import default_worker, setup_worker

        options = {name for each in setup_worker.parser._actions for name in each.option_strings}
        assert options == {"-h", "--help", "--serialized-runtime-env-context", "--language"}
        assert "--worker-type" in default_worker.parser.format_help()
        assert Path(setup_worker.__file__).parent == Path(default_worker.__file__).parent
    with relied_on("ray._private.runtime_env.context.RuntimeEnvContext", LAUNCHER):
        from ray._private.runtime_env.context import RuntimeEnvContext

        context = json.loads(RuntimeEnvContext(env_vars={"A": "b"}).serialize())
        assert context.pop("env_vars") == {"A": "b"}
        assert context.pop("py_executable") == sys.executable
        assert not any(context.values()), "the launcher would leave such a worker to Ray"
    assert Path(worker_launcher.__file__).match(LAUNCHER)


def test_the_errors_of_ray_have_these_words() -> None:
    from ray import exceptions

    with relied_on("ray.exceptions.AuthenticationError", NODE):
        assert ray_internals.refuses_token(exceptions.AuthenticationError("another token"))
        assert not ray_internals.refuses_token(exceptions.RayActorError())
    with relied_on("ray._private.utils.check_version_info", NODE):
        from ray._private.utils import check_version_info

        other = {"ray_version": "0", "python_version": "3"}
        with pytest.raises(RuntimeError) as raised:
            check_version_info(other, "127.0.0.1", raise_on_mismatch=True)
        assert ray_internals.is_version_mismatch(str(raised.value))
    with relied_on("ray.exceptions.RayActorError.actor_id", NODE):
        assert exceptions.RayActorError("an id").actor_id == "an id"


@pytest.mark.parametrize("obeyed", [True, False])
def test_visited_files_are_those_that_ray_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obeyed: bool
) -> None:
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0" if obeyed else "1")
    project, visited = tmp_path / "project", list[Path]()
    for name in ("task.py", "deep/module.py", "deep/ignored.py", "data.bin", "left/out.py"):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (project / ".gitignore").write_text("data.bin\n")
    (project / "deep" / ".rayignore").write_text("ignored.py\n")
    excludes = ["left", "/deep/nothing"]
    with relied_on(f"{PACKAGING}._dir_travel", NODE):
        from ray._private.runtime_env.packaging import create_package

        ray_internals.visit_uploaded(project, excludes, visited.append)
        create_package(
            str(project), tmp_path / "package.zip", include_gitignore=obeyed, excludes=excludes
        )
        with zipfile.ZipFile(tmp_path / "package.zip") as package:
            packed = {name for name in package.namelist() if not name.endswith("/")}
        assert {str(path.relative_to(project)) for path in visited if path.is_file()} == packed
        assert ("data.bin" in packed) is not obeyed
        assert {"task.py", "deep/module.py"} < packed


# A real node, started through the patches.


@pytest.mark.integration
@pytest.mark.usefixtures("ray_on_two_cores")
class TestNode:
    """What Ray's processes do that were started through `ray_internals`."""

    def test_no_process_runs_that_is_left_out(self) -> None:
        with relied_on("ray._private.parameter.RayParams, start_api_server", NODE):
            started = [
                " ".join(process.cmdline())
                for process in psutil.Process().children(recursive=True)
                if process.status() != psutil.STATUS_ZOMBIE
            ]
            (raylet,) = (line for line in started if "raylet/raylet" in line)
            assert str(worker_launcher.__file__) in raylet, "workers start without the launcher"
            unwanted = ("dashboard/dashboard.py", "log_monitor.py", "_private/monitor.py")
            assert not [line for line in started if any(each in line for each in unwanted)]

    def test_a_raylet_has_two_agents_with_their_titles(self) -> None:
        with relied_on("ray::DashboardAgent, ray::RuntimeEnvAgent", NODE):
            (raylet,) = (p for p in psutil.Process().children() if p.name() == "raylet")
            wait_until(lambda: {*ray_internals.find_agents(raylet.pid)} == {*ray_internals.AGENTS})

    def test_the_driver_keeps_its_signals(self) -> None:
        with relied_on("ray._private.utils.set_sigterm_handler", NODE):
            handler = signal.getsignal(signal.SIGTERM)
            assert not str(getattr(handler, "__module__", "")).startswith("ray"), handler
        with relied_on("ray._private.worker.listen_error_messages", NODE):
            listening = [t.name for t in threading.enumerate() if "error_messages" in t.name]
            assert listening == [], "it prints to the driver's standard output"

    def test_the_socket_of_the_node_accepts_connections(self) -> None:
        name = "ray._private.node.Node.raylet_socket_name"
        with relied_on(name, NODE), socket.socket(socket.AF_UNIX) as node:
            node.connect(ray_internals.raylet_socket())

    def test_the_node_has_its_directory_and_its_address(self) -> None:
        import ray

        with relied_on("_temp_dir and _node_ip_address of ray.init", NODE):
            assert ray_internals.raylet_socket().startswith("/tmp/gradsweep-")
            (node,) = ray.nodes()
            assert node["NodeManagerAddress"] == "127.0.0.1"
            fields = {"NodeID", "Alive", "Resources", "NodeManagerPort", "NodeManagerHostname"}
            assert fields <= node.keys(), "sweeps/engine/cluster.py reads these, too"

    def test_a_node_knows_whether_it_is_the_head_and_drains(self) -> None:
        import ray

        with relied_on("node:__internal_head__ and get_draining_nodes", NODE):
            (node,) = ray.nodes()
            assert ray_internals.is_head(node)
            assert ray_internals.draining_nodes() == set()

    def test_a_request_reaches_the_head(self) -> None:
        import ray

        with relied_on("ray._raylet.GcsClient.internal_kv_keys", NODE):
            ray_internals.query_head(ray.get_runtime_context().gcs_address, 20.0)

    def test_the_error_of_a_lost_worker_names_its_process(self) -> None:
        import ray

        class Dies:
            def pid(self) -> int:
                return os.getpid()

            def die(self) -> None:
                os.write(2, b"its last words\n")
                os._exit(3)

        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Dies).remote()
        pid = ray.get(actor.pid.remote())
        with pytest.raises(ray.exceptions.RayActorError) as raised:
            ray.get(actor.die.remote())
        with relied_on("the text of ray.exceptions.ActorDiedError", NODE):
            lost = ray_internals.lost_worker(raised.value)
            assert lost is not None, str(raised.value)
            assert lost.pid == pid
            assert lost.detail, str(raised.value)
        with relied_on("ray._private.state.actors", NODE):
            (node,) = ray.nodes()
            assert ray_internals.node_of_lost_actor(raised.value) == node["NodeID"]
        with relied_on("ray._private.node.Node.get_logs_dir_path", NODE):
            (log,) = ray_internals.error_logs(pid)
            assert "its last words" in log.read_text()


# Ray Tune, whose trials have a directory in Ray's session.


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "4")  # it would ask a running Ray
    with relied_on(CONTROLLER, TUNE):
        from ray.train._internal.storage import StorageContext
        from ray.tune.execution.tune_controller import TuneController

        factory: Any = SimpleNamespace
        return TuneController(
            resource_manager_factory=factory, storage=StorageContext(str(tmp_path), "sweep")
        )


@pytest.fixture
def trial(tmp_path: Path, ray_on_two_cores: None) -> Any:
    del ray_on_two_cores
    with relied_on("ray.tune.experiment.Trial", TUNE):
        from ray.train._internal.storage import StorageContext
        from ray.tune.experiment import Trial

        storage = StorageContext(str(tmp_path), "sweep", trial_dir_name="trial")
        config = {"number": 3, "params": {"long": "x" * 5_000}}
        made = Trial("nothing", config=config, stub=True, storage=storage, experiment_tag="tag")
        Path(str(made.local_path)).mkdir(parents=True, exist_ok=True)
        return made


def test_the_controller_has_these_attributes(controller: Any) -> None:
    with relied_on(f"the attributes of {CONTROLLER}", TUNE):
        assert controller._trial_to_actor == {}
        assert controller._trials == []
        assert controller._pending_trials == controller._resetting_trials == set()
        assert controller._started_actors == set()
        assert controller._actor_manager._live_actors_to_ray_actors_resources == {}
        assert [*inspect.signature(controller._actor_manager.is_actor_started).parameters] == [
            "tracked_actor"
        ]
    with relied_on(f"{CONTROLLER}._wrapped", TUNE):
        assert controller._wrapped()._tune_controller is controller


def test_schedulers_choose_trials_through_the_wrapper(controller: Any, trial: Any) -> None:
    with relied_on("ray.tune.schedulers.FIFOScheduler.choose_trial_to_run", TUNE):
        controller._trials.append(trial)
        controller._pending_trials.add(trial)
        scheduler: Any = StopperScheduler(None, "none", "val/loss")
        with tune_internals.patch_tune():
            assert scheduler.choose_trial_to_run(controller._wrapped()) is trial
            assert type(scheduler).choose_trial_to_run.__module__ == tune_internals.__name__
        assert type(scheduler).choose_trial_to_run.__module__.startswith("ray.")


def test_the_status_of_a_trial_moves_between_sets(controller: Any, trial: Any) -> None:
    trial.placement_group_factory = "resources"
    with relied_on(f"{CONTROLLER}._set_trial_status", TUNE):
        controller._pending_trials.add(trial)
        controller._set_trial_status(trial, trial.RUNNING)
        assert trial.status == trial.RUNNING
        assert trial not in controller._pending_trials
    with relied_on(f"{CONTROLLER}._unstage_trial_with_resources", TUNE):
        controller._staged_trials.add(trial)
        controller._unstage_trial_with_resources(trial)
        assert not controller._staged_trials


def test_the_error_of_a_callback_comes_as_a_stop_error(controller: Any, trial: Any) -> None:
    """Its type marks it, the original error is being handled, and the patch raises that."""

    def refuse(**_: Any) -> None:
        raise BlockingIOError("the ledger is locked")

    with relied_on("ray.tune.error._TuneStopTrialError", TUNE):
        logging.getLogger("ray.tune.execution.tune_controller").setLevel(logging.CRITICAL)
        controller._callbacks = SimpleNamespace(on_trial_complete=refuse)
        controller._pending_trials.add(trial)
        with (
            tune_internals.patch_tune(),
            contextlib.suppress(BlockingIOError),
        ):
            controller.stop_trial(trial)
            raise AssertionError("Tune took the error for a failure of the trial")


def test_the_error_of_a_result_is_the_context_of_a_tune_error(controller: Any) -> None:
    from ray.tune import TuneError

    trial, actor, scheduled = object(), object(), dict[str, Any]()

    def fail(*_: Any) -> None:
        raise BlockingIOError("the ledger is locked")

    with relied_on(f"{CONTROLLER}._schedule_trial_task", "sweeps/run/tune_loop.py"):
        controller._trial_to_actor, controller._actor_to_trial = {trial: actor}, {actor: trial}
        controller._actor_manager = SimpleNamespace(schedule_actor_task=scheduled.update)
        controller._schedule_trial_task(trial, "train", on_result=fail)
        with pytest.raises(TuneError) as raised:
            scheduled["on_result"](actor, {})
        assert isinstance(raised.value.__context__, BlockingIOError)


def test_the_error_of_a_lost_worker_is_read_where_tune_writes_it(trial: Any) -> None:
    from ray.exceptions import RayActorError

    with (
        relied_on("ray.tune.experiment.Trial.pickled_error_file", TUNE),
        tune_internals.patch_tune(),
    ):
        assert tune_internals.worker_error(trial) is None
        trial.handle_error(RayActorError("an id", "the reason"))
        assert str(tune_internals.worker_error(trial)) == "the reason"


def test_a_trial_without_retries_left_does_not_recover(trial: Any) -> None:
    with relied_on("ray.tune.experiment.Trial.max_failures", TUNE):
        trial.max_failures = -1
        trial.run_metadata.num_failures = 2
        assert trial.should_recover()
        tune_internals.end_at_next_loss(trial)
        assert not trial.should_recover()


def test_an_ended_trial_holds_nothing_but_its_number(trial: Any) -> None:
    with relied_on("the attributes of ray.tune.experiment.Trial", TUNE):
        released = {*tune_internals._RELEASED, "run_metadata", "_default_result_or_future"}
        assert released <= vars(trial).keys(), f"it has {sorted(vars(trial))}"
        trial.update_last_result({"objective": 1.0, "rows": "y" * 5_000})
        tune_internals.release_trial(trial)
        assert trial.config == {"number": 3}
        assert sum(map(len, trial.get_json_state())) < 4_000
        assert str(trial)


def test_no_secret_is_passed_to_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    with relied_on("ray.tune.execution.class_cache.ENV_VARS_TO_PROPAGATE", TUNE):
        from ray.tune.execution import class_cache

        known = {*class_cache.ENV_VARS_TO_PROPAGATE, "AWS_SECRET_ACCESS_KEY"}
        monkeypatch.setattr(class_cache, "ENV_VARS_TO_PROPAGATE", known)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do not tell")
        tune_internals.withhold_env(lambda name: "SECRET" in name)
        passed = class_cache._ActorClassCache().get(TuneTrial)._default_options["runtime_env"]
        assert "do not tell" not in str(passed)
        assert "PL_DISABLE_FORK" in str(passed), "it is another environment"


def test_tune_counts_callbacks_where_the_patch_replaces_that() -> None:
    with relied_on("ray.air._internal.usage.tag_callbacks", TUNE):
        module = inspect.getmodule(_find("ray.tune.run"))
        usage = _find("ray.air._internal.usage")
        assert usage in vars(module).values(), "`ray.tune.run` has a reference of its own"


def test_each_patch_of_tune_is_taken_back() -> None:
    names = [part.name for part in PARTS if part.used_in == TUNE and part.parameters is not None]
    before = [_find(name) for name in names]
    with relied_on("a patched part", TUNE):
        with tune_internals.patch_tune():
            during = [_find(name) for name in names]
        assert [_find(name) for name in names] == before
    replaced = {
        name for name, one, other in zip(names, before, during, strict=True) if one != other
    }
    assert len(replaced) == 6


def test_schedulers_use_few_attributes_of_a_trial() -> None:
    from ray.tune.schedulers import ASHAScheduler

    class Known(NamedTuple):
        trial_id: str
        config: dict[str, int]

    with relied_on("ray.tune.schedulers.ASHAScheduler, called without a controller", SCHEDULERS):
        scheduler: Any = ASHAScheduler(
            time_attr="epoch", metric="objective", mode="min", max_t=4, grace_period=1,
            reduction_factor=2, stop_last_trials=False,
        )  # fmt: skip
        verdicts = []
        for number, value in enumerate([1.0, 2.0]):
            trial = Known(str(number), {"number": number})
            scheduler.on_trial_add(None, trial)
            result = {"epoch": 1, "objective": value}
            verdicts.append(scheduler.on_trial_result(None, trial, result))
            scheduler.on_trial_remove(None, trial)
        assert verdicts == [ASHAScheduler.CONTINUE, ASHAScheduler.STOP]


def test_results_of_a_trainable() -> None:
    with relied_on("ray.tune.result", ADAPTER):
        assert _find("ray.tune.result.DONE") == "done"
        assert _find("ray.tune.result.SHOULD_CHECKPOINT") == "should_checkpoint"
    with relied_on("RAY_RAYLET_PID", "trainable/adapters/ray_ranks.py"):
        assert "RAY_RAYLET_PID" in _find("ray._private.ray_constants").RAY_INTERNAL_FLAGS
