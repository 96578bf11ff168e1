"""The FashionMNIST task, read from real IDX files that the tests write."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torchvision.datasets import FashionMNIST

from sweeps.spec.spec import load_with_positions
from trainable import figures
from trainable.build import open_trainer
from trainable.check.testing import check_task
from trainable.config import BudgetConfig, CheckpointConfig
from trainable.errors import ConfigError
from trainable.find_task import load_task
from trainable.store.metrics_file import read_rows

SAMPLES = 50


def _idx(values):
    """The IDX format: two zeros, 8 for unsigned bytes, the dimensions, then the bytes."""
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return head + values.numpy().tobytes()


def _write(raw, suffix, samples=SAMPLES):
    raw.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(256, (10, 28, 28), generator=generator)
    for split, count in (("train", samples), ("t10k", 10)):
        classes = (torch.arange(count) % 10).to(torch.uint8)
        noise = torch.randint(256, (count, 28, 28), generator=generator)
        images = ((3 * patterns[classes.long()] + noise) // 4).to(torch.uint8)
        for name, values in (("images-idx3", images), ("labels-idx1", classes)):
            content = _idx(values)
            path = raw / f"{split}-{name}-ubyte{suffix}"
            path.write_bytes(gzip.compress(content) if suffix else content)


@pytest.fixture(params=["", ".gz"], ids=["unpacked", "packed"])
def root(tmp_path, request):
    _write(tmp_path / "FashionMNIST" / "raw", request.param)
    return tmp_path


@pytest.mark.seeds("S24")
def test_images_are_normalised_and_split_four_to_one(root):
    data = load_task("fashion_mnist", {"data_dir": str(root), "download": False}).build_data()
    images, classes = data.train
    assert images.shape == (40, 1, 28, 28)
    assert data.val[0].shape == (10, 1, 28, 28)
    assert (images.dtype, classes.dtype) == (torch.float32, torch.int64)
    files = FashionMNIST(root, train=True)
    every = torch.cat([images, data.val[0]])
    pixels = (every * 0.3530 + 0.2860) * 255
    expected = sorted(files.data.flatten(1).long().sum(1).tolist())
    assert sorted(pixels.flatten(1).round().long().sum(1).tolist()) == expected
    assert torch.cat([classes, data.val[1]]).bincount().tolist() == [5] * 10
    torch.manual_seed(2)  # the split has a seed of its own
    arguments = {"data_dir": str(root), "download": False}
    assert torch.equal(load_task("fashion_mnist", arguments).build_data().val[0], data.val[0])
    other = load_task("fashion_mnist", arguments | {"split_seed": 1}).build_data()
    assert not torch.equal(other.val[0], data.val[0])
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]


def test_task_keeps_the_contract(root):
    check_task(load_task("fashion_mnist", {"data_dir": str(root), "download": False, "width": 4}))


def test_missing_files_without_download_name_the_place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    task = load_task("fashion_mnist", {"data_dir": "~/pictures", "download": False})
    place = tmp_path / "pictures" / "FashionMNIST" / "raw"
    with pytest.raises(ConfigError, match="download is false") as caught:
        task.build_data()
    assert f"{place} lacks train-images-idx3-ubyte, train-labels" in str(caught.value)
    assert not place.exists()


def test_missing_network_names_where_to_put_files(tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", unreachable)
    task = load_task("fashion_mnist", {"data_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="could not be downloaded or unpacked to") as caught:
        task.build_data()
    assert str(tmp_path / "FashionMNIST" / "raw") in str(caught.value)
    assert "no route to host" in str(caught.value)


def test_files_are_downloaded_once_and_moved_into_place(tmp_path, monkeypatch):
    source = tmp_path / "source"
    _write(source, ".gz")
    fetched = []

    def fetch(url, download_root, filename, md5):  # noqa: ARG001  torchvision's signature
        fetched.append(filename)
        content = gzip.decompress((source / filename).read_bytes())
        with open(f"{download_root}/{filename.removesuffix('.gz')}", "wb") as file:
            file.write(content)

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", fetch)
    task = load_task("fashion_mnist", {"data_dir": str(tmp_path / "there")})
    assert len(task.build_data().train[0]) == 40
    assert len(task.build_data().train[0]) == 40
    assert len(fetched) == 4


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="width is 0; it must be at least 1"):
        load_task("fashion_mnist", {"width": 0})
    with pytest.raises(ConfigError, match=r"must lie in \[0, 1\)"):
        load_task("fashion_mnist", {"dropout": 1.0})


@pytest.mark.seeds("S24")
def test_model_is_two_convolutions_and_a_head_of_128():
    model = load_task("fashion_mnist", {}).build_model()
    kinds = [type(layer).__name__ for layer in model]
    assert kinds[:6] == ["Conv2d", "ReLU", "MaxPool2d"] * 2
    assert model[7].out_features == 128
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


CRASHING = """
import itertools, os, sys
from pathlib import Path
from trainable import TrialConfig, open_trainer

