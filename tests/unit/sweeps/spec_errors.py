"""Run the commands on an invalid spec and return their messages."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from sweeps.cli.app import app

HEAD = """\
name: digits
task: digits
metric: val/loss
mode: min
trials: 24
"""
"""What a spec cannot do without, in five lines."""


def refusal(spec: str | bytes, *overrides: str, commands: Sequence[str] = ("check",)) -> list[str]:
    """Return the messages about a spec that must be refused.

    They are the same from all of the commands, which say nothing else, exit with 2 and leave
    nothing behind.
    """
    content = spec.encode() if isinstance(spec, str) else spec
    settings = [word for override in overrides for word in ("-s", override)]
    told = set()
    for command in commands:
        with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
            Path("s.yaml").write_bytes(content)
            done = CliRunner().invoke(app, [command, "s.yaml", *settings])
            assert (done.exit_code, done.stdout) == (2, ""), done.stderr or done.exception
            assert os.listdir() == ["s.yaml"]
            assert Path("s.yaml").read_bytes() == content
            told.add(done.stderr)
    [messages] = told
    return messages.removesuffix("\n").split("\n")
