"""Versions and hashes of packages: both files agree, and every installation uses them.

What must not live here: an installation; pip and uv compare the hashes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from sysconfig import get_path

ROOT = Path(__file__).parents[2]
VERSIONS = ROOT / ".ci" / "constraints.txt"
HASHES = ROOT / ".ci" / "hashes.txt"


def _pins(text: str) -> dict[str, list[str]]:
    """The options of each pin, by `name==version`."""
    joined = text.replace("\\\n", " ").splitlines()
    words = [line.split() for line in joined]
    return {pin: options for pin, *options in words}


def _awk(program: str, file: Path) -> dict[str, list[str]]:
    told = subprocess.run(["awk", program, file], capture_output=True, text=True, check=True)
    return _pins(told.stdout)


def _name(pin: str) -> str:
    return pin.partition("==")[0]


PINS = _pins(HASHES.read_text(encoding="utf-8"))


def test_both_files_pin_the_same_versions() -> None:
    assert sorted(PINS) == sorted(VERSIONS.read_text(encoding="utf-8").splitlines())


def test_each_pin_has_hashes_and_no_address() -> None:
    for pin, options in PINS.items():
        assert re.fullmatch(r"[a-z0-9-]+==[\w.!+]+", pin), pin
        assert options, pin
        for option in options:
            assert re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", option), pin


def test_each_installed_package_is_pinned() -> None:
    """One that is not pinned has no hash to be compared with."""
    own = distributions(path=[get_path("purelib")])  # not what Ray puts on sys.path
    installed = {re.sub(r"[-_.]+", "-", one.name).lower() for one in own}
    assert installed - {"gradsweep"} <= {_name(pin) for pin in PINS}


def test_each_installation_in_the_environment_uses_hashes() -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "--always-make", "env"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.replace("\\\n", " ")
    first, second = (line for line in shown.splitlines() if " pip install " in line)
    (program,) = re.findall(r"awk '([^']+)' \.ci/hashes\.txt > \.venv/uv\.txt", shown)
    tools = _awk(program, HASHES)
    assert tools == {pin: PINS[pin] for pin in PINS if _name(pin) == "uv"}
    assert tools
    assert shlex.split(first)[-2:] == ["--requirement", ".venv/uv.txt"]
    for option in ("--constraints", "--build-constraints"):
        words = shlex.split(second)
        assert words[words.index(option) + 1] == ".ci/hashes.txt"


def test_the_image_is_built_with_the_hashes() -> None:
    allowed = (ROOT / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    assert "!.ci/hashes.txt" in allowed.splitlines()