config = TrialConfig.model_validate_json(sys.argv[1])
asked = itertools.count(1)
with open_trainer(config, Path(sys.argv[2]), device="cpu", threads=1,
                  should_stop=lambda: next(asked) == 14 and os._exit(1)) as trainer:
    list(trainer.events())
"""


@pytest.mark.seeds("S24")
def test_fashion_mnist_survives_a_crash_and_draws_figures(tmp_path, monkeypatch):
    """The example as it ships, with fewer images, more epochs and more frequent checkpoints."""
    _write(tmp_path / "FashionMNIST" / "raw", ".gz", samples=800)
    spec = load_with_positions(Path(str(files("sweeps.examples") / "fashion_mnist.yaml")))[0]
    config = spec.trial_config(0, {"task.data_dir": str(tmp_path), "task.download": False})
    config = config.model_copy(
        update={
            "budget": BudgetConfig(epochs=10),
            "checkpoint": CheckpointConfig.model_validate({"every": "5 steps"}),
        }
    )
    directory = tmp_path / "run"
    command = [sys.executable, "-c", CRASHING, config.model_dump_json(), str(directory)]
    assert subprocess.run(command, check=False).returncode == 1
    with open_trainer(config, directory, device="cpu") as trainer:
        # The second one was perhaps still being written.
        assert (trainer.resumed_at, trainer.state.progress.epoch) in ((5, 1), (10, 2))
        resumed_at = trainer.resumed_at
        reports = list(trainer.events())
        drawn, save = {}, figures._save

        def keep(figure, path):
            drawn[path.name] = list(figure.axes[0].lines)  # which are taken off to draw the next
            return save(figure, path)

        monkeypatch.setattr(figures, "_save", keep)
        pictures = figures.draw_run(config, trainer, directory, tmp_path / "figures")
    assert reports[-1].metrics["val/accuracy"] > 0.9
    rows = read_rows(directory)
    assert [row.step for row in rows] == list(range(1, 51))
    assert all("train/grad_norm" in row.metrics for row in rows)
    accuracy = [row.metrics["val/accuracy"] for row in rows if "val/accuracy" in row.metrics]
    assert len(accuracy) == 10
    rates = [row.metrics["train/lr"] for row in rows]
    assert rates.index(max(rates)) == pytest.approx(0.3 * 50, abs=1)
    assert {path.name for path in pictures} >= {"grad_norm.png", "val_accuracy.png"}
    # Large norms belong to the warmup: in the second half hardly a step is clipped.
    steady = [row.metrics["train/grad_norm"] for row in rows[len(rows) // 2 :]]
    assert sum(norm > config.train.clip.max_norm for norm in steady) < 0.05 * len(steady)
    for name, points in (("train_loss.png", 50), ("val_accuracy.png", 10)):
        line, mark = drawn[name]
        assert len(line.get_xdata()) == points, "one line, across the crash"
        assert list(mark.get_xdata()) == [resumed_at, resumed_at]
        assert mark.get_label() == f"interrupted; resumed after step {resumed_at}"
