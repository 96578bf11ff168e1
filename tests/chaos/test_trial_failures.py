"""Rows 22, 23, 24 and 31: failing trials, skipped steps, and workers that die repeatedly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from sweeps.ledger.ledger import Ledger
from tests.chaos.invariants import (
    PARALLEL,
    References,
    Sandbox,
    assert_all,
    assert_ended,
    assert_no_residue,
)
from tests.chaos.outcome import read_outcome
from tests.chaos.sandbox import INTERVAL, MICRO_BATCHES, SERIAL, STEPS
from trainable.checkpoint import CheckpointStore

_TROUBLED = '''
"""The probe's task, in trouble for as long as a file of that name lies beside its marks, for all
trials, or with a number behind the name for one.
"""

import os
import sys
from pathlib import Path

import torch

import probe_task


PLACE = Path(os.environ[probe_task.VARIABLE])


def there_is(trouble):
    # What a trial prints goes to the log in its own directory.
    number = int(Path(sys.stdout.name).parent.name)
    return (PLACE / trouble).exists() or (PLACE / f"{trouble}-{number}").exists()


def passes_of_this_process():
    # In a file, because a resumed run restores what a task keeps.
    with open(PLACE / f"passes-{os.getpid()}", "ab", buffering=0) as file:
        file.write(b".")
        return file.tell()


class Probe(probe_task.Probe):
    def loss(self, model, batch):
        inputs, targets = batch
        if not model.training:
            return super().loss(model, batch)
        if there_is("raises"):
            raise ValueError("out of cheese")
        if there_is("poison") and bool((inputs[:, 0] == inputs_of_sample(60)).any()):
            os._exit(9)
        # A save that is due waits for the one before: five steps commit at least one.
        if there_is("tired") and passes_of_this_process() == 11:
            os._exit(9)
        if there_is("starves") or (there_is("greedy") and len(inputs) > 6):
            raise torch.OutOfMemoryError("out of memory")
        total, weight = super().loss(model, batch)
        if there_is("overflows") and bool((inputs[:, 0] == inputs_of_sample(60)).any()):
            total.register_hook(lambda gradient: gradient * float("inf"))
        for factor in ("nan", "inf"):
            if there_is(f"diverges-to-{factor}"):
                return total * float(factor), weight
        return total, weight


def inputs_of_sample(index):
    return torch.randn(160, 8, generator=torch.Generator().manual_seed(5))[index, 0]
'''


@pytest.fixture
def troubled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox whose task can be in trouble; the parameter is its spec."""
    spec = getattr(request, "param", PARALLEL)
    sandbox = Sandbox(tmp_path / "sweep", spec.replace("probe_task:", "troubled_task:"))
    sandbox.cli.write("troubled_task.py", _TROUBLED)
    yield sandbox
    sandbox.close()


def _trouble(sandbox: Sandbox, name: str) -> Path:
    file = sandbox.probe.directory / name
    file.touch()
    return file


@pytest.mark.chaos
@pytest.mark.fault(31, "every trial's code raises; once it is corrected, the others succeed")
@pytest.mark.parametrize("troubled", [SERIAL], indirect=True, ids=["serial"])
def test_row_31_code_that_raises(troubled: Sandbox) -> None:
    raises = _trouble(troubled, "raises")
    ended = troubled.run().wait()
    assert_ended(
        ended,
        3,
        r"^stopped: trials 0, 1 and 2 failed in the same way: ValueError: out of cheese "
        r"\(.*troubled_task\.py:\d+\)$",
    )
    assert ended.last_line == "sweep resume chaos --retry"  # which also continues the sweep
    assert "read more: sweep show chaos 2" in ended.text
    assert "raise ValueError" in troubled.cli.ok("show", "chaos", "2")
    assert troubled.cli("best", "chaos").returncode == 3
    found = read_outcome(troubled)
    assert [t["state"] for t in found.trials] == ["failed"] * 3
    assert [t["attempts"] for t in found.trials] == [1] * 3
    for number in range(3):
        (run,) = found.runs[number]
        assert run.status == "FAILED"
        assert run.tags["reason"] == "ValueError: out of cheese"
        assert run.tags["failure.kind"] == "error"
    assert found.runs[None][0].status == "FAILED"
    assert_no_residue(troubled)

    raises.unlink()
    assert_ended(troubled.resume().wait(), 0)
    after = read_outcome(troubled)
    assert [t["state"] for t in after.trials] == ["failed"] * 3 + ["complete"]
    assert after.status["best"]["number"] == 3
    assert after.runs[None][0].status == "FINISHED"


