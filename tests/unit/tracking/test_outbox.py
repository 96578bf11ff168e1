from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from tracking.address import store_identity
from tracking.metric_points import PointRow
from tracking.outbox import SWEEP, Outbox, OutboxError
from tracking.outbox_status import read_outbox
from tracking.unsent_rows import Target


def row(step: int, **metrics: float) -> PointRow:
    return PointRow(step, 1000 + step, metrics)


def steps(outbox: Outbox, trial: int) -> list[int]:
    batch = outbox.next_batch(trial)
    assert batch is not None
    return [point.step for point in batch.points]


def write_log(outbox: Path, trial: int, rows: list[PointRow], name: str = "metrics") -> Path:
    """Write a trial's log beside the outbox, as the trial's process does."""
    file = outbox.parent / "trials" / f"{trial:04d}" / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({"step": one.step, "time": one.timestamp_ms, "metrics": one.metrics})
        for one in rows
    )
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def deliver(outbox: Outbox, trial: int = 0) -> list[tuple[str, int]]:
    """Deliver everything of a trial; returns the key and step of each point."""
    found: list[tuple[str, int]] = []
    while batch := outbox.next_batch(trial):
        found += [(point.key, point.step) for point in batch.points]
        outbox.delivered(batch)
    return found


def test_a_batch_holds_at_most_a_thousand_points(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    write_log(outbox.directory, 0, [row(step, a=1.0, b=2.0) for step in range(1, 1201)])
    outbox.append(0, "start", {"params": {}})
    outbox.follow(0, Target(1200, every=1, ended=True))
    outbox.append(0, "finish", {"status": "FINISHED"})
    assert outbox.pending == 3
    seen = []
    while batch := outbox.next_batch(0):
        seen.append((len(batch.points), [record.kind for record in batch.records]))
        outbox.delivered(batch)
    assert seen == [(1000, ["start"]), (1000, []), (400, ["finish"])]
    assert outbox.pending == 0
    outbox.close()


def test_log_is_delivered_up_to_the_last_report(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    file = write_log(outbox.directory, 0, [row(step, a=1.0) for step in range(1, 6)])
    outbox.follow(0, Target(3, every=1, ended=False))
    assert deliver(outbox) == [("a", 1), ("a", 2), ("a", 3)]
    assert outbox.trials() == []
    outbox.follow(0, Target(3, every=1, ended=False))
    assert outbox.trials() == [], "nothing has changed"
    with file.open("a") as more:
        more.write('{"step": 6, "time": 1, "metrics": {"a": 1.0}}\n{"step": 7, "ti')
    outbox.follow(0, Target(5, every=1, ended=True))
    assert deliver(outbox) == [("a", 4), ("a", 5), ("a", 6)]
    assert outbox.last_step(0) == 6
    outbox.close()


def test_rows_that_are_trained_again_are_not_sent_again(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    rows = [row(step, a=1.0) for step in range(1, 101)]
    write_log(outbox.directory, 0, rows)
    outbox.follow(0, Target(100, every=1, ended=False))
    assert len(deliver(outbox)) == 100
    # The trial resumes from step 40, and logs other times and one more metric.
    write_log(outbox.directory, 0, rows[:40])
    outbox.follow(0, Target(90, every=1, ended=False))
    assert deliver(outbox) == []
    again = [row(step, a=2.0, b=1.0)._replace(timestamp_ms=9) for step in range(41, 121)]
    write_log(outbox.directory, 0, rows[:40] + again)
    outbox.follow(0, Target(110, every=1, ended=False))
    found = deliver(outbox)
    assert [step for key, step in found if key == "a"] == list(range(101, 111))
    assert [step for key, step in found if key == "b"] == list(range(41, 111))
    outbox.close()


def test_log_in_flight_is_compared_until_all_of_it_has_arrived(tmp_path: Path) -> None:
    """The trial may have removed rows that were in flight, and train them again."""
    outbox = Outbox(tmp_path / "outbox")
    rows = [row(step, a=1.0) for step in range(1, 31)]
    write_log(outbox.directory, 0, rows)
    outbox.follow(0, Target(20, every=1, ended=False))
    assert len(steps(outbox, 0)) == 20
    outbox.close()

    outbox = Outbox(tmp_path / "outbox")
    write_log(outbox.directory, 0, rows[:10])
    seen = []
    for last in (10, 20, 30):
        outbox.follow(0, Target(last, every=1, ended=False))
        batch = outbox.next_batch(0)
        assert batch is not None
        seen.append(([point.step for point in batch.points], batch.uncertain))
        outbox.delivered(batch)
        write_log(outbox.directory, 0, rows)
    assert seen == [
        (list(range(1, 11)), True),
        (list(range(11, 21)), True),
        (list(range(21, 31)), False),
    ]
    outbox.close()


def test_curve_is_thinned_and_own_steps_are_not(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox")
    curve = [row(step, a=1.0) for step in range(1, 13)]
    curve[7] = row(8, a=1.0, epoch=1.0)
    write_log(outbox.directory, 0, curve)
    logged = outbox.directory.parent / "trials" / "0000" / "logged.jsonl"
    own = ({"step": 4 * n, "own_step": n, "time": 1, "metrics": {"x": 1.0}} for n in (1, 2, 3))
    logged.write_text("".join(f"{json.dumps(one)}\n" for one in own))
    outbox.follow(0, Target(8, every=5, ended=False))
    assert deliver(outbox) == [("x", 1), ("x", 2), *(("a", s) for s in (1, 5, 8)), ("epoch", 8)]
    outbox.follow(0, Target(8, every=5, ended=True))
    assert deliver(outbox) == [("x", 3), ("a", 10), ("a", 12)]
    outbox.close()


@pytest.mark.parametrize("what", ["the directory", "rows", "a line"])
def test_lost_log_is_told_and_delays_nothing(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    outbox = Outbox(tmp_path / "outbox")
    file = write_log(outbox.directory, 7, [row(step, a=1.0) for step in range(1, 6)])
    outbox.append(7, "start", {"params": {}})
    outbox.follow(7, Target(9, every=1, ended=True))
    outbox.append(7, "finish", {"status": "FINISHED"})
    if what == "the directory":
        shutil.rmtree(file.parent)
    else:
        if what == "a line":
            with file.open("a") as more:
                more.write('{"step": 6, "time": 1, "metrics": {"a": null}}\n')
        assert len(deliver(outbox, 7)) == (3 if what == "a line" else 5)
        assert outbox.trials() == [7], "a worker elsewhere may not have written them yet"
        assert outbox.next_batch(7) is None
        assert not caplog.messages
        monkeypatch.setattr("tracking.outbox._LATE_SECONDS", 0.0)
    assert deliver(outbox, 7) == []
    assert outbox.pending == 0
    [told] = caplog.messages
    last = {"the directory": 0, "rows": 5, "a line": 3}[what]
    assert told.startswith(
        f"trial 7 has reported step 9, and its metrics after step {last} are not sent: "
    )
    assert str(file) in told
    assert told.endswith("restore it from a backup, then run sync --verify")
    outbox.close()


def test_high_water_marks_are_durable_before_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(tmp_path)
    outbox.append_rows(0, [row(1, a=1.0)])
    waits: list[int] = []

    def fail_once(file: int) -> None:
        waits.append(file)
        if len(waits) == 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(OSError, match="Input/output error"):
        outbox.next_batch(0)
    batch = outbox.next_batch(0)
    assert batch is not None
    assert batch.uncertain
    assert len(waits) == 2, "the mark of the first attempt was waited for again"
    outbox.close()
    outbox = Outbox(tmp_path)
    assert outbox.next_batch(0) is not None
    assert len(waits) == 3, "another process may have been killed before it had waited"
    outbox.close()


def test_full_disk_names_path_and_free_bytes(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.append_rows(0, [row(1, a=1.0)])
    size = outbox._db.execute("PRAGMA page_count").fetchone()[0]
    outbox._db.execute(f"PRAGMA max_page_count = {size}")
    big = [row(2 + i, a=float(i)) for i in range(5000)]
    with pytest.raises(OutboxError, match=rf"{tmp_path}.*full; \d+ bytes are free"):
        outbox.append_rows(0, big)
    assert outbox.pending == 1
    outbox._db.execute("PRAGMA max_page_count = 1000000")
    outbox.append_rows(0, big)
    assert len(deliver(outbox)) == 5001
    outbox.close()


def test_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutboxError, match="file/outbox"):
        Outbox(tmp_path / "file" / "outbox")


@pytest.mark.parametrize(
    "content", [b"not a database" * 100, b"SQLite format 3\0" + b"\xff" * 5000]
)
def test_damaged_file_is_moved_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "outbox.db").write_bytes(content)
    before = read_outbox(tmp_path)
    assert (before.pending, before.damage is None) == (0, False)
    outbox = Outbox(tmp_path)
    assert outbox.moved_aside is not None
    assert outbox.moved_aside.read_bytes() == content
    assert outbox.needs_figures, "what waited was not delivered"
    outbox.append_rows(0, [row(1, a=1.0)])
    outbox.close()
    after = read_outbox(tmp_path)
    assert (after.pending, after.damage) == (1, None)


@pytest.mark.parametrize(
    "planted",
    [
        "ALTER TABLE told RENAME TO t; CREATE VIEW told AS SELECT * FROM t",
        "CREATE TRIGGER more AFTER INSERT ON told BEGIN DELETE FROM runs; END",
    ],
)
def test_file_with_triggers_is_moved_aside(tmp_path: Path, planted: str) -> None:
    Outbox(tmp_path).close()
    db = sqlite3.connect(tmp_path / "outbox.db")
    db.executescript(planted)
    db.close()
    damage = read_outbox(tmp_path).damage
    assert damage is not None
    assert "it holds a view or a trigger" in damage
    outbox = Outbox(tmp_path)
    assert outbox.moved_aside is not None
    outbox.close()


def test_links_and_irregular_files_are_not_staged(tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("secret")
    (tmp_path / "loss.png").symlink_to(tmp_path / "id_rsa")
    os.mkfifo(tmp_path / "fifo")
    outbox = Outbox(tmp_path / "outbox")
    for name in ("loss.png", "fifo"):
        with pytest.raises(OSError, match=name):
            outbox.append_artifact(0, tmp_path / name, name)
    assert not outbox.pending
    assert not [p for p in (tmp_path / "outbox").rglob("artifacts/*") if p.is_dir()]
    outbox.close()


def test_file_of_another_version_is_left_alone(tmp_path: Path) -> None:
    Outbox(tmp_path).close()
    db = sqlite3.connect(tmp_path / "outbox.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(OutboxError, match="version 99; this release reads 5; use the release"):
        Outbox(tmp_path)


def test_staged_files_without_a_record_are_removed(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("kept")
    outbox = Outbox(tmp_path / "outbox")
    outbox.append_artifact(0, source, "a.txt")
    outbox.close()
    orphan = tmp_path / "outbox" / "artifacts" / "0123"
    orphan.mkdir()
    Outbox(tmp_path / "outbox").close()
    assert not orphan.exists()
    assert [p.read_text() for p in (tmp_path / "outbox").rglob("a.txt")] == ["kept"]


def test_only_staged_files_are_removed(tmp_path: Path) -> None:
    kept = tmp_path / "home" / "papers" / "thesis.tex"
    kept.parent.mkdir(parents=True)
    kept.touch()
    outbox = Outbox(tmp_path / "outbox")
    places = (str(kept), "../home/papers/thesis.tex", "artifacts/../../home/papers/thesis.tex")
    for place in (*places, "x", "", "artifacts/..", "artifacts/0123/../../../home/papers/x"):
        outbox.append(0, "artifact", {"staged": place, "folder": ""})
        batch = outbox.claim_artifact(SWEEP)
        assert batch is not None
        outbox.delivered(batch)
        assert kept.exists(), place
        outbox.append(0, "artifact", {"staged": place, "folder": ""})
        outbox.close()
        outbox = Outbox(tmp_path / "outbox")  # which removes copies without a record
        assert kept.exists(), place
        batch = outbox.claim_artifact(SWEEP)
        assert batch is not None
        outbox.refuse(batch, "no copy")
    outbox.close()


def test_removal_of_staged_files_follows_no_link(tmp_path: Path) -> None:
    kept = tmp_path / "home" / ("0" * 32) / "thesis.tex"
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / "outbox").mkdir()
    (tmp_path / "outbox" / "artifacts").symlink_to(tmp_path / "home")
    outbox = Outbox(tmp_path / "outbox")
    assert kept.exists()
    outbox.append(0, "artifact", {"staged": f"artifacts/{'0' * 32}/thesis.tex", "folder": ""})
    batch = outbox.claim_artifact(SWEEP)
    assert batch is not None
    outbox.delivered(batch)
    assert kept.exists()
    outbox.close()


def test_linked_outbox_removes_nothing_at_its_target(tmp_path: Path) -> None:
    kept = tmp_path / "sweep" / "trials" / "0000" / "artifacts" / "samples" / "1.png"
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / "outbox").symlink_to(kept.parents[2])
    Outbox(tmp_path / "outbox").close()
    assert kept.exists()


def test_artifacts_delay_nothing_and_trials_alternate(tmp_path: Path) -> None:
    source = tmp_path / "x"
    source.touch()
    outbox = Outbox(tmp_path / "outbox")
    outbox.append(1, "start", {"params": {}})
    for trial, name in [(1, "a"), (1, "b"), (0, "c")]:
        outbox.append_artifact(trial, source, name)
    outbox.append(1, "finish", {"status": "FINISHED"})
    assert outbox.trials() == [1]

    def claimed(after: int) -> str:
        batch = outbox.claim_artifact(after)
        assert batch is not None
        return Path(batch.records[0].payload["staged"]).name

    assert [claimed(after) for after in (SWEEP, 0, 1)] == ["c", "c", "c"], "the start comes first"
    batch = outbox.next_batch(1)
    assert batch is not None
    assert [record.kind for record in batch.records] == ["start", "finish"]
    outbox.delivered(batch)
    assert [claimed(after) for after in (SWEEP, 0, 1)] == ["c", "a", "c"]
    assert outbox.trials() == []
    outbox.close()


def test_files_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        outbox = Outbox(tmp_path / "outbox")
        outbox.append_rows(0, [row(1, a=float("nan"))])
    finally:
        os.umask(old)
    modes = {path.stat().st_mode & 0o077 for path in outbox.directory.iterdir()}
    assert modes == {0}
    outbox.close()


def test_delivery_drops_what_it_read_before_a_trial_was_reset(tmp_path: Path) -> None:
    queue, other = Outbox(tmp_path / "outbox"), Outbox(tmp_path / "outbox", delivers=True)
    write_log(queue.directory, 0, [row(step, a=1.0) for step in range(1, 6)])
    queue.follow(0, Target(3, every=1, ended=False))
    before = other.next_batch(0)
    assert before is not None
    queue.reset_trials({0: True})
    other.delivered(before)
    queue.follow(0, Target(5, every=1, ended=False))
    batch = other.next_batch(0)
    assert batch is not None
    assert batch.uncertain
    assert [point.step for point in batch.points] == [1, 2, 3, 4, 5]
    other.close()
    queue.close()


def test_file_being_staged_is_no_orphan(tmp_path: Path) -> None:
    staged = tmp_path / "artifacts" / "abc"
    staged.mkdir(parents=True)
    Outbox(tmp_path, delivers=True).close()
    assert staged.exists()
    Outbox(tmp_path).close()
    assert not staged.exists()


@pytest.mark.parametrize(
    ("uri", "store"),
    [
        ("sqlite:///elsewhere.db?timeout=5", "sqlite"),
        ("https://ada:old@mlflow.lab/team/", "https://mlflow.lab/team"),
        ("postgresql://ada@db/mlflow?password=x", "postgresql://db/mlflow"),
    ],
)
def test_store_identity_excludes_password_and_path(uri: str, store: str) -> None:
    assert store_identity(uri) == store


@pytest.mark.parametrize(("store", "gone"), [("b", False), ("a", True)])
def test_state_of_another_store_is_dropped(tmp_path: Path, store: str, gone: bool) -> None:
    outbox = Outbox(tmp_path)
    outbox.set_target("a", gone=True)  # nobody was told anything
    outbox.append(0, "start", {"params": {}})
    outbox.append_rows(0, [row(1, a=1.0)])
    outbox.set_target("b", gone=False)  # nothing was delivered yet
    outbox.set_target("a", gone=False)
    while batch := outbox.next_batch(0):
        outbox.delivered(batch)
    outbox.set_run_id(0, "run", recorded=None)
    outbox.append_rows(0, [row(2, a=2.0)])
    outbox.append(0, "finish", {"status": "FINISHED"})
    outbox.append(0, "tags", {"x": "y"})
    outbox.set_target("a", gone=False)
    assert not outbox.needs_figures
    outbox.set_target(store, gone=gone)
    outbox.set_target(store, gone=False)
    outbox.close()
    outbox = Outbox(tmp_path)
    assert outbox.needs_figures, "until it was given them"
    outbox.figures_sent()
    outbox.set_target(store, gone=False)
    assert not outbox.needs_figures, "it is told once"
    known = read_outbox(tmp_path)
    assert (known.run_ids, known.tracked_statuses, known.marks) == ({}, {}, {})
    batch = outbox.next_batch(0)
    assert batch is not None
    assert [record.kind for record in batch.records] == ["tags"]
    outbox.append_rows(0, [row(1, a=1.0), row(2, a=2.0)])
    assert steps(outbox, 0) == [1, 2]
    outbox.close()
