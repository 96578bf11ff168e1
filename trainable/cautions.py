"""Say of a model and its data what can be trained but is probably a mistake.

What must not live here: what is refused (`task_checks.py`), and who prints the sentences.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from trainable.batch_norm import batch_norm_cautions
from trainable.config import TrialConfig
from trainable.splits import has_state, is_stream, length_of
from trainable.task import Data


def cautions(model: nn.Module, data: Data, trial: TrialConfig) -> Iterator[str]:
    """Yield a sentence for each part that can be trained but is probably a mistake."""
    config = trial.train
    if (part := _in_evaluation_mode(model)) is not None:
        yield (
            f"build_model() returned {f'`{part}`' if part else 'the model'} in evaluation mode, "
            "and it is trained in that mode: without dropout, and with fixed BatchNorm "
            "statistics; return model.train(), and call eval() only on modules that must stay in "
            "evaluation mode"
        )
    for name, collate, split, samples in (
        ("collate", data.collate, "train", data.train),
        ("collate_val", data.collate_val, "val", data.val),
    ):
        if collate is not None and isinstance(samples, tuple):
            yield (
                f"{name} is never called for {split}: {split} is a tuple of tensors, and tensors "
                "are indexed directly; to have samples collated, give "
                "torch.utils.data.TensorDataset(*tensors)"
            )
    if is_stream(data.train) and not (has_state(data.train) and config.loader.resume != "skip"):
        yield (
            "a resumed run reads the stream train again from the epoch's start and drops the "
            "samples that were trained: after an interruption late in an epoch this takes about "
            "as long as reading the whole epoch; to continue without it, give the stream "
            "state_dict() and load_state_dict(), which return and take {} where it only draws "
            "from the global generators; to refuse such a stream, write "
            "train.loader.resume: exact"
        )
    if is_stream(data.val) and length_of(data.val) is None and trial.budget.val_batches is None:
        yield (
            "val is a stream that does not tell its length, and an evaluation reads it to its "
            "end: if it has no end, the first evaluation never ends; write budget: {val_batches: "
            "50}, or let the stream tell its length by __len__()"
        )
    yield from batch_norm_cautions(model, trial)


def _in_evaluation_mode(model: nn.Module) -> str | None:
    """Return the name of the outermost trained part in evaluation mode, "" for the whole model.

    Pretrained models are often returned in this mode. In a leaf module it is taken as intended.
    """
    for name, module in model.named_modules():
        is_single = name and next(module.children(), None) is None
        if module.training or is_single:
            continue
        if any(parameter.requires_grad for parameter in module.parameters()):
            return str(name)
    return None
