"""The digits equal scikit-learn's, without its slow import."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

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


def test_without_the_file_scikit_learn_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda _: None)
    pixels, classes = digits._load()
    assert pixels.shape == (1797, 64)
    assert classes.shape == (1797,)
