"""A custom training loop with Hugging Face Accelerate (the extra `gradsweep[accelerate]`).

Compared with `plain_loop.py` it has no `.to(context.device)` and no `.cpu()`, because model,
optimizer and loaders pass through `accelerator.prepare(...)`. It adds two data loaders and
gradient accumulation, with `accelerator.accumulate(model)` and `accelerator.backward(loss)`. Plain
PyTorch would count micro-batches and divide the loss by their number. In a trial of several
processes (`resources.workers`) Accelerate splits each micro-batch into equal parts, so
`batch_size / accumulation` must be a multiple of their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainable import Context, TrialConfig
from trainable.errors import ConfigError

try:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name} is not installed; it comes with an extra; "
        "pip install 'gradsweep[accelerate]'"
    ) from missing


def run(
    config: TrialConfig, context: Context
) -> Iterator[tuple[dict[str, float], dict[str, Any]]]:
    """Train two layers on handwritten digits, in micro-batches."""
    ranks, micro_batch = context.world_size, config.train.micro_batch_size
    if micro_batch % ranks:
        raise ConfigError(
            f"{config.train.batch_size} makes micro-batches of {micro_batch} samples, and "
            f"Accelerate splits each evenly between {ranks} workers; write a multiple of "
            f"{ranks * config.train.accumulation}, or another number of workers",
            key="train.batch_size",
        )
    AcceleratorState._reset_state(reset_partial_state=True)  # a warm worker trains many trials
    accelerator = Accelerator(
        gradient_accumulation_steps=config.train.accumulation,
        cpu=context.device.type == "cpu",
        # batch sizes of all ranks; an order that depends on the epoch alone
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )
    images, classes = load_digits(return_X_y=True)
    inputs = torch.as_tensor(images / 16, dtype=torch.float32)
    samples = TensorDataset(inputs[:1437], torch.as_tensor(classes[:1437]))
    held_out = TensorDataset(inputs[1437:], torch.as_tensor(classes[1437:]))

    width = config.task.arguments.get("width", 64)
    network = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    model, optimizer, train, val = accelerator.prepare(
        network,
        torch.optim.AdamW(network.parameters(), lr=config.train.optimizer.lr),
        DataLoader(samples, batch_size=micro_batch, shuffle=True),
        DataLoader(held_out, batch_size=-(-len(held_out) // ranks) * ranks),  # one batch
    )
    if context.restored:
        accelerator.unwrap_model(model).load_state_dict(context.restored["model"])
        optimizer.load_state_dict(context.restored["optimizer"])

    for epoch in context.remaining_epochs():
        train.set_epoch(epoch)
        model.train()
        total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # loss, samples
        for batch, targets in train:
            with accelerator.accumulate(model):  # one step for `accumulation` micro-batches
                loss = nn.functional.cross_entropy(model(batch), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += torch.stack([loss.detach() * len(targets), loss.new_tensor(len(targets))])
        train_loss, trained = accelerator.reduce(total).tolist()

        model.eval()
        hits, val_loss = 0.0, 0.0
        with torch.inference_mode():
            for batch, targets in val:
                # of all ranks, without the samples that fill up the last batch
                logits, targets = accelerator.gather_for_metrics((model(batch), targets))
                val_loss += nn.functional.cross_entropy(logits, targets, reduction="sum").item()
                hits += (logits.argmax(1) == targets).sum().item()
        yield (
            {
                "train/loss": train_loss / trained,
                "val/loss": val_loss / len(held_out),
                "val/accuracy": hits / len(held_out),
            },
            {
                "model": accelerator.unwrap_model(model).state_dict(),
                "optimizer": optimizer.state_dict(),
            },
        )
