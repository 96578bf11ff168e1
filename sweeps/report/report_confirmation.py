"""The report's section about a confirmation.

What must not live here: what a confirmation says (`trust.confirmation`).
"""

from __future__ import annotations

from collections.abc import Iterator

from sweeps.formatting import format_number
from sweeps.report.page import PageSection, escape, table
from sweeps.trust.confirmation import (
    ConfirmedTrial,
    find_confirmation,
    format_chance,
    format_seconds,
)
from sweeps.view.sweep_view import SweepView

_HEADS = [
    *("trial", "", "P(best)", "mean", "95 %", "seeds", "search saw", "looked better by"),
    *("values by seed", "time a run"),
]


def confirmed(view: SweepView) -> Iterator[PageSection]:
    """Yield the section, if leaders were confirmed."""
    found = find_confirmation(view)
    if found is None:
        return
    items = "".join(f"<li>{escape(one)}</li>\n" for one in found.sentences())
    sentence = (
        "The leaders were trained again by sweep confirm, under seeds that they share. P(best) is "
        "the probability that a leader's mean over all seeds is the best of the leaders."
    )
    rows = [_row(one) for one in found.leaders]
    yield PageSection("Confirmation", sentence, f"<ul>{items}</ul>{table(_HEADS, rows)}")


def _row(one: ConfirmedTrial) -> list[str]:
    known = one.low is not None
    return [
        str(one.number),
        one.standing,
        format_chance(one.p_best),
        format_number(one.mean),
        f"{format_number(one.low)} to {format_number(one.high)}" if known else "-",
        str(len(one.values)),
        format_number(one.original),
        format_number(one.optimism),
        ", ".join(map(format_number, one.values)) or "-",
        format_seconds(one.seconds),
    ]
