"""Tasks of a user's package: a working one, and several failing ones.

It knows secrets, and says them where it can; its sweep runs under secrets of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.integration.commandline import CommandLine, wait_until
from tests.integration.process_inspection import Watcher, ask_ray
from tests.time_limits import scaled

CANARY = "canary-7f3a"
SECRETS = {
    name: f"{CANARY}-{name.lower()}"
    for name in (
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "STORE_PASSWORD",
        "HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "RAY_AUTH_TOKEN",
        "TOKEN",
        "PGPASSWORD",
        "PGSERVICEFILE",
        "MYSQL_PWD",
        "SSH_PASSPHRASE",
        "GITHUB_PAT",
        "GOOGLE_CREDENTIALS",
    )
} | {
    "DB_PASS": f"{CANARY}/with a blank & more",
    "MLFLOW_TRACKING_URI": f"http://ada:{CANARY}-in-an-address@127.0.0.1:1",
}
UMASK = 0o004
"""Others may not read, but may write: nobody wants that, and no file gets it."""
TASK = '''
import json
import logging
import os
import sys
import time
import warnings
from base64 import b64encode
from pathlib import Path
from urllib.parse import quote, quote_plus

import torch
from torch import nn
from torch.utils.data import Dataset

from trainable import Data, Task


class Points(Dataset):
    """Somebody's own map-style data set: which side of a line a point lies on."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 3, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.x[i].sum() > 0)


class Net(nn.Module):
    """Somebody's own module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.outer = nn.Linear(8, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Mine(Task):
    def __init__(self, *, behaviour="works"):
        self.behaviour = behaviour

    def build_model(self):
        named = ("MLFLOW_TRACKING_", "PGPASS", "PGSERVICEFILE")
        seen = {name: value for name, value in os.environ.items() if name.startswith(named)}
        seen["knows its own"] = bool(os.environ["STORE_PASSWORD"])
        if (began := Path("/proc/self/environ")).exists():  # as long as the process lives
            named = began.read_text().split("\\0")
            seen["began with"] = [one for one in named if "_TRACKING_" in one and one[-1] != "="]
        if not Path("looked-around").exists():  # a command that registers models does know them
            Path(f"seen-{os.getpid()}.json").write_text(json.dumps(seen))
        while "ray" in sys.modules and not Path("looked-around").exists():
            time.sleep(0.1)
        return Net()

    def build_data(self):
        return Data(train=Points(256, 0), val=Points(64, 1))

    def loss(self, model, batch):
        if self.behaviour == "raises":
            self.log_in(os.environ["STORE_PASSWORD"], os.environ["HUB_TOKEN"])
        loss, weight = super().loss(model, batch)
        return (loss * float("nan"), weight) if self.behaviour == "diverges" else (loss, weight)

    def say_everywhere(self, known):
        names = "TOKEN", "PGPASSWORD", "MYSQL_PWD", "SSH_PASSPHRASE", "GITHUB_PAT", "DB_PASS"
        for value in map(os.environ.__getitem__, (*names, "GOOGLE_CREDENTIALS")):
            print(value, quote(value), quote_plus(value), json.dumps(value), repr(value))
        print("api_key:", known)
        print(json.dumps({"password": f"x {known}"}), {"db_pass": known, "n": 1})
        print(f"GET /a?token={known}&n=1, ?sig={known}, ?X-Amz-Signature={known}")
        print(f"Authorization: Bearer {known}, or Bearer {known}, --password {known} -n 1")
        login = b64encode(f"ada:{known}".encode()).decode()
        print(f"postgres://ada:p/w?'{known}@host/db", "Basic", login)
        for part in ("DB_PA", "SS='", *known, "'\\n"):
            sys.stdout.write(part)
            sys.stdout.flush()
        sys.stdout.buffer.write(f"GITHUB_PAT={known}\\n".encode())
        print("\\x1b[2J\\x9b2J\\u202e", end="\\r")

    def log_in(self, password, token):
        print("as ada with", password)
        print(f"and {token}", file=sys.stderr)
        logging.getLogger("store").error("refused %s", password)
        warnings.warn(f"{token} is old")
        try:
            known = password.partition("-store")[0]
            self.say_everywhere(known)
            raise ConnectionError(f"s3://ada:{known}@store: {password}; hub_key={known}")
        except ConnectionError as error:
            raise ValueError("out of cheese") from error
'''
SPEC = """
name: mine
task: {name: "somewhere.else_:Mine"}
metric: val/accuracy
mode: max
trials: 6
concurrency: 1
budget: {epochs: 3}
space:
  train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}
  task.behaviour: {choice: [works, raises, diverges]}
