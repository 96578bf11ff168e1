from __future__ import annotations

import contextlib
import gc
import subprocess
import sys

from trainable.process_start import without_collection


class _Made:
    pass


def test_imported_modules_are_not_scanned_again() -> None:
    try:
        with contextlib.suppress(ImportError), without_collection():
            assert not gc.isenabled()
            imported = _Made()
            raise ImportError
        after = _Made()
        assert gc.isenabled()
        assert [one for one in gc.get_objects() if isinstance(one, _Made)] == [after]
        del imported
    finally:
        gc.unfreeze()


TEMPLATE = """
import importlib.metadata
from trainable.process_start import load_training
load_training()
importlib.metadata.entry_points = None  # which reads a file of each installed package
import torch.distributed as dist
dist.BackendConfig(dist.Backend("gloo"))
"""


def test_forks_of_a_template_have_the_backend_of_groups() -> None:
    subprocess.run([sys.executable, "-c", TEMPLATE], check=True)
