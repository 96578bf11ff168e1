"""Files that a task opens while it is built are compared at each start."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.errors import ConfigError
from trainable.user_code.fingerprint import differences, opened_files

TASK = '''
from pathlib import Path
import torch
from trainable import Data, Task

HERE = Path(__file__).parent

class Weighted(Task):
    """What it multiplies its loss by lies in a file, of which neither model nor data tell."""

    def build_model(self):
        self.factor = float((HERE / "files/factor.txt").read_text())
        return torch.nn.Linear(2, 2)

    def build_data(self):
        data = torch.arange(16.0).view(8, 2) / 16, torch.arange(8) % 2
        return Data(data, data)

    def loss(self, model, batch):
        total, weight = super().loss(model, batch)
        return self.factor * total, weight
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user's module with `files/` beside it; the working directory is where it lies."""
    name = f"weighted_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(TASK)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/factor.txt").write_text("2.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


def _train(directory: Path, module: str, until: int | None = None) -> None:
    config = TrialConfig.model_validate(
        {
            "task": {"name": f"{module}:Weighted"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 2},
            "train": {"batch_size": 4},
        }
    )
    with open_trainer(config, directory, device="cpu", until=until) as trainer:
        list(trainer.events())


def test_opened_file_is_compared_on_resume(tmp_path: Path, module: str) -> None:
    _train(tmp_path / "run", module, until=1)
    (tmp_path / "files/factor.txt").write_text("20.")
    with pytest.raises(ConfigError, match=r"something else .*\(opened file files/factor.txt\)"):
        _train(tmp_path / "run", module)
    (tmp_path / "files/factor.txt").write_text("2.0")
    _train(tmp_path / "run", module)


def _opened(module: str, reads: Callable[[], object]) -> dict[str, str]:
    __import__(module)
    with opened_files(f"{module}:Weighted") as found:
        reads()
    return found


@pytest.mark.parametrize(
    "how",
    [
        lambda path: Path(path).read_bytes(),
        lambda path: os.close(os.open(path, os.O_RDONLY)),
        lambda path: numpy.memmap(path, dtype=numpy.uint8, mode="r"),
        lambda path: numpy.fromfile(path, dtype=numpy.uint8),
        lambda path: open(os.fsencode(path)).close(),
    ],
    ids=["read", "os.open", "memmap", "fromfile", "bytes"],
)
@pytest.mark.parametrize("absolute", [True, False])
def test_every_way_of_opening_is_seen(
    tmp_path: Path, module: str, how: Callable[[str], object], absolute: bool
) -> None:
    path = str(tmp_path / "files/factor.txt") if absolute else "files/factor.txt"
    assert list(_opened(module, lambda: how(path))) == ["opened file files/factor.txt"]


def test_written_hidden_and_foreign_files_are_ignored(
    tmp_path: Path, module: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "base.pt"
    elsewhere.touch()
    (tmp_path / ".cache").touch()

    def reads() -> None:
        (tmp_path / "cache.txt").write_text("made now")
        for path in (tmp_path / "cache.txt", tmp_path / ".cache", elsewhere):
            path.read_text()

    assert _opened(module, reads) == {}


def test_link_beside_the_task_is_below_its_directory(
    tmp_path: Path, module: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("elsewhere") / "base.pt"
    target.write_text("weights")
    (tmp_path / "base.pt").symlink_to(target)
    assert list(_opened(module, (tmp_path / "base.pt").read_text)) == ["opened file base.pt"]


def test_a_cache_that_comes_or_goes_is_no_difference(tmp_path: Path, module: str) -> None:
    path = tmp_path / "files/factor.txt"
    read = _opened(module, path.read_text)
    assert read
    assert differences({}, read) == differences(read, {}) == []


_LARGE = 200 << 20  # sparse


@pytest.mark.parametrize(
    ("size", "changed"), [(_LARGE - 1, None), (_LARGE, 0), (_LARGE, _LARGE - 1)]
)
def test_large_file_is_compared_by_size_and_ends(
    tmp_path: Path, module: str, size: int, changed: int | None
) -> None:
    path = tmp_path / "files/large"
    path.touch()
    os.truncate(path, _LARGE)
    before = _opened(module, lambda: path.open("rb").close())
    os.truncate(path, size)
    if changed is not None:
        with path.open("r+b") as file:
            file.seek(changed)
            file.write(b"x")
    after = _opened(module, lambda: path.open("rb").close())
    assert differences(before, after) == ["opened file files/large"]
