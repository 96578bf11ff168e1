"""What train.compile costs and gives: the first step in seconds, and the step after it.

Nothing here has a goal: a compiler's gain depends on the model and on the machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.device import DEVICE
from tests.bench.loops import PROBLEMS, Ours
from tests.bench.table import Result, alone, interleave

_NAMES = ("MLP", "transformer")


def compiled(repeats: int) -> list[Result]:
    """Epochs compiled and not, in turn; the first step is timed once, with an empty cache."""
    _start_the_compiler()
    results = []
    for name in _NAMES:
        problem = PROBLEMS[name]
        with torch._inductor.utils.fresh_cache():
            ours = Ours(problem, loader=False, compile=True)
            eager = Ours(problem, loader=False)
            first = ours()  # compiles, then trains its epoch
            ours(), eager()
            per_step = 1e3 / problem.steps
            rows = interleave(
                f"compile {name}, step after the first",
                lambda: ours() * per_step,  # noqa: B023  called before the next turn
                {"not compiled": lambda: eager() * per_step},  # noqa: B023
                unit="ms/step",
                repeats=repeats,
            )
            # What the first epoch took longer than another one is the compilation.
            cost = first - rows[0].ours / per_step
            results += [alone(f"compile {name}, first step", [cost], "s"), *rows]
            ours.close()
            eager.close()
    return results


def _start_the_compiler() -> None:
    """What the compiler imports and builds once for a process belongs to no model."""
    model = torch.compile(nn.Linear(2, 2).to(DEVICE))
    F.relu(model(torch.ones(1, 2, device=DEVICE))).sum().backward()
