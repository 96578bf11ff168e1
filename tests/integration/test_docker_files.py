"""The files of docker/ without an engine: the image, the stack, and the cluster.

The stack itself is built and run by `tests/chaos/test_containers.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from tests.integration.slurm_job import Job
from tests.time_limits import Deadline

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
SCRIPTS = [
    DOCKER / "entrypoint.sh",
    DOCKER / "make-certificates.sh",
    DOCKER / "postgres-roles.sh",
    DOCKER / "postgres-tls.sh",
    DOCKER / "slurm" / "sweep.sbatch",
]
SERVICES = ("postgres", "mlflow", "ray-head", "ray-worker")
SECRET_NAME = re.compile(r"PASSWORD|TOKEN|SECRET|_KEY$", re.IGNORECASE)


def _yaml(path: Path) -> list[Any]:
    return list(YAML(typ="safe").load_all(path.read_text(encoding="utf-8")))


def _filled(value: Any) -> Any:
    """With the default of each `${NAME:-default}` in its place."""
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one) for one in value]
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def stack() -> Any:
    (document,) = _yaml(DOCKER / "compose.yaml")
    return _filled(document)


def test_each_service_has_a_health_check(stack: Any) -> None:
    assert tuple(stack["services"]) == SERVICES
    for name, service in stack["services"].items():
        check = service["healthcheck"]
        assert check["test"][0] == "CMD", name
        assert {"interval", "timeout", "retries"} <= set(check), name


def test_each_service_is_confined(stack: Any) -> None:
    outside = {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}
    for name, service in stack["services"].items():
        assert all(int(one) > 0 for one in service["user"].split(":")), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["pids_limit"] > 0, name
        assert not outside & set(service), name
        assert not any("docker.sock" in volume for volume in service["volumes"]), name


def test_no_port_is_open_to_another_machine(stack: Any) -> None:
    ports = [port for one in stack["services"].values() for port in one.get("ports", [])]
    assert ports == ["127.0.0.1:5000:5000"]


def test_secrets_are_files_only(stack: Any) -> None:
    for name, service in stack["services"].items():
        for variable, value in service.get("environment", {}).items():
            if SECRET_NAME.search(variable):
                assert value.startswith("/run/secrets/"), f"{name}: {variable}"
        assert set(service["secrets"]) <= set(stack["secrets"])
    assert all(set(secret) == {"file"} for secret in stack["secrets"].values())


def test_trial_reaches_no_credentials_and_no_server(stack: Any) -> None:
    worker = stack["services"]["ray-worker"]
    assert worker["secrets"] == ["ray_token"]
    assert set(worker["networks"]) == {"cluster"}
    assert {
        name for name, service in stack["services"].items() if "cluster" in service["networks"]
    } == {"ray-head", "ray-worker"}


def test_tracking_server_runs_no_jobs_and_no_telemetry(stack: Any) -> None:
    off = {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    assert off.items() <= stack["services"]["mlflow"]["environment"].items()


def test_tracking_server_answers_to_its_host_names_only(stack: Any) -> None:
    allowed = stack["services"]["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"]
    assert {name.partition(":")[0] for name in allowed.split(",")} == {
        "mlflow",
        "localhost",
        "127.0.0.1",
    }


def test_images_are_pinned_by_an_overridable_version(stack: Any) -> None:
    written = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    images = re.findall(r"image: (\S+)", written)
    assert [re.sub(r":-[^}]*", "", image) for image in images] == [
        "gradsweep:${GRADSWEEP_VERSION}",
        "postgres:${POSTGRES_VERSION}",
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert stack["services"]["mlflow"]["image"] == f"gradsweep:{project['version']}"
    assert re.fullmatch(r"postgres:\d+\.\d+-\w+", stack["services"]["postgres"]["image"])


def test_volumes_are_declared_and_used(stack: Any) -> None:
    named = {
        volume.partition(":")[0]
        for service in stack["services"].values()
        for volume in service["volumes"]
        if volume[0] not in "./"
    }
    assert named == set(stack["volumes"])


def test_gpus_are_added_to_workers_only(stack: Any) -> None:
    (more,) = _yaml(DOCKER / "compose.gpu.yaml")
    assert set(more["services"]) == {"ray-worker"} <= set(stack["services"])


def test_image_runs_unprivileged_from_given_sources() -> None:
    recipe = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    lines = [line.split() for line in recipe.splitlines() if line[:1].isupper()]
    stages = {line[3] for line in lines if line[0] == "FROM" and len(line) > 3}
    assert {line[1] for line in lines if line[0] == "FROM"} <= {"${BASE}"} | stages
    assert [line[1] for line in lines if line[0] == "USER"] == ["1000:1000"]
    assert not any(line[0] == "ADD" for line in lines)
    settings = re.findall(r"^(?:ARG|ENV|    )\s*(\w+)=", recipe, re.MULTILINE)
    assert "TORCH_BACKEND" in settings
    assert not [name for name in settings if SECRET_NAME.search(name)]


def test_image_installs_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.split(".")[0] for name in project["tool"]["setuptools"]["packages"]}
    recipe = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert packages == set(re.findall(r"^COPY (\w+) /source/\1$", recipe, re.MULTILINE))
    assert packages == set(re.findall(r"/site-packages/(\w+)", recipe))
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{package}" for package in packages} <= set(allowed)


def test_git_and_image_exclude_secrets() -> None:
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert allowed[0] == "*"
    assert not any("secret" in line or line == "!docker" for line in allowed)
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"docker/secrets/", "docker/wheelhouse/"} <= set(ignored)


def test_scripts_pass_shellcheck() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([shellcheck, *SCRIPTS], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")
    assert all(script.stat().st_mode & stat.S_IXUSR for script in SCRIPTS)


class Entrypoint:
    """The entrypoint, with a home and secrets of its own, and commands that tell how they were
    called instead of starting anything.
    """

    def __init__(self, directory: Path) -> None:
        self.home, self.secrets, tools = (directory / n for n in ("home", "secrets", "tools"))
        for made in (self.home, self.secrets, tools):
            made.mkdir()
        self._tools = tools
        for name in ("mlflow", "ray"):
            tool = tools / name
            tool.write_text('#!/bin/sh\necho "$(basename "$0")" "$@"\nenv\n')
            tool.chmod(0o755)
        getent = tools / "getent"
        getent.write_text("#!/bin/sh\necho '10.0.0.7   gcs'\n")
        getent.chmod(0o755)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self._tools}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "SECRETS": str(self.secrets),
            "RAY_HEAD": "gcs",
            "RAY_OBJECT_STORE_BYTES": "1000",
            "RAY_WORKER_CPUS": "2",
        }
        return subprocess.run(
            [DOCKER / "entrypoint.sh", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def entrypoint(tmp_path: Path) -> Entrypoint:
    return Entrypoint(tmp_path)


ROLES = {
    "mlflow-server": ("mlflow_db_password", "mlflow_password"),
    "ray-head": ("ray_token", "mlflow_password"),
    "ray-worker": ("ray_token",),
}


@pytest.mark.parametrize("role", ROLES)
def test_role_writes_secrets_readable_by_its_user_only(entrypoint: Entrypoint, role: str) -> None:
    values = {name: f"{name}-canary-0123456789" for name in ROLES[role]}
    for name, value in values.items():
        (entrypoint.secrets / name).write_text(f"{value}\n")
    ended = entrypoint.run(role)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[0] in ("mlflow", "ray")
    assert not [value for value in values.values() if value in ended.stdout + ended.stderr]
    written = [path for path in entrypoint.home.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} <= {0o600}
    found = "".join(path.read_text() for path in written)
    assert {name for name, value in values.items() if value in found} == set(values) - {
        "ray_token"
    }


@pytest.mark.parametrize("role", ROLES)
def test_role_refuses_to_start_without_a_valid_secret(entrypoint: Entrypoint, role: str) -> None:
    *others, last = ROLES[role]
    for name in others:
        (entrypoint.secrets / name).write_text("x" * 16)
    blanks, two_lines = "sixteen letters and blanks", "0123456789abcdef\nand more"
    for value in (None, "", "short", blanks, two_lines):
        if value is not None:
            (entrypoint.secrets / last).write_text(value)
        ended = entrypoint.run(role)
        assert (ended.returncode, ended.stdout) == (2, ""), value
        assert ended.stderr.startswith(f"secret {last}: ")
        assert "docker/README.md" in ended.stderr
        assert not value or value not in ended.stderr


def test_other_commands_run_unchanged(entrypoint: Entrypoint) -> None:
    assert entrypoint.run("printf", "%s|", "a b", "c").stdout == "a b|c|"


@pytest.fixture(scope="module")
def ray_cluster() -> Any:
    (cluster,) = [
        document
        for document in _yaml(DOCKER / "kuberay" / "raycluster.yaml")
        if document["kind"] == "RayCluster"
    ]
    return cluster


@pytest.fixture(scope="module")
def ray_cluster_schema() -> Any:
    path = ROOT / "tests" / "assets" / "raycluster.schema.json"
    return jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))


def test_ray_cluster_is_valid_for_kuberay(ray_cluster: Any, ray_cluster_schema: Any) -> None:
    assert list(ray_cluster_schema.iter_errors(ray_cluster)) == []
    wrong = json.loads(json.dumps(ray_cluster))
    wrong["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0  # they are texts
    wrong["spec"]["workerGroupSpecs"][0]["replica"] = 2
    assert len(list(ray_cluster_schema.iter_errors(wrong))) == 2


def test_pods_are_as_confined_as_the_stack(ray_cluster: Any) -> None:
    head = ray_cluster["spec"]["headGroupSpec"]
    (workers,) = ray_cluster["spec"]["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"  # no trial runs beside the credentials
    for group in (head, workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert container["livenessProbe"]
        assert container["readinessProbe"]
        environment = {one["name"]: one["value"] for one in container["env"]}
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN_PATH"].startswith("/run/secrets/")
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert ("tracking" in mounted) is (group is head)


def test_worker_pods_drain_their_node_before_they_end(ray_cluster: Any) -> None:
    from ray.scripts.scripts import drain_node

    (workers,) = ray_cluster["spec"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    *shell, command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    drain, _, pause = command.partition(" && ")
    assert shell == ["sh", "-c"]
    assert int(pause.removeprefix("sleep ")) < pod["terminationGracePeriodSeconds"]
    words = shlex.split(drain)
    assert words[:2] == ["ray", "drain-node"]
    assert drain_node.make_context("drain-node", words[2:]).params["address"] is None


def test_ray_cluster_runs_the_installed_version(ray_cluster: Any) -> None:
    pinned = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8")
    assert f"\nray=={ray_cluster['spec']['rayVersion']}\n" in pinned


def test_slurm_job_starts_ray_on_each_node(tmp_path: Path) -> None:
    job = Job(tmp_path, environment={"SLURM_CPUS_PER_TASK": "3"})
    assert job.run("first", "my.yaml", "-s", "trials=4") == (3, "", "")  # the sweep's own end
    head, worker = sorted(line for line in job.calls("srun") if "ray start" in line)
    assert "--nodelist=node-a" in head
    assert "--head" in head
    assert "--node-ip-address=10.0.0.7 --port=20042" in head
    assert "--nodelist=node-b" in worker
    assert "--address=10.0.0.7:20042" in worker
    for each in (head, worker):
        assert "--cpus-per-task=3" in each  # of the job's, Slurm gives a step none unasked
        assert "--num-cpus=3" in each
    assert job.calls("sweep") == [
        "sweep run my.yaml --name first --address 10.0.0.7:20042 -s trials=4"
    ]
    assert list(job.root.iterdir()) == []  # the token is gone


def test_slurm_job_resumes_an_existing_sweep(tmp_path: Path) -> None:
    job = Job(tmp_path)
    (job.root / "first").mkdir(parents=True)
    (job.root / "first" / "sweep.yaml").touch()
    assert job.run("first", "my.yaml", "-s", "trials=8") == (3, "", "")
    assert job.calls("sweep") == ["sweep resume first --address 10.0.0.7:20042 -s trials=8"]


def test_slurm_job_refuses_flags_it_cannot_repeat(tmp_path: Path) -> None:
    code, _, said = Job(tmp_path).run("first", "my.yaml", "--tracking-uri=http://127.0.0.1:5000")
    assert code == 2
    assert "write: -s tracking.uri=ADDRESS" in said
    assert not (tmp_path / "runs").exists()


def test_slurm_warning_signal_reaches_the_sweep(tmp_path: Path) -> None:
    job = Job(tmp_path, environment={"SLOW": "yes"})
    with job.start("first", "my.yaml") as running:
        deadline = Deadline(30)
        while not job.calls("sweep"):
            assert not deadline.passed
            time.sleep(0.05)
        (token,) = job.root.glob(".slurm-42-*/ray_token")
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert re.fullmatch("[0-9a-f]{64}", token.read_text())
        assert token.read_text() not in job.told()
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 143
    assert list(job.root.iterdir()) == []


def test_slurm_job_without_spec_names_what_is_missing(tmp_path: Path) -> None:
    code, _, said = Job(tmp_path).run("first")
    assert code == 2
    assert said.startswith("1 arguments; a name and a spec are needed")
    assert not (tmp_path / "runs").exists()
