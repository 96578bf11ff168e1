"""Start the ranks above 0 of a run as child processes of rank 0, on this machine and without Ray.

    python -m trainable.processes.local_ranks PARENT

The child reads a line of JSON: which function it calls as which rank. It answers with one: what
the function returned, or how it failed. The kernel kills a child when its parent ends, and `close`
kills it with its own child processes. What must not live here: what a rank does (`rank_run.py`),
and how ranks talk to each other (`rank_group.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from redaction.secrets import redact
from trainable import rank_waits
from trainable.config import TrialConfig
from trainable.errors import RankLost, TrainingError
from trainable.failures import as_error, as_note
from trainable.process_start import end_with_parent, load_training
from trainable.user_code.task_import import prepare_process

if TYPE_CHECKING:
    from trainable.ranks import Ranks

_LAST_LINES = 20


@dataclass(frozen=True)
class ChildEnd:
    """How the process of a rank ended: what it returned, or why it failed."""

    rank: int
    result: Any = None
    error: TrainingError | None = None
    lost_another: bool = False


@contextmanager
def local_ranks(
    config: TrialConfig,
    directory: Path,
    *,
    searched: Collection[str] = (),
    device: str | None = None,
    threads: int | None = None,
    accept_workers: bool = False,
) -> Iterator[Ranks]:
    """Start the further ranks of a run on this machine, and give the ranks to its first one.

    All but `config` is as in `open_trainer`, which receives the ranks. The further ranks train
    until the context ends. Of several GPUs each rank takes one, and starts again with the first
    where there are fewer.
    """
    from trainable.group_joining import GroupPlace, listen
    from trainable.parallel.rank_group import RankGroup
    from trainable.precision import find_device
    from trainable.ranks import ALONE

    if config.workers == 1:
        yield ALONE
        return
    found = find_device(device)
    environments = _environments(config.workers) if found.type == "cuda" else ()
    with LocalRanks(config.workers, environments) as children, listen() as listening:
        address, port = listening.getsockname()[:2]
        place = GroupPlace(address, port, config.workers, timeout=rank_waits.STEP_ALONE)
        children.begin(
            "trainable.processes.local_ranks:follow_in_child",
            asdict(place),
            config=config.model_dump(mode="json"),
            directory=str(directory),
            searched=list(searched),
            device="cpu" if found.type == "cpu" else None,
            threads=threads,
            accept_workers=accept_workers,
        )
        try:
            joined = RankGroup.join(
                place, 0, device=found, listening=listening, has_lost=children.has_lost
            )
            with joined as ranks:
                yield ranks
        except RankLost as problem:
            if (cause := children.cause()) is None:
                raise
            raise cause from problem


def follow_in_child(rank: int, place: dict[str, Any], config: Any, **options: Any) -> None:
    """Train as a further rank: `rank_run.follow` with plain data."""
    from trainable.group_joining import GroupPlace
    from trainable.processes.rank_run import follow

    options["directory"] = Path(options["directory"])
    follow(TrialConfig.model_validate(config), place=GroupPlace(**place), rank=rank, **options)


def _environments(size: int) -> list[dict[str, str]]:
    """Return the variables that show each rank above 0 one GPU; rank 0 takes the first."""
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[:count] if visible else [str(index) for index in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": names[rank % count]} for rank in range(1, size)]


class LocalRanks:
    """The child processes of a run's ranks above 0; as a context manager it ends them.

    The children start immediately and import torch while the caller works. Each prints to
    a temporary file; `end` shows its last lines if the process ended by itself.
    """

    def __init__(self, size: int, environments: Sequence[Mapping[str, str]] = ()) -> None:
        self.size = size
        variables = environments or [{}] * (size - 1)
        self._children = [_Child(rank + 1, own) for rank, own in enumerate(variables)]

    def begin(self, function: str, place: Mapping[str, Any], **arguments: Any) -> None:
        """Have each rank call a function, once it has imported torch; return when all have."""
        for child in self._children:
            child.wait_until_ready()
        for child in self._children:
            child.send({"function": function, "place": place, "arguments": arguments})

    def ends(self) -> list[ChildEnd]:
        """Wait until all ranks have ended, and return how."""
        return [child.end() for child in self._children]

    def has_lost(self) -> bool:
        """Return whether the process of a rank has ended."""
        return any(child.has_ended() for child in self._children)

    def cause(self) -> TrainingError | None:
        """Return why a rank ended that the others lost: killed, or failed; None if unknown."""
        deadline = time.monotonic() + rank_waits.END_ALONE
        while True:
            for child in self._children:
                # one that only lost another rank says so, and is not the cause
                if child.has_ended() and (end := child.end()).error and not end.lost_another:
                    return end.error
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)

    def close(self) -> None:
        """Kill the ranks that still run, with their own child processes."""
        for child in self._children:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Child:
    """The process of one rank."""

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        # no terminal for a debugger in this process; its group is its own, for `close`
        variables = {**os.environ, "PYTHONBREAKPOINT": "0", **environment}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainable.processes.local_ranks", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,  # no pipe: this process does not read it while the rank trains
            text=True,
            env=variables,
            process_group=0,
        )
        self._end: ChildEnd | None = None

    def wait_until_ready(self) -> None:
        if not self._read():
            loss = self._loss()
            self._end = ChildEnd(self.rank, error=loss)
            raise loss

    def send(self, call: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone, and `end` says so
            self._process.stdin.write(json.dumps({**call, "rank": self.rank}) + "\n")
            self._process.stdin.flush()

    def end(self) -> ChildEnd:
        if self._end is None:
            answer = json.loads(self._read() or "{}")
            if not answer:
                self._end = ChildEnd(self.rank, error=self._loss())
            elif "failure" in answer:
                error = as_error(answer["failure"])
                self._end = ChildEnd(self.rank, None, error, isinstance(error, RankLost))
            else:
                self._end = ChildEnd(self.rank, answer["result"])
        return self._end

    def has_ended(self) -> bool:
        return self._end is not None or self._process.poll() is not None

    def close(self) -> None:
        if self._output.closed:  # the group's id may belong to other processes by now
            return
        with self._output, self._process, contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _loss(self) -> RankLost:
        """Return an error that says how the process ended."""
        code = self._process.wait()
        self._output.seek(0)
        printed = self._output.read().strip().splitlines()[-_LAST_LINES:]
        what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        error = RankLost(f"rank {self.rank}: its process ended ({what})")
        if last_lines := "\n".join(printed):
            error.add_note(f"Rank {self.rank}:\n{redact(last_lines)}")
        return error


def _main() -> None:
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it ended before this line
        sys.exit(128 + signal.SIGKILL)
    # What the user's code prints must not mix with the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.register_at_fork(after_in_child=answers.close)
        os.dup2(2, 1)
        load_training()  # before the group is made: its time-out does not cover an import
        prepare_process()
        _write(answers, {"ready": True})
        if not (line := sys.stdin.readline()):  # rank 0 needs it no longer
            return
        call = json.loads(line)
        try:
            module, _, name = call["function"].partition(":")
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
            result = function(rank=call["rank"], place=call["place"], **call["arguments"])
            _write(answers, {"result": result})
        # a user's code may raise anything; rank 0 says what
        except BaseException as error:
            _write(answers, {"failure": as_note(error, call["rank"])})


def _write(answers: IO[str], answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _main()
