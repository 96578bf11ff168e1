"""The cards of the audit in their order: the only place that lists them.

To add a card, write its module with a pure function of `AuditData` and add a line to `CARDS`.
What must not live here: what a card looks at.
"""

from __future__ import annotations

from collections.abc import Callable

from sweeps.trust.audit.bounds import bounds
from sweeps.trust.audit.budget import budget
from sweeps.trust.audit.card import Card
from sweeps.trust.audit.clipping import clipping
from sweeps.trust.audit.data import AuditData
from sweeps.trust.audit.effects import effects
from sweeps.trust.audit.failures import failures
from sweeps.trust.audit.noise import noise
from sweeps.trust.audit.stopping import stopping
from sweeps.trust.audit.validation import validation

CARDS: dict[str, Callable[[AuditData], Card]] = {
    "failures": failures,
    "bounds": bounds,
    "budget": budget,
    "stopping": stopping,
    "noise": noise,
    "validation": validation,
    "effects": effects,
    "clipping": clipping,
}
"""By id, in the order in which they are shown."""


def audit(data: AuditData) -> list[Card]:
    """Return all cards of a sweep."""
    return [card(data) for card in CARDS.values()]
