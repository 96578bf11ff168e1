"""The file of a sweep from Python, for a command that reads one.

What must not live here: what a sweep file says (`arguments`), and running commands (`command`).
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sweeps.api.command import SweepCommandError
from sweeps.errors import UserError


@contextlib.contextmanager
def written_file(
    name: str, file: Path | None, overrides: Sequence[str], text: str | None
) -> Iterator[list[str]]:
    """Yield the arguments that name the file of a new sweep and its overrides.

    Args:
        name: The sweep's name.
        file: The file from which it was read; None: from none.
        overrides: Values that replace those of the file.
        text: What a file of it says, which exists until the end of the block; None: it has begun.

    Raises:
        UserError: The sweep has begun.
        SweepCommandError: The block raised it; a message does not name a file that is gone.
    """
    if file is not None:
        yield [str(file), *(f"-s{setting}" for setting in overrides)]
    elif text is not None:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, f"{name}.yaml")
            file.write_text(text, encoding="utf-8")
            try:
                yield [str(file)]
            except SweepCommandError as error:  # the caller does not know the file
                said = re.sub(rf"{re.escape(str(file))}(:\d+)*", "Sweep(...)", str(error))
                raise SweepCommandError(said, error.exit_code) from None
    else:
        raise UserError(
            f"sweep '{name}' was opened, and exists already; only a new sweep can be checked, "
            "planned and run; call resume() to go on with it"
        )
