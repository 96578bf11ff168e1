"""Write the spec of a new sweep that is configured as an existing one.

What must not live here: starting the new sweep (`run`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sweeps.config.revisions import describe_changes, read_spec
from sweeps.config.spec import parse_with_positions
from sweeps.errors import SweepExists, UserError
from sweeps.paths import SweepPaths
from sweeps.results.sweep_status import UnknownSweep
from sweeps.store_access import check_stores
from trainable.storage.regular_files import create_regular


def write_clone(
    paths: SweepPaths, new: str, settings: Sequence[str]
) -> tuple[Path, str, str | None]:
    """Write the spec of a new sweep into the working directory.

    Returns:
        The file, the changes in one line, and a message about a damaged revision.

    Raises:
        UnknownSweep: There is no sweep to clone.
        UserError: The new name is not valid, or the file exists or cannot be written.
        SweepExists: There is a sweep of the new name.
        SpecError: A setting is wrong.
        StoreUntrusted: A store is named by a sweep of another user, and is not trusted.
    """
    target = SweepPaths(paths.root, new)  # checks the name
    if not paths.exists():
        raise UnknownSweep(paths.name, paths.root)
    if target.exists():
        raise SweepExists(target, "choose another name")
    before = read_spec(paths.spec)
    spec, document = parse_with_positions(before.text, str(paths.spec), settings, name=new)
    check_stores(paths, spec, document)
    changed = describe_changes(before.spec, spec)
    file = Path(f"{new}.yaml")
    text = f"# A clone of sweep '{paths.name}'; changed: {changed}\n{spec.to_yaml()}"
    try:
        create_regular(file, text.encode())
    except FileExistsError:
        raise UserError(
            f"{file} exists already; nothing is overwritten; remove it, or choose another name"
        ) from None
    return file, changed, before.damage
