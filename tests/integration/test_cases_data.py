"""Cases of `tests/cases` about data: epochs, batches, tasks and checks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commandline import CommandLine
from tests.time_limits import scaled

CASES = Path(__file__).parents[1] / "cases"


@pytest.fixture
def case(cli: CommandLine, request: pytest.FixtureRequest) -> CommandLine:
    """The command line in a copy of a case's directory."""
    shutil.copytree(CASES / request.param, cli.directory, dirs_exist_ok=True)
    return cli


def _python(cli: CommandLine, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cli.directory,
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )


@pytest.mark.parametrize("case", ["05-stopiteration"], indirect=True)
def test_running_generator_of_a_data_set_is_refused(case: CommandLine) -> None:
    """It also ends before the epoch does."""
    done = case("train", "sweep.yaml", "--dir", "d1")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "data.train.reader (an object of type generator) has changed" in last
    assert "epoch 1 step" not in done.stdout


@pytest.mark.parametrize("case", ["15-batch-types"], indirect=True)
def test_batches_of_every_type_are_moved(case: CommandLine) -> None:
    done = _python(case, "move_types.py")
    rows = done.stdout.splitlines()
    assert len(rows) == 8, done.stderr
    assert all("meta" in row for row in rows), done.stdout
    assert "'OrderedDict'" in done.stdout


@pytest.mark.parametrize("case", ["17-samplers"], indirect=True)
def test_failure_in_first_step_is_refused_at_check(case: CommandLine) -> None:
    # other forms: tests/golden/messages/forms.txt
    said = "Outputs.yaml:2:7: task: the model returns a dict of 'logits'"
    done = case("check", "Outputs.yaml")
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not case.root.exists()


@pytest.mark.parametrize("case", ["01-weight-norm"], indirect=True)
def test_model_that_cannot_be_deep_copied_passes(case: CommandLine) -> None:
    done = _python(
        case, "-c", "from trainable import check_task; import tcn; check_task(tcn.Waves())"
    )
    assert done.returncode == 0, done.stderr
