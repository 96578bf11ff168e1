"""What a sweep found: each sentence from trials that were made for it."""

from __future__ import annotations

import math
import random
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sweeps.run.launch as operation
from sweeps.cli.app import app
from sweeps.spec.spec import SweepSpec
from sweeps.trust.evidence import bad_regions, chance_difference
from sweeps.trust.findings import Findings, find
from sweeps.view.outcome import SweepOutcome
from tests.unit.sweeps.sweep_factory import RATE, MadeSweep

LR, NORM, WARMUP = "train.optimizer.lr", "train.clip.max_norm", "train.schedule.warmup"
SPACE = (
    f"{{{LR}: {{loguniform: [1.0e-4, 1.0e-1]}}, {NORM}: {{loguniform: [0.1, 10]}}, "
    f"{WARMUP}: {{uniform: [0.0, 0.3]}}}}"
)
ASHA = "early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 3}"


def _points(count: int) -> list[dict[str, float]]:
    """Points whose parameters do not depend on each other."""
    draw = random.Random(0)
    rates = [1e-4 * 1000 ** ((index + 0.5) / count) for index in range(count)]
    draw.shuffle(rates)
    return [
        {LR: rate, NORM: 10 ** draw.uniform(-1, 1), WARMUP: draw.uniform(0, 0.3)} for rate in rates
    ]


def _loss(point: dict[str, float], best: float = 0.03) -> float:
    return 0.2 + abs(math.log10(point[LR] / best))


def stopped_sweep(
    root: Path,
    *,
    count: int = 24,
    low: float = 5e-3,
    best: float = 0.03,
    space: str = SPACE,
    more: str = "",
) -> MadeSweep:
    """A sweep of ten epochs that stopped each trial below a learning rate at epoch 1."""
    sweep = MadeSweep(root, space=space, more=f"{ASHA}\n{more}")
    for point in _points(count):
        loss = _loss(point, best)
        if point[LR] < low:
            sweep.add("pruned", loss, reason="asha at epoch 1", params=point)
        else:
            sweep.add("complete", *(loss / epoch for epoch in range(1, 11)), params=point)
    return sweep


def _said(findings: Findings) -> dict[str, str]:
    return {one.topic: one.sentence for one in findings.sentences}


def test_sentences_name_numbers_and_sample_sizes(tmp_path: Path) -> None:
    sweep = stopped_sweep(tmp_path)
    rates = sorted(record.params[LR] for record in sweep.view.records)
    low = [rate for rate in rates if rate < 5e-3]
    best = min(sweep.view.records, key=lambda record: record.value)
    said = _said(find(sweep.view))
    assert list(said) == ["best", "importance", "region", "epochs"]
    assert said["best"].startswith(f"Trial {best.number} has the best val/loss, {best.value:.4g}")
    assert "after epoch 10 of 10" in said["best"]
    assert f"the median of {24 - len(low)} trials that trained to the end" in said["best"]
    assert said["importance"].startswith("lr mattered most: it explains ")
    assert "of how 24 trials rank by val/loss at the end" in said["importance"]
    assert "No clear effect of" in said["importance"]
    edge = f"{rates[len(low)]:.4g}"
    assert said["region"] == f"All {len(low)} trials with lr below {edge} were stopped at epoch 1."
    trained = len(low) + 10 * (24 - len(low))
    assert f"24 trials trained {trained} of 240 epochs" in said["epochs"]
    assert f"saved {100 - 100 * trained / 240:.0f} %" in said["epochs"]


def test_noise_shows_no_region(tmp_path: Path) -> None:
    """It may in one of twenty sweeps."""
    space = MadeSweep(tmp_path, space=SPACE).spec.space
    params, num_regions = dict(enumerate(_points(24))), 0
    for seed in range(200):
        values = dict(zip(params, random.Random(seed).sample(range(24), 24), strict=True))
        num_regions += bool(bad_regions(space, params, {n for n in params if values[n] < 12}))
    assert num_regions <= 16


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_is_compared_with_the_specs_own_values(tmp_path: Path, mode: str) -> None:
    own = "train: {optimizer: {lr: 0.01}, clip: {max_norm: 1.0}, schedule: {warmup: 0.1}}"
    sweep = MadeSweep(tmp_path, space=SPACE, mode=mode, more=own)
    sweep.add("complete", 0.5, params={LR: 0.01, NORM: 1.0, WARMUP: 0.1})
    better = 0.4 if mode == "min" else 0.6
    sweep.add("complete", better, params={LR: 0.02, NORM: 1.0, WARMUP: 0.1})
    said = _said(find(sweep.view))["best"]
    word = "lower" if mode == "min" else "higher"
    assert f"20 % {word} than 0.5 of trial 0, which has the values without the search" in said
    assert "each was trained once" in said


