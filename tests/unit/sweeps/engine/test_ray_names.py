"""Private names of Ray stand in `sweeps.engine.ray_compat` and in the files listed here alone.

What must not live here: what these names mean, which `tests/contract/test_ray_compat.py` asserts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PRODUCT = ("sweeps", "trainable", "tracking", "redaction")
COMPAT = "sweeps/engine/ray_compat/"

PRIVATE = re.compile(
    r"\bray(?:\.\w+)*\._\w+"  # ray._private.worker
    r"|\bfrom ray[\w.]* import (?:.*[ (])?_\w+"
    r"|\bray\.(?:air|train|dashboard|core|job_config|tune\.(?:execution|error|impl))\b"
)
INTERNAL_ATTRIBUTE = re.compile(
    r"\.(?:max_failures|run_metadata|evaluated_params|experiment_tag|pickled_error_file"
    r"|get_pickled_error|raylet_socket_name|get_logs_dir_path)\b"
)
"""Attributes of Ray's trials and nodes; tests give some of them to objects of their own."""
VARIABLE = re.compile(r"(?<![A-Za-z_])(?:RAY|TUNE)_[A-Za-z]\w*")
DOCUMENTED = {
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_RUNTIME_ENV_IGNORE_GITIGNORE",
}
"""Variables that Ray documents, and that users set."""

ALLOWED = {
    "sweeps/engine/worker_launcher.py": {"RAY_RAYLET_PID"},  # runs before any import
    "trainable/adapters/ray_ranks.py": {"RAY_RAYLET_PID"},  # must not import sweeps
}
ALLOWED_IN_TESTS = {
    "tests/chaos/ray_nodes.py",  # starts nodes of a cluster as processes
    "tests/integration/process_inspection.py",  # connects to Ray as another user would
    "tests/integration/test_minimal_ray.py",  # counts what Tune writes, and prints as Ray does
    "tests/bench",  # runs Tune as others do
    "tests/contract/test_ray_compat.py",
    "tests/unit/sweeps/engine/test_ray_names.py",
}


def _lines(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield each line of Python with the path of its file."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for line in path.read_text(encoding="utf-8").splitlines():
                yield name, line


def test_private_names_of_ray_stand_in_one_package() -> None:
    found = {
        (name, match[0])
        for name, line in _lines(*PRODUCT)
        if not name.startswith(COMPAT)
        for pattern in (PRIVATE, INTERNAL_ATTRIBUTE)
        for match in pattern.finditer(line)
    }
    assert found == set(), "move these into sweeps.engine.ray_compat"


def test_variables_of_ray_stand_in_one_module() -> None:
    found = {
        (name, variable)
        for name, line in _lines(*PRODUCT)
        if name != f"{COMPAT}environment.py"
        for variable in VARIABLE.findall(line)
        if variable not in DOCUMENTED | ALLOWED.get(name, set())
    }
    assert found == set(), "move these into sweeps.engine.ray_compat.environment"


def test_tests_use_private_names_of_ray_in_few_files() -> None:
    found = {name for name, line in _lines("tests") if PRIVATE.search(line)}
    assert {name for name in found if not name.startswith(tuple(ALLOWED_IN_TESTS))} == set()


@pytest.mark.parametrize("name", sorted({*ALLOWED, *ALLOWED_IN_TESTS}))
def test_each_exception_is_needed(name: str) -> None:
    lines = [line for path, line in _lines(*PRODUCT, "tests") if path.startswith(name)]
    assert any(PRIVATE.search(line) or VARIABLE.search(line) for line in lines)
