"""The digits equal scikit-learn's, without its slow import."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from trainable.errors import ConfigError
from trainable.tasks import digits


def test_digits_equal_scikit_learns() -> None:
    for found, wanted in zip(digits._load(), load_digits(return_X_y=True), strict=True):
        assert np.array_equal(found, wanted)


def test_digits_do_not_import_scikit_learn() -> None:
    program = (
        "import sys; from trainable.tasks.digits import Digits; "
        "data = Digits(model='mlp').build_data(); "
        "print(len(data.train[0]), 'sklearn' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["1438", "False"], done.stderr


def test_each_image_is_held_out_in_one_fold() -> None:
    folds = [digits.Digits(fold=fold, folds=5).build_data() for fold in range(5)]
    held_out = torch.cat([data.val[0] for data in folds])
    assert [len(data.val[0]) for data in folds] == [359, 359, 360, 359, 360]
    assert all(len(data.train[0]) + len(data.val[0]) == 1797 for data in folds)
    every = torch.cat([folds[0].train[0], folds[0].val[0]])
    assert torch.equal(held_out.flatten(1).sum(0), every.flatten(1).sum(0))
    with pytest.raises(ConfigError, match="fold is 5 of 5 folds"):
        digits.Digits(fold=5, folds=5)


def test_without_the_file_scikit_learn_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda _: None)
    pixels, classes = digits._load()
    assert pixels.shape == (1797, 64)
    assert classes.shape == (1797,)
