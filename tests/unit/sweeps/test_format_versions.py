"""Format versions: an older sweep opens and gets its number, a newer one is left unchanged.

`tests/assets/format-1` holds a sweep from before there was a number, as a real driver left it that
was killed: pictures, logs and the older checkpoints are taken out, names of the machine replaced.
`tests/assets/format-2` holds one whose trials share a data seed, treated alike.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.cli.train import _resumed_config
from sweeps.ledger.ledger import Ledger
from sweeps.operations.doctor import check_sweeps
from sweeps.paths import FORMAT, SweepPaths
from sweeps.reconciliation.collect_state import read_sweep_state
from sweeps.reconciliation.reconcile import OrphanedRun, StaleRunStatus, reconcile
from sweeps.reconciliation.repairs import apply
from sweeps.recording.trial_config import read_config
from sweeps.spec.revisions import read_spec, write_spec
from sweeps.spec.spec import trial_yaml
from tests.message_parts import assert_parts
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.recorder import MemoryRecorder

ASSET = Path(__file__).parents[2] / "assets/format-1/chaos"
NO_SWEEP_NEEDED = {"init", "check", "plan", "run", "train", "list", "doctor", "trust"}
MORE = {
    "export": ["--csv", "out"],
    "show": ["0"],
    "logs": ["0"],
    "diff": ["0", "1"],
    "stop": ["--now"],
    "best": ["--export", "out"],
    "rm": ["--yes"],
    "clone": ["new"],
}
OF_A_SWEEP = [
    [command.name or command.callback.__name__]
    for command in app.registered_commands
    if command.callback is not None
    and (command.name or command.callback.__name__) not in NO_SWEEP_NEEDED
]
NEWER = f"{{path}} says that the sweep has format {FORMAT + 1}; this release reads formats up to {FORMAT} and does not change the sweep; upgrade gradsweep"  # noqa: E501  compared whole


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepPaths:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ASSET, tmp_path / "runs/chaos")
    return SweepPaths(tmp_path / "runs", "chaos")


@pytest.fixture
def newer(paths: SweepPaths) -> SweepPaths:
    """The sweep, once a later release has gone on with it and said things unknown to this one."""
    text = f"# format {FORMAT + 1}, revision 2, 2030-01-01T00:00:00Z\nunheard: [of\n".encode()
    seal = f"# sha256 {hashlib.sha256(text).hexdigest()}\n".encode()
    paths.spec.write_bytes(paths.spec.read_bytes() + b"---\n" + text + seal)
    return paths


def _files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _shown(*arguments: str) -> object:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert (done.exit_code, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_inspecting_an_older_sweep_changes_nothing(paths: SweepPaths) -> None:
    before = _files(paths.root)
    status = _shown("status", "chaos")
    assert isinstance(status, dict)
    assert status["state"] == "interrupted"
    assert status["trials"] == {
        "waiting": 2, "running": 0, "complete": 1, "pruned": 1, "failed": 0
    }  # fmt: skip
    assert status["best"]["number"] == 0
    assert status.pop("findings") is None
    assert status.pop("audit") is None
    assert status.pop("usage")["planned"] is None
    assert _shown("list") == [status]
    trials = _shown("trials", "chaos")
    assert isinstance(trials, list)
    assert [trial["step"] for trial in trials] == [15, 5, 0]
    assert [trial["checkpoint"] is not None for trial in trials] == [True, True, False]
    shown = _shown("show", "chaos", "1")
    assert isinstance(shown, dict)
    assert (shown["state"], list(shown["reports"])) == ("pruned", ["1"])
    assert _shown("best", "chaos") == trials[0]
    assert _shown("compare", "chaos")
    assert _files(paths.root) == before


def test_older_sweep_is_repaired_and_given_its_format(paths: SweepPaths) -> None:
    assert read_spec(paths.spec).format is None
    spec, ledger, recorder = (
        read_spec(paths.spec).spec,
        Ledger.open(paths.ledger),
        MemoryRecorder(),
    )
    assert [trial.state for trial in ledger.trials()] == [
        "complete", "pruned", "running"
    ]  # fmt: skip
    write_spec(paths.spec, spec)  # as who goes on with it does
    found = read_spec(paths.spec)
    assert (found.spec, found.number, found.format, found.damage) == (spec, 2, FORMAT, None)
    corrections = reconcile(read_sweep_state(paths, spec, ledger.trials(), live=False))
    # Earlier releases recorded a pruned trial as KILLED.
    assert [(type(one), one.number) for one in corrections] == [
        (StaleRunStatus, 1), (OrphanedRun, 2),
    ]  # fmt: skip
    apply(corrections, paths, spec, ledger, recorder, warn=pytest.fail)
    assert (recorder.runs[1].status, recorder.runs[2].status) == ("FINISHED", "KILLED")
    before = paths.spec.stat()
    write_spec(paths.spec, spec)
    assert (paths.spec.stat().st_ino, paths.spec.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def test_older_sweep_gets_its_format_with_a_change(paths: SweepPaths) -> None:
    write_spec(paths.spec, with_overrides(read_spec(paths.spec).spec, ["trials=6"]))
    head = paths.spec.read_text().split("---\n")[1].splitlines()[0]
    assert head.startswith(f"# format {FORMAT}, revision 2, ")
    assert head.endswith("Z: trials: 4 -> 6")


@pytest.mark.parametrize("command", OF_A_SWEEP, ids=" ".join)
def test_a_newer_sweep_is_refused_by_every_command(newer: SweepPaths, command: list[str]) -> None:
    before = _files(newer.root.parent)
    done = CliRunner().invoke(app, [*command, "chaos", *MORE.get(command[0], [])])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == NEWER.format(path=newer.spec) + "\n"
    assert _files(newer.root.parent) == before


def test_a_newer_sweep_teaches_a_new_one_nothing(newer: SweepPaths) -> None:
    before = _files(newer.root)
    Path("s.yaml").write_text(
        "name: small\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 2\n"
        "search: {warm_start: [chaos]}\n"
    )
    done = CliRunner().invoke(app, ["run", "s.yaml"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == NEWER.format(path=newer.spec) + "\n"
    assert _files(newer.root) == before


def test_list_names_a_newer_sweep_and_shows_others(newer: SweepPaths) -> None:
    MadeSweep(newer.root, "small")
    done = CliRunner().invoke(app, ["list", "--json"])
    assert done.exit_code == 0
    assert [sweep["name"] for sweep in json.loads(done.stdout)] == ["small"]
    assert done.stderr == NEWER.format(path=newer.spec) + "\n"


def test_a_list_names_a_spec_of_a_newer_version(newer: SweepPaths) -> None:
    text = (
        f"# format {FORMAT}, revision 3, 2030-01-01T00:00:00Z\nversion: 2\nunheard: 3\n".encode()
    )
    seal = f"# sha256 {hashlib.sha256(text).hexdigest()}\n".encode()
    older = newer.spec.read_bytes() + b"---\n"
    newer.spec.write_bytes(older + text + seal)
    line = older.count(b"\n") + 2
    done = CliRunner().invoke(app, ["list", "--json"])
    assert (done.exit_code, done.stdout) == (0, "[]\n")
    parts = (f"{newer.spec}:{line}:10: version: version 2 ", "supported: 1; upgrade gradsweep\n")
    assert_parts(done.stderr, *parts)


def test_the_doctor_names_a_newer_sweep(newer: SweepPaths) -> None:
    (finding,) = check_sweeps(newer.root)
    assert (finding.level, finding.what) == ("fail", "chaos")
    assert finding.detail == NEWER.format(path=newer.spec)


def test_a_sweep_of_format_1_keeps_its_training_rules(paths: SweepPaths) -> None:
    before = read_spec(paths.spec)
    assert before.spec.training_rules == before.spec.trial_config(2, {}).training_rules == 1
    assert before.spec.trial_config(2, {}).data_seed is None
    write_spec(paths.spec, with_overrides(before.spec, ["trials=6"]))
    after = read_spec(paths.spec)
    assert (after.format, after.spec.training_rules) == (FORMAT, 1)
    assert read_config(paths.trial(0) / "config.yaml").training_rules == 1


def test_format_2_sweep_shares_its_data_seed(tmp_path: Path) -> None:
    shutil.copytree(ASSET.parents[1] / "format-2/split", tmp_path / "split")
    paths = SweepPaths(tmp_path, "split")
    found = read_spec(paths.spec)
    assert (found.format, found.spec.training_rules) == (2, 2)
    assert [trial.state for trial in Ledger.open(paths.ledger).trials()] == ["complete"] * 4
    configs = [read_config(paths.trial(number) / "config.yaml") for number in range(4)]
    assert configs[0] == found.spec.trial_config(0, {"train.optimizer.lr": 0.001})
    assert len({config.data_seed for config in configs}) == 1
    assert len({config.seed for config in configs}) == 4


def test_single_run_keeps_its_training_rules(tmp_path: Path) -> None:
    spec = read_spec(ASSET.parents[1] / "format-2/split/sweep.yaml").spec
    new = spec.trial_config(0, {})
    older = new.model_copy(update={"training_rules": 1, "data_seed": None})
    written = [
        line
        for line in trial_yaml(older).splitlines(keepends=True)
        if not line.startswith(("training_rules", "data_seed"))
    ]
    (tmp_path / "config.yaml").write_text("".join(written))
    assert _resumed_config(tmp_path, new) == new  # nothing was trained
    shutil.copytree(
        ASSET.parents[1] / "format-2/split/trials/0000/checkpoints", tmp_path / "checkpoints"
    )
    assert _resumed_config(tmp_path, new) == older
