"""Which failures end a sweep, and when retries of a trial end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sweeps.reconcile.failure_policy import (
    UNCOUNTED_CRASHES,
    CrashCounter,
    Failure,
    RepeatedFailureDetector,
)
from trainable.errors import (
    AllCheckpointsDamaged,
    ConfigError,
    NonFiniteLoss,
    OutOfMemory,
    TaskError,
    WithoutEffect,
)
from trainable.failures import failure_of

RAISED = Failure("error", "ValueError: out of cheese", "Traceback ...", "task.py:7")


def _tell(policy: RepeatedFailureDetector, failures: list[Failure]) -> None:
    for number, failure in enumerate(failures):
        policy.failed(number, failure)


def test_three_equal_failures_end_the_sweep() -> None:
    policy = RepeatedFailureDetector(3)
    _tell(policy, [RAISED, replace(RAISED, reason="ValueError: out of brie")])
    assert policy.abort_reason is None
    policy.failed(7, RAISED)
    assert policy.abort_reason is not None
    assert policy.abort_reason.numbers == (0, 1, 7)
    assert policy.abort_reason.cause == (
        "trials 0, 1 and 7 failed in the same way: ValueError: out of cheese (task.py:7)"
    )


def test_successful_trial_resets_the_count() -> None:
    policy = RepeatedFailureDetector(2)
    policy.failed(0, RAISED)
    policy.passed()
    policy.failed(2, RAISED)
    assert policy.abort_reason is None


@pytest.mark.parametrize(
    "other",
    [
        replace(RAISED, place="task.py:8"),
        replace(RAISED, reason="KeyError: 'cheese'"),
        replace(RAISED, reason="RankFailed: rank 1: KeyError: 'cheese'"),
        Failure("lost", "lost: its process ended", ""),
    ],
)
def test_another_type_or_place_is_another_way(other: Failure) -> None:
    policy = RepeatedFailureDetector(2)
    _tell(policy, [RAISED, other])
    assert policy.abort_reason is None


def test_failures_of_any_rank_are_counted_together() -> None:
    policy = RepeatedFailureDetector(3)
    on_another = [f"RankFailed: rank {rank}: {RAISED.reason}" for rank in (1, 10)]
    _tell(policy, [RAISED, *(replace(RAISED, reason=reason) for reason in on_another)])
    assert policy.abort_reason is not None
    assert policy.abort_reason.numbers == (0, 1, 2)


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (NonFiniteLoss(3, math.nan), False),
        (OutOfMemory("7 GiB"), False),
        (ConfigError("512, and there are 100 samples", key="train.batch_size"), False),
        (ConfigError("bf16, and this device has none", key="train.precision"), True),
        (ConfigError("width is 6"), True),
        (WithoutEffect("was searched, and run did not read it", key="train.batch_size"), True),
        (TaskError("loss() returned None"), True),
        (AllCheckpointsDamaged("step 3"), True),
        (ValueError("train.batch_size: out of cheese"), True),
    ],
)
def test_failures_that_parameters_cause_do_not_count(error: Exception, counts: bool) -> None:
    policy = RepeatedFailureDetector(2, searched={"train.batch_size"})
    _tell(policy, [Failure(**failure_of(error))] * 2)
    assert (policy.abort_reason is not None) is counts


def test_limit_of_one_stops_at_the_first_and_none_never() -> None:
    strict, lenient = RepeatedFailureDetector(1), RepeatedFailureDetector(0)
    for policy in (strict, lenient):
        _tell(policy, [RAISED] * 9)
    assert strict.abort_reason is not None
    assert strict.abort_reason.cause.startswith("trial 0 failed: ValueError")
    assert lenient.abort_reason is None


@pytest.mark.parametrize("max_retries", [0, 3])
def test_consecutive_losses_without_progress_are_counted(max_retries: int) -> None:
    losses = CrashCounter(max_retries)
    losses.started(4, newest=0)
    uncounted = [losses.lost(4, newest) for newest in (0, 0, 1, 1, 1)]
    assert uncounted == [True] * 5, "the machine's losses depend on no number of the user's"
    assert [losses.lost(4, 1) for _ in range(max_retries + 1)] == [True] * max_retries + [False]
    assert losses.in_a_row(4) == UNCOUNTED_CRASHES + max_retries + 1


def test_trial_that_progresses_each_time_is_never_given_up() -> None:
    losses = CrashCounter(max_retries=0)
    losses.started(0, newest=5)
    assert all(losses.lost(0, newest) for newest in range(6, 50))
    assert [losses.lost(0, 49) for _ in range(3)] == [True, True, False]
