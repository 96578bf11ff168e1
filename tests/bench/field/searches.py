"""The searches of the field: ours, and peers as their documentation shows them.

All have the first rung at one epoch and reduce by 3. What must not live here: measuring.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sweeps.spec.space import Distribution
from tests.bench.curves.pool import Mapped, PooledOurs
from tests.bench.field.grounds import Ground, Round
from tests.bench.field.played import OneEpochThenTop, PlayedSide, RandomPoints
from tests.bench.field.process import PeerProcess, make_environment
from tests.bench.quality_cases import ASHA
from tests.bench.quality_stock import Stock
from tests.bench.quality_sweeps import Ours, Side

GRACE, REDUCTION = ASHA["grace_epochs"], ASHA["reduction"]
RANDOM, TOP, STOCK = "random", "one epoch, then the top", "Ray: Optuna + ASHA"
DEFAULT = "ours: tpe + asha_promote"
"""What a sweep takes by itself."""
_PROMOTE = {**ASHA, "scheduler": "asha_promote"}
OUR_RULES: dict[str, dict[str, Any]] = {
    "random + asha": {"search": {"sampler": "random"}, "early_stopping": ASHA},
    "random + asha_promote": {"search": {"sampler": "random"}, "early_stopping": _PROMOTE},
    DEFAULT: {"search": {"sampler": "tpe"}, "early_stopping": _PROMOTE},
    "ours: gp + asha_promote": {"search": {"sampler": "gp"}, "early_stopping": _PROMOTE},
}
"""What a sweep file says of each of ours; those of other names than `ours` count as peers."""


@dataclass(frozen=True)
class Program:
    """A peer of another library.

    Attributes:
        program: The module of `programs/`.
        environment: The requirements of its environment; None for the project's own.
        options: What the program is told beside the problem.
    """

    program: str
    environment: str | None
    options: Mapping[str, Any]

    def start(self) -> PeerProcess:
        """Start the program in its environment."""
        python = str(make_environment(self.environment)) if self.environment else sys.executable
        return PeerProcess([python, "-m", f"tests.bench.field.programs.{self.program}"])


PROGRAMS = {
    "Optuna: TPE + Hyperband": Program("optuna", None, {}),
    "DEHB": Program("dehb", "dehb", {}),
    "SMAC3: multi-fidelity": Program("smac", "smac", {}),
    "Syne Tune: BOHB": Program("syne_tune", "syne-tune", {"scheduler": "BOHB"}),
    "Syne Tune: ASHA + CQR": Program("syne_tune", "syne-tune", {"scheduler": "ASHACQR"}),
    "NePS: Hyperband": Program("neps", "neps", {"algorithm": "hyperband"}),
    "NePS: PriorBand": Program("neps", "neps", {"algorithm": "priorband"}),
    "Ax: early stopping": Program("ax", "ax", {}),
}


def problem(ground: Ground, workers: int, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a program is told of a problem."""
    space = {f"x{index}": described(one) for index, one in enumerate(ground.space.values())}
    rungs = {"grace": GRACE, "reduction": REDUCTION}
    sizes = {"epochs": ground.epochs, "budget": ground.budget, "workers": workers, "seed": seed}
    return {"space": space, **sizes, **rungs, "options": dict(options)}


def described(one: Distribution) -> dict[str, Any]:
    """Return a distribution as programs read it.

    Raises:
        ValueError: Not all peers have such a distribution.
    """
    if one.when or one.name not in ("uniform", "loguniform", "int", "logint", "choice"):
        raise ValueError(f"peers have no parameter such as {one}")
    if one.name == "choice":
        return {"kind": "choice", "choices": list(one.arguments())}
    low, high = one.arguments()
    kind = "int" if one.name.endswith("int") else "float"
    return {"kind": kind, "low": low, "high": high, "log": one.name.startswith("log")}


Make = Callable[[Ground, Round, int, int], Side]


def _random(ground: Ground, meets: Round, _workers: int, seed: int) -> Side:
    points = ground.points(np.random.default_rng(seed))
    return PlayedSide(RandomPoints(points, ground.epochs), ground, meets)


def _top(ground: Ground, meets: Round, _workers: int, seed: int) -> Side:
    points = ground.points(np.random.default_rng(seed))
    return PlayedSide(OneEpochThenTop(points, ground.epochs, ground.budget), ground, meets)


def _stock(ground: Ground, meets: Round, _workers: int, seed: int) -> Side:
    space = {key: one.to_optuna() for key, one in ground.space.items()}
    side = Stock(space, epochs=ground.epochs, seed=seed, asha=(GRACE, REDUCTION))
    return side if meets.pool is None else Mapped(side, meets.pool)


def _ours(parts: Mapping[str, Any]) -> Make:
    def make(ground: Ground, meets: Round, workers: int, seed: int) -> Side:
        spec = ground.spec(workers, seed, parts)
        return Ours(spec) if meets.pool is None else PooledOurs(spec, meets.pool)

    return make


IN_PROCESS: dict[str, Make] = {
    RANDOM: _random,
    TOP: _top,
    STOCK: _stock,
    **{name: _ours(parts) for name, parts in OUR_RULES.items()},
}
SEARCHES = (*IN_PROCESS, *PROGRAMS)
OURS = tuple(name for name in SEARCHES if name.startswith("ours"))
PEERS = tuple(name for name in SEARCHES if name not in OURS)
