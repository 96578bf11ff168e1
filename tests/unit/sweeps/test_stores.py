"""Where trials' checkpoints lie, by the spec alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.layout import SweepPaths
from sweeps.ledger.place import StorageMoved, check_kept
from sweeps.spec.spec import parse_spec
from sweeps.stores import address_of, probe_store, trial_files
from tests.integration.commandline import TINY
from tests.specs import with_overrides

PATHS = SweepPaths(Path("/runs"), "small")
LOCAL = parse_spec(TINY, "s.yaml")
STORED = with_overrides(LOCAL, ["storage.checkpoints=s3://bucket/team/sweeps/"])


def test_checkpoints_lie_in_the_trials_directory_unless_the_spec_says_otherwise():
    assert address_of(PATHS, LOCAL, 7) is None
    assert trial_files(PATHS, LOCAL, 7).address("") == "/runs/small/trials/0007/checkpoints"
    probe_store(PATHS, LOCAL, new=True)  # asks nobody


def test_names_below_the_prefix_are_those_below_the_root():
    below = "s3://bucket/team/sweeps/small/trials/0007/checkpoints"
    assert address_of(PATHS, STORED, 7) == below
    files = trial_files(PATHS, STORED, 7)
    assert files.address("step-00000120") == f"{below}/step-00000120"
    assert files.at(below).address("x") == f"{below}/x"


@pytest.mark.parametrize(("before", "after"), [(LOCAL, STORED), (STORED, LOCAL)])
def test_checkpoints_of_a_sweep_stay_where_they_are(before, after):
    check_kept(before, before)
    was, wanted = (one.storage.checkpoints or "null" for one in (before, after))
    said = f"^storage.checkpoints is {was} and cannot become {wanted}: a sweep's trials stay"
    with pytest.raises(StorageMoved, match=said):
        check_kept(before, after)
