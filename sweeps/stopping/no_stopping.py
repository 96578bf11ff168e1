"""The rule `none`: every trial trains to the end of its budget."""

from __future__ import annotations

from typing import ClassVar

from sweeps.stopping.rule import StoppingRule


class NoStopping(StoppingRule):
    """Let every trial finish. It is the rule of a spec without the section `early_stopping`."""

    name: ClassVar[str] = "none"
    description: ClassVar[str] = "lets every trial finish."
    needs_one_metric: ClassVar[bool] = False

    def no_rungs_reason(self) -> str:
        """Return that no trial is stopped."""
        return "this sweep stops no trial early"
