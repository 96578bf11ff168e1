"""P3: our instrumented step against the bare loop, and against Lightning and Accelerate.

    python -m tests.bench.steps REPEATS      measures in this environment, and prints JSON

What must not live here: the loops themselves (see `loops.py` and `peers.py`).
"""

from __future__ import annotations

import subprocess
import sys

from tests.bench.loops import PROBLEMS, Bare, Ours, Problem
from tests.bench.peers import installed, make_environment, missing
from tests.bench.table import Goal, Result, Sample, dump, interleave, load, not_measured

_WARM_UP = 2
_MEMORY = {"bare, DataLoader": Goal("ratio", 1.00)}
_LOADER = {"bare, DataLoader": Goal("ratio", 1.02)}
_EMA = {"without": Goal("ratio", 1.02)}


def steps(repeats: int) -> list[Result]:
    """Measure where both peers are installed; without a way to do so, with those that are."""
    try:
        command = [str(make_environment()), "-m", "tests.bench.steps", str(repeats)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        print(f"the environment of the peers failed: {problem}", file=sys.stderr)
        absent = [
            not_measured(f"P3 DataLoader / {peer}", "its environment failed") for peer in missing()
        ]
        return measure(repeats) + absent
    return load(printed.splitlines()[-1])


def measure(repeats: int) -> list[Result]:
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
                peers |= {peer: make(problem) for peer, make in installed().items()}
            sides: list[Sample] = [ours, *peers.values()]
            for side in sides:
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
        results += _averaging(name, problem, repeats)
    return results


def _averaging(name: str, problem: Problem, repeats: int) -> list[Result]:
    """What an average of the weights costs: our trainer with it and without."""
    averaged, plain = (Ours(problem, loader=False, ema=ema) for ema in (True, False))
    for side in (averaged, plain) * _WARM_UP:
        side()
    per_step = 1e3 / problem.steps
    results = interleave(
        f"P3 {name}, averaged weights",
        _scaled(averaged, per_step),
        {"without": _scaled(plain, per_step)},
        unit="ms/step",
        goals=_EMA,
        repeats=repeats,
    )
    averaged.close()
    plain.close()
    return results


def _scaled(side: Sample, factor: float) -> Sample:
    return lambda: side() * factor


if __name__ == "__main__":
    print(dump(measure(int(sys.argv[1]))))