def test_gain_is_told_with_what_seeds_alone_make(tmp_path: Path) -> None:
    own = "train: {optimizer: {lr: 0.01}}\nrepeats: 2"
    found: list[float] = []
    for name, spread in (("calm", 0.01), ("noisy", 0.02)):
        sweep = MadeSweep(tmp_path, name, more=own)
        for lr, value in ((0.01, 0.5), (0.02, 0.4)):
            first = sweep.add("complete", value, params={LR: lr})
            sweep.repeat(first, "complete", value + lr / 0.01 * spread)
        found.append(chance_difference(sweep.view) or 0.0)
    # The pooled standard deviation over seeds is 0.0112 where the seeds differ by 0.01 and 0.02.
    assert found[0] > 2 * 0.0112
    assert found[1] == pytest.approx(2 * found[0])
    said = _said(find(sweep.view))["best"]
    assert "which has the values without the search; a difference up to" in said


def test_stopped_trial_with_own_values_compares_at_its_end(tmp_path: Path) -> None:
    own = "train: {optimizer: {lr: 0.01}, clip: {max_norm: 1.0}, schedule: {warmup: 0.1}}"
    sweep = MadeSweep(tmp_path, space=SPACE, more=f"{own}\n{ASHA}")
    sweep.add("pruned", 0.8, params={LR: 0.01, NORM: 1.0, WARMUP: 0.1})
    sweep.add("complete", 0.6, 0.1, params={LR: 0.02, NORM: 1.0, WARMUP: 0.1})
    assert (
        "at epoch 1 it had 0.6: 25 % lower than 0.8 of trial 0" in _said(find(sweep.view))["best"]
    )


def test_search_that_found_nothing_better_says_so(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more="train: {optimizer: {lr: 0.01}}")
    sweep.add("complete", 0.1, params={LR: 0.01})
    sweep.add("complete", 0.2, params={LR: 0.02})
    said = _said(find(sweep.view))["best"]
    assert said.endswith("it has the values without the search, and the other one is no better.")


def test_equal_values_are_said_to_say_nothing(tmp_path: Path) -> None:
    for name, last, is_said in (("flat", 0.5, True), ("learns", 0.4, False)):
        sweep = MadeSweep(tmp_path, name)
        for value in (0.5, 0.5, 0.5, 0.5, last):
            sweep.add("complete", value)
        topics = [finding.topic for finding in find(sweep.view).sentences]
        assert ("equal" in topics) is is_said


def test_region_is_the_worse_half_without_early_stopping(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, space=SPACE)
    for point in _points(24):
        sweep.add("complete", *[_loss(point)] * 10, params=point)
    said = _said(find(sweep.view))
    assert said["region"].endswith("ended in the worse half.")
    assert "epochs" not in said


def test_option_of_which_all_trials_failed_is_named(tmp_path: Path) -> None:
    space = f"{{train.optimizer.name: {{choice: [adamw, sgd, adam]}}, {RATE[1:]}"
    sweep = MadeSweep(tmp_path, space=space)
    for number in range(24):
        name = ("adamw", "sgd", "adam")[number % 3]
        point = {"train.optimizer.name": name, "train.optimizer.lr": 0.001 + number / 1e4}
        if name == "sgd":
            reason = f"non_finite: the loss is nan at step {number}"
            sweep.add("failed", reason=reason, params=point)
        else:
            sweep.add("complete", 0.1 + number / 100, params=point)
    found = find(sweep.view)
    said = _said(found)
    assert said["region"] == "All 8 trials with optimizer.name sgd failed."
    assert said["failures"] == (
        "8 of 24 trials failed: 8 like trial 1 (non_finite: the loss is nan at step 1)."
    )
    assert "space.train.optimizer.name={choice: [adamw, adam]}" in found.overrides


def test_reports_that_patience_saved_are_counted(tmp_path: Path) -> None:
    sweep = MadeSweep(
        tmp_path, budget="{steps: 100, report_every: 10}", more="early_stopping: {patience: 2}"
    )
    sweep.add("complete", 0.1, 0.2, 0.3, reason="patience at report 3: val/loss not better")
    sweep.add("complete", *[0.5] * 10)
    assert "trained 13 of 20 reports" in _said(find(sweep.view))["epochs"]


def test_best_near_a_bound_widens_the_range(tmp_path: Path) -> None:
    found = find(stopped_sweep(tmp_path, low=1.5e-2, best=0.1).view)
    assert "lr near the upper end of its range (0.1)" in _said(found)["bound"]
    (space,) = (one for one in found.overrides if one.startswith("space."))
    assert space == f"space.{LR}={{loguniform: [0.015, 1.0]}}"
    assert found.changes_space


