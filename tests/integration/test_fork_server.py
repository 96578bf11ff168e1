"""Forked workers equal their requesting process and end with it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sweeps.engine import fork_server, worker_launcher
from sweeps.engine.resources import ResourcePlan
from sweeps.engine.task_check import TaskInspector
from sweeps.spec.spec import parse_spec
from tests.slices import sliced
from tests.time_limits import Deadline, scaled

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone"),
]

PROGRAM = """
import json, os, random, resource, signal, subprocess, sys
from threadpoolctl import threadpool_info
child = subprocess.Popen(["sleep", "600"]) if sys.argv[1] == "wait" else None
print(json.dumps({
    "arguments": sys.argv,
    "place": sys.path[0],
    "marked": os.environ.get("MARKED"),
    "added": os.environ.get("ADDED"),
    "directory": os.getcwd(),
    "umask": os.umask(0),
    "niceness": os.nice(0),
    "oom_score": open("/proc/self/oom_score_adj").read(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "ignored": [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                if signal.getsignal(one) == signal.SIG_IGN],
    "group": os.getpgid(0) == os.getpid(),
    "warm": "torch._dynamo" in sys.modules,
    "ray": "ray" in sys.modules,
    "drawn": [random.random(), "numpy" in sys.modules and sys.modules["numpy"].random.random(),
              "torch" in sys.modules and sys.modules["torch"].initial_seed()],
    "pid": os.getpid(),
    "child": child and child.pid,
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "threads": [one["num_threads"] for one in threadpool_info()
                if one["internal_api"] == "openblas"],
    "secret": "canary" in open("/proc/self/environ").read(),
}), flush=True)
print("complaint", file=sys.stderr)
if sys.argv[1] == "wait":
    signal.pause()
sys.exit(int(sys.argv[1]))
"""
THEIRS = "import sys; print('as Ray starts it', *sys.argv[1:])"


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "canary")
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with fork_server.serving(1, ["SECRET"]):
            yield


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "setup_worker.py").write_text(THEIRS)
    program = tmp_path / "default_worker.py"
    program.write_text(PROGRAM)
    return program


def _command(program: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(fork_server.WORKER_START), str(program), *arguments]


def _module(*arguments: str) -> list[str]:
    return [sys.executable, "-P", *fork_server.launcher(), "-m", *arguments]


def _gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def _wait_until_gone(pid: int) -> None:
    deadline = Deadline(20)
    while not _gone(pid):
        assert not deadline.passed, f"process {pid} lives on"
        time.sleep(0.02)


@pytest.mark.usefixtures("server")
def test_fork_equals_the_requesting_process(program: Path, tmp_path: Path) -> None:
    context = json.dumps({"env_vars": {"ADDED": "yes"}, "py_executable": sys.executable})

    def prepare() -> None:
        os.umask(0o027)
        os.nice(7)
        Path(worker_launcher.OOM_SCORE).write_text("900")
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1001))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])

    done = [
        subprocess.run(
            _command(
                program, "3", f"--serialized-runtime-env-context={context}", "--language=PYTHON"
            ),
            cwd=tmp_path,
            env={**os.environ, "MARKED": "by its parent"},
            capture_output=True,
            text=True,
            preexec_fn=prepare,
            check=False,
        )
        for _ in range(2)
    ]
    told, other = (json.loads(one.stdout) for one in done)
    assert [one.returncode for one in done] == [3, 3]
    assert [one.stderr.splitlines()[0] for one in done] == ["complaint"] * 2
    drawn = zip(told.pop("drawn"), other.pop("drawn"), strict=True)
    assert all(one != another for one, another in drawn)
    assert told.pop("pid") != other.pop("pid")
    assert set(told.pop("threads")) == {1}, "else its sums differ from those of other workers"
    assert told == {
        "arguments": [str(program), "3"],
        "place": str(tmp_path),
        "marked": "by its parent",
        "added": "yes",
        "directory": str(tmp_path),
        "umask": 0o027,
        "niceness": 7,
        "oom_score": "900\n",
        "blocked": [signal.SIGHUP],
        "ignored": [],
        "group": True,
        "warm": True,
        "ray": False,
        "child": None,
        "files": [1000, 1001],
        "secret": False,
    }


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("who", sliced(["the fork", "who asked for it"], "the fork".__eq__))
def test_fork_and_requester_end_together(program: Path, who: str) -> None:
    with subprocess.Popen(
        _command(program, "wait"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as asker:
        assert asker.stdout is not None
        fork = json.loads(asker.stdout.readline())["pid"]
        assert not _gone(fork)
        os.kill(fork if who == "the fork" else asker.pid, signal.SIGKILL)
        code = asker.wait(20)
    _wait_until_gone(fork)
    assert code == (-signal.SIGKILL & 0xFF if who == "the fork" else -signal.SIGKILL)


SEEN = """
import os, sys
print("torch" in sys.modules, sys.argv[1:2], os.environ.get("GRADSWEEP_FORK_SERVER"),
      sys.stdin.read(), flush=True)
"""


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("warm", "end", "code"),
    [(True, "os.kill(os.getpid(), 9)", -9), (False, "os._exit(3)", 3)],
    ids=["fork", "the server has ended"],
)
def test_module_runs_and_ends_as_usual(
    monkeypatch: pytest.MonkeyPatch, warm: bool, end: str, code: int
) -> None:
    if not warm:
        monkeypatch.setenv(worker_launcher.VARIABLE, "gradsweep-that-has-ended")
    command = _module("timeit", "-n1", "-r1", SEEN + end)  # runs what it is given
    done = subprocess.run(command, input="said", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, f"{warm} ['-n1'] None said\n"), done.stderr


DRIVER = """
import os, signal, subprocess, sys
from sweeps.engine import fork_server
signal.pthread_sigmask(signal.SIG_BLOCK, {blocked})
with fork_server.serving(1):
    subprocess.Popen(sys.argv[1:])
    signal.pause()
"""


@pytest.mark.parametrize(
    ("end", "blocked"),
    sliced(
        [(signal.SIGKILL, []), (signal.SIGINT, []), (signal.SIGKILL, [int(signal.SIGUSR1)])],
        (signal.SIGKILL, []).__eq__,
    ),
)
def test_forks_end_with_their_driver(
    program: Path, end: signal.Signals, blocked: list[int]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(blocked=blocked), *_command(program, "wait")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        told = json.loads(driver.stdout.readline())
        fork = told["pid"]
        server = psutil.Process(fork).ppid()
        asker = next(
            child.pid
            for child in psutil.Process(driver.pid).children()
            if str(fork_server.WORKER_START) in child.cmdline()
        )
        driver.send_signal(end)
    for pid in (server, fork, told["child"], asker):
        _wait_until_gone(pid)


SERVER = """
import os, socket, sys, torch
from sweeps.spec.spec import parse_spec
from sweeps.engine import fork_server, worker_launcher
from sweeps.engine.resources import ResourcePlan
from sweeps.engine.task_check import TaskInspector
address, user = sys.argv[1:]
real, forks = os.fork, []
def fork():
    forks.append(None)
    if len(forks) == 2:
        raise BlockingIOError("no more processes")
    return real()
os.fork = fork
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
os.setuid(int(user))
listener.bind(worker_launcher.socket_name(address))
listener.listen()
print("ready", flush=True)
fork_server._Server(listener, address, os.open(os.devnull, os.O_WRONLY)).serve()
"""


@contextlib.contextmanager
def _serving(user: int, patch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A server of a user's whose second fork fails."""
    address = f"gradsweep-test-{os.getpid()}:secret"
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, address, str(user)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        patch.setenv(worker_launcher.VARIABLE, address)
        yield server
        server.kill()


LEAVES = """
import threading, time
from trainable.tasks.spiral import Spiral

class Leaves(Spiral):
    def build_data(self):
        threading.Thread(target=time.sleep, args=(600,)).start()
        return super().build_data()
"""


@pytest.mark.usefixtures("server")
def test_inspected_task_may_leave_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves_thread.py").write_text(LEAVES)
    monkeypatch.chdir(tmp_path)
    spec = parse_spec(
        "name: leaves\ntask: leaves_thread:Leaves\nmetric: val/loss\nmode: min\ntrials: 1\n"
        "budget: {epochs: 1}\n",
        "leaves.yaml",
    )
    began = time.monotonic()
    assert TaskInspector(spec, ResourcePlan(1, 0, 1)).facts().num_parameters
    assert time.monotonic() - began < scaled(300)


def test_module_is_killed_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later attempt may succeed, as after any signal."""
    waits = "print(flush=True); import time; time.sleep(600)"
    with (
        _serving(os.geteuid(), monkeypatch) as server,
        subprocess.Popen(_module("timeit", "-n1", "-r1", waits), stdout=subprocess.PIPE) as module,
    ):
        assert module.stdout is not None
        assert module.stdout.readline() == b"\n"
        server.kill()
        assert module.wait(scaled(20)) == -signal.SIGKILL


@pytest.mark.usefixtures("server")
def test_stopped_server_is_continued() -> None:
    """Its clients wait without an end: the descriptors that they sent stay open in its socket."""
    (server,) = (
        child for child in psutil.Process().children() if fork_server.__name__ in child.cmdline()
    )
    for _ in range(2):
        server.send_signal(signal.SIGSTOP)
        command = _module("timeit", "-n1", "-r1", "print('ran')")
        with subprocess.Popen(command, stdout=subprocess.PIPE) as module:
            try:
                printed, _ = module.communicate(timeout=scaled(20))
            finally:
                server.send_signal(signal.SIGCONT)
        assert printed.startswith(b"ran\n")


def test_failed_fork_leaves_other_forks_running(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _serving(os.geteuid(), monkeypatch) as server:
        with subprocess.Popen(_command(program, "wait"), stdout=subprocess.PIPE) as first:
            assert first.stdout is not None
            told = json.loads(first.stdout.readline())
            second, third = (
                subprocess.run(_command(program, "3"), capture_output=True, text=True, check=False)
                for _ in range(2)
            )
            assert second.stdout == f"as Ray starts it {program} 3\n"
            assert third.returncode == 3
            assert psutil.Process(told["pid"]).ppid() == server.pid
            first.kill()
        _wait_until_gone(told["pid"])
        _wait_until_gone(told["child"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else; run it as root")
def test_other_users_server_is_not_used(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _serving(65534, monkeypatch):
        done = subprocess.run(_command(program, "3"), capture_output=True, text=True, check=True)
    assert done.stdout == f"as Ray starts it {program} 3\n"


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("said", [b"\xff" * 8, (200_000).to_bytes(8, "big") + b"[" * 200_000])
def test_oversized_request_ends_no_process(program: Path, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as much:
        much.connect(worker_launcher.socket_name(os.environ[worker_launcher.VARIABLE]))
        much.sendall(said)
        done = subprocess.run(
            _command(program, "3"), capture_output=True, timeout=scaled(60), check=False
        )
        assert done.returncode == 3
        assert much.recv(1) == b""


@pytest.mark.chaos
@pytest.mark.usefixtures("server")
def test_silent_client_delays_others_briefly(program: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(worker_launcher.socket_name(os.environ[worker_launcher.VARIABLE]))
        done = subprocess.run(
            _command(program, "3"), capture_output=True, timeout=scaled(60), check=False
        )
        assert done.returncode == 3
        assert silent.recv(1) == b""


LEAVING = """
import os, signal, subprocess, sys, time
if os.fork() == 0:  # a child that keeps what it inherited, as of connections
    if sys.argv[1] == "elsewhere":
        os.setsid()
        if os.fork():
            os._exit(0)
    os.write(1, f"{os.getpid()}\\n".encode())  # one write: two processes share the pipe
    time.sleep(600)
os.write(1, f"{os.getpid()}\\n".encode())
signal.pause()
"""


@pytest.mark.parametrize("where", sliced(["in its group", "elsewhere"], "elsewhere".__eq__))
def test_children_of_a_worker_end_with_it(server: None, program: Path, where: str) -> None:
    del server
    program.write_text(LEAVING)
    with subprocess.Popen(_command(program, where), stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        pids = [int(asked.stdout.readline()) for _ in range(2)]
        [worker] = [pid for pid in pids if os.getpgid(pid) == pid and os.getsid(pid) != pid]
        [child] = set(pids) - {worker}
        os.kill(worker, signal.SIGSEGV)
        assert fork_server.exit_code(worker, 10) == -signal.SIGSEGV
        _wait_until_gone(child)
        asked.wait(10)


@pytest.mark.parametrize(
    "why", sliced(["nobody serves", "the server has ended"], "the server has ended".__eq__)
)
def test_worker_starts_by_ray_without_a_server(program: Path, why: str) -> None:
    environment = {**os.environ, worker_launcher.VARIABLE: "gradsweep-that-has-ended"}
    if why == "nobody serves":
        del environment[worker_launcher.VARIABLE]
    done = subprocess.run(
        _command(program, "3", "--language=PYTHON"),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"as Ray starts it {program} 3 --language=PYTHON\n"


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "argument",
    sliced(
        [
            '--serialized-runtime-env-context={"py_executable": "another-python"}',
            '--serialized-runtime-env-context={"command_prefix": ["nice"]}',
            "--worker-type=SPILL_WORKER",
        ],
        lambda argument: "another-python" in argument,
    ),
)
def test_unusual_worker_starts_by_ray(program: Path, argument: str) -> None:
    done = subprocess.run(
        _command(program, "3", argument), capture_output=True, text=True, check=True
    )
    assert done.stdout == f"as Ray starts it {program} 3 {argument}\n"


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("user", "secret", "made"),
    [(0, None, True), (0, "", False), (0, "ünknown", False), (65534, None, False)],
)
def test_other_processes_get_no_fork(
    tmp_path: Path, user: int, secret: str | None, made: bool
) -> None:
    """Everybody may read where a server listens."""
    if user and os.geteuid():
        pytest.skip("only root can be somebody else; run it as root")
    program, marker = tmp_path / "program.py", tmp_path / "marker"
    program.write_text(f"open({str(marker)!r}, 'w')")
    address = os.environ[worker_launcher.VARIABLE]
    if secret is not None:
        address = f"{address.partition(':')[0]}:{secret}"
    asking = f"""
import os, socket
from sweeps.engine import worker_launcher
os.setuid({user} or os.geteuid())
worker_launcher.OOM_SCORE = os.devnull if {user} else worker_launcher.OOM_SCORE  # may not be read
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
    try:
        worker_launcher._ask(connection, {address!r}, [{str(program)!r}], {{}})
    except OSError:
        pass
"""
    subprocess.run([sys.executable, "-c", asking], check=True, cwd=tmp_path)
    assert marker.exists() == made


@pytest.mark.usefixtures("server")
def test_fork_that_cannot_take_over_starts_no_worker(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: str(tmp_path / "removed"))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        pytest.raises(ConnectionError),
    ):
        worker_launcher._ask(
            connection, os.environ[worker_launcher.VARIABLE], [str(program), "3"], {}
        )


def test_nothing_starts_after_raylet_ended(program: Path) -> None:
    done = subprocess.run(
        _command(program, "3"),
        env={
            **os.environ,
            worker_launcher.VARIABLE: "gradsweep-that-has-ended",
            "RAY_RAYLET_PID": "0",
        },
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")
