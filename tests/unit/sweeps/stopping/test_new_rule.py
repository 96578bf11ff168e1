"""A new stopping rule: one module and one line of the registry make it work everywhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sweeps
import trainable
from sweeps.spec.sections import early_stopping_section
from sweeps.stopping.registry import RULES, parameters
from sweeps.stopping.rule import StoppingRule
from tests.unit.sweeps.stopping.simulated_sweep import EPOCHS, SimulatedSweep
from tests.unit.sweeps.stopping.stagnation import Stagnation

CURVES = [
    [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
    [0.9, 0.8, 0.8, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4],
    [float("nan")] * EPOCHS,
    [0.9, 0.8, 0.8, 0.7, 0.7, 0.6, 0.6, 0.5, 0.5],
]
LAST_EPOCHS = [EPOCHS, 4, 2, EPOCHS]
"""Of each curve, with a stagnation of 2."""


@pytest.mark.parametrize("mode", ["min", "max"])
def test_new_rule_decides_the_same_after_any_kill(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, Stagnation.name, Stagnation)
    config = early_stopping_section(RULES)(scheduler="stagnation", stagnation=2)
    sign = 1 if mode == "min" else -1
    curves = [[sign * value for value in curve] for curve in CURVES]
    once = SimulatedSweep(config, mode, curves)
    once.run(dies_after=-1)
    assert [max(reports) for reports in once.reports.values()] == LAST_EPOCHS
    for point in range(sum(LAST_EPOCHS)):
        killed = SimulatedSweep(config, mode, curves)
        killed.run(dies_after=point)
        killed.run(dies_after=-1)
        # NaN equals nothing; the epochs tell the decisions.
        epochs = [list(reports) for reports in killed.reports.values()]
        assert epochs == [list(reports) for reports in once.reports.values()], point


# The registry is amended before anything imports the specs, as a line in it would.
PARSE = """
import sys
from sweeps.stopping.registry import RULES
from tests.unit.sweeps.stopping.stagnation import Stagnation
RULES[Stagnation.name] = Stagnation

from sweeps.spec.spec import SpecError, parse_spec

HEAD = "{name: s, task: digits, metric: val/loss, mode: min, trials: 2, early_stopping: %s}"

def parse(section):
    return parse_spec(HEAD % section, "s.yaml")

spec = parse("{scheduler: stagnation, stagnation: 2}")
assert parse_spec(spec.to_yaml(), "s.yaml") == spec
for wrong in ("{scheduler: stagnation, stagnation: 0}", "{scheduler: stagnation, stagnation: 10}"):
    try:
        parse(wrong)
    except SpecError as error:
        print(error)
assert not {"ray", "optuna"} & sys.modules.keys(), "a spec is read without them"

from sweeps.stopping.rule import Standing
from sweeps.stopping.schedulers import make_verdict_fn
reports = {0: {1: 0.5, 2: 0.4, 3: 0.3}, 1: {1: 0.5, 2: 0.6, 3: 0.7}}
print(sorted(make_verdict_fn(spec)(Standing(reports, {0, 1}, set()))))
"""


def test_one_registry_line_makes_a_rule_available() -> None:
    root = Path(sweeps.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PARSE], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    too_small, too_late, verdict = done.stdout.splitlines()
    assert "early_stopping.stagnation: 0 is out of range" in too_small
    assert "early_stopping.stagnation: 10 is not below budget.epochs (10)" in too_late
    assert verdict == "[1]"


def test_two_rules_share_no_parameter_of_other_meaning() -> None:
    class Impatient(Stagnation):
        stagnation: int = 1

    with pytest.raises(AssertionError, match="stagnation defines stagnation differently"):
        parameters([Stagnation, Impatient])


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_a_rule_describes_itself_in_one_sentence(rule: type[StoppingRule]) -> None:
    assert rule.description[0].islower()
    assert rule.description.endswith(".")
    assert rule.description.count(". ") == 0
    key = rule.first_epoch_key
    assert key is None or key in rule.model_fields


def test_the_registry_alone_compares_names_of_rules() -> None:
    """`none` also names other things."""
    names, found = RULES.keys() - {"none"}, []
    for package in (sweeps, trainable):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                compared = isinstance(node, ast.Compare | ast.MatchValue)
                constants = ast.walk(node) if compared else ()
                values = {one.value for one in constants if isinstance(one, ast.Constant)}
                if values & names:
                    found.append(f"{path}:{node.lineno}")
    assert not found
