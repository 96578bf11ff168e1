"""Start the ranks above 0 of a run as child processes of rank 0, on this machine and without Ray.

    python -m trainable.local_ranks PARENT

The child imports torch, says so, and reads one line: which function it calls as which rank. It
answers with one line: what the function returned, or how it failed. Both lines are JSON. The
kernel kills a child when its parent ends, and `close` kills it with its own child processes.
What must not live here: what a rank does, and how ranks talk to each other (`ranks.py`).
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

from redaction.secrets import redact
from trainable.errors import TrainingError
from trainable.exception_text import reason_of, traceback_of
from trainable.lazy_imports import load_training
from trainable.parent_death import end_with_parent
from trainable.task_import import prepare_process

_SECONDS_TO_END = 5.0
"""How long a rank may take to end after rank 0 has ended its part, before it is killed."""
_LAST_LINES = 20


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
        rank: Its number.
        result: What its function returned; None if it failed.
        reason: Why it failed, in one line; None if it did not.
        kind: The kind of its failure; see `errors.py`. `lost` if its process ended.
        traceback: The traceback of its failure, or the last lines that the process printed.
    """

    rank: int
    result: Any = None
    reason: str | None = None
    kind: str = ""
    traceback: str = ""


class LocalRanks:
    """The child processes of a run's ranks above 0; as a context manager it ends them.

    The children start immediately and import torch while the caller works. Each prints to
    a temporary file; `end` shows its last lines if the process ended by itself.

    Args:
        size: How many ranks the run has, with rank 0, which is this process.
        environments: Variables of the ranks 1, 2 and so on, beside those of this process.
    """

    def __init__(self, size: int, environments: Sequence[Mapping[str, str]] = ()) -> None:
        self.size = size
        variables = environments or [{}] * (size - 1)
        self._children = [_Child(rank + 1, own) for rank, own in enumerate(variables)]

    def begin(self, function: str, place: Mapping[str, Any], **arguments: Any) -> None:
        """Have each rank call a function, once it has imported torch; return when all have.

        Args:
            function: `module:name`; it is called with `rank`, `place` and the arguments.
            place: Where the ranks meet, as plain data.
            arguments: Plain data.

        Raises:
            RankEnded: A rank ended while it imported torch.
        """
        for child in self._children:
            child.wait_until_ready()
        for child in self._children:
            child.send({"function": function, "place": place, "arguments": arguments})

    def ends(self) -> list[RankEnd]:
        """Wait until all ranks have ended, and return how."""
        return [child.end() for child in self._children]

    def lost(self) -> RankEnd | None:
        """Return how the first rank ended whose process is gone without an answer, if one is."""
        return next((end for child in self._children if (end := child.lost()) is not None), None)

    def close(self) -> None:
        """Kill the ranks that still run, with their own child processes."""
        for child in self._children:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RankEnded(TrainingError):
    """The process of a rank has ended, and its code did not fail: it was killed, or it crashed.

    Args:
        end: How it ended.
    """

    kind = "lost"

    def __init__(self, end: RankEnd) -> None:
        super().__init__(f"rank {end.rank}: {end.reason}")
        self.end = end


class _Child:
    """The process of one rank."""

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        # no terminal for a debugger in this process; its group is its own, for `close`
        variables = {**os.environ, "PYTHONBREAKPOINT": "0", **environment}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainable.local_ranks", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,  # no pipe: nobody reads it while the rank trains
            text=True,
            env=variables,
            process_group=0,
        )
        self._end: RankEnd | None = None

    def wait_until_ready(self) -> None:
        if not self._read():
            self._end = self._gone()
            raise RankEnded(self._end)

    def send(self, call: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone, and `end` says so
            self._process.stdin.write(json.dumps({**call, "rank": self.rank}) + "\n")
            self._process.stdin.flush()

    def end(self) -> RankEnd:
        if self._end is None:
            answer = self._read()
            self._end = RankEnd(self.rank, **json.loads(answer)) if answer else self._gone()
        return self._end

    def lost(self) -> RankEnd | None:
        if self._end is None and self._process.poll() is not None:
            self.end()
        return self._end if self._end is not None and self._end.kind == RankEnded.kind else None

    def close(self) -> None:
        if self._output.closed:  # the group's id may belong to other processes by now
            return
        with self._output, self._process, contextlib.suppress(ProcessLookupError):
            if self._end is not None and self._end.reason is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_SECONDS_TO_END)
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _gone(self) -> RankEnd:
        code = self._process.wait()
        self._output.seek(0)
        printed = self._output.read().strip().splitlines()[-_LAST_LINES:]
        what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return RankEnd(
            self.rank,
            reason=f"its process ended ({what})",
            kind=RankEnded.kind,
            traceback=redact("\n".join(printed)),
        )


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
            kind = error.kind if isinstance(error, TrainingError) else "error"
            failure = {"reason": reason_of(error, kind), "traceback": traceback_of(error)}
            _write(answers, {**failure, "kind": kind})


def _write(answers: IO[str], answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _main()
