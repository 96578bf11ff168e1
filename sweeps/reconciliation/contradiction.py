"""A contradiction between two records that a sweep keeps, or a damaged one.

What must not live here: finding one.
"""

from __future__ import annotations

from typing import NamedTuple


class Contradiction(NamedTuple):
    """Something that cannot be right.

    Attributes:
        where: The part of the sweep: `sweep.yaml`, `ledger`, `trial 3`, `outbox` or
            `tracking store`.
        what: What is wrong, in words.
        remedy: What the user should do.
        file: The file that is damaged, or one of two that contradict each other; None: none alone.
    """

    where: str
    what: str
    remedy: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"
