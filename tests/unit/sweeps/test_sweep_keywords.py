"""`Sweep(...)`: Python values as keys of a sweep file, with the file's own errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sweeps import SpecError, Sweep, SweepCommandError, UserError

KEYS: dict[str, Any] = {"name": "x", "task": "digits", "metric": "val/loss", "mode": "min"}
BATCH = "train.batch_size"


@pytest.mark.parametrize(
    "options", [[32, 64], (32, 64), range(32, 65, 32), np.array([32, 64]), [np.int64(32), 64]]
)
def test_python_values_are_those_of_yaml(options: Any) -> None:
    sweep = Sweep(**KEYS, trials=np.int32(2), space={BATCH: {"choice": options}})
    assert f"{BATCH}: {{choice: [32, 64]}}" in sweep.to_yaml()
    assert "trials: 2\n" in sweep.to_yaml()


@pytest.mark.parametrize("value", [{32, 64}, object(), 1j, b"x"])
def test_value_without_a_form_in_yaml_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="which a sweep file cannot hold"):
        Sweep(**KEYS, trials=2, space={BATCH: {"choice": value}})


def test_error_names_the_key_and_no_position() -> None:
    with pytest.raises(SpecError) as caught:
        Sweep(**KEYS, trails=8)
    (missing, unknown) = str(caught.value).splitlines()
    assert missing.startswith("Sweep(...): trials: is missing")
    assert unknown.startswith("Sweep(...): trails: unknown key 'trails'; did you mean 'trials'?")


def test_check_returns_the_plan_and_names_no_file_of_its_own() -> None:
    space = {"train.optimizer.lr": {"loguniform": [1e-4, 1e-1]}}
    sweep = Sweep(**KEYS | {"mode": "max"}, trials=2, budget={"epochs": 3}, space=space)
    checked = sweep.check()
    assert (checked["plan"]["trials"], checked["plan"]["epochs"]) == (2, 3)
    assert checked["warnings"][0].startswith("mode is max for val/loss")
    with pytest.raises(SweepCommandError) as caught:
        Sweep(**KEYS | {"metric": "val/los"}, trials=2, space=space).check()
    assert caught.value.exit_code == 2
    assert str(caught.value).splitlines()[1].startswith("Sweep(...): metric: 'val/los' is not")
