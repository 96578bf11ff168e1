"""Train a small language model on the source code of the Python standard library.

A decoder-only transformer over bytes: pre-norm blocks, learned positions, tied embeddings.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainable.errors import ConfigError
from trainable.losses import Weight, cross_entropy
from trainable.task import Batch, Data, Task

VOCABULARY = 256  # a token is a byte
_INITIAL_STD = 0.02


class CharLm(Task):
    """Predict the next byte of Python source code.

    The text consists of the standard library's top-level modules in the order of their names, cut
    off after `text_bytes`. Its end is held out for validation. All runs of one Python version have
    the same text.
    """

    def __init__(
        self,
        *,
        context: int = 128,
        layers: int = 2,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.0,
        text_bytes: int = 1_000_000,
        val_fraction: float = 0.1,
    ) -> None:
        for name, value in (("context", context), ("layers", layers), ("heads", heads)):
            if value < 1:
                raise ConfigError(f"char_lm: {name} is {value}; it must be at least 1")
        if width < 1 or width % heads:
            raise ConfigError(
                f"char_lm: width is {width} and heads is {heads}; width must be a positive "
                "multiple of heads"
            )
        if not 0 < val_fraction < 1:
            raise ConfigError(
                f"char_lm: val_fraction is {val_fraction}; it must lie between 0 and 1; write 0.1"
            )
        least = math.ceil((context + 1) / min(val_fraction, 1 - val_fraction))
        if text_bytes < least:
            raise ConfigError(
                f"char_lm: text_bytes is {text_bytes}; it must be at least {least}, so that "
                f"training and validation each hold {context} + 1 bytes"
            )
        self.context, self.layers, self.heads, self.width = context, layers, heads, width
        self.dropout, self.text_bytes, self.val_fraction = dropout, text_bytes, val_fraction

    def build_model(self) -> nn.Module:
        """Return a model from bytes (N, L) to logits (N, L, 256)."""
        return Decoder(
            context=self.context,
            layers=self.layers,
            heads=self.heads,
            width=self.width,
            dropout=self.dropout,
        )

    def build_data(self) -> Data:
        """Return bytes, shape (N, context), and the next byte of each, of the same shape."""
        text = read_text(self.text_bytes)
        held_out = round(self.val_fraction * len(text))
        return Data(
            train=_samples(text[: len(text) - held_out], self.context),
            val=_samples(text[len(text) - held_out :], self.context),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Weight]:
        """Return the cross entropy summed over all predicted bytes, and their number."""
        inputs, targets = batch
        # Flatten: on a GPU, torch's cross entropy over more dimensions is not deterministic.
        return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float | Tensor]:
        """Return `loss` (nats per byte), `bits_per_byte` and `accuracy`."""
        loss: Tensor | float = 0.0
        correct: Tensor | float = 0.0
        count = 0
        for inputs, targets in batches:
            logits = model(inputs)
            loss = loss + cross_entropy(logits.flatten(0, 1), targets.flatten())[0]
            correct = correct + (logits.argmax(dim=-1) == targets).sum()
            count += targets.numel()
        return {
            "loss": loss / count,
            "bits_per_byte": loss / count / math.log(2),
            "accuracy": correct / count,
        }


def read_text(limit: int) -> bytes:
    """Return the first `limit` bytes of the standard library's modules in order of their names."""
    directory = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    length = 0
    for path in sorted(directory.glob("*.py")):
        if length >= limit:
            break
        parts.append(path.read_bytes())
        length += len(parts[-1])
    if length < limit:
        raise ConfigError(
            f"char_lm: text_bytes is {limit}, and the modules in {directory} hold {length}; lower "
            "task.text_bytes"
        )
    return b"".join(parts)[:limit]


def _samples(text: bytes, context: int) -> tuple[Tensor, Tensor]:
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    count = (len(tokens) - 1) // context
    inputs, targets = tokens[: count * context], tokens[1 : count * context + 1]
    return inputs.view(count, context), targets.view(count, context)


class Decoder(nn.Module):
    """A decoder-only transformer; the output layer is the embedding, transposed."""

    def __init__(
        self, *, context: int, layers: int, heads: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds two updates to the residual stream. Scale them so that its
                # variance does not grow with depth (Radford et al., 2019, section 2.3).
                is_update = name.endswith("out.weight")
                scale = (2 * layers) ** -0.5 if is_update else 1.0
                nn.init.normal_(parameter, std=_INITIAL_STD * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (N, L) to logits (N, L, 256); L is at most the context."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.embedding(tokens) + self.position(places)
        for block in self.blocks:
            stream = block(stream)
        return F.linear(self.norm(stream), self.embedding.weight)


class Block(nn.Module):
    """Causal self-attention, then two layers with a GELU, each after a LayerNorm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden_in = nn.Linear(width, 4 * width)
        self.hidden_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        for layer in (
            self.attention_in,
            self.attention_out,
            self.hidden_in,
            self.hidden_out,
        ):
            nn.init.zeros_(layer.bias)

    def forward(self, stream: Tensor) -> Tensor:
        """Map the residual stream (N, L, width) to itself with two updates."""
        stream = stream + self.dropout(self._attend(self.attention_norm(stream)))
        hidden = F.gelu(self.hidden_in(self.hidden_norm(stream)))
        update: Tensor = self.dropout(self.hidden_out(hidden))
        return stream + update

    def _attend(self, inputs: Tensor) -> Tensor:
        each = self.attention_in(inputs).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = each.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        update: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return update