search: {sampler: random}
train: {batch_size: 32}
"""


@dataclass
class Ran:
    """A sweep of that task, run to its end, and what was seen of it meanwhile."""

    watcher: Watcher
    printed: str
    answers: list[str]
    """What Ray said to somebody who knows its token, and to two who do not."""


@contextmanager
def _odd_umask() -> Iterator[None]:
    before = os.umask(UMASK)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def ran(module_cli: CommandLine) -> Ran:
    (module_cli.directory / "somewhere").mkdir()
    module_cli.write("somewhere/else_.py", TASK)
    module_cli.write("mine.yaml", SPEC)
    module_cli.environment |= SECRETS
    with _odd_umask():
        driver = module_cli.start("run", "mine.yaml")
    watcher = Watcher(driver.pid, module_cli.root / "mine" / "lock", CANARY)
    watcher.start()
    # The task was looked at before the run, and a trial waits to be looked at.
    wait_until(lambda: len(list(module_cli.directory.glob("seen-*.json"))) > 1 and watcher.ray)
    known = ("token", SECRETS["RAY_AUTH_TOKEN"]), ("token", "guessed"), ("disabled", "")
    with ThreadPoolExecutor() as beside:
        answers = list(beside.map(lambda it: ask_ray(watcher.ray, *it), known))
    (module_cli.directory / "looked-around").touch()
    printed, _ = driver.communicate(timeout=scaled(200))
    watcher.stop()
    assert driver.returncode == 0, printed
    return Ran(watcher, printed, answers)


@pytest.fixture(scope="module")
def trials(module_cli: CommandLine, ran: Ran) -> list[dict[str, Any]]:
    """Its trials."""
    del ran
    found: list[dict[str, Any]] = module_cli.json("trials", "mine")
    assert {trial["params"]["task.behaviour"] for trial in found} == {
        "works",
        "raises",
        "diverges",
    }
    return found


def test_each_trial_ends_as_its_task_behaved(trials: list[dict[str, Any]]) -> None:
    reasons = {
        "raises": "ValueError: out of cheese",
        "diverges": (
            "non_finite: the loss is nan at step 1; no parameter was changed by that step; "
            "lower the learning rate, lengthen the warmup or lower max_norm"
        ),
    }
    for trial in trials:
        behaviour = trial["params"]["task.behaviour"]
        if behaviour == "works":
            assert (trial["state"], trial["epoch"], trial["reason"]) == ("complete", 3, None)
            assert trial["value"] > 0.8
        else:
            assert trial["state"] == "failed"
            assert trial["reason"] == reasons[behaviour]
            assert trial["attempts"] == 1
            assert trial["checkpoint"] is None


def test_show_names_where_an_error_was_raised(
    module_cli: CommandLine, trials: list[dict[str, Any]]
) -> None:
    number = next(t["number"] for t in trials if t["params"]["task.behaviour"] == "raises")
    shown = module_cli.ok("show", "mine", str(number))
    assert "else_.py" in shown
    assert "out of cheese" in shown
    log = (module_cli.root / f"mine/trials/{number:04d}/trial.log").read_text()
    assert "out of cheese" in log


def test_failed_runs_have_a_reason(module_cli: CommandLine, trials: list[dict[str, Any]]) -> None:
    client = MlflowClient(f"sqlite:///{module_cli.root / 'mlflow.db'}")
    for trial in trials:
        run = client.get_run(trial["mlflow_run_id"])
        if trial["state"] == "failed":
            assert run.info.status == "FAILED"
            assert run.data.tags["reason"] == trial["reason"]
            traceback = run.data.tags["failure.traceback"].rstrip().splitlines()
            assert traceback[0].startswith("Traceback")
            assert trial["reason"].partition(": ")[2] in traceback[-1]
        else:
            assert run.info.status == "FINISHED"


@pytest.mark.chaos
def test_sweep_without_success_has_no_best(
    module_cli: CommandLine, trials: list[dict[str, Any]]
) -> None:
    del trials
    settings = ("trials=1", "space={}", "task.behaviour=diverges")
    overrides = [word for setting in settings for word in ("-s", setting)]
    done = module_cli("run", "mine.yaml", "--name", "hopeless", *overrides)
    assert done.returncode == 3
    assert "the first training batch: the loss" in done.stderr
    assert module_cli.json("status", "hopeless")["state"] == "failed"
    best = module_cli("best", "hopeless")
    assert best.returncode == 3
    assert best.stderr.startswith("no trial of sweep 'hopeless' has ended with a value")


def _holding(directory: Path, text: str) -> list[str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 50
    return [str(path) for path in files if text.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def told(module_cli: CommandLine, trials: list[dict[str, Any]]) -> list[str]:
    """What the other commands print of that sweep, under the same secrets."""
    failed = next(trial["number"] for trial in trials if trial["state"] == "failed")
    commands = (
        f"show mine {failed}",
        "resume mine",
        "best mine --export exported",
        "best mine --register ours",
        "report mine",
        "compare mine",
        "doctor",
    )
    with _odd_umask():
        done = [module_cli(*command.split()) for command in commands]
    assert [each.returncode for each in done] == [0] * len(done), done
    return [each.stdout + each.stderr for each in done]


def test_secrets_are_not_written(module_cli: CommandLine, ran: Ran, told: list[str]) -> None:
    """Searched is every byte of sweep, tracking store, artifacts, outbox, exports and trials'
    logs, what each command prints, and while it ran Ray's own files and the processes' command
    lines.
    """
    assert [text for text in told if CANARY in text] == []
    assert (module_cli.directory / "exported").is_dir()
    assert _holding(module_cli.directory, CANARY) == []
    assert _holding(module_cli.directory, "as ada with [hidden]") != []
    assert _holding(module_cli.directory, "api_key: [hidden]") != []
    assert CANARY not in ran.printed
    logs = [path.read_text() for path in module_cli.root.glob("mine/trials/*/trial.log")]
    assert any(r"\x1b[2J\x9b2J\u202e" in log for log in logs)
    assert not any(mark in "".join(logs) for mark in "\x1b\x9b\r\u202e")
    assert ran.watcher.leaks == set()
    assert ran.watcher.num_files > 5
    assert not any(CANARY in command for command in ran.watcher.command_lines)
    assert any("raylet" in command for command in ran.watcher.command_lines)


@pytest.mark.parametrize(
    "option", [f"task.api_key={CANARY}", f"tracking.uri=http://ada:{CANARY}@127.0.0.1:1"]
)
def test_secret_in_a_spec_is_refused_and_not_repeated(
    module_cli: CommandLine, ran: Ran, option: str
) -> None:
    del ran
    done = module_cli("run", "mine.yaml", "--name", "told", "-s", option)
    assert done.returncode == 2
    assert "a spec is stored and tracked unencrypted" in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert not (module_cli.root / "told").exists()


def test_trials_hold_no_tracking_credentials(module_cli: CommandLine, trials: object) -> None:
    del trials
    seen = [path.read_text() for path in module_cli.directory.glob("seen-*.json")]
    assert len(seen) >= 2  # the look at the task before the run, and the trials' processes
    nothing = {name: "" for name in SECRETS if name.startswith(("MLFLOW_", "PG"))}
    for one in map(json.loads, seen):
        # In a trial the plain MLflow API leads to files of the trial's own.
        if one["MLFLOW_TRACKING_URI"] == "gradsweep-trial://run":
            one["MLFLOW_TRACKING_URI"] = ""
        assert {name: one[name] for name in nothing} == nothing
        assert one["knows its own"]
        assert one.get("began with", []) == []


def test_other_users_cannot_reach_ray(ran: Ran) -> None:
    assert ran.answers == ["answered", "AuthenticationError", "AuthenticationError"]
    assert ran.watcher.listening == {"127.0.0.1"}
    assert ran.watcher.open_to == {0}


def test_ray_starts_no_unneeded_process(ran: Ran) -> None:
    unasked = ("dashboard/dashboard.py", "log_monitor.py", "_private/monitor.py")
    lines = ran.watcher.command_lines
    assert any("gcs_server" in line for line in lines)
    assert not [line for line in lines for name in unasked if name in line]


def test_files_are_for_their_owner_alone(module_cli: CommandLine, told: object) -> None:
    del told
    root, exported = module_cli.root, module_cli.directory / "exported"
    ours = (root / "mine", root / "mlartifacts/mine", exported)
    paths = [root / "mlflow.db", *(path for each in ours for path in each.rglob("*"))]
    assert all(any(each in path.parents for path in paths) for each in ours)
    wrong = [str(path) for path in paths if path.stat().st_mode & 0o077]
    assert (len(paths) > 30, wrong) == (True, [])
