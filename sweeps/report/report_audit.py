"""The report's section with the cards of the audit.

What must not live here: what the cards look at (`trust.audit`).
"""

from __future__ import annotations

from sweeps.report.report_page import PageSection, escape, table
from sweeps.trust.audit.read import audit_sweep
from sweeps.view.sweep_view import SweepView


def audit_section(view: SweepView) -> PageSection:
    """Return the cards as a table, and the commands of those that warn."""
    found = audit_sweep(view)
    rows = [
        [card.verdict, card.question, card.evidence, card.remedy or "-"] for card in found.cards
    ]
    body = table(["verdict", "question", "evidence", "remedy"], rows)
    commands = dict.fromkeys(found.command(card) for card in found.warned)
    shown = "\n".join(command for command in commands if command is not None)
    if shown:
        body += f"<p>Commands for the cards that warn:</p><pre>{escape(shown)}</pre>"
    sentence = (
        f"Whether the result can be trusted, from {found.num_trials} ended trials: "
        f"{len(found.warned)} of {len(found.cards)} cards warn."
    )
    return PageSection("Audit", sentence, body)
