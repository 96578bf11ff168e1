"""P3: our instrumented step against the bare loop, and against peers where they are installed."""

from __future__ import annotations

import importlib.util

from tests.bench.loops import PROBLEMS, Bare, Ours
from tests.bench.table import Goal, Result, Sample, interleave

_WARM_UP = 2
_MEMORY = {"bare, DataLoader": Goal("ratio", 1.00)}
_LOADER = {"bare, DataLoader": Goal("ratio", 1.02)}


def steps(repeats: int) -> list[Result]:
    """Epochs of each problem, the sides in turn; in milliseconds for one step."""
    results = []
    for name, problem in PROBLEMS.items():
        for loader in (False, True):
            ours = Ours(problem, loader=loader)
            peers: dict[str, Sample] = {"bare, DataLoader": Bare(problem, loader=True)}
            if not loader:
                peers["bare, indexed"] = Bare(problem, loader=False)
                peers["bare, indexed, fused"] = Bare(problem, loader=False, fused=True)
            elif problem.accumulation == 1:
                peers |= _installed_peers(problem)
            for side in (ours, *peers.values()):
                for _ in range(_WARM_UP):
                    side()
            per_step = 1e3 / problem.steps
            results += interleave(
                f"P3 {name}, {'DataLoader' if loader else 'in memory'}",
                _scaled(ours, per_step),
                {peer: _scaled(side, per_step) for peer, side in peers.items()},
                unit="ms/step",
                goals=_LOADER if loader else _MEMORY,
                repeats=repeats,
            )
            ours.close()
    return results


def _installed_peers(problem: object) -> dict[str, Sample]:
    if importlib.util.find_spec("lightning") is None:
        return {}
    from tests.bench.peers import Accelerated, Lightning

    return {"Lightning": Lightning(problem), "Accelerate": Accelerated(problem)}


def _scaled(side: Sample, factor: float) -> Sample:
    return lambda: side() * factor
