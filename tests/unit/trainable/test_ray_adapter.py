"""The actor of a trial: what it passes on between Ray, the trial's process and the other ranks.

The other ranks, as the first one sees them: why one was lost, and who stays.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.tune.result import SHOULD_CHECKPOINT

from trainable.adapters import ray as ray_adapter
from trainable.adapters.ray import TuneTrial
from trainable.adapters.ray_ranks import OtherRanks
from trainable.errors import NodeLeaves, RankLost
from trainable.failures import as_error, as_note, failure_of
from trainable.processes.rank_run import gpu_share
from trainable.processes.trial_run import (
    CALL,
    CLOSE,
    LEFT_NODE,
    LOST,
    POINTER,
    RESTART,
    RESULT,
    STEP,
)


class FakeProcess:
    """A trial's process that sends what it is given."""

    def __init__(self, *messages: tuple[Any, ...]) -> None:
        self.messages, self.received, self.is_running = list(messages), [], False

    def begin(self, function: str, config: dict[str, Any]) -> None:
        assert not self.is_running
        self.is_running, self.received = True, [(function, config["number"])]

    def send(self, message: object) -> None:
        self.received.append(message)

    def receive(self) -> tuple[Any, ...]:
        return self.messages.pop(0)

    def end(self) -> int:
        self.is_running = False
        return 0


class FakeRanks:
    """Other ranks, of which one is lost."""

    def __init__(self, error: RankLost) -> None:
        self._error, self.closed, self.left = error, False, 0

    def cause(self, _: str) -> RankLost:
        return self._error

    def prepare(self, _: str) -> str:
        raise self._error

    def leave(self) -> None:
        self.left += 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TuneTrial, FakeProcess]]:
    def trial(*messages: tuple[Any, ...]) -> tuple[TuneTrial, FakeProcess]:
        process = FakeProcess(*messages)
        for name in ("exit_with_raylet", "prepare_process"):
            monkeypatch.setattr(ray_adapter, name, lambda: None)
        monkeypatch.setattr(ray_adapter, "AttemptProcess", lambda *_: process)
        return TuneTrial({"number": 3}), process

    return trial


def test_each_trial_begins_a_process_and_ends_it(make: Any, tmp_path: Path) -> None:
    pointer = {"step": 4}
    trial, process = make(
        (RESULT, {"epoch": 1, POINTER: pointer}), (RESULT, {"epoch": 2, "done": True})
    )
    assert not process.is_running
    assert trial.step() == {"epoch": 1, SHOULD_CHECKPOINT: True}
    assert process.is_running
    assert trial.step() == {"epoch": 2, "done": True, SHOULD_CHECKPOINT: False}
    assert not process.is_running
    assert process.received == [("trainable.processes.trial_run:train", 3), STEP, STEP]
    trial.save_checkpoint(str(tmp_path))
    assert list(tmp_path.iterdir()) == []

    process.messages = [(RESULT, {}), (CALL, "leave"), (RESULT, {})]
    trial._others = FakeRanks(RankLost(""))
    assert trial.reset_config({"number": 4})
    trial.step()
    trial.cleanup()
    assert process.received == [("trainable.processes.trial_run:train", 4), STEP, CLOSE, None]
    assert (trial._others.left, process.is_running) == (1, False)


@pytest.mark.parametrize("method", ["cause", "prepare"])
def test_loss_of_a_rank_is_raised_with_all_that_ray_says(make: Any, method: str) -> None:
    trial, process = make((CALL, method, "it waited"), (LOST, "rank 1 was lost"))
    error = RankLost("rank 1 was lost")
    error.actor_id = "of Ray"  # type: ignore[attr-defined]
    trial._others = FakeRanks(error)
    with pytest.raises(RankLost) as raised:
        trial.step()
    assert raised.value is error
    assert (trial._others.closed, process.is_running) == (True, False)
    answer = process.received[-1]
    assert str(answer) == "rank 1 was lost"
    assert isinstance(answer, str) == (method == "cause")
    assert not hasattr(answer, "actor_id"), "the trial's process has no Ray"


def test_rank_that_is_lost_while_it_prepares_keeps_what_ray_says(make: Any) -> None:
    """The trial's process then asks for the cause, of which nobody knows more."""
    trial, _ = make((CALL, "prepare", 0), (CALL, "cause", "lost"), (LOST, "lost"))
    first, later = RankLost("rank 1 was lost"), RankLost("lost")
    first.actor_id = "of Ray"  # type: ignore[attr-defined]
    others = FakeRanks(first)
    others.cause = lambda _: later  # type: ignore[method-assign,assignment]
    trial._others = others
    with pytest.raises(RankLost) as raised:
        trial.step()
    assert raised.value is first


