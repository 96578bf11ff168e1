"""Custom loops on several ranks: in step, with any framework's own group, resumed exactly."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import pytest
import torch

from tests.loop_cases import Case, config_of, other_ranks
from trainable.build import open_trainer
from trainable.checkpoint import CheckpointStore
from trainable.errors import ConfigError, RankFailed, RankLost, TaskError
from trainable.loop_context import restored_state
from trainable.ranks import ALONE, Ranks
from trainable.store.metrics_file import read_rows
from trainable.watch.diagnostics import MEASURED

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # advice of the frameworks
]
PLAIN = "tests.loop_cases:plain"
FRAMEWORKS = {
    "accelerate": ("sweeps.examples.accelerate_loop:run", 256),
    "transformers": ("tests.framework_loops:hugging_face", 16),
    "lightning": ("tests.framework_loops:lightning", 16),
}
INSTALLED = [
    name
    for name in FRAMEWORKS
    if importlib.util.find_spec(name) is not None or os.environ.get("CI") == "true"
]


class Outcome:
    """How a run ended on the first rank."""

    error: Exception | None = None
    resumed_at = 0
    initialized = False
    environment: dict[str, str]
    signals: list[str]


def _run(case: Case, stop_after: int | None = None) -> Outcome:
    outcome, before = Outcome(), dict(os.environ)
    reports = 0

    def should_stop() -> bool:
        nonlocal reports
        reports += 1
        return reports == stop_after

    try:
        with (
            case.join() as ranks,
            open_trainer(
                case.config,
                case.directory,
                device="cpu",
                ranks=ranks,
                should_stop=should_stop,
                accept_workers=True,
            ) as run,
        ):
            outcome.resumed_at = run.resumed_at
            outcome.environment = {k: v for k, v in os.environ.items() if before.get(k) != v}
            outcome.signals = [said for report in run.events() for said in report.signals]
    except Exception as problem:
        outcome.error = problem
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
    assert not torch.distributed.is_initialized()
    return outcome


def _curve(directory) -> list[dict[str, float]]:
    rows = [row.metrics for row in read_rows(directory)]
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


def _state(directory) -> dict[str, Any]:
    store = CheckpointStore(directory)
    return store.load(store.newest())


def _assert_same(one: Any, other: Any, tolerance: float = 0.0) -> None:
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            _assert_same(value, other[key], tolerance)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            _assert_same(each, its, tolerance)
    else:
        assert one == other


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One group of processes runs all loops on two or three ranks; another one, that is killed."""
    base = tmp_path_factory.mktemp("loops")
    dies = Case(config_of(PLAIN, in_epoch_2="die"), base / "killed")
    # a loss that falls is never better
    impatient = config_of(PLAIN, workers=3).model_copy(update={"mode": "max", "patience": 1})
    cases = {  # the failed one first: the processes of the ranks live on
        "raises": Case(config_of(PLAIN, workers=3, in_epoch_2="raise"), base / "raises"),
        "whole": Case(config_of(PLAIN, workers=3), base / "whole"),
        "stopped": Case(config_of(PLAIN, workers=3), base / "cut"),
        "resumed": Case(config_of(PLAIN, workers=3), base / "cut"),
        "patience": Case(impatient, base / "impatient"),
        "rank 1 ends early": Case(config_of(PLAIN, workers=3, skips=1), base / "early"),
        "rank 0 ends early": Case(config_of(PLAIN, workers=3, skips=0), base / "late"),
        "two": Case(config_of(PLAIN), base / "two"),
        "continued": Case(config_of(PLAIN), base / "killed"),
        "more stopped": Case(config_of(PLAIN), base / "more"),
        "more resumed": Case(config_of(PLAIN, workers=3), base / "more"),
        "fewer resumed": Case(config_of(PLAIN, workers=2), base / "fewer"),
        "apart": Case(config_of("tests.loop_cases:apart"), base / "apart"),
    }
    for name in INSTALLED:
        loop, batch_size = FRAMEWORKS[name]
        config = config_of(loop, batch_size=batch_size)
        cases[f"{name} whole"] = Case(config, base / f"{name} whole")
        cases[f"{name} stopped"] = Case(config, base / f"{name} cut")
        cases[f"{name} resumed"] = Case(config, base / f"{name} cut")
    with other_ranks([dies]), other_ranks([*cases.values()]) as ranks:
        outcomes = {"killed": _run(dies)}
        for name, case in cases.items():
            outcomes[name] = _run(case, 2 if name.endswith("stopped") else None)
            if name == "stopped":
                shutil.copytree(base / "cut", base / "fewer")
        ends = [dict(zip(cases, end.result, strict=True)) for end in ranks.ends()]
    return base, outcomes, ends


def test_loop_has_the_environment_of_torchrun(runs):
    environment = runs[1]["whole"].environment
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "3")
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


def test_first_rank_alone_reports(runs):
    base, outcomes, ends = runs
    assert outcomes["whole"].error is None
    assert [row["rank"] for row in _curve(base / "whole")] == [0.0] * 4
    assert [end["whole"] for end in ends] == ["", ""]


