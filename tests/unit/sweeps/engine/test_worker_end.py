"""What a sweep says of a lost worker: which process of the trial it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RayActorError

from sweeps.engine import worker_end
from sweeps.engine.worker_end import end_of_worker, end_with_node
from trainable.adapters import ray_ranks
from trainable.adapters.ray_ranks import OtherRanks
from trainable.errors import RankLost


def _silent(monkeypatch: pytest.MonkeyPatch) -> object:
    others = OtherRanks()
    others._runs = {2: object()}
    monkeypatch.setattr(ray_ranks.ray, "wait", lambda *_, **__: ([], []))
    return others.cause("it waited")


def test_lost_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = end_of_worker(ray_ranks._loss(1, RayActorError())).sentence()
    assert "the process of rank 1 ended" in said
    silent = _silent(monkeypatch)
    assert isinstance(silent, RankLost)
    said = end_of_worker(silent).sentence()
    assert "rank 2" in said
    assert "did not answer" in said
    assert "of one rank" in end_of_worker(_unknown()).sentence()
    assert "the trial's process" in end_of_worker(RuntimeError("it died")).sentence()
    assert "rank 3" in end_with_node(ray_ranks._loss(3, RayActorError())).sentence()


def test_marks_of_ray_are_no_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "worker.err"
    log.write_text(":job_id:01000000\n:actor_name:SweepRank\nout of luck\n")
    monkeypatch.setattr(worker_end, "error_logs", lambda _: [log])
    assert worker_end._last_lines(1) == "out of luck"


def _unknown() -> RankLost:
    """As `trainable.parallel.collectives` writes it."""
    return RankLost("rank 0 waited for the other 1 ranks of its trial, and one was lost (x)")
