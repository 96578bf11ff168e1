"""The other ranks of a trial, as its first rank sees them: why one was lost, and who stays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from trainable.adapters.ray_ranks import OtherRanks
from trainable.errors import RankLost
from trainable.failures import as_error, as_note, failure_of
from trainable.processes.trial_run import TrialRun

LOST = "one did not come"
FAILURE = {"kind": "error", "reason": "ValueError: 3", "traceback": "...", "place": "a.py:3"}
STUCK = object()


class FakeRay:
    """Ray, whose references are the results of the calls."""

    def __init__(self) -> None:
        self.killed: list[str] = []

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

    def kill(self, actor: str) -> None:
        self.killed.append(actor)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[OtherRanks, FakeRay]]:
    def make(*ends: Any) -> tuple[OtherRanks, FakeRay]:
        fake, others = FakeRay(), OtherRanks()
        for name in ("wait", "get", "kill"):
            monkeypatch.setattr(ray, name, getattr(fake, name))
        others._runs = dict(enumerate(ends, start=1))
        others._actors = {rank: f"actor {rank}" for rank in others._runs}
        return others, fake

    return make


def test_dead_rank_is_named_with_its_actor(ranks: Any) -> None:
    others, _ = ranks(None, RayActorError())
    found = others.cause(LOST)
    assert isinstance(found, RankLost)
    assert "rank 2 was lost" in str(found)
    assert hasattr(found, "actor_id")


def test_failure_of_a_rank_precedes_the_loss(ranks: Any) -> None:
    others, _ = ranks(None, FAILURE, STUCK)
    assert others.cause(LOST) == FAILURE | {"reason": "ValueError: 3 (rank 2)"}


def test_silent_rank_is_named(ranks: Any) -> None:
    others, _ = ranks(None, STUCK)
    found = others.cause(LOST)
    assert isinstance(found, RankLost)
    assert "rank 2 did not answer" in str(found)


def test_actors_that_ended_their_run_stay_for_the_next_trial(ranks: Any) -> None:
    others, fake = ranks(None, FAILURE, STUCK, RayError(), None)
    for _ in range(2):
        others.leave()
        assert fake.killed == ["actor 3", "actor 4"]
        assert others._actors.keys() == {1, 2, 5}


def test_gpu_share_is_that_of_one_rank() -> None:
    halves = SimpleNamespace(_bundles=[{"CPU": 1, "GPU": 0.5}] * 2)
    assert TrialRun._gpu_share(halves) == 0.5  # type: ignore[arg-type]


def test_failure_of_another_rank_has_the_place_of_its_code() -> None:
    def fail(error: Exception) -> Exception:
        with pytest.raises(type(error)) as caught:
            raise error
        return caught.value

    there = fail(ZeroDivisionError("3"))
    found = failure_of(fail(as_error(as_note(there, rank=2))))
    assert found["place"] == failure_of(there)["place"]
    assert found["reason"] == "RankFailed: rank 2: ZeroDivisionError: 3"
