"""Our own table of trainings: the digits under common seeds, trained in this process.

The configurations are drawn at random; those whose training diverges under a seed are left out.
What must not live here: what is done with the table.
"""

from __future__ import annotations

import math

import numpy as np
import optuna

from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import TrialSeed
from tests.bench.quality_digits import EPOCHS, SPEC, train
from tests.bench.trust_tables import Table

_SPEC = {"name": "trust", "mode": "min", "trials": 1, "seed": 37, "resources": {"gpu": 0}}


def digits_table(num_configurations: int, num_seeds: int) -> Table:
    """Train configurations to the end; returns their losses after the last epoch."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spec = SweepSpec.model_validate({**_SPEC, **SPEC})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=spec.seed))
    distributions = {key: one.to_optuna() for key, one in spec.space.items()}
    rows = []
    for _ in range(num_configurations):
        params = study.ask(distributions).params
        row = []
        for seed in range(num_seeds):
            curve = list(train(spec, TrialSeed("confirm", seed), params))
            if len(curve) < EPOCHS or not math.isfinite(curve[-1]):
                break
            row.append(curve[-1])
        else:
            rows.append(row)
    return Table("digits", np.array(rows))
