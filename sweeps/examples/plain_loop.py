"""A custom training loop: plain PyTorch in a generator that yields after each epoch.

`config` is the configuration of one trial, with `config.train.optimizer.lr` and
`config.task.width`. The loop yields metrics and a state. The state is saved in a checkpoint, and
is in `context.restored` when the trial resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from trainable import Context, TrialConfig


def run(
    config: TrialConfig, context: Context
) -> Iterator[tuple[dict[str, float], dict[str, Any]]]:
    """Train two layers on handwritten digits."""
    arguments, optimizer_config = config.task.arguments, config.train.optimizer
    images, classes = load_digits(return_X_y=True)
    inputs = torch.as_tensor(images / 16, dtype=torch.float32)
    targets = torch.as_tensor(classes)
    train, val = slice(0, 1437), slice(1437, None)

    width = arguments.get("width", 64)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    model.to(context.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optimizer_config.lr, weight_decay=optimizer_config.weight_decay
    )
    if context.restored:
        model.load_state_dict(context.restored["model"])
        optimizer.load_state_dict(context.restored["optimizer"])

    for _ in context.remaining_epochs():  # seeds each epoch, so that a resumed epoch is the same
        model.train()
        total = 0.0
        for index in torch.randperm(1437).split(config.train.batch_size):
            optimizer.zero_grad()
            batch = inputs[index].to(context.device), targets[index].to(context.device)
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), arguments.get("max_norm", 1.0))
            optimizer.step()
            total += loss.item() * len(index)

        model.eval()
        with torch.inference_mode():
            logits = model(inputs[val].to(context.device)).cpu()
        yield (
            {
                "train/loss": total / len(inputs[train]),
                "val/loss": nn.functional.cross_entropy(logits, targets[val]).item(),
                "val/accuracy": (logits.argmax(1) == targets[val]).float().mean().item(),
            },
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        )
