"""Rows 22, 24 and 31: trials that fail, each by its kind, and workers that die again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.ledger import Ledger
from tests.chaos.harness import (
    PARALLEL,
    Sandbox,
    assert_all,
    assert_ended,
    assert_no_residue,
    assert_says_how_to_go_on,
)
from tests.chaos.outcome import read_outcome
from tests.chaos.sandbox import MICRO_BATCHES, SERIAL, STEPS

_TROUBLED = '''
"""The probe's task, in trouble for as long as a file of that name lies beside its marks."""

import os
from pathlib import Path

import torch

import probe_task


def there_is(trouble):
    return (Path(os.environ[probe_task.VARIABLE]) / trouble).exists()


class Probe(probe_task.Probe):
    passes = 0

    def loss(self, model, batch):
        inputs, targets = batch
        if not model.training:
            return super().loss(model, batch)
        if there_is("raises"):
            raise ValueError("out of cheese")
        if there_is("poison") and bool((inputs[:, 0] == inputs_of_sample(60)).any()):
            os._exit(9)
        Probe.passes += 1
        # A save that is due waits for the one before: five steps commit at least one.
        if there_is("tired") and Probe.passes == 11:
            os._exit(9)
        if there_is("greedy") and len(inputs) > 6:
            raise torch.OutOfMemoryError("out of memory")
        total, weight = super().loss(model, batch)
        if there_is("overflows") and bool((inputs[:, 0] == inputs_of_sample(60)).any()):
            total.register_hook(lambda gradient: gradient * float("inf"))
        return (total * float("nan"), weight) if there_is("diverges") else (total, weight)


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


@pytest.mark.fault(31, "every trial's code raises; once it is corrected, the others succeed")
@pytest.mark.parametrize("troubled", [SERIAL], indirect=True, ids=["serial"])
def test_row_31_code_that_raises(troubled: Sandbox) -> None:
    raises = _trouble(troubled, "raises")
    ended = troubled.run().wait()
    assert_says_how_to_go_on(
        ended,
        3,
        r"^stopped: trials 0, 1 and 2 failed in the same way: ValueError: out of cheese "
        r"\(.*troubled_task\.py:\d+\)$",
    )
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
@pytest.mark.fault(22, "a loss that is NaN in every trial: failed, none retried, none the best")
def test_row_22_diverging(troubled: Sandbox) -> None:
    _trouble(troubled, "diverges")
    ended = troubled.run().wait()
    assert_ended(ended, 3, "^stopped: no trial succeeded, 4 failed; trial .: non_finite: the loss")
    assert ended.last_line == "sweep resume chaos -s trials=8"
    found = read_outcome(troubled)
    assert [t["state"] for t in found.trials] == ["failed"] * 4  # FAIL in the study
    assert all(
        t["reason"].startswith("non_finite: the loss is nan at step 1") for t in found.trials
    )
    assert {run.tags["failure.kind"] for n in range(4) for run in found.runs[n]} == {"non_finite"}
    assert found.status["best"] is None
    assert all(t["checkpoint"] is None for t in found.trials)
    assert_no_residue(troubled)


_ONE = SERIAL.replace("trials: 4", "trials: 1")


@pytest.mark.chaos
@pytest.mark.fault(23, "a gradient that overflows in each epoch, and the power goes off after it")
def test_row_23_overflow(tmp_path: Path) -> None:
    spec = _ONE.replace("probe_task:", "troubled_task:")
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
        assert reference.history(0)["num_skipped_steps", STEPS - skipped] == skipped
        driver, _ = sandboxes[1].run_to("backward", 17)
        driver.power_off()
        assert_all(sandboxes[1], reference, sandboxes[1].go_on())
    finally:
        for sandbox in sandboxes:
            sandbox.close()


@pytest.mark.chaos
@pytest.mark.fault(31, "a worker that dies at the same step every time: given up, and said so")
@pytest.mark.parametrize("troubled", [_ONE], indirect=True, ids=["one trial"])
def test_row_31_lost_at_the_same_step(troubled: Sandbox) -> None:
    poison = _trouble(troubled, "poison")
    started = time.monotonic()
    ended = troubled.run().wait()
    assert_ended(ended, 3, "^stopped: the trial failed: lost: its process ended 3 times in a row ")
    (trial,) = troubled.cli.json("trials", "chaos")
    assert trial["state"] == "failed"
    assert trial["reason"] == ("lost: its process ended 3 times in a row without a new checkpoint")
    assert 3 <= trial["attempts"] <= 5, f"{trial['attempts']} in {time.monotonic() - started} s"
    assert read_outcome(troubled).runs[0][0].tags["failure.kind"] == "lost"
    assert_no_residue(troubled)
    poison.unlink()


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
    _trouble(troubled, "greedy")
    assert_ended(troubled.run().wait(), 3, "^stopped: the trial failed: oom: the memory of the")
    assert_no_residue(troubled)


_HALVED = f"{_ONE}failures: {{out_of_memory: halve_batch}}\n".replace("fp16", "fp32")


@pytest.mark.chaos
@pytest.mark.fault(24, "out of memory: the same steps in smaller parts, also when resumed")
@pytest.mark.parametrize("troubled", [_HALVED], indirect=True, ids=["one trial"])
def test_row_24_out_of_memory_halves(troubled: Sandbox) -> None:
    greedy = _trouble(troubled, "greedy")
    place = troubled.probe.hold("backward", 4 * 8)  # in the second epoch, with four micro-batches
    driver = troubled.run()
    driver.until_held(place)
    driver.power_off()
    assert Ledger.open(troubled.paths.ledger).trial(0).accumulation == 2 * MICRO_BATCHES
    greedy.unlink()
    troubled.probe.let_go(place)
    before = troubled.probe.count("forward")
    assert_ended(troubled.resume().wait(), 0)
    (trial,) = troubled.cli.json("trials", "chaos")
    assert (trial["state"], trial["step"]) == ("complete", STEPS)
    assert troubled.cli.json("show", "chaos", "0")["accumulation"] == 2 * MICRO_BATCHES
    left = troubled.probe.count("forward") - before
    assert left % (2 * MICRO_BATCHES) == 0, "went back to the larger micro-batches"
    (run,) = read_outcome(troubled).runs[0]
    assert run.tags["gradsweep.accumulation"] == str(2 * MICRO_BATCHES)
    assert run.status == "FINISHED"
