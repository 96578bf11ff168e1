"""What comparisons of searches share: a rule, two peers, and what a spec says of a problem."""

from __future__ import annotations

from typing import Any

from tests.bench.quality_problems import METRIC, PROBLEMS

ASHA: dict[str, Any] = {"scheduler": "asha", "grace_epochs": 1, "reduction": 3}
STOCK, RANDOM = "stock: asha + optuna", "random"


def problem_spec(name: str) -> dict[str, Any]:
    """What a spec says of a closed-form problem."""
    problem = PROBLEMS[name]
    return {
        "task": {"name": "tests.bench.quality_problems:run", "problem": name},
        "metric": METRIC,
        "budget": {"epochs": problem.epochs},
        "space": problem.space,
    }
