"""A ledger in PostgreSQL: one driver on any host, each transaction once, and an unavailable
database.

What a ledger does wherever it lies is in `test_ledger.py` and `test_view.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import RandomSampler
from sqlalchemy import Engine, event
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.driver.session import open_ledger
from sweeps.errors import LedgerBusy, LedgerError, LedgerRefused, LockLost, SweepLockedError
from sweeps.ledger import postgres as ledger_database
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.location import ledger_lock
from sweeps.ledger.postgres import LedgerDatabase, SweepTaken
from sweeps.ledger.reader import LedgerReader
from sweeps.operations.doctor import check_sweeps
from sweeps.paths import SweepPaths
from sweeps.spec.provenance_check import Origin
from sweeps.spec.spec import load_spec
from sweeps.sweep_lock import SweepLock
from tests.chaos.postgres import Cluster, own_cluster
from tests.make_trials import proposal
from tests.postgres_ledger import held_place, holder
from tests.time_limits import Deadline, scaled

SPACE = {"train.optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True)}
SPEC = """
name: commands
task: digits
metric: val/loss
mode: min
trials: 2
space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}
"""
_HOLD = """
import sys, time
from pathlib import Path
from sweeps.ledger.location import ledger_lock
from sweeps.ledger.postgres import LedgerDatabase
from sweeps.sweep_lock import SweepLock
directory = Path(sys.argv[2])
place = LedgerDatabase(sys.argv[1], "digits", directory)
lock = SweepLock(directory / "digits" / "lock", ledger_lock(place))
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path) -> Iterator[LedgerDatabase]:
    with held_place(cluster, tmp_path) as made:
        yield made


@pytest.fixture
def ledger(place: LedgerDatabase) -> Ledger:
    return Ledger.create(place, mode="min", sweep_id="s1")


def _add(ledger: Ledger) -> object:
    return ledger.add(proposal(SPACE, RandomSampler(seed=1)))


