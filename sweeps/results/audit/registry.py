"""The cards of the audit in their order: the only place that lists them.

To add a card, write its module with a pure function of `AuditData` and add a line to `CARDS`.
What must not live here: what a card looks at.
"""

from __future__ import annotations

from collections.abc import Callable

from sweeps.results.audit.bounds import bounds
from sweeps.results.audit.budget import budget
from sweeps.results.audit.card import Card
from sweeps.results.audit.clipping import clipping
from sweeps.results.audit.data import AuditData
from sweeps.results.audit.effects import effects
from sweeps.results.audit.failures import failures
from sweeps.results.audit.noise import noise
from sweeps.results.audit.stopping import stopping
from sweeps.results.audit.validation import validation

CARDS: dict[str, Callable[[AuditData], Card]] = {
    "bounds": bounds,
    "noise": noise,
    "stopping": stopping,
    "effects": effects,
    "failures": failures,
    "clipping": clipping,
    "budget": budget,
    "validation": validation,
}
"""By id, in the order in which they are shown."""


def audit(data: AuditData) -> list[Card]:
    """Return all cards of a sweep."""
    return [card(data) for card in CARDS.values()]
