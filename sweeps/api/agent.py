"""The agent's door: the sweeps below one directory as tools of the Model Context Protocol.

A tool reads, or starts a command of `sweep`, which goes on when the server ends. None deletes
anything or writes code, and no path that a tool is given leads out of the directory. It needs the
extra `gradsweep[mcp]`. What must not live here: what a command does, and what a task may do.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from redaction.secrets import redact
from sweeps.api.command import SweepCommandError, read_command, start_unseen
from sweeps.api.sweep_file import override_texts, sweep_file
from sweeps.errors import LedgerError, UserError
from sweeps.paths import SweepPaths, list_sweeps
from sweeps.spec.spec import SweepSpec, load_with_positions, parse_spec
from sweeps.sweep_lock import is_held

_INSTRUCTIONS = (
    "Hyperparameter sweeps for PyTorch. `init` writes a sweep file, `check` says what it would "
    "take, `run` starts it; `status`, `findings` and `compare` say what was found; `confirm` "
    "trains the best trials again under common seeds, before a result is believed."
)
_ELSEWHERE = ("storage.checkpoints", "tracking.uri", "notify.webhook", "preemption.command")
"""Keys by which a sweep reaches outside of its directory: its user's, not an agent's."""
_START_SECONDS = 120.0


class AgentTools:
    """What an agent may do with the sweeps below a directory.

    Args:
        directory: Where sweep files and tasks lie; the sweeps are in `runs` below it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._root = self._directory / "runs"

    def init(self, file: str, keys: dict[str, Any]) -> dict[str, str]:
        """Write a new sweep file, such as `wide.yaml`, with the keys of the reference.

        Required are name, task, metric, mode, trials and space, for example {"name": "wide",
        "task": "digits", "metric": "val/loss", "mode": "min", "trials": 12, "space":
        {"train.optimizer.lr": {"loguniform": [0.001, 0.1]}}}.
        """
        path, text = self._below(file), sweep_file(keys)
        if path.suffix != ".yaml" or path.exists():
            why = "exists already" if path.exists() else "does not end with .yaml"
            raise UserError(f"{file} {why}; a sweep is a new YAML file; give it another name")
        _stays_inside(parse_spec(text, file, environ={}))  # no variable is read into a file
        with path.open("x", encoding="utf-8") as new:
            new.write(text)
        return {"file": file}

    def check(self, file: str, hours: float | None = None) -> dict[str, Any]:
        """Check a sweep file and its task, and say what it would take; nothing is started."""
        limit = [] if hours is None else ["--hours", str(hours)]
        return self._read("check", str(self._below(file)), *limit)

    def run(self, file: str) -> dict[str, Any]:
        """Start the sweep of a file, and return its status; it runs on by itself."""
        path = self._below(file)
        spec, _ = load_with_positions(path)
        _stays_inside(spec)
        return self._start(spec.name, "run", str(path))

    def resume(self, name: str, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
        """Continue an interrupted sweep, or add trials by the overrides {"trials": 40}."""
        changed = override_texts(overrides)
        sections = {key.partition(".")[0] for key in _ELSEWHERE}
        for text in changed:
            key = text.partition("=")[0].strip()
            if "${" in text or key.partition(".")[0] in sections:
                raise UserError(
                    f"{key}: an agent changes neither where a sweep writes nor which command it "
                    "runs, and reads no variables of the environment; its user does, by sweep "
                    "resume"
                )
        return self._start(name, "resume", name, *(f"-s{text}" for text in changed))

    def confirm(self, name: str, top: int = 5) -> dict[str, Any]:
        """Start training the best trials again, until it is known which is the best."""
        return self._start(name, "confirm", name, "--top", str(top))

    def stop(self, name: str) -> dict[str, Any]:
        """Stop a sweep, whose trials save first; `resume` continues it."""
        self._read("stop", name, *self._rooted(name))
        return self.status(name)

    def sweeps(self) -> list[str]:
        """List the names of all sweeps."""
        return sorted(paths.name for paths in list_sweeps(self._root))

    def status(self, name: str) -> dict[str, Any]:
        """Say the state of a sweep, its best trial, and what was found so far."""
        return self._read("status", name, *self._rooted(name))

    def trials(self, name: str) -> list[dict[str, Any]]:
        """List the trials of a sweep with parameters, values, and why each ended."""
        found: list[dict[str, Any]] = read_command(["trials", name, *self._rooted(name), "--json"])
        return found

    def findings(self, name: str) -> list[str]:
        """Say what was found so far, a sentence each."""
        return [one["sentence"] for one in self.status(name)["findings"]["sentences"]]

    def audit(self, name: str) -> dict[str, Any]:
        """Say whether the result can be trusted, a card for each doubt."""
        return self._read("audit", name, *self._rooted(name))

    def compare(self, names: list[str], top: int = 5) -> dict[str, Any]:
        """Compare the best trials of sweeps with the same metric."""
        for name in names:
            self._rooted(name)
        return self._read("compare", *names, "--top", str(top), "--root", str(self._root))

    def export(self, name: str, directory: str, trial: int | None = None) -> dict[str, Any]:
        """Write the weights of the best trial, or of another, to a new directory."""
        chosen = [] if trial is None else [str(trial)]
        target = ["--export", str(self._below(directory))]
        return self._read("best", name, *chosen, *target, *self._rooted(name))

    def _below(self, file: str) -> Path:
        path = (self._directory / file).resolve()
        if path == self._directory or not path.is_relative_to(self._directory):
            raise UserError(
                f"{file} lies outside of the directory that this server was given; name a file "
                "below it"
            )
        return path

    def _rooted(self, name: str) -> list[str]:
        """Return the option of the root, once a name is known to be one."""
        SweepPaths(self._root, name)
        return ["--root", str(self._root)]

    def _read(self, *arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = read_command([*arguments, "--json"])
        return found

    def _start(self, name: str, *arguments: str) -> dict[str, Any]:
        """Start a command that runs trials; return the sweep's status once it does."""
        paths = SweepPaths(self._root, name)
        if is_held(paths.lock):
            raise UserError(f"sweep '{name}' runs already; stop it first, or wait for its end")
        with tempfile.TemporaryFile("w+") as output:
            child = start_unseen([*arguments, "--root", str(self._root)], output)
            deadline = time.monotonic() + _START_SECONDS
            while child.poll() is None and time.monotonic() < deadline:
                if paths.exists() and is_held(paths.lock):
                    break
                time.sleep(0.1)
            if child.poll():
                output.seek(0)
                raise UserError(output.read().strip())
        return self.status(name)


def _stays_inside(spec: SweepSpec) -> None:
    """Refuse a sweep that writes outside of its directory."""
    data: Mapping[str, Any] = spec.model_dump(mode="json")
    for key in _ELSEWHERE:
        section, _, inner = key.partition(".")
        if data.get(section, {}).get(inner) is not None:
            raise UserError(
                f"{key} is set; an agent's sweeps write below its directory alone, and run no "
                "command; leave it out, or let the user run this sweep"
            )


def serve(directory: Path) -> None:
    """Offer the tools over standard input and output, until the client ends."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise UserError(
            "the package mcp is not installed; it is an extra: pip install 'gradsweep[mcp]'"
        ) from None
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory; name the one with the sweep files")
    os.chdir(directory)  # tasks are imported from there, as for its user
    tools = AgentTools(directory)
    server = MCPServer("gradsweep", instructions=_INSTRUCTIONS)

    def told(tool: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(tool)
        def call(*args: Any, **keys: Any) -> Any:
            try:
                return tool(*args, **keys)
            except (ValueError, OSError, LedgerError, SweepCommandError) as error:
                raise ToolError(redact(str(error))) from error  # else the client learns no reason

        return call

    for name in (one for one in vars(AgentTools) if not one.startswith("_")):
        server.tool()(told(getattr(tools, name)))
    server.run("stdio")
