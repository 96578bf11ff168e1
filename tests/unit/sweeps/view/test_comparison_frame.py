"""`sweeps.compare`: what `sweep compare` prints, as a DataFrame."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sweeps import Sweep, compare
from sweeps.cli.app import app
from sweeps.view.compare import Incomparable
from tests.unit.sweeps.sweep_factory import MadeSweep

SPACE = "{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}, train.batch_size: {choice: [32]}}"


def _made(root: Path, name: str, *values: float, metric: str = "val/loss") -> Sweep:
    made = MadeSweep(root, name, space=SPACE, metric=metric)
    for value in values:
        made.add("complete", value)
    return Sweep.open(name, root=root)


def test_leaders_are_those_of_the_command(tmp_path: Path) -> None:
    names = ("first", "second")
    found = compare(_made(tmp_path, "first", 0.5, 0.2), _made(tmp_path, "second", 0.4), top=1)
    line = ["compare", *names, "--top", "1", "--json", "--root", str(tmp_path)]
    printed = json.loads(CliRunner().invoke(app, line).stdout)
    assert list(found.leaders.index) == [("first", 1), ("second", 0)]
    assert list(found.leaders["val/loss"]) == [0.2, 0.4]
    for leader, (_, row) in zip(printed["leaders"], found.leaders.iterrows(), strict=True):
        assert [row[name] for name in printed["differing"]] == [
            leader["params"][name] for name in printed["differing"]
        ]
    assert found.same == printed["same"] == {"train.batch_size": 32}


def test_several_metrics_have_a_column_each(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, metric="[val/loss, val/accuracy]", mode="[min, max]")
    made.add("complete", (0.5, 0.9))
    made.add("complete", (0.6, 0.8))
    made.add("failed")
    leaders = compare(Sweep.open("small", root=tmp_path)).leaders
    assert list(leaders["pareto"]) == [True, False]
    assert leaders.loc[("small", 0), ["val/loss", "val/accuracy"]].tolist() == [0.5, 0.9]


def test_sweep_without_trials_gives_an_empty_frame(tmp_path: Path) -> None:
    leaders = compare(_made(tmp_path, "empty")).leaders
    assert leaders.empty
    assert "val/loss" in leaders


def test_sweeps_without_a_common_order_are_refused(tmp_path: Path) -> None:
    first = _made(tmp_path, "first", 0.5)
    with pytest.raises(Incomparable):
        compare(first, _made(tmp_path, "other", 0.5, metric="val/perplexity"))
    with pytest.raises(ValueError, match="at least one sweep"):
        compare()
    pd.testing.assert_frame_equal(compare(first, first).leaders, compare(first).leaders)
