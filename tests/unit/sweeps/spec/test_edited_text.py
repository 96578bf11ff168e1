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
        ("trials", "7", "trials: 24    # enough", "trials: 7     # enough"),
        ("name", "tall", "name: small   # a", "name: tall    # a"),
        ("early_stopping.reduction", "4", "reduction: 3}", "reduction: 4}"),
        (
            "early_stopping",
            "{scheduler: none}",
            "{scheduler: asha, reduction: 3}  #",
            f"{'{scheduler: none}':<32} #",
        ),
        ("train.batch_size", "8", "batch_size: 64 #", "batch_size: 8  #"),
        (
            "space.train.optimizer.lr",
            "{uniform: [1e-4, 1]}",
            "{loguniform: [0.1, 1]}",
            "{uniform: [1e-4, 1]}",
        ),
        ("seed", "3", "1]}\n", "1]}\nseed: 3\n"),
        ("budget.epochs", "5", "1]}\n", "1]}\nbudget:\n  epochs: 5\n"),
    ],
)
def test_value_is_replaced_and_comments_stay(key: str, value: str, old: str, new: str) -> None:
    assert with_values(TEXT, [(key, value)]) == TEXT.replace(old, new)


@pytest.mark.parametrize("item", ["  - a", "- a"])
def test_indentation_of_lists_stays(item: str) -> None:
    text = f"metric:\n{item}  # one\n"
    assert with_values(text, [("trials", "3")]) == f"{text}trials: 3\n"


def test_key_below_a_single_value_is_left_to_the_caller() -> None:
    assert with_values("search: auto\n", [("search.sampler", "tpe")]) is None
