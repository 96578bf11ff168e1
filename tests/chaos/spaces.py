"""A small search space, as the ledger takes it."""

from __future__ import annotations

from optuna.distributions import CategoricalDistribution, FloatDistribution

SPACE = {
    "train.optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True),
    "train.optimizer.name": CategoricalDistribution(("adamw", "sgd")),
}
