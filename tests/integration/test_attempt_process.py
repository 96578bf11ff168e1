"""Each call is in a fresh process, nothing of which is left when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sweeps.engine import fork_server
from tests.slices import sliced
from tests.time_limits import Deadline
from trainable.processes.attempt_process import AttemptProcess, template_command

pytestmark = pytest.mark.integration

REPORT = "tests.integration.forked_functions:report"
TASK = "import os\nMARKED, PID = [], os.getpid()\n"
CUDA = "import torch\ntorch.cuda._is_in_bad_fork = lambda: os.getpid() != PID\n"
THREAD = "threading.Thread(target=time.sleep, args=(600,), daemon=True)"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    for name, more in (
        ("quiet", ""),
        ("uses_arrow", "import pyarrow\nARRAY = pyarrow.array([1])\n"),
        ("starts_threads", f"import threading, time\n{THREAD}.start()\n"),
        ("starts_children", "import subprocess\nCHILD = subprocess.Popen(['sleep', '600'])\n"),
        ("starts_cuda", f"{CUDA}torch.cuda.device_count = lambda: 1\n"),
        ("no_cuda", f"{CUDA}torch.cuda.device_count = lambda: 0\n"),
    ):
        (directory / f"{name}.py").write_text(TASK + more)
    return directory


@pytest.fixture(scope="module")
def forked(tasks: Path) -> Iterator[AttemptProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(tasks), *sys.path])
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        process = AttemptProcess(template_command())
        yield process
        process._control.close()
        process._template.wait(20)


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with fork_server.serving(1):
        yield


def _call(forked: AttemptProcess, *arguments: str) -> dict[str, Any]:
    forked.begin(REPORT, *arguments)
    found: dict[str, Any] = forked.receive()
    assert forked.end() == 0
    return found


@pytest.mark.parametrize("task", sliced(["quiet", "no_cuda", "uses_arrow"], "quiet".__eq__))
def test_task_is_imported_once_and_each_process_is_fresh(
    forked: AttemptProcess, task: str
) -> None:
    found = [_call(forked, task) for _ in range(3)]
    assert [one["marked"] for one in found] == [[], [], []]
    assert [one["imports"] for one in found] == [True, False, False]
    assert len({one["pid"] for one in found}) == 3
    (template,) = {one["imported by"] for one in found}
    assert [one["parent"] for one in found] == [template] * 3
    assert len({one["random"] for one in found}) == 3


@pytest.mark.parametrize(
    "task", sliced(["starts_threads", "starts_children", "starts_cuda"], "starts_threads".__eq__)
)
def test_task_that_cannot_be_forked_is_imported_by_each_process(
    forked: AttemptProcess, task: str
) -> None:
    found = [_call(forked, task) for _ in range(2)]
    assert [one["imported by"] for one in found] == [one["pid"] for one in found]
    assert [one["marked"] for one in found] == [[], []]


@pytest.mark.parametrize(
    ("does", "code"),
    sliced([("kill", -signal.SIGKILL), ("exit", 7), ("", 0)], ("exit", 7).__eq__),
)
def test_all_that_a_process_leaves_ends_with_it(
    forked: AttemptProcess, does: str, code: int
) -> None:
    forked_by = psutil.Process(forked._template.pid)
    before = {one.pid for one in forked_by.children(recursive=True)}
    for _ in range(2):
        forked.begin(REPORT, "quiet", "daemon", does)
        found = forked.receive()
        assert forked.end() == code
        now = {one.pid for one in forked_by.children(recursive=True)}
        assert now <= {*before, found["imported by"]}


ACTOR = f"""
import sys
from sweeps.engine import fork_server
from trainable.processes.attempt_process import AttemptProcess
sys.path.insert(0, sys.argv[1])
forked = AttemptProcess(fork_server.template_command())
for does in sys.argv[2:]:
    forked.begin({REPORT!r}, "quiet", does)
    print(forked._template.pid, forked.receive()["pid"], flush=True)
    if does:
        forked.receive()
    forked.end()
"""


def _actor(directory: Path, *does: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ACTOR, str(directory), *does],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize(
    ("does", "code"),
    sliced([("kill", -signal.SIGKILL), ("exit", 7)], ("kill", -signal.SIGKILL).__eq__),
)
@pytest.mark.usefixtures("server")
def test_actor_ends_like_its_process(tasks: Path, does: str, code: int) -> None:
    with _actor(tasks, "", does) as actor:
        assert actor.wait(60) == code


@pytest.mark.parametrize("who", sliced(["actor", "template", "process"], "actor".__eq__))
@pytest.mark.usefixtures("server")
def test_actor_template_and_process_end_together(tasks: Path, who: str) -> None:
    with _actor(tasks, "stay") as actor:
        assert actor.stdout is not None
        template, process = map(int, actor.stdout.readline().split())
        pids = {"actor": actor.pid, "template": template, "process": process}
        above = psutil.Process(process).parent()
        assert above is not None
        os.kill(pids[who], signal.SIGKILL)
        assert actor.wait(60) == -signal.SIGKILL
    deadline = Deadline(20)
    while any(psutil.pid_exists(pid) for pid in (template, above.pid, process)):
        assert not deadline.passed, "a process lives on"
        time.sleep(0.02)