def test_first_rank_ends_all_by_patience(runs):
    base, outcomes, ends = runs
    assert outcomes["patience"].error is None
    assert len(_curve(base / "impatient")) == 2
    assert [end["patience"] for end in ends] == ["", ""]


def test_stopped_and_resumed_it_equals_a_whole_run(runs):
    """Up to rounding: DDP sums three ranks in another order in its first step."""
    base, outcomes, ends = runs
    assert outcomes["resumed"].resumed_at == 2
    values = [[row["val/loss"] for row in _curve(base / run)] for run in ("cut", "whole")]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    cut, whole = _state(base / "cut"), _state(base / "whole")
    _assert_same(cut["loop"], whole["loop"], 1e-5)
    _assert_same(cut["ranks"], whole["ranks"])
    own = [part["own"] for part in cut["ranks"]]
    assert not torch.equal(*own), "each rank keeps its own generator"
    assert [end["stopped"] for end in ends] == ["", ""]


@pytest.mark.parametrize(("name", "before", "now"), [("more", 2, 3), ("fewer", 3, 2)])
def test_ranks_resume_in_another_number(runs, name, before, now):
    """Each continues with its own generator, and a rank that is new begins one."""
    base, outcomes, ends = runs
    assert outcomes[f"{name} resumed"].error is None
    assert outcomes[f"{name} resumed"].resumed_at == 2
    assert [end[f"{name} resumed"] for end in ends] == ["", ""]
    others = [part["own"] for part in _state(base / name)["ranks"]]
    assert len(others) == now - 1
    for rank, state in enumerate(others, start=1):
        generator = torch.Generator().manual_seed(3 + rank)
        for ranks in (*[before] * 2, *[now] * 2):
            if rank < ranks:
                torch.rand(12 // ranks, 3, generator=generator)
        assert torch.equal(state, generator.get_state())


@pytest.mark.parametrize("which", ["rank 1 ends early", "rank 0 ends early"])
def test_rank_that_yields_less_is_named(runs, which):
    _, outcomes, ends = runs
    error = outcomes[which].error
    assert isinstance(error, TaskError)
    assert "rank 1" in str(error)
    assert "3 reports" in str(error)
    assert ends[1][which].startswith("TaskError")


def test_error_on_a_rank_fails_the_trial_with_its_text(runs):
    """The others are within an operation of the loop's own group at that time."""
    _, outcomes, ends = runs
    error = outcomes["raises"].error
    assert isinstance(error, RankFailed)
    assert "rank 1: ValueError: bad sample 17" in str(error)
    assert "in _misbehave" in "".join(error.__notes__)
    assert ends[0]["raises"] == "ValueError: bad sample 17"
    assert ends[1]["raises"].startswith("RankFailed: rank 1")


def test_killed_rank_is_lost_and_the_run_resumes(runs):
    base, outcomes, _ = runs
    assert isinstance(outcomes["killed"].error, RankLost)
    assert outcomes["continued"].resumed_at == 2
    assert _curve(base / "killed") == _curve(base / "two")
    _assert_same(_state(base / "killed")["loop"], _state(base / "two")["loop"])


def test_loop_without_a_group_is_a_signal(runs):
    outcomes = runs[1]
    assert outcomes["apart"].error is None
    assert all("resources.workers is 2" in sentence for sentence in outcomes["apart"].signals)
    assert len(outcomes["apart"].signals) == 4
    assert not any("resources.workers" in sentence for sentence in outcomes["whole"].signals)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_framework_trains_on_all_ranks_and_resumes(runs, name):
    if name not in INSTALLED:
        pytest.skip(f"needs {name}")
    base, outcomes, ends = runs
    whole, resumed = outcomes[f"{name} whole"], outcomes[f"{name} resumed"]
    assert (whole.error, resumed.error) == (None, None)
    assert [ends[0][f"{name} {run}"] for run in ("whole", "stopped", "resumed")] == [""] * 3
    assert not any("resources.workers" in sentence for sentence in whole.signals)
    assert resumed.resumed_at == 2
    curves = [_curve(base / f"{name} {run}") for run in ("whole", "cut")]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 4
    assert curves[0][-1]["val/loss"] < curves[0][0]["val/loss"]


class _Second(Ranks):
    rank, size = 1, 2


def test_another_number_of_ranks_must_be_accepted():
    """Each rank gets its own part of the state."""
    alone: dict[str, Any] = {"loop": {"model": 1, "per_rank": {"own": 2}}}
    saved = {**alone, "ranks": [{"own": 3}]}
    assert restored_state(saved, _Second()) == {"model": 1, "per_rank": {"own": 3}}
    with pytest.raises(ConfigError, match="workers: 2"):
        restored_state(saved, ALONE)
    assert restored_state(saved, ALONE, accept_workers=True) == alone["loop"]
    assert restored_state(alone, _Second(), accept_workers=True) == {"model": 1}
