"""The reason that a child process gives is its last line, whatever libraries print at its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sweeps.sweep_factory import MadeSweep

NOISY = """
import atexit, runpy, sys
atexit.register(print, "1 leaked type; see https://example.invalid", file=sys.stderr)
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        ("trainable.export", ("ROOT/none", "ROOT/weights"), "ROOT/none"),
        ("sweeps.report.report", ("ROOT", "none", "ROOT/page.html"), "none"),
        ("sweeps.artifacts.model_registry", ("ROOT", "small", "0", "m", "pt2"), "checkpoint"),
    ],
)
def test_reason_is_the_last_line(
    tmp_path: Path, module: str, arguments: tuple[str, ...], reason: str
) -> None:
    MadeSweep(tmp_path).add("complete", 1.0)
    given, said = (
        [one.replace("ROOT", str(tmp_path)) for one in words] for words in (arguments, [reason])
    )
    child = subprocess.run(
        [sys.executable, "-c", NOISY, module, *given],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 1
    last = child.stderr.splitlines()[-1]
    assert said[0] in last
    assert "leaked" not in last
