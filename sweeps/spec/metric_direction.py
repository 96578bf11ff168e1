"""Warn of a metric whose name and mode contradict each other, such as `val/accuracy` and `min`.

A name proves nothing, so a sweep is never refused for it. What must not live here: whether a
metric is reported, which only the task shows (`trainable.check.first_batches`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sweeps.spec.spec import SweepSpec

_HIGHER = re.compile(
    "accuracy|acc|auc|auroc|auprc|f1|precision|recall|iou|miou|dice|bleu|rouge|r2|psnr|ssim|kappa|"
    "ndcg|mrr|reward"
)
_LOWER = re.compile("loss|error|err|mse|rmse|mae|mape|nll|perplexity|ppl|wer|cer|fid|divergence")


def direction_warnings(spec: SweepSpec) -> list[str]:
    """Return a sentence for each metric whose mode is probably the wrong one."""
    found = []
    for metric, mode in zip(spec.metrics, spec.modes, strict=True):
        better = _better(metric)
        if better is not None and better != mode:
            higher = "higher" if better == "max" else "lower"
            found.append(
                f"mode is {mode} for {metric}, whose name says that {higher} is better: the sweep "
                f"would look for the worst trial and stop the best ones early; write {better}, "
                "unless the name misleads"
            )
    return found


def _better(metric: str) -> str | None:
    """Return the mode that a metric's name suggests; None if it suggests none, or both."""
    words = re.split(r"[^a-z0-9]+", metric.rpartition("/")[2].lower())
    higher, lower = (any(map(kind.fullmatch, words)) for kind in (_HIGHER, _LOWER))
    if higher == lower:
        return None
    return "max" if higher else "min"
