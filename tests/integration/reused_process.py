"""Run many trials in one process, as Ray's reused actors do, and print the results.

`python -m tests.integration.reused_process DIRECTORY TRIALS`. Of each five trials one changes all
that a task can change for its process and then fails, one reads its samples in a process of its
own, and the others are alike. What must not live here: what must be true of it
(`test_actor_reuse.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim import optimizer
from torch.utils.data import TensorDataset

from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.diagnostics import MEASURED
from trainable.metrics_file import read_rows
from trainable.ray_adapter import TuneTrial
from trainable.task import Data, Task

EPOCHS, THREADS = 2, 2


class Plain(Task):
    """Forty samples of three inputs, with dropout: a trial draws from the generators."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 2))

    def build_data(self) -> Data:
        return Data(
            train=(torch.randn(40, 3), torch.arange(40) % 2),
            val=(torch.randn(40, 3), torch.arange(40) % 2),
        )


class Loaded(Plain):
    """The same samples, read one by one."""

    def build_data(self) -> Data:
        data: Any = super().build_data()
        return Data(train=TensorDataset(*data.train), val=data.val)


class Meddler(Plain):
    """Leaves everything changed and the trial failed."""

    def build_model(self) -> nn.Module:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.autograd.set_detect_anomaly(True)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        torch.backends.cuda.enable_flash_sdp(False)
        torch.set_deterministic_debug_mode("warn")
        torch.set_num_threads(1)
        nn.modules.module.register_module_forward_hook(lambda *_: torch.zeros(1))
        optimizer.register_optimizer_step_pre_hook(lambda *_: None)
        os.chdir("/")
        raise RuntimeError("meddled")


def switches() -> dict[str, str]:
    """What a task can change, in words."""
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": str(torch.is_grad_enabled()),
        "autocast": f"{torch.is_autocast_enabled('cpu')} {torch.get_autocast_dtype('cpu')}",
        "anomaly": str(torch.is_anomaly_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
        "convolution": torch.backends.cudnn.conv.fp32_precision,
        "attention": str(torch.backends.cuda.flash_sdp_enabled()),
        "deterministic": str(torch.get_deterministic_debug_mode()),
        "module hooks": str(len(nn.modules.module._global_forward_hooks)),
        "optimizer hooks": str(len(optimizer._global_optimizer_pre_hooks)),
        "directory": os.getcwd(),
    }


def _config(directory: Path, number: int, kind: str) -> dict[str, Any]:
    place = directory / f"{number:04d}"
    config = TrialConfig.model_validate(
        {
            "task": {"name": f"{__spec__.name}:{kind.capitalize()}"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": EPOCHS},
            "train": {
                "batch_size": 8,
                "precision": "fp32",
                "loader": {"num_workers": 1 if kind == "loaded" else 0},
            },
        }
    )
    return {
        "number": number,
        "params": {},
        "config": config.model_dump(mode="json"),
        "directory": str(place),
        "drain": str(directory / "drain"),
        "stop": str(place / "stop"),
        "threads": THREADS,
        "halve_batch": False,
    }


def _fingerprint(directory: Path) -> str:
    """A digest of what a trial trained: its weights, and its curve but for what is measured."""
    generation = CheckpointStore(directory).newest()
    assert generation is not None
    model = CheckpointStore(directory).load(generation)["model"]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.values()))
    for row in read_rows(directory):
        kept = {key: value for key, value in row.metrics.items() if key not in MEASURED}
        digest.update(f"{row.step} {sorted(kept.items())}".encode())
    return digest.hexdigest()


def main(directory: Path, trials: int) -> None:
    """Run the trials; print one JSON object for each."""
    actor: TuneTrial | None = None
    process = psutil.Process()
    for number in range(trials):
        kind = {3: "meddler", 4: "loaded"}.get(number % 5, "plain")
        config = _config(directory, number, kind)
        if actor is None:
            actor = TuneTrial(config)
        else:
            assert actor.reset_config(config)
        before, threads = switches(), None
        while True:
            result = actor.step()
            threads = torch.get_num_threads()
            if "ending" in result:
                break
        told = {
            "kind": kind,
            "ending": result["ending"],
            "before": before,
            "torch threads": threads,
            "fingerprint": _fingerprint(directory / f"{number:04d}") if kind == "plain" else "",
            "rss": process.memory_info().rss,
        }
        actor.cleanup()
        told |= {
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "files": process.num_fds(),
            "children": len(process.children()),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
