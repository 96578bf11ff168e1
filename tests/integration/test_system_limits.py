"""Too low resource limits: the error comes quickly and names the limit."""

from __future__ import annotations

import subprocess

import pytest

from tests.integration.commandline import SWEEP, TINY, CommandLine
from tests.slices import sliced
from tests.time_limits import scaled


def _limited(cli: CommandLine, limits: str, command: str) -> str:
    """The last line of what a command says that ends with the code of wrong input."""
    cli.write("sweep.yaml", TINY)
    done = subprocess.run(
        ["bash", "-c", f'ulimit {limits}; exec "$0" {command} sweep.yaml', SWEEP],
        cwd=cli.directory,
        env=cli.environment,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("limits", "told"),
    sliced(
        [
            ("-n 60", "ulimit -n is 60;"),
            ("-f 2048", "ulimit -f is 2 MiB;"),
            ("-v 4194304", "ulimit -v is 4096 MiB;"),
        ],
        lambda row: row[0] == "-n 60",
    ),
)
def test_sweep_is_refused_before_anything_is_created(
    cli: CommandLine, limits: str, told: str
) -> None:
    assert told in _limited(cli, limits, "run")
    assert not cli.root.exists()


@pytest.mark.parametrize("command", sliced(["check", "train"], "train".__eq__))
def test_failed_torch_import_names_the_limit(cli: CommandLine, command: str) -> None:
    assert "ulimit -v is 732 MiB;" in _limited(cli, "-v 750000", command)
