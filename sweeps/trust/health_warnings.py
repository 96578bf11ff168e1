"""State which trials had health warnings at their last report, a sentence for each kind.

What must not live here: what is unhealthy (`trainable.watch.health`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sweeps.ledger.trials import TrialSummary

_MOST = 2
_NUMBER = re.compile(r"\d[\d.e+-]*")


def health_sentences(records: Sequence[TrialSummary]) -> list[str]:
    """Return the warnings that most trials had, each with one of these trials.

    Warnings that differ only in their numbers are one.
    """
    alike: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        for signal in record.signals or ():
            alike.setdefault(_NUMBER.sub("#", signal), []).append((record.number, signal))
    groups = sorted(alike.values(), key=len, reverse=True)
    sentences = [f"{_who(group, len(records))}: {group[0][1]}." for group in groups[:_MOST]]
    if rest := len(groups) - len(sentences):
        kinds = "kinds" if rest > 1 else "kind"
        sentences.append(
            f"{rest} more {kinds} of health warnings: see `sweep show` of each trial."
        )
    return sentences


def _who(group: Sequence[tuple[int, str]], num_trials: int) -> str:
    number = group[0][0]
    if len(group) == 1:
        return f"Trial {number} has a health warning"
    return f"{len(group)} of {num_trials} trials have a health warning, as trial {number}"