def test_trial_that_has_left_its_node_is_raised_for_tune(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_adapter, "nodes_of_trial", lambda ranks: {"n" * ranks})
    trial, process = make((RESULT, {"ending": LEFT_NODE, "done": True}))
    trial._others = FakeRanks(RankLost(""))
    with pytest.raises(NodeLeaves, match=NodeLeaves.text):
        trial.step()
    assert (trial._others.closed, process.is_running) == (True, False)
    config = {"number": 4, "leaves": f"{tmp_path}/leaves-"}
    assert trial.reset_config(config)
    assert trial._config["leaves"] == [f"{tmp_path}/leaves-n"]
    (tmp_path / "leaves-n").touch()
    with pytest.raises(NodeLeaves):  # no worker of that node takes another trial
        trial.reset_config(config)


def test_run_continues_in_a_fresh_process_after_a_restart(make: Any) -> None:
    trial, process = make((RESTART, {"config": "finer"}), (RESULT, {"done": True}))
    assert trial.step()["done"]
    assert process.received[:2] == [("trainable.processes.trial_run:train", 3), STEP]
    assert trial._config["config"] == "finer"


CAME_NOT = "one did not come"
FAILURE = {"kind": "error", "reason": "ValueError: 3", "traceback": "...", "place": "a.py:3"}
PREPARED = ("a node", "10.0.0.1")
STUCK = object()


class FakeRay:
    """Ray, whose references are the results of the calls."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.ended: list[int] = []
        self.begun: list[int] = []

    def wait(self, refs: list[Any], num_returns: int = 1, timeout: float = 0) -> tuple[Any, Any]:
        del timeout
        ready = [ref for ref in refs if ref is not STUCK][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Any, timeout: float | None = None) -> Any:
        if ref is STUCK:
            assert timeout == 0
            raise GetTimeoutError
        if isinstance(ref, BaseException):
            raise ref
        return ref

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.rank)

    def actor(self, rank: int) -> Any:
        end = SimpleNamespace(remote=lambda: self.ended.append(rank))
        prepare = SimpleNamespace(remote=lambda *_: self.begun.append(rank) or PREPARED)
        return SimpleNamespace(rank=rank, end=end, prepare=prepare)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[OtherRanks, FakeRay]]:
    def make(*ends: Any) -> tuple[OtherRanks, FakeRay]:
        fake, others = FakeRay(), OtherRanks()
        for name in ("wait", "get", "kill"):
            monkeypatch.setattr(ray, name, getattr(fake, name))
        others._runs = dict(enumerate(ends, start=1))
        others._actors = {rank: fake.actor(rank) for rank in others._runs}
        return others, fake

    return make


def test_dead_rank_is_named_with_its_actor(ranks: Any) -> None:
    others, _ = ranks(None, RayActorError())
    found = others.cause(CAME_NOT)
    assert isinstance(found, RankLost)
    assert "rank 2 was lost" in str(found)
    assert hasattr(found, "actor_id")


def test_failure_of_a_rank_precedes_the_loss(ranks: Any) -> None:
    others, _ = ranks(None, FAILURE, STUCK)
    assert others.cause(CAME_NOT) == FAILURE | {"reason": "ValueError: 3 (rank 2)"}


def test_silent_rank_is_named(ranks: Any) -> None:
    others, _ = ranks(None, STUCK)
    found = others.cause(CAME_NOT)
    assert isinstance(found, RankLost)
    assert "rank 2 did not answer" in str(found)


def test_actors_that_ended_their_run_stay_for_the_next_trial(ranks: Any) -> None:
    others, fake = ranks(None, FAILURE, STUCK, RayError(), None)
    for _ in range(2):
        others.leave()
        assert fake.killed == [3, 4]
        assert fake.ended == [1, 2, 5], "their processes end, and before the next trial"
        assert others._actors.keys() == {1, 2, 5}


def test_actors_of_the_trial_before_begin_with_the_first_rank(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, fake = ranks(None)
    context = SimpleNamespace(get_node_id=lambda: PREPARED[0])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(others, "_start", fake.actor)
    config = {"config": {}, "directory": "runs", "threads": 1, "bundles": [{}] * 3}
    others.begin(config)
    assert (fake.ended, fake.begun) == ([1], [1]), "its last process ends before"
    assert others.prepare() == "127.0.0.1"
    assert fake.begun == [1, 2], "what did not live begins where it is waited for"


def test_gpu_share_is_that_of_one_rank() -> None:
    assert gpu_share({"bundles": [{"CPU": 1, "GPU": 0.5}] * 2}) == 0.5
    assert gpu_share({"bundles": [{"CPU": 1, "GPU": 2}] * 2}) == 1.0


def test_failure_of_another_rank_has_the_place_of_its_code() -> None:
    def fail(error: Exception) -> Exception:
        with pytest.raises(type(error)) as caught:
            raise error
        return caught.value

    there = fail(ZeroDivisionError("3"))
    found = failure_of(fail(as_error(as_note(there, rank=2))))
    assert found["place"] == failure_of(there)["place"]
    assert found["reason"] == "RankFailed: rank 2: ZeroDivisionError: 3"