def _holder_process(cluster: Cluster, directory: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, cluster.uri, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_second_driver_is_refused_until_the_first_is_dead(
    cluster: Cluster, tmp_path: Path
) -> None:
    here = LedgerDatabase(cluster.uri, "digits", tmp_path / "here")
    lock = SweepLock(tmp_path / "here" / "digits" / "lock", ledger_lock(here))
    with _holder_process(cluster, tmp_path / "there") as child:
        try:
            refused: Callable[[], object]
            for refused in (lock.acquire, here.check_available):
                with pytest.raises(SweepLockedError) as held:
                    refused()
                assert f"run by process {child.pid} on {socket.gethostname()};" in str(held.value)
            assert not (tmp_path / "here").exists(), "who is refused has made nothing"
            os.kill(child.pid, signal.SIGSTOP)
            with pytest.raises(SweepLockedError):
                lock.acquire()
        finally:
            child.kill()
    _soon(lambda: here.holder() is None)
    mine = lock.acquire()
    assert here.fencing_token == 2
    found = here.holder()
    assert found is not None
    assert (found.host, found.pid) == (mine.host, mine.pid)
    lock.release()
    assert here.holder() is None


def test_lost_connection_is_restored_unless_lock_was_taken(
    cluster: Cluster, tmp_path: Path
) -> None:
    place = LedgerDatabase(cluster.uri, "lost", tmp_path)
    lock = ledger_lock(place)
    lock.acquire(holder())
    ledger = Ledger.create(place, mode="min", sweep_id="s")
    _end_sessions(cluster)
    lock.check()
    assert place.fencing_token == 1
    assert place.holder() is not None
    _add(ledger)
    assert len(LedgerReader(place).trials) == 1
    lock.release()


def test_replaced_driver_writes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    place = LedgerDatabase(cluster.uri, "taken", tmp_path)
    lock = ledger_lock(place)
    lock.acquire(holder())
    ledger = Ledger.create(place, mode="min", sweep_id="s")
    _end_sessions(cluster)
    with held_place(cluster, tmp_path, "taken"):
        taken = rf"was taken over by process {os.getpid()} on .* from this driver; only the"
        for use in (lock.check, lambda: _add(ledger), lambda: ledger.store_seconds(3.0)):
            with pytest.raises(LockLost, match=taken):
                use()
    assert LedgerReader(place).trials == []
    lock.release()


@pytest.mark.parametrize(
    ("do", "committed", "trials", "starts"),
    [
        pytest.param(_add, True, 2, 0, id="an addition, made"),
        pytest.param(_add, False, 2, 0, id="an addition, not made"),
        pytest.param(lambda ledger: ledger.start(0), True, 1, 1, id="an attempt, made"),
    ],
)
def test_unacknowledged_commit_is_made_once(
    ledger: Ledger,
    place: LedgerDatabase,
    do: Callable[[Ledger], object],
    committed: bool,
    trials: int,
    starts: int,
) -> None:
    _add(ledger)
    dialect = ledger._storage.engine.dialect
    real, calls = dialect.do_commit, 0

    def lost(connection: object) -> None:
        nonlocal calls
        calls += 1
        if committed or calls > 1:
            real(connection)
        if calls == 1:
            raise psycopg2.OperationalError("server closed the connection unexpectedly")

    dialect.do_commit = lost
    try:
        do(ledger)
    finally:
        dialect.do_commit = real
    assert calls == (1 if committed else 2), "what was committed is not done again"
    found = LedgerReader(place).trials
    assert (len(found), found[0].attempts) == (trials, starts)
    _add(ledger)  # and the count goes on from there
    assert len(LedgerReader(place).trials) == trials + 1


def test_abandoned_commit_is_not_confused_with_the_next(
    ledger: Ledger, place: LedgerDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sweeps.ledger.postgres.WAIT_SECONDS", 0.0)
    dialect = ledger._storage.engine.dialect
    real = dialect.do_commit

    def lost(connection: object) -> None:
        real(connection)
        raise psycopg2.OperationalError("server closed the connection unexpectedly")

    dialect.do_commit = lost
    try:
        with pytest.raises(LedgerRefused):
            _add(ledger)
    finally:
        dialect.do_commit = real
    _add(ledger)
    assert [trial.number for trial in LedgerReader(place).trials] == [0, 1]


def test_database_that_lost_commits_is_not_written_to(
    cluster: Cluster, ledger: Ledger, place: LedgerDatabase
) -> None:
    _add(ledger)
    # As after a failover to a copy that lagged behind.
    _do(cluster, f"UPDATE gradsweep_drivers SET written = 1 WHERE sweep = '{place.study}'")
    for table in ("trial_params", "trials"):
        _do(
            cluster,
            f"DELETE FROM {table} WHERE trial_id IN (SELECT trial_id FROM trials JOIN studies "
            f"USING (study_id) WHERE study_name = '{place.study}')",
        )
    for _ in range(2):
        with pytest.raises(LedgerRefused, match=r"has lost 1 of the transactions that this driv"):
            _add(ledger)
    assert LedgerReader(place).trials == [], "its number is another trial's directory"


def test_short_restart_is_waited_for(
    cluster: Cluster, ledger: Ledger, place: LedgerDatabase
) -> None:
    _add(ledger)
    cluster.stop()
    again = threading.Timer(1.0, cluster.start)
    again.start()
    try:
        ledger.report(0, epoch=1, step=10, value=0.5)
    finally:
        again.join()
    assert LedgerReader(place).reports_of(0) == {1: 0.5}


def test_unavailable_database_is_given_up(
    cluster: Cluster, ledger: Ledger, place: LedgerDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    _add(ledger)
    monkeypatch.setattr("sweeps.ledger.postgres.WAIT_SECONDS", 0.5)
    cluster.stop()
    try:
        for use in (
            lambda: ledger.report(0, epoch=1, step=10, value=0.5),
            ledger.trials,
            lambda: LedgerReader(place),
        ):
            with pytest.raises(LedgerRefused, match=r"cannot be used: .*; what it holds is unto"):
                use()
    finally:
        cluster.start()
    ledger.report(0, epoch=1, step=10, value=0.5)
    assert ledger.trial(0).reports == {1: 0.5}


def test_locked_ledger_is_waited_for_within_a_bound(
    cluster: Cluster, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    _add(ledger)
    monkeypatch.setitem(ledger_database._SETTINGS, "lock_timeout", 200)
    ledger._storage.engine.dispose()
    with closing(cluster.connect()) as other, other.cursor() as cursor:
        cursor.execute("LOCK TABLE gradsweep_drivers IN EXCLUSIVE MODE")
        with pytest.raises(LedgerBusy, match=r"locked the ledger of sweep '.*' in postgresql"):
            ledger.start(0)
    assert ledger.start(0) == 1


def test_rejecting_database_is_named_with_cause_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as bound, own_cluster(password="right") as guarded:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        nobody = f"postgresql://ada@127.0.0.1:{bound.getsockname()[1]}/sweeps"
        closed = f"/postgres?port={bound.getsockname()[1]},5432&"
        monkeypatch.setenv("PGPASSWORD", "hunter2")
        monkeypatch.setenv("SWEEP_TRUSTED_STORES", "postgresql://ada@host:x/sweeps")
        for uri, cause in (
            (nobody, "Connection refused"),
            (guarded.uri, 'password authentication failed for user "gradsweep"'),
            (
                guarded.uri.replace("?host=", "?host=127.0.0.1,").replace("/postgres?", closed),
                'password authentication failed for user "gradsweep"',
            ),
            ("postgresql://ada@host:x/sweeps", "invalid integer value"),
        ):
            place = LedgerDatabase(uri, "digits", tmp_path)
            started = time.monotonic()
            for use in (place.check_available, lambda at=place: ledger_lock(at).acquire(holder())):
                with pytest.raises(LedgerRefused) as refused:
                    use()
                told = str(refused.value)
                assert f"the ledger of sweep 'digits' in {uri} cannot be used: " in told
                assert cause in told
                assert "; start the database or correct storage.ledger; PostgreSQL rea" in told
                assert "hunter2" not in told
            assert time.monotonic() - started < scaled(5)
        monkeypatch.setenv("PGPASSWORD", "right")
        assert not guarded.query("SELECT 1 FROM pg_tables WHERE schemaname = 'public'")


def test_a_name_is_given_once_in_a_database(cluster: Cluster, tmp_path: Path) -> None:
    with held_place(cluster, tmp_path / "a", "once") as first:
        Ledger.create(first, mode="min", sweep_id="a")
        first.remove_incomplete(tmp_path)
        assert first.num_trials() is None, "what died before it was a sweep is nobody's"
        Ledger.create(first, mode="min", sweep_id="b")
    second = LedgerDatabase(cluster.uri, "once", tmp_path / "b")
    for use in (second.check_available, lambda: second.remove_incomplete(tmp_path)):
        with pytest.raises(SweepTaken) as refused:
            use()
        assert re.fullmatch(
            rf"{re.escape(cluster.uri)} holds a sweep 'once' of 0 trials already, whose files are "
            rf"at {re.escape(socket.gethostname())}:{tmp_path}/a; a name is given once in a "
            "database; resume it there, choose another name with --name, or remove it with: "
            rf"optuna delete-study --storage '{re.escape(cluster.uri)}' --study-name 'once'",
            str(refused.value),
        )
    plain = cluster.uri.replace("+psycopg2", "")
    with pytest.raises(SweepTaken) as refused:
        LedgerDatabase(plain, "once", tmp_path / "b").check_available()
    assert str(refused.value).startswith(f"{plain} holds ")
    told = f"--storage '{cluster.uri}' "  # that of no driver means another one to SQLAlchemy
    assert told in str(refused.value)
    with held_place(cluster, tmp_path / "a", "once") as again:
        _add(Ledger.open(again))
        with pytest.raises(SweepTaken, match="of 1 trials already"):
            again.remove_incomplete(tmp_path)


def test_tables_of_another_program_are_left_alone(tmp_path: Path) -> None:
    with own_cluster() as mixed:
        _do(mixed, "CREATE TABLE alembic_version (version_num text)")
        place = LedgerDatabase(mixed.uri, "digits", tmp_path)
        with pytest.raises(LedgerError, match=r"holds the tables of another program, such as MLf"):
            place.check_available()
        assert mixed.query("SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == [
            ("alembic_version",)
        ]
        _do(mixed, "DROP TABLE alembic_version")
        _do(mixed, "CREATE TABLE version_info (release text)")
        with pytest.raises(LedgerError, match="holds the tables of another program"):
            place.check_available()
        _do(mixed, "DROP TABLE version_info")
        with held_place(mixed, tmp_path) as made:
            Ledger.create(made, mode="min", sweep_id="s")
        _do(mixed, "UPDATE version_info SET schema_version = 11")
        with pytest.raises(LedgerError, match=r"has tables of version 11 .* reads version 12 "):
            place.check_available()


@pytest.mark.parametrize("commits", [2, 3])
def test_kill_while_creating_tables_leaves_usable_database(
    cluster: Cluster, tmp_path: Path, commits: int
) -> None:
    class Killed(BaseException):
        pass

    def die(_: object) -> None:
        nonlocal commits
        commits -= 1
        if not commits:
            raise Killed

    def begin(name: str) -> LedgerReader:
        place = LedgerDatabase(uri, name, tmp_path)
        place.check_available()
        ledger_lock(place).acquire(holder())
        Ledger.create(place, mode="min", sweep_id="s")
        return LedgerReader(place)

    uri = cluster.create_database(f"unborn-{commits}")
    event.listen(Engine, "commit", die)
    try:
        with pytest.raises(Killed):
            begin("first")
    finally:
        event.remove(Engine, "commit", die)
    _end_sessions(cluster)  # as with its process
    assert begin("second").trials == []


def test_a_sweep_that_is_not_there_is_no_ledger(place: LedgerDatabase) -> None:
    for use in (lambda: Ledger.open(place), lambda: LedgerReader(place)):
        with pytest.raises(
            LedgerError, match=r"the ledger of sweep 's-\w+' in .* is not readable"
        ):
            use()


def test_commands_recognise_a_driver_on_another_host(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(f'{SPEC}storage: {{ledger: "{cluster.uri}"}}\n')
    paths = SweepPaths(tmp_path / "runs", "commands")
    spec = load_spec(Path("s.yaml"))
    running = rf"run by process {os.getpid()} on {re.escape(socket.gethostname())}"
    paths.directory.mkdir(parents=True)
    with held_place(cluster, paths.directory, "commands") as place:
        ledger = open_ledger(paths, spec, Origin(), new=True, accepted=False, place=place)
        for value in (0.5, 0.25):
            record = ledger.add(proposal(SPACE, RandomSampler(seed=1)))
            ledger.report(record.number, epoch=1, step=10, value=value)
            ledger.finish(record.number, "complete")
        status = json.loads(_said(0, "status", "commands", "--json"))
        assert (status["state"], status["best"]["number"]) == ("running", 1)
        assert status.pop("findings") is None
        assert status.pop("audit") is None
        assert status.pop("usage")["epochs"] == 2
        assert json.loads(_said(0, "list", "--json")) == [status]
        assert json.loads(_said(0, "show", "commands", "1", "--json"))["reports"] == {"1": 0.25}
        assert re.search(rf"already being {running};", _said(4, "resume", "commands"))
        assert re.search(
            rf"already being {running};", _said(4, "run", "s.yaml", "--root", "elsewhere")
        )
        assert re.search(
            rf"is {running} with another directory than", _said(2, "stop", "commands")
        )
    assert json.loads(_said(0, "status", "commands", "--json"))["state"] == "finished"
    assert len(json.loads(_said(0, "trials", "commands", "--json"))) == 2
    assert json.loads(_said(0, "compare", "commands", "--json"))
    taken = "holds a sweep 'commands' of 2 trials already"
    assert taken in _said(2, "run", "s.yaml", "--root", "elsewhere")
    moved = "storage.ledger is postgresql"
    assert moved in _said(2, "resume", "commands", "-s", "storage.ledger=null")
    assert not Path("elsewhere").exists()
    assert not paths.ledger.exists()
    (finding,) = check_sweeps(tmp_path / "runs")
    assert (finding.level, finding.what) == ("warn", "commands"), "tracking knows of no trial"


def _said(code: int, *arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def _do(cluster: Cluster, statement: str) -> None:
    with closing(cluster.connect()) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)


def _end_sessions(cluster: Cluster) -> None:
    """End every connection, as a restart or a cut cable does; returns once all have ended."""
    ours = "FROM pg_stat_activity WHERE application_name LIKE 'gradsweep%'"
    known = cluster.query(f"SELECT pid, pg_terminate_backend(pid) {ours}")
    pids = ", ".join(str(pid) for pid, _ in known)
    _soon(lambda: not pids or not cluster.query(f"SELECT pid {ours} AND pid IN ({pids})"))


def _soon(condition: Callable[[], bool]) -> None:
    deadline = Deadline(5)
    while not condition():
        assert not deadline.passed
        time.sleep(0.02)
