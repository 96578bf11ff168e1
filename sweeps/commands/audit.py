"""`sweep audit`: print whether a sweep's result can be trusted, card by card.

What must not live here: what the cards look at (`results.audit`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from sweeps.commands.console import AsJson, Name, Root, input_errors, show_found, view_of
from sweeps.commands.plain_console import line

if TYPE_CHECKING:
    from sweeps.results.audit.read import Audit

_STYLES = {"pass": "green", "warn": "yellow", "not enough data": "dim"}


def audit(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Check whether a sweep's result can be trusted: eight cards, each with its evidence."""
    from sweeps.results.audit.read import audit_sweep

    with input_errors():
        found = audit_sweep(view_of(name, root))
    show_found(found.as_dict() if as_json else found, as_json, lambda: _cards(found))


def _cards(found: Audit) -> RenderableType:
    """Return the cards, one below the other."""
    parts: list[RenderableType] = []
    spec = found.view.spec
    if len(spec.metrics) > 1:
        parts.append(Text(f"The cards look at the first metric, {spec.metrics[0]}.\n"))
    for card in found.cards:
        verdict = card.verdict if card.verdict == "not enough data" else card.verdict.upper()
        parts += [
            Text.assemble(
                (verdict, _STYLES[card.verdict]), "  ", (card.question, "bold"), f"  ({card.id})"
            ),
            Text(card.evidence),
        ]
        command = found.command(card)
        if card.remedy is not None and command is not None:
            parts.append(line(f"{card.remedy}: {command}"))
        elif card.remedy is not None:
            parts.append(Text(card.remedy))
        parts.append(Text())
    count = len(found.cards)
    parts.append(
        Text(f"{len(found.warned)} of {count} cards warn, from {found.num_trials} ended trials")
    )
    return Group(*parts)
