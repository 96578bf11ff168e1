"""Run the code of a sweep in this process, also from another directory than the last driver.

Importing a task runs its code, so the last driver's directory counts only if this user's driver
recorded it for these very files, and no other user could have placed code there. What must not
live here: the import itself (`user_code.task_import`), and what is recorded (`stores`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from sweeps.errors import UserError
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import leave_directory
from sweeps.spec.spec import SweepSpec
from sweeps.stores import check_owner, place_of, withheld_variables
from sweeps.view.sweep_view import SweepView
from trainable.config import TrialConfig
from trainable.store.private_files import NotPrivate, private_directory
from trainable.user_code.task_import import check_hash_order, prepared, resolve_task_name


def enter_code_directory(view: SweepView, say: Callable[[str], object] = lambda _: None) -> Path:
    """Change to the directory of a sweep's code, if the present one does not have it.

    Each command that runs the code of a sweep calls this first.
    """
    check_owner(view.paths.directory)
    resolve_task_name(view.spec.task.name)  # of a function in a script there is no module
    packages = {module.partition(".")[0] for module in view.spec.modules}
    here, recorded = Path.cwd(), view.ledger.run_from.get("code")
    missing = [one for one in packages if not _is_found(one, here)]
    if not missing or recorded is None or not all(_is_found(one, recorded) for one in packages):
        return Path()  # the check of the names says what is wrong
    try:
        _check_recorded(view, Path(recorded))
    except UserError as error:
        raise UserError(
            f"there is no module '{missing[0]}' in {here}; the sweep last ran in {recorded}, "
            f"which is not used unasked: {error}; if it is your code, repeat the command there: "
            f"cd {shlex.quote(recorded)}"
        ) from None
    leave_directory(Path(recorded))
    say(f"the sweep's code is in {recorded}: continuing there")
    return here


def changed_code(view: SweepView) -> list[str]:
    """Return the files of the task that have changed since the sweep ran."""
    from trainable.user_code.fingerprint import changed_files  # once the task is imported

    then = view.ledger.code
    return changed_files(view.spec.task.name, then) if then else []


def _check_recorded(view: SweepView, directory: Path) -> None:
    """Check that this user's own driver recorded a directory, to which only the user can write."""
    paths, run_from = view.paths, view.ledger.run_from
    now = place_of(paths)
    if any(run_from.get(key) != now[key] for key in ("host", "inode")):
        raise UserError("the sweep's files lay in another directory or on another machine then")
    try:
        private_directory(directory, trust_groups=False)
    except (NotPrivate, OSError) as error:
        raise UserError(str(error)) from error


def _is_found(package: str, directory: Path | str) -> bool:
    """Return whether a package is in a directory, or installed."""
    try:
        found = PathFinder.find_spec(package, [str(directory)]) or find_spec(package)
    except ValueError:  # loaded, but not from a file
        return False
    # A directory without Python files is a package to Python, such as that of the sweep itself.
    return found is not None and (found.loader is not None or _has_code(found))


def _has_code(package: ModuleSpec) -> bool:
    places = package.submodule_search_locations or ()
    return any(next(Path(place).rglob("*.py"), None) for place in places)


@contextmanager
def as_a_trial(spec: SweepSpec) -> Iterator[None]:
    """Prepare this process as a trial's worker: import paths, and no credentials.

    The command that calls this begins with `restart_in_hash_order`.
    """
    check_hash_order()
    withheld = os.environ.keys() & withheld_variables(spec)
    kept = {name: os.environ[name] for name in withheld}
    with prepared():
        os.environ.update(dict.fromkeys(withheld, ""))
        try:
            yield
        finally:
            os.environ.update(kept)


def checked_config(view: SweepView, record: TrialSummary) -> TrialConfig:
    """Return the configuration of a trial, with which this process may run its task."""
    check_owner(view.paths.directory)
    return TrialConfig.model_validate(view.config(record))
