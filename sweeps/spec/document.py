"""A mapping that was read, with the position of every value and the problems found in it.

What must not live here: YAML (`yaml_reader`), and the meaning of the keys (`spec`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sweeps.errors import Issue, KeyPath, LocatedIssue, SpecError, UserError, dotted

if TYPE_CHECKING:
    from sweeps.spec.automatic import AutoChoice

AFTER_THE_FILE = (2**31, 0)
"""The order of values that are not in the file: overrides and options are reported last."""


class SourcePosition(NamedTuple):
    """The position of a value, and its text as the user wrote it."""

    where: str
    key_where: str
    order: tuple[int, int]
    shown: str


@dataclass
class Document:
    """A mapping that was read, with the position of every value in it.

    Attributes:
        label: The file as the user named it.
        problems: The problems found so far, with the path of each.
        choices: What `auto` took.
    """

    label: str
    data: dict[str, Any]
    positions: dict[KeyPath, SourcePosition]
    problems: list[tuple[KeyPath, tuple[int, int], LocatedIssue]] = field(default_factory=list)
    choices: list[AutoChoice] = field(default_factory=list)

    def position(self, path: KeyPath) -> SourcePosition:
        """Return the position of a path, or of the nearest mapping around it."""
        while path not in self.positions and path:
            path = path[:-1]
        return self.positions.get(path, SourcePosition(self.label, self.label, (0, 0), ""))

    def add(self, fault: Issue) -> None:
        """Add an issue at the position of its path."""
        self.problems.append((fault.path, self.position(fault.path).order, self._problem(fault)))

    @contextmanager
    def attach_locations(self) -> Iterator[None]:
        """Turn a later `UserError` about keys into a `SpecError` with their positions.

        Such errors are resources that no machine has, or a task that cannot be loaded.
        """
        try:
            yield
        except UserError as refused:
            if not all(fault.path for fault in refused.faults):
                raise  # about something else than the spec, such as an option
            raise SpecError(list(map(self._problem, refused.faults))) from refused

    def _problem(self, fault: Issue) -> LocatedIssue:
        position = self.position(fault.path)
        at_key = fault.at_key and fault.path in self.positions
        where = position.key_where if at_key else position.where
        return LocatedIssue(where, dotted(fault.path), fault.message)

    def error(self) -> SpecError | None:
        """Return all problems as one error in the order of the file, or None."""
        if not self.problems:
            return None
        return SpecError([p for _, _, p in sorted(self.problems, key=lambda item: item[1])])

    def put(self, path: KeyPath, other: Document) -> None:
        """Replace the value at `path` by the value of `other`, a document of one value.

        Nothing changes if anything but mappings is on the path: that is a problem of its own.
        """
        target: Any = self.data
        for part in path[:-1]:
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
            if not isinstance(target, dict):
                return
        target[path[-1]] = other.data[""]
        size = len(path)
        self.positions = {p: v for p, v in self.positions.items() if p[:size] != path}
        self.problems = [item for item in self.problems if item[0][:size] != path]
        for inner, position in other.positions.items():
            if inner:
                self.positions[path + inner[1:]] = position._replace(order=AFTER_THE_FILE)
        for inner, _, problem in other.problems:
            key = dotted(path) + problem.key
            moved = LocatedIssue(problem.where, key, problem.message)
            self.problems.append((path + inner[1:], AFTER_THE_FILE, moved))

    def has_problem(self, path: KeyPath) -> bool:
        """Return whether a problem of the value at `path` is known already."""
        return any(known == path for known, _, _ in self.problems)

    def extend(self, where: str, problems: Sequence[LocatedIssue] | str) -> None:
        """Add problems of something else than the file, such as an option."""
        found = [LocatedIssue(where, "", problems)] if isinstance(problems, str) else problems
        self.problems += [((), AFTER_THE_FILE, problem) for problem in found]