@pytest.mark.chaos
@pytest.mark.fault(
    22, "a loss that is NaN or infinite in every trial: none retried, none the best"
)
@pytest.mark.parametrize("factor", ["nan", "inf"])
def test_row_22_diverging(troubled: Sandbox, factor: str) -> None:
    _trouble(troubled, f"diverges-to-{factor}")
    ended = troubled.run().wait()
    assert_ended(ended, 3, "^stopped: no trial succeeded, 4 failed; trial .: non_finite: the loss")
    assert ended.last_line == "sweep resume chaos -s trials=8"
    found = read_outcome(troubled)
    assert _optuna_states(troubled) == [TrialState.FAIL] * 4
    assert [t["state"] for t in found.trials] == ["failed"] * 4
    assert [t["attempts"] for t in found.trials] == [1] * 4
    assert all(
        t["reason"].startswith(f"non_finite: the loss is {factor} at step 1") for t in found.trials
    )
    assert {run.tags["failure.kind"] for n in range(4) for run in found.runs[n]} == {"non_finite"}
    assert found.status["best"] is None
    assert all(t["checkpoint"] is None for t in found.trials)
    assert_no_residue(troubled)


@pytest.mark.chaos
@pytest.mark.fault(22, "a loss that becomes NaN in the middle: that step changes no parameter")
@pytest.mark.parametrize("troubled", [SERIAL], indirect=True, ids=["serial"])
def test_row_22_diverging_in_the_middle(troubled: Sandbox, references: References) -> None:
    driver, _ = troubled.run_to("backward", 47)  # the first half of the third trial's fourth step
    store = CheckpointStore(troubled.paths.trial(2))
    driver.until(store.newest)
    before = store.newest()
    _trouble(troubled, "diverges-to-nan")
    troubled.probe.release("backward-47")
    assert_ended(driver.wait(), 0)
    found = assert_all(troubled, references.of(SERIAL), only=(0, 1))
    complete, pruned, failed = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL
    assert _optuna_states(troubled) == [complete, pruned, failed, failed]
    assert found.trials[2]["reason"].startswith("non_finite: the loss is nan at step 4;")
    assert (store.newest(), before and before.step) == (before, INTERVAL)


def _optuna_states(sandbox: Sandbox) -> list[TrialState]:
    """How the study itself has the trials' ends."""
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{sandbox.paths.ledger}")
    return [trial.state for trial in study.trials]


_ONE = SERIAL.replace("trials: 4", "trials: 1")


_WARMUP = 3
_RAMPED = _ONE.replace(
    "precision: fp16", f"precision: fp16, schedule: {{name: linear, warmup: {_WARMUP}, final: 0}}"
)


@pytest.mark.chaos
@pytest.mark.fault(23, "a gradient that overflows in each epoch, and the power goes off after it")
def test_row_23_overflow(tmp_path: Path) -> None:
    """The schedule is that of the steps that were taken: up to the peak, then towards 0 at step
    15, which is not reached.
    """
    spec = _RAMPED.replace("probe_task:", "troubled_task:")
    sandboxes = [Sandbox(tmp_path / name, spec) for name in ("reference", "sweep")]
    try:
        for sandbox in sandboxes:
            sandbox.cli.write("troubled_task.py", _TROUBLED)
            _trouble(sandbox, "overflows")
        assert_ended(sandboxes[0].run().wait(), 0)
        reference = read_outcome(sandboxes[0])
        (trial,) = reference.trials
        skipped = 3  # one window of each epoch
        assert (trial["epoch"], trial["step"]) == (3, STEPS - skipped)
        history, peak = reference.history(0), trial["params"]["train.optimizer.lr"]
        assert history["num_skipped_steps", STEPS - skipped] == skipped
        up = [(step + 1) / (_WARMUP + 1) for step in range(_WARMUP)]
        down = [(STEPS - step) / (STEPS - _WARMUP) for step in range(_WARMUP, STEPS - skipped)]
        rates = [history["train/lr", step + 1] for step in range(STEPS - skipped)]
        assert rates == pytest.approx([peak * factor for factor in up + down])
        driver, _ = sandboxes[1].run_to("backward", 17)
        driver.power_off()
        assert_all(sandboxes[1], reference, sandboxes[1].resume_to_end())
    finally:
        for sandbox in sandboxes:
            sandbox.close()


@pytest.mark.chaos
@pytest.mark.fault(31, "a worker that dies at the same step every time: given up, and said so")
@pytest.mark.parametrize(
    "troubled", [f"{_ONE}failures: {{max_retries: 2}}\n"], indirect=True, ids=["one trial"]
)
def test_row_31_lost_at_the_same_step(troubled: Sandbox) -> None:
    """Without progress a trial is lost twice before it counts, and here twice more as allowed;
    the next time is one too many.
    """
    poison = _trouble(troubled, "poison")
    ended = troubled.run().wait()
    reason = (
        "lost: its process ended 5 times in a row without a new checkpoint; it ended with exit "
        "status 9"
    )
    assert_ended(ended, 3, f"^stopped: the trial failed: {reason}")
    assert ended.last_line == "sweep resume chaos --retry"
    (trial,) = troubled.cli.json("trials", "chaos")
    assert trial["state"] == "failed"
    assert trial["reason"] == reason
    # Five that count, one or two that came further, and one that only heard that it is over.
    assert 5 <= trial["attempts"] <= 8
    assert read_outcome(troubled).runs[0][0].tags["failure.kind"] == "lost"
    assert_no_residue(troubled)
    poison.unlink()