def test_range_without_effect_is_not_widened(tmp_path: Path) -> None:
    """The three best lie at the end of a range by chance, among trials that noise ranks."""
    sweep, noise = MadeSweep(tmp_path, space=SPACE), random.Random(1)
    for index, point in enumerate(_points(40)):
        loss = 0.1 + index / 1000 if index < 3 else noise.uniform(0.2, 0.9)
        end = {NORM: 9.9 - index / 10} if index < 3 else {}
        sweep.add("complete", *(loss / epoch for epoch in range(1, 11)), params=point | end)
    findings = find(sweep.view)
    assert findings.importance is not None
    assert "max_norm" in _said(findings)["importance"]
    assert "bound" not in _said(findings)


def test_explored_end_of_a_range_is_not_widened(tmp_path: Path) -> None:
    """Three trials between the best and the end of the range are worse."""
    sweep = stopped_sweep(tmp_path, low=1.5e-2, best=0.1)
    assert "bound" in _said(find(sweep.view))
    for rate in (0.097, 0.098, 0.099):
        sweep.add("complete", *[0.9] * 10, params={LR: rate, NORM: 1.0, WARMUP: 0.1})
    assert "bound" not in _said(find(sweep.view))


def test_region_names_only_what_happened_there(tmp_path: Path) -> None:
    """A trial failed elsewhere in the space."""
    sweep = stopped_sweep(tmp_path)
    sweep.add("failed", reason="oom: too large", params={LR: 0.09, NORM: 1.0, WARMUP: 0.1})
    assert _said(find(sweep.view))["region"].endswith("were stopped at epoch 1.")
    sweep.add("failed", reason="oom: too large", params={LR: 2e-4, NORM: 1.0, WARMUP: 0.1})
    assert _said(find(sweep.view))["region"].endswith("were stopped at epoch 1 or failed.")


@pytest.mark.parametrize(
    "more",
    [
        "",
        f"search: {{constraints: ['{LR} * {NORM} < 2']}}",
    ],
)
def test_printed_command_is_accepted_by_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    """The last line of `sweep status`, split as a shell does; only the trials do not run."""
    sweep = stopped_sweep(tmp_path, low=1.5e-2, best=0.1, more=more)
    text = sweep.paths.spec.read_text()
    printed = CliRunner().invoke(app, ["status", "small", "--root", str(tmp_path)])
    assert printed.exit_code == 0, printed.output
    (command,) = (one for one in printed.output.splitlines() if "sweep resume" in one)
    words = shlex.split(command.partition("sweep ")[2])
    resumed: list[SweepSpec] = []

    def attempt(_paths: object, spec: SweepSpec, *_: object, **__: object) -> SweepOutcome:
        resumed.append(spec)
        return sweep.view.outcome()

    monkeypatch.setattr(operation, "attempt", attempt)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert resumed[0].trials == 48
    assert str(resumed[0].space[LR]) == "{loguniform: [0.015, 1.0]}"
    assert sweep.paths.spec.read_text() == text


@pytest.mark.parametrize(("prior", "is_kept"), [(0.03, True), (1.0e-3, False)])
def test_bad_region_with_the_prior_is_cut_off_and_the_prior_with_it(
    tmp_path: Path, prior: float, is_kept: bool
) -> None:
    space = SPACE.replace("1.0e-1]", f"1.0e-1], prior: {prior}", 1)
    found = find(stopped_sweep(tmp_path, low=1.5e-2, best=0.1, space=space).view)
    assert (f"Its prior {prior:g} lies there." in _said(found)["region"]) is not is_kept
    kept = f", prior: {prior}" if is_kept else ""
    assert f"space.{LR}={{loguniform: [0.015, 1.0]{kept}}}" in found.overrides


def test_change_that_a_resume_would_refuse_is_left_out(tmp_path: Path) -> None:
    """The best trials are near the upper end, but a momentum is below 1."""
    key = "train.optimizer.momentum"
    space, more = (
        f"{{{key}: {{uniform: [0.5, 0.99]}}}}",
        "train: {optimizer: {name: sgd, lr: 0.1}}",
    )
    sweep = MadeSweep(tmp_path, space=space, more=more)
    for number in range(12):
        value = 0.54 + 0.04 * number
        sweep.add("complete", *[1 - value] * 10, params={key: value})
    found = find(sweep.view)
    assert "upper end of its range (0.99)" in _said(found)["bound"]
    assert not any("1.0" in one for one in found.overrides)
