"""Values that are replaced in the text of a YAML file."""

from __future__ import annotations

import pytest

from sweeps.spec.yaml_reader import with_values

TEXT = """\
# which rate?
name: small   # a name
trials: 24    # enough
metric: "val/loss"
early_stopping: {scheduler: asha, reduction: 3}  # one in three
train:
  batch_size: 64 # as before
space:
  train.optimizer.lr: {loguniform: [0.1, 1]}
"""


@pytest.mark.parametrize(
    ("key", "value", "old", "new"),
    [
        ("trials", "7", "trials: 24    # enough", "trials: 7    # enough"),
        ("name", "tall", "name: small   # a", "name: tall   # a"),
        ("metric", "val/accuracy", 'metric: "val/loss"', "metric: val/accuracy"),
        ("early_stopping.reduction", "4", "reduction: 3}", "reduction: 4}"),
        ("early_stopping.scheduler", "median", "scheduler: asha,", "scheduler: median,"),
        ("train.batch_size", "8", "batch_size: 64 #", "batch_size: 8 #"),
    ],
)
def test_value_is_replaced_and_comments_stay(key: str, value: str, old: str, new: str) -> None:
    assert with_values(TEXT, "s.yaml", [(key, value)]) == TEXT.replace(old, new)


def test_new_key_of_the_top_level_is_added_at_the_end() -> None:
    assert with_values(TEXT.strip(), "s", [("seed", "3")]) == TEXT + "seed: 3\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (TEXT, "early_stopping"),
        (TEXT, "space.train.optimizer.lr"),
        (TEXT, "budget.epochs"),
        ("{trials: 3}", "seed"),
        ("trials: [", "trials"),
    ],
)
def test_other_changes_are_left_to_the_caller(text: str, key: str) -> None:
    assert with_values(text, "s.yaml", [(key, "5")]) is None