@pytest.mark.chaos
@pytest.mark.fault(31, "a worker that dies at the same step every time; the other trials finish")
def test_row_31_lost_at_the_same_step_beside_others(
    troubled: Sandbox, references: References
) -> None:
    _trouble(troubled, "poison-1")
    ended = troubled.run().wait()
    assert_ended(ended, 0, r"^trial 1 failed.*: lost: its process ended 3 times in a row ")
    found = assert_all(troubled, references.of(PARALLEL), only=(0, 2, 3))
    assert [t["state"] for t in found.trials] == ["complete", "failed", "complete", "complete"]
    assert found.trials[1]["attempts"] >= 3
    assert found.status["best"]["number"] != 1


@pytest.mark.chaos
@pytest.mark.fault(31, "workers that die all the time, each a little further: nothing is counted")
@pytest.mark.parametrize(
    "troubled", [f"{_ONE}failures: {{max_retries: 0}}\n"], indirect=True, ids=["one trial"]
)
def test_row_31_lost_but_further_each_time(troubled: Sandbox) -> None:
    _trouble(troubled, "tired")
    assert_ended(troubled.run().wait(), 0)
    (trial,) = troubled.cli.json("trials", "chaos")
    assert (trial["state"], trial["step"]) == ("complete", STEPS)
    assert trial["attempts"] >= 3


@pytest.mark.chaos
@pytest.mark.fault(24, "out of memory: failed by policy")
@pytest.mark.parametrize("troubled", [_ONE], indirect=True, ids=["one trial"])
def test_row_24_out_of_memory_fails(troubled: Sandbox) -> None:
    """The error is raised by the task, as torch raises it; no memory is exhausted."""
    _trouble(troubled, "greedy")
    ended = troubled.run().wait()
    assert_ended(ended, 3, "^stopped: the trial failed: oom: the memory of the")
    assert ended.last_line == "sweep resume chaos -s trials=2"
    found = read_outcome(troubled)
    (trial,) = found.trials
    assert (trial["state"], trial["attempts"]) == ("failed", 1), (
        "failed by policy, not tried again"
    )
    (run,) = found.runs[0]
    assert (run.status, run.tags["failure.kind"]) == ("FAILED", "oom")
    assert_no_residue(troubled)


@pytest.mark.chaos
@pytest.mark.fault(24, "out of memory: failed by policy, while a neighbour is in training")
def test_row_24_neighbours_are_unaffected(troubled: Sandbox, references: References) -> None:
    driver = troubled.run()
    places = []
    for number in (5, 10):  # the first process that comes there stays; then it is the other one
        places.append(troubled.probe.hold("forward", number))
        driver.until_held(places[-1])
    _trouble(troubled, "starves-1")
    for place in places:
        troubled.probe.release(place)
    assert_ended(driver.wait(), 0, "^trial 1 failed.*: oom: ")
    found = assert_all(troubled, references.of(PARALLEL), only=(0, 2, 3))
    assert [t["state"] for t in found.trials] == ["complete", "failed", "complete", "complete"]
    assert [t["attempts"] for t in found.trials] == [1] * 4


_HALVED = f"{_ONE}failures: {{out_of_memory: halve_batch}}\n".replace("fp16", "fp32")


@pytest.mark.chaos
@pytest.mark.fault(24, "out of memory: the same steps in smaller parts, also when resumed")
@pytest.mark.parametrize("troubled", [_HALVED], indirect=True, ids=["one trial"])
def test_row_24_out_of_memory_halves(troubled: Sandbox, references: References) -> None:
    greedy = _trouble(troubled, "greedy")
    place = troubled.probe.hold("backward", 4 * 8)  # in the second epoch, with four micro-batches
    driver = troubled.run()
    driver.until_held(place)
    driver.power_off()
    assert Ledger.open(troubled.paths.ledger).trial(0).accumulation == 2 * MICRO_BATCHES
    greedy.unlink()
    troubled.probe.release(place)
    before = troubled.probe.count("forward")
    ended = troubled.resume().wait()
    # From its first step on, it is the sweep that was asked for these micro-batches at once.
    finer = _HALVED.replace("accumulation: 2", f"accumulation: {2 * MICRO_BATCHES}")
    found = assert_all(troubled, references.of(finer), ended)
    assert troubled.cli.json("show", "chaos", "0")["accumulation"] == 2 * MICRO_BATCHES
    left = troubled.probe.count("forward") - before
    assert left % (2 * MICRO_BATCHES) == 0, "went back to the larger micro-batches"
    (run,) = found.runs[0]
    assert run.tags["gradsweep.accumulation"] == str(2 * MICRO_BATCHES)
    assert run.status == "FINISHED"
