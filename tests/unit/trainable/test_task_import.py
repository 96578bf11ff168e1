"""The state of a process before it imports a task, and imports that try to end it."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import python_subprocess_env

from trainable import Task, TrialConfig
from trainable.build import build_parts
from trainable.errors import ConfigError
from trainable.user_code.module_names import hidden_by, hidden_imports
from trainable.user_code.task_import import SAFE_PATH, SAFE_PATH_VARIABLE, no_exit, prepared


def test_working_directory_is_last_and_argv_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin" / "sweep"
    monkeypatch.setenv("PYTHONPATH", "/opt/code")
    before = ["", "/opt/code", str(program.parent), str(tmp_path), *sys.path]
    monkeypatch.setattr(sys, "path", list(before))
    monkeypatch.setattr(sys, "argv", [str(program), "run", "s.yaml"])
    with prepared():
        assert sys.argv == ["sweep"]
        assert (sys.path[0], sys.path[-1]) == ("/opt/code", str(tmp_path))
        assert sys.path.count(str(tmp_path)) == 1
        assert not {"", str(program.parent)} & set(sys.path)
    assert sys.argv == [str(program), "run", "s.yaml"]
    assert sys.path == before


@pytest.mark.parametrize(("value", "within"), [(SAFE_PATH, None), ("1", "1"), (None, None)])
def test_child_of_a_task_has_the_users_import_path(
    monkeypatch: pytest.MonkeyPatch, value: str | None, within: str | None
) -> None:
    monkeypatch.delenv(SAFE_PATH_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(SAFE_PATH_VARIABLE, value)
    with prepared():
        assert os.environ.get(SAFE_PATH_VARIABLE) == within
    assert os.environ.get(SAFE_PATH_VARIABLE) == value


def test_torch_compiles_only_without_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCH_CUSTOM_PYTHONPATH", raising=False)
    (tmp_path / "sitecustomize.py").write_text("open('imported', 'w').close()\n")
    program = "import torch\nprint(torch.__file__)"
    with prepared():
        assert str(tmp_path) in sys.path
        environment = python_subprocess_env()
        command = [sys.executable, "-c", program]
        started = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
    assert started.stdout.strip() == torch.__file__
    assert not (tmp_path / "imported").exists()
    assert "TORCH_CUSTOM_PYTHONPATH" not in os.environ


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_exit_at_import_is_a_task_error(error: BaseException) -> None:
    with pytest.raises(ConfigError) as refused, no_exit("'a:B': its module", "task"):
        raise error
    assert f"'a:B': its module ended its process ({type(error).__name__}" in str(refused.value)
    assert refused.value.key == "task"


def test_interrupt_is_no_task_error() -> None:
    with pytest.raises(KeyboardInterrupt), no_exit("it", "task"):
        os.kill(os.getpid(), signal.SIGINT)


def test_argparse_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    refused = pytest.raises(ConfigError, match=r"required: --data.*if __name__")
    with refused, no_exit("it", "task"):
        parser.parse_args([])
    assert capfd.readouterr() == ("", "")
    with pytest.raises(SystemExit):
        parser.parse_args([])  # as ever outside
    assert "usage" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["logging", "numpy", "sweeps"])
def test_shadowing_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()  # of data
    assert hidden_by(name, str(tmp_path)) is None
    (tmp_path / f"{name}.py").write_text("")
    hidden = hidden_by(name, str(tmp_path))
    assert hidden is not None
    assert hidden[0] == str(tmp_path / f"{name}.py")
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "link"))
    assert hidden_by("mine", str(tmp_path)) is None, "it is on the path already"


@pytest.mark.parametrize(
    ("module", "files"),
    [
        ("net", {"net.py": "def f():\n  from logging import handlers"}),
        ("net", {"net.py": "import parts", "parts.py": "import logging"}),
        ("pack.net", {"pack/__init__.py": "", "pack/net.py": "from .parts import a",
                      "pack/parts.py": "import logging"}),
        ("pack.net", {"pack/net.py": "from pack import parts", "pack/parts.py": "import logging"}),
    ],
)  # fmt: skip
def test_imported_shadowing_name_is_found(
    tmp_path: Path, module: str, files: dict[str, str]
) -> None:
    for name, text in {**files, "logging.py": "", "queue.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [found[1] for found in hidden_imports(module, str(tmp_path))] == ["logging"]


def test_a_module_of_a_package_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("from .logging import a\nfrom . import types")
    (tmp_path / "pack/logging.py").write_text("import logging")
    (tmp_path / "pack/types.py").write_text("")
    assert not [*hidden_imports("pack", str(tmp_path))]


class Exits(Task):
    def __init__(self) -> None:
        sys.exit("no data here")


def test_constructor_that_exits_is_refused(configure: Callable[..., TrialConfig]) -> None:
    task = {"name": f"{__name__}:Exits"}
    config = TrialConfig.model_validate({**configure().model_dump(), "task": task})
    with pytest.raises(ConfigError, match=r"ended its process \(SystemExit: no data here\)"):
        build_parts(config, device=torch.device("cpu"))
