"""Provenance of a sweep as tags: git state, package versions, hardware, command line.

Nothing here raises an error or imports a heavy library. A fact that cannot be found has no tag.
What must not live here: MLflow.
"""

from __future__ import annotations

import getpass
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from redaction.secrets import HIDDEN, is_secret, redact
from sweeps.engine.resources import usable_cpus, visible_gpus
from tracking.limits import clean_text

_PACKAGES = ("torch", "numpy", "ray", "optuna", "mlflow", "pydantic", "gradsweep")
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "PYTHONHASHSEED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables that choose how numbers are computed. The number of threads is not among them: each
worker has its own."""
_CPUS = Path("/proc/cpuinfo")
_GIT_SECONDS = 5.0


def provenance(
    directory: Path | None = None, command: Sequence[str] | None = None
) -> dict[str, str]:
    """Describe this process as tags for a sweep's run."""
    command = sys.argv if command is None else command
    tags = {
        "mlflow.source.name": Path(command[0]).name if command else "",
        "mlflow.source.type": "LOCAL",
        "gradsweep.command": _command_line(command),
        "gradsweep.host": socket.gethostname(),
        "gradsweep.platform": platform.platform(),
        "gradsweep.num_cpus": str(usable_cpus()),
        "gradsweep.cpu": _cpu_model(),
        "gradsweep.environment": _environment(),
        "gradsweep.version.python": platform.python_version(),
    }
    try:
        tags["mlflow.user"] = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no entry in the password file
        tags["mlflow.user"] = str(os.getuid())
    for package in _PACKAGES:
        try:
            tags[f"gradsweep.version.{package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if gpus := _gpu_names():
        tags["gradsweep.gpus"] = ", ".join(gpus)
    tags.update(_git_tags(directory or Path.cwd()))
    return {name: clean_text(text) for name, text in tags.items()}


def _command_line(command: Sequence[str]) -> str:
    """Join a command line, with secrets hidden, also in the argument after a secret option."""
    shown: list[str] = []
    for argument in command:
        follows = bool(shown) and shown[-1].startswith("-") and "=" not in shown[-1]
        if follows and is_secret(shown[-1]) and not argument.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(redact(argument))
    return shlex.join(shown)


def _cpu_model() -> str:
    """Return the CPU's model: its vector instructions decide how sums are rounded."""
    try:
        lines = _CPUS.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _environment() -> str:
    """Return the variables that are set of those that choose how numbers are computed."""
    found = [f"{name}={redact(os.environ[name])}" for name in _VARIABLES if name in os.environ]
    return " ".join(found) or "none"


def _gpu_names() -> list[str]:
    try:
        return [gpu.name for gpu in visible_gpus(None)]
    except Exception:  # no library, no permission: each has its own class, and none matters here
        return []


def _git_tags(directory: Path) -> dict[str, str]:
    commit = _git(directory, "rev-parse", "HEAD")
    if not commit:
        return {}
    tags = {"mlflow.source.git.commit": commit}
    if branch := _git(directory, "rev-parse", "--abbrev-ref", "HEAD"):
        tags["mlflow.source.git.branch"] = branch
    status = _git(directory, "status", "--porcelain", "--untracked-files=no")
    if status is not None:
        tags["gradsweep.git.dirty"] = "true" if status else "false"
    return tags


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        # With optional locks, another git command that runs at the same time could fail.
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=directory,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
