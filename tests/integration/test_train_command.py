"""`sweep train`: one run in one process, with figures, and with the real compiler."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.integration.commandline import CommandLine

SPEC = """
name: plane
task: {name: spiral, samples: 40}
metric: val/loss
mode: min
trials: 1
budget: {epochs: 2}
train: {batch_size: 40}
"""
_NO_COMPILER = "needs a C++ compiler; on Debian and Ubuntu: apt-get install g++"


@pytest.fixture(scope="module")
def printed(module_cli: CommandLine) -> str:
    """What a run printed whose pictures lie in `figures/`."""
    return module_cli.ok(
        "train", str(module_cli.write("plane.yaml", SPEC)), "--figures", "figures"
    )


@pytest.mark.seeds("S25", "S6 histogram")
def test_figures_are_drawn_and_named(module_cli: CommandLine, printed: str) -> None:
    pictures = sorted((module_cli.directory / "figures").iterdir())
    assert [path.name for path in pictures] == [
        "decision_boundary.png",
        "grad_norm.png",
        "learning_rate.png",
        "train_loss.png",
        "val_loss.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in pictures)
    assert {f"wrote figures/{path.name}" for path in pictures} <= set(printed.splitlines())


@pytest.mark.seeds("S21")
def test_compiled_model_trains_like_eager_model(
    module_cli: CommandLine, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        assert os.environ.get("CI") != "true", _NO_COMPILER
        pytest.skip(_NO_COMPILER)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    monkeypatch.setattr(module_cli, "environment", module_cli.environment | cache)
    compiled = module_cli.ok("train", "plane.yaml", "-s", "train.compile=true")
    assert list(tmp_path.rglob("*.so")), "nothing was compiled"
    assert _losses(compiled) == pytest.approx(_losses(printed), rel=1e-2)


def _losses(printed: str) -> list[float]:
    found = [float(value) for value in re.findall(r"\w+/loss ([\d.e-]+)", printed)]
    assert len(found) == 4, printed  # of training and validation, in two epochs
    return found
