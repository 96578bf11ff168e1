"""Fingerprints: the files and samples that a task depends on."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trainable.find_task import load_task
from trainable.task import Data, Task
from trainable.user_code.fingerprint import changed_files, code_digests, tensor_digest


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory: a task, a module and a package it uses, one it does not, a library."""
    files = {
        "fp_task.py": "import fp_parts.model, fp_beside\n",
        "fp_beside.py": "x = 1\n",
        "fp_unused.py": "y = 1\n",
        "fp_parts/__init__.py": "",
        "fp_parts/model.py": "import fp_installed\n",
        ".venv/site-packages/fp_installed.py": "z = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / ".venv/site-packages")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("fp_")]:
        del sys.modules[name]


def test_code_fingerprint_covers_loaded_task_files(project: Path) -> None:
    importlib.import_module("fp_task")
    expected = ["fp_beside.py", "fp_parts/__init__.py", "fp_parts/model.py", "fp_task.py"]
    assert code_digests("fp_task:Any") == {name: _digest(project / name) for name in expected}
    assert code_digests("fp_parts.model:Any").keys() == {"__init__.py", "model.py"}
    load_task("spiral", {})
    assert code_digests("spiral").keys() == {"spiral.py"}


def test_only_files_with_other_content_have_changed(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also a file that the task read, elsewhere, and a module that is not loaded now."""
    weights = tmp_path_factory.mktemp("elsewhere") / "base.pt"
    weights.write_bytes(b"weights")
    importlib.import_module("fp_task")
    before = code_digests("fp_task:Any") | {
        str(weights): _digest(weights),
        "fp_unused.py": _digest(project / "fp_unused.py"),
    }
    assert changed_files("fp_task:Any", before) == []
    weights.write_bytes(b"other weights")
    (project / "fp_unused.py").unlink()
    assert changed_files("fp_task:Any", before) == [str(weights), "fp_unused.py"]


def test_a_module_that_was_made_up_names_no_file(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    importlib.import_module("fp_task")
    made_up = ModuleType("fp_made_up")
    made_up.__file__ = "_classes.py"  # as torch.classes does
    sys.modules["fp_made_up"] = made_up
    assert "_classes.py" not in code_digests("fp_task:Any")


def test_tensor_digest_covers_values_types_and_shapes() -> None:
    base = torch.arange(6)
    different = [base, base + 1, base.float(), base.reshape(2, 3), base.flip(0), base[:5]]
    assert len({tensor_digest(tensor) for tensor in different}) == len(different)
    assert tensor_digest(base) == tensor_digest(torch.arange(6))
    assert tensor_digest(base.reshape(2, 3).T) == tensor_digest(base.reshape(2, 3).T.contiguous())
    assert tensor_digest(base.to(torch.bfloat16)) != tensor_digest(base.to(torch.float16))


@pytest.mark.parametrize("name", ["digits", "spiral", "char_lm"])
def test_built_in_tasks_declare_their_data(name: str) -> None:
    task = load_task(name, {})
    assert task.fingerprint(task.build_data()) == task.fingerprint(task.build_data())
    other = load_task(name, {"spiral": {"samples": 40}}.get(name, {"val_fraction": 0.3}))
    assert task.fingerprint(task.build_data()) != other.fingerprint(other.build_data())
    lazy = torch.utils.data.TensorDataset(torch.zeros(2, 1))
    assert Task().fingerprint(Data(train=lazy, val=(torch.zeros(1),))) is None
