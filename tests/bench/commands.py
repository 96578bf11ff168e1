"""P11: how long the commands that only look take."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.table import Goal, Result, interleave

_SWEEP = Path(sys.executable).with_name("sweep")
_TRIALS, _EPOCHS = 1000, 10

_SPEC = f"""
name: large
task: digits
metric: val/loss
mode: min
trials: {_TRIALS}
budget: {{epochs: {_EPOCHS}}}
space:
  train.optimizer.lr: {{loguniform: [1.0e-4, 1.0e-1]}}
  train.schedule.warmup: {{uniform: [0.0, 0.3]}}
  train.clip.max_norm: {{loguniform: [0.1, 10]}}
"""


def help_page(repeats: int) -> list[Result]:
    """`sweep --help` against an interpreter that does nothing."""
    return interleave(
        "P11 sweep --help",
        lambda: _wall([str(_SWEEP), "--help"]),
        {"python -c pass": lambda: _wall([sys.executable, "-c", "pass"])},
        unit="s",
        goals={"python -c pass": Goal("ours", 0.5)},
        repeats=repeats,
    )


def looking(repeats: int) -> list[Result]:
    """`sweep status` and `sweep trials` on a ledger of a thousand trials."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        _write_large_sweep(root)
        results = []
        for command in ("status", "trials"):
            line = [str(_SWEEP), command, "large", "--root", directory]
            results += interleave(
                f"P11 sweep {command}, {_TRIALS} trials",
                lambda line=line: _wall(line),  # type: ignore[misc]
                {"python -c pass": lambda: _wall([sys.executable, "-c", "pass"])},
                unit="s",
                goals={"python -c pass": Goal("ours", 1.0)},
                repeats=repeats,
            )
        return results


def _wall(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def _write_large_sweep(root: Path) -> None:
    """A finished sweep: half of its trials pruned on their third epoch, the others complete."""
    import numpy
    import optuna

    from sweeps.layout import SweepPaths
    from sweeps.ledger import Ledger
    from sweeps.revisions import write_spec
    from sweeps.spec import load_spec

    file = root / "large.yaml"
    file.write_text(_SPEC)
    spec = load_spec(file)
    paths = SweepPaths(root, spec.name)
    paths.directory.mkdir()
    write_spec(paths.spec, spec)
    ledger = Ledger.create(paths.ledger, mode=spec.mode, sweep_id="bench")
    space = {key: value.to_optuna() for key, value in spec.space.items()}
    draw = numpy.random.default_rng(0)
    trials = []
    for number in range(_TRIALS):
        epochs = 3 if number % 2 else _EPOCHS
        values = {epoch: float(draw.uniform(0, 2)) for epoch in range(1, epochs + 1)}
        pruned = epochs < _EPOCHS
        trials.append(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED
                if pruned
                else optuna.trial.TrialState.COMPLETE,
                value=None if pruned else min(values.values()),
                params={key: float(draw.uniform(d.low, d.high)) for key, d in space.items()},
                distributions=space,
                intermediate_values=values,
                user_attrs={"attempts": 1, "progress": {"step": 23 * epochs, "epoch": epochs}},
            )
        )
    optuna.load_study(storage=f"sqlite:///{ledger.path}", study_name="sweep").add_trials(trials)
