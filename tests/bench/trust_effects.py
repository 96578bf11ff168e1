"""What mattered, by stopped sweeps over recorded curves, against all full curves of the table.

A sweep of 40 trials draws its configurations from a table and stops them by `asha`. The truth is
what all 128 configurations say, each trained to its end. What must not live here: the estimate
(`sweeps.trust.importance`), and the tables (`curves.tables`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from sweeps.spec.spec import SweepSpec
from sweeps.statistics.variance_shares import VarianceShares
from sweeps.trust.importance import final_places, importance
from tests.bench.curves.pool import Pool, PooledOurs
from tests.bench.curves.tables import CurveTable, Params, read_table, recorded
from tests.bench.quality_problems import METRIC
from tests.bench.quality_sweeps import drive
from tests.bench.table import Result, size

Curves = Mapping[int, Mapping[int, float]]
_TRIALS, _SWEEPS, _AT_ONCE = 40, 12, 4


def _common(curves: Curves) -> dict[int, float]:
    """The best value up to the last report that all trials made."""
    last = min(map(max, curves.values()))
    return {n: min(v for at, v in one.items() if at <= last) for n, one in curves.items()}


def _survivors(curves: Curves) -> dict[int, float]:
    """The best value of the trials that were not stopped."""
    last = max(map(max, curves.values()))
    return {n: min(one.values()) for n, one in curves.items() if max(one) == last}


def _below_survivors(curves: Curves) -> dict[int, float]:
    """First all that trained longer, then by the best value."""
    order = sorted(curves, key=lambda n: (-max(curves[n]), min(curves[n].values())))
    return {number: float(at) for at, number in enumerate(order)}


def _own(curves: Curves) -> dict[int, float]:
    """The best value of each trial, however long it trained."""
    return {number: min(one.values()) for number, one in curves.items()}


def _among_longer(curves: Curves) -> dict[int, float]:
    """What the project does."""
    return final_places(curves, minimize=True)


WAYS: Mapping[str, Callable[[Curves], dict[int, float]]] = {
    "among those that trained on": _among_longer,
    "at the last common report": _common,
    "below all that trained on": _below_survivors,
    "own best value": _own,
    "survivors alone": _survivors,
}
"""How a stopped trial is placed."""


def mattered() -> list[Result]:
    """Print by way: the error of a share, how often its interval holds the truth, and the rest."""
    found: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    num = 0
    for name in recorded()[: size(5, 1)]:
        table = read_table(name)
        truth = _truth(table)
        for sampler in ("tpe", "random"):
            for seed in range(size(_SWEEPS, 1)):
                num += 1
                params, curves = _sweep(table, sampler, seed)
                for way, places in WAYS.items():
                    shares = importance(table.spec.space, params, places(curves))
                    if shares is not None:
                        found[way].append(_errors(shares, truth))
    print(f"{num} sweeps of {_TRIALS} trials: mean error of a share, intervals of 95 % that hold")
    print("the truth, their mean width, the first parameter right; sweeps that can tell\n")
    for way, some in found.items():
        error, held, width, first = np.mean(some, axis=0)
        print(f"{way:30}{error:6.3f}{held:6.0%}{width:6.2f}{first:6.0%}{len(some):6}")
    print(flush=True)
    error, held, _, _ = np.mean(found[next(iter(WAYS))], axis=0)
    return [
        Result("what mattered: mean error of a share", 100 * float(error), None, "points", ()),
        Result("what mattered: intervals that hold", 100 * float(held), None, "%", ()),
    ]


def _errors(
    found: VarianceShares, truth: Mapping[str, float]
) -> tuple[float, float, float, float]:
    shares = found.shares
    return (
        float(np.mean([abs(one.value - truth[key]) for key, one in shares.items()])),
        float(np.mean([one.low <= truth[key] <= one.high for key, one in shares.items()])),
        float(np.mean([one.high - one.low for one in shares.values()])),
        float(next(iter(shares)) == max(truth, key=truth.__getitem__)),
    )


def _truth(table: CurveTable) -> dict[str, float]:
    """Return the shares among all configurations with full curves, their mean over the seeds."""
    every = []
    for seed in range(table.loss.shape[1]):
        full = np.flatnonzero(table.last_epochs[:, seed] == table.epochs).tolist()
        params = {n: table.params[n] for n in full}
        places = {n: float(table.loss[n, seed].min()) for n in full}
        found = importance(table.spec.space, params, places)
        assert found is not None
        every.append(found.shares)
    return {key: float(np.mean([one[key].value for one in every])) for key in every[0]}


def _sweep(
    table: CurveTable, sampler: str, seed: int
) -> tuple[Mapping[int, Params], dict[int, dict[int, float]]]:
    """Return the parameters and the curves of a sweep's trials that did not fail."""
    random = np.random.default_rng((55, seed))
    pool = Pool(table, tuple(range(table.loss.shape[1])), random)
    spec = SweepSpec.model_validate(
        {
            "name": "mattered",
            "task": {"name": "invented:run"},
            "metric": METRIC,
            "mode": "min",
            "trials": _TRIALS,
            "concurrency": _AT_ONCE,
            "resources": {"cpu": 0.5, "gpu": 0},
            "seed": int(random.integers(2**31)),
            "budget": {"epochs": table.epochs},
            "early_stopping": {"scheduler": "asha"},
            "search": {"sampler": sampler},
            "space": {key: one.to_data() for key, one in table.spec.space.items()},
        }
    )
    side = PooledOurs(spec, pool)
    curves: dict[int, dict[int, float]] = defaultdict(dict)

    def train(number: int, params: Params) -> Iterator[float]:
        for at, loss in enumerate(pool.train(number, params), start=1):
            curves[number][at] = loss
            yield loss

    for _ in drive(side, train, epochs=table.epochs, at_once=_AT_ONCE, seconds=pool.seconds):
        pass
    ended = [one for one in side.trials() if one.state != "failed" and curves[one.number]]
    return {one.number: one.params for one in ended}, {n.number: curves[n.number] for n in ended}
