"""P3: the same training with Lightning and with Accelerate, as their documentation shows it.

They live in an environment of their own that sees the project's packages and adds theirs; neither
is a dependency of anything. What must not live here: code that the benchmarks need without them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.device import DEVICE, wait_for_device

# Installed without what they depend on: torch and the rest are the project's own.
PINNED = (
    "lightning==2.6.6",
    "pytorch-lightning==2.6.6",
    "lightning-utilities==0.15.3",
    "torchmetrics==1.9.0",
    "accelerate==1.15.0",
)
_ENVIRONMENT = Path(sys.prefix) / "bench"


def make_environment() -> Path:
    """Make the environment that has both peers, if it is not there; returns its Python.

    Raises:
        OSError: A program that makes it is missing.
        CalledProcessError: The packages could not be installed.
    """
    python = _ENVIRONMENT / "bin" / "python"
    ready = _ENVIRONMENT / "ready"
    if not ready.exists() or ready.read_text() != repr(PINNED):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", _ENVIRONMENT], check=True)
        # What is installed there comes first; everything else is the project's own.
        (site,) = _ENVIRONMENT.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (site / "project.pth").write_text("\n".join([*ours, os.getcwd()]) + "\n")
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*uv, "--python", python, *PINNED], check=True)
        ready.write_text(repr(PINNED))
    return python


def installed() -> dict[str, Callable[[Any], Callable[[], float]]]:
    """The peers that can be imported here, each whether or not the other one can."""
    return {name: _PEERS[name] for name in _PEERS if _is_installed(name)}


def missing() -> list[str]:
    """The peers that cannot be imported here."""
    return [name for name in _PEERS if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name.lower()) is not None


class Lightning:
    """A LightningModule, an epoch of `fit` per call, timed from its first batch to its last.

    What `fit` does before and after its epoch is not counted; progress bar, logger and checkpoints
    are off.
    """

    def __init__(self, problem: Any) -> None:
        import lightning
        import torch

        from tests.bench.loops import EPOCHS, LR, MAX_NORM, mean_loss

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning")
        task, tensors = problem.build()

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = task.build_model()

            def training_step(self, batch: Any, _index: int) -> Any:
                loss = mean_loss(self.net, *batch)
                self.log("train_loss", loss)
                return loss

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
                schedule = torch.optim.lr_scheduler.OneCycleLR(
                    optimizer, max_lr=LR, total_steps=EPOCHS * problem.steps
                )
                return [optimizer], [{"scheduler": schedule, "interval": "step"}]

            def on_train_epoch_start(self) -> None:
                self.started = time.perf_counter()

            def on_train_epoch_end(self) -> None:
                wait_for_device()
                self.seconds = time.perf_counter() - self.started

        self._module = Module()
        self._loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*tensors), batch_size=problem.batch_size, shuffle=True
        )
        self._trainer: Any = lambda: lightning.Trainer(
            max_epochs=1,
            accelerator="gpu" if DEVICE.type == "cuda" else "cpu",
            devices=1,
            gradient_clip_val=MAX_NORM,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
        )

    def __call__(self) -> float:
        self._trainer().fit(self._module, self._loader)
        return float(self._module.seconds)


class Accelerated:
    """The bare loop with its objects prepared by Accelerate, an epoch per call."""

    def __init__(self, problem: Any) -> None:
        import torch
        from accelerate import Accelerator

        from tests.bench.loops import EPOCHS, LR

        task, tensors = problem.build()
        self._accelerator = Accelerator(cpu=DEVICE.type == "cpu")
        model = task.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=LR, total_steps=EPOCHS * problem.steps
        )
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*tensors), batch_size=problem.batch_size, shuffle=True
        )
        self._parts = self._accelerator.prepare(model, optimizer, loader, schedule)

    def __call__(self) -> float:
        from tests.bench.loops import MAX_NORM, mean_loss

        started = time.perf_counter()
        model, optimizer, loader, schedule = self._parts
        model.train()
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = mean_loss(model, inputs, targets)
            self._accelerator.backward(loss)
            self._accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            total += loss.item()
        wait_for_device()
        return time.perf_counter() - started


_PEERS: dict[str, Callable[[Any], Callable[[], float]]] = {
    "Lightning": Lightning,
    "Accelerate": Accelerated,
}
