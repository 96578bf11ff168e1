from __future__ import annotations

import contextlib
import gc

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
