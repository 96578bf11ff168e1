"""An agent's door: the real server over its pipes, as a client of the protocol starts it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from sweeps import Sweep
from tests.integration.commandline import wait_until
from tests.message_parts import assert_parts

KEYS = {
    "name": "wide",
    "task": {"name": "digits", "model": "mlp"},
    "metric": "val/loss",
    "mode": "min",
    "trials": 2,
    "budget": {"epochs": 2},
    "space": {"train.optimizer.lr": {"loguniform": [0.001, 0.1]}},
}
Call = Callable[..., Coroutine[Any, Any, Any]]


def _ask(directory: Path, talk: Callable[[Call], Coroutine[Any, Any, None]]) -> None:
    """Start a server for a directory, and let `talk` call its tools."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "sweeps.entry", "mcp", str(directory)],
        env=dict(os.environ),
    )

    async def connect() -> None:
        async with Client(server) as client:

            async def call(tool: str, **given: Any) -> Any:
                answer = await client.call_tool(tool, given)
                if answer.is_error:
                    return str(answer.content[0])
                found = answer.structured_content
                return found["result"] if set(found) == {"result"} else found

            await talk(call)

    asyncio.run(connect())


def test_agent_runs_a_sweep_that_outlives_the_server(tmp_path: Path) -> None:
    async def start(call: Call) -> None:
        await call("init", file="wide.yaml", keys=KEYS)
        assert (await call("check", file="wide.yaml"))["plan"]["trials"] == 2
        started = await call("run", file="wide.yaml")
        assert (started["name"], started["num_trials"]) == ("wide", 2)

    _ask(tmp_path, start)
    sweep = Sweep.open("wide", root=tmp_path / "runs")
    wait_until(lambda: sweep.status["state"] == "finished")

    async def look(call: Call) -> None:
        assert await call("sweeps") == ["wide"]
        assert await call("status", name="wide") == sweep.status
        assert [one["number"] for one in await call("trials", name="wide")] == [0, 1]
        assert await call("findings", name="wide") == sweep.findings
        best = (await call("compare", names=["wide"], top=1))["leaders"]
        assert [one["number"] for one in best] == [sweep.best.number]
        await call("export", name="wide", directory="best")
        assert (tmp_path / "best" / "model.safetensors").is_file()

    _ask(tmp_path, look)


def test_agent_stays_in_its_directory(tmp_path: Path) -> None:
    directory, outside = tmp_path / "mine", tmp_path / "other.yaml"
    directory.mkdir()
    (directory / "link.yaml").symlink_to(outside)
    elsewhere = KEYS | {"tracking": {"uri": "http://127.0.0.1:1"}}

    async def stray(call: Call) -> None:
        for file in ("../other.yaml", str(outside), "link.yaml"):
            said = await call("init", file=file, keys=KEYS)
            assert_parts(said, file, "outside of the directory", "name a file below it")
        assert_parts(await call("init", file="a.py", keys=KEYS), "a.py", "give it another name")
        said = await call("init", file="a.yaml", keys=elsewhere)
        assert_parts(said, "tracking.uri is set", "leave it out")
        runs = KEYS | {"preemption": {"command": "touch x"}}
        said = await call("init", file="a.yaml", keys=runs)
        assert_parts(said, "preemption.command is set", "run no command")
        said = await call("init", file="a.yaml", keys=KEYS | {"trials": -1})
        assert_parts(said, "a.yaml:", "trials: -1 is out of range")
        assert_parts(await call("status", name="../x"), "'../x'", "path separator")
        assert_parts(await call("status", name="x"), "no sweep 'x'")
        for overrides in (
            {"name": "${HOME}"},
            {"storage.checkpoints": "s3://elsewhere/x"},
            {"storage": {"checkpoints": "s3://elsewhere/x"}},
            {"preemption": {"command": "touch x"}},
            {" tracking": {"uri": "http://127.0.0.1:1"}},
        ):
            said = await call("resume", name="x", overrides=overrides)
            assert_parts(said, next(iter(overrides)).strip(), "an agent changes neither")

    _ask(directory, stray)
    assert [path.name for path in directory.iterdir()] == ["link.yaml"]
    assert not outside.exists()
