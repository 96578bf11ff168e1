"""Custom loops with a framework's own distributed training, as users write them.

What must not live here: what the tests expect of them (`tests/unit/trainable/test_loop_ranks.py`).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def _points(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def hugging_face(config, context):
    from transformers import Trainer

    from trainable.adapters.hugging_face import reports, training_arguments

    x, labels = _points(32)
    samples = [{"x": row, "labels": int(label)} for row, label in zip(x, labels, strict=True)]
    torch.manual_seed(context.seed + context.rank)  # other dropout masks on each rank
    arguments = training_arguments(
        context,
        learning_rate=config.train.optimizer.lr,
        per_device_train_batch_size=config.train.batch_size // context.world_size,
    )
    yield from reports(
        Trainer(Net(), arguments, train_dataset=samples, eval_dataset=samples[:16]), context
    )


def lightning(config, context):
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return self.net(*batch)["loss"]

        def validation_step(self, batch, _):
            self.log("val/loss", self.net(*batch)["loss"], sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=config.train.optimizer.lr)

    samples = TensorDataset(*_points(32))
    size = config.train.batch_size // context.world_size
    train, val = DataLoader(samples, size, shuffle=True), DataLoader(samples, size)
    file = context.directory / f"restored_{context.rank}.ckpt"
    if context.restored:
        file.write_bytes(context.restored["checkpoint"].numpy().tobytes())
    module = Module()
    for epoch in context.remaining_epochs():
        torch.manual_seed(context.seed + 1000 * epoch + context.rank)  # dropout on each rank
        trainer = Trainer(
            accelerator="cpu" if context.device.type == "cpu" else "gpu",
            devices=1,
            num_nodes=context.world_size,
            strategy="ddp",
            max_epochs=epoch + 1,
            num_sanity_val_steps=0,
            default_root_dir=context.directory,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, train, val, ckpt_path=file if epoch else None, weights_only=True)
        file = context.directory / "lightning.ckpt"
        trainer.save_checkpoint(file)  # by all ranks; the first one writes
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        content = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        yield metrics, {"checkpoint": content}
