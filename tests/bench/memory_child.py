"""One process whose memory is measured: `python -m tests.bench.memory_child SIDE` prints JSON.

Both sides import torch and load the same data by the same function; the bare one trains it with a
loop written by hand. What must not live here: imports at the top, since they are what is measured.
"""

from __future__ import annotations

import json
import sys

EPOCHS, BATCH = 5, 64


def _ours(*, large: bool) -> None:
    import tempfile
    from pathlib import Path

    from trainable.build import open_trainer
    from trainable.config import TrialConfig

    task = None
    if large:
        from tests.bench.saving import Large

        task = Large(2)
    config = TrialConfig.model_validate(
        {
            "task": {"name": "given" if large else "digits"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": EPOCHS},
            "train": {"batch_size": BATCH},
        }
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        open_trainer(config, Path(directory), device="cpu", threads=1, task=task) as trainer,
    ):
        for _ in trainer.events():
            pass


def _bare(*, large: bool, epochs: int) -> None:
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.set_num_threads(1)
    if large:
        images, classes = torch.randn(640, 2048), torch.randint(10, (640,))
        model = nn.Sequential(
            nn.Linear(2048, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 10)
        )  # fmt: skip
    else:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
        classes = torch.as_tensor(bunch.target)
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip
    train = len(images) * 4 // 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        model.train()
        for index in torch.randperm(train).split(BATCH):
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(images[index]), classes[index])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            model(images[train:]).argmax(1)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "/dev/null")


def main(side: str) -> None:
    """Train, then print what this process took."""
    if side.endswith("with Ray"):
        import ray.tune  # noqa: F401  the import alone is what is measured
    large = side.endswith("large")
    if side.startswith("ours"):
        _ours(large=large)
    else:
        _bare(large=large, epochs=1 if side.endswith("one epoch") else EPOCHS)
    import psutil

    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    uss = psutil.Process().memory_full_info().uss
    print(json.dumps({"peak RSS": peak / 1024, "USS": uss / 2**20}))


if __name__ == "__main__":
    main(sys.argv[1])
