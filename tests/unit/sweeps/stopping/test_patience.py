"""Patience: the reports alone tell that a trial has ended, and as its own run decided."""

from __future__ import annotations

import itertools
import math

import pytest

from sweeps.stopping.patience import Patience
from trainable.base_run import is_better, is_out_of_patience

VALUES = (1.0, 2.0, 3.0, math.nan, math.inf)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_reports_tell_what_the_run_decided(mode, limit):
    patience = Patience(limit, mode == "min", last=5, word="report")
    for curve in itertools.product(VALUES, repeat=4):
        best, since, made = None, 0, {}
        for number, value in enumerate(curve, start=1):
            better = is_better(value, best, mode)
            best, since = (value, 0) if better else (best, since + 1)
            made[number] = value
            ended = is_out_of_patience(limit, since)
            reason = patience.reason(made, "val/loss")
            assert (reason is not None) == (ended and best is not None)
            if ended:
                break


def test_reason_names_the_best_report():
    patience = Patience(2, True, last=9, word="epoch")
    assert patience.reason({1: 0.5, 2: 0.4, 3: 0.45}, "val/loss") is None
    assert patience.reason({1: 0.5, 2: 0.4, 3: 0.45, 4: 0.4}, "val/loss") == (
        "patience at epoch 4: val/loss not better than 0.4 of epoch 2 in 2 epochs"
    )


def test_last_report_of_the_budget_needs_no_reason():
    patience = Patience(2, True, last=4, word="epoch")
    assert patience.reason({1: 0.5, 2: 0.4, 3: 0.45, 4: 0.4}, "val/loss") is None


def test_reports_without_the_metric_do_not_count():
    patience = Patience(2, True, last=90, word="epoch")
    assert patience.reason({10: 0.5, 20: 0.6}, "val/loss") is None
    assert patience.reason({10: 0.5, 20: 0.6, 30: 0.7}, "val/loss") is not None
