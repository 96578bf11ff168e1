"""The location of checkpoints follows from the spec alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sweeps.paths import SweepPaths
from sweeps.run.sync import deliver
from sweeps.spec.spec import parse_spec
from sweeps.stores import StorageMoved, address_of, check_kept, probe_store, trial_files
from sweeps.view.sweep_view import SweepView
from tests.integration.commandline import TINY
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep

PATHS = SweepPaths(Path("/runs"), "small")
LOCAL = parse_spec(TINY, "s.yaml")
STORED = with_overrides(LOCAL, ["storage.checkpoints=s3://bucket/team/sweeps/"])


def test_checkpoints_default_to_the_trial_directory():
    assert address_of(PATHS, LOCAL, 7) is None
    assert trial_files(PATHS, LOCAL, 7).address("") == "/runs/small/trials/0007/checkpoints"
    probe_store(PATHS, LOCAL, new=True)  # asks nobody


def test_object_names_follow_local_names(monkeypatch):
    monkeypatch.setenv("SWEEP_TRUSTED_STORES", "s3://bucket")
    below = "s3://bucket/team/sweeps/small/trials/0007/checkpoints"
    assert address_of(PATHS, STORED, 7) == below
    files = trial_files(PATHS, STORED, 7)
    assert files.address("step-00000120") == f"{below}/step-00000120"
    assert files.at(below).address("x") == f"{below}/x"


@pytest.mark.parametrize(("before", "after"), [(LOCAL, STORED), (STORED, LOCAL)])
def test_checkpoints_of_a_sweep_stay_where_they_are(before, after):
    check_kept(PATHS, before, before)
    was, wanted = (one.storage.checkpoints or "null" for one in (before, after))
    said = f"^storage.checkpoints is {was} and cannot become {wanted}: a sweep's trials stay"
    with pytest.raises(StorageMoved, match=said):
        check_kept(PATHS, before, after)


def test_sweep_resumes_in_the_directory_of_its_name(tmp_path):
    sweep = MadeSweep(tmp_path)
    shutil.copytree(sweep.paths.directory, tmp_path / "copy")
    view = SweepView(SweepPaths(tmp_path, "copy"))
    for refused in (
        lambda: check_kept(view.paths, view.spec, view.spec),
        lambda: deliver(view),
    ):
        with pytest.raises(StorageMoved, match=r"copy holds the sweep 'small'.*; rename .* mv "):
            refused()
    assert not view.paths.lock.exists()
