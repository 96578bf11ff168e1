"""A mapping that was read, with the place of every value, and what was found wrong in it.

What must not live here: YAML (`source`), and what the keys mean (`spec`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sweeps.errors import Issue, KeyPath, LocatedIssue, SpecError, UserError, dotted

AFTER_THE_FILE = (2**31, 0)
"""The order of what stands in no file: overrides and options are reported last."""


class SourcePosition(NamedTuple):
    """Where a value was written, and how."""

    where: str
    key_where: str
    order: tuple[int, int]
    shown: str


@dataclass
class Document:
    """A mapping that was read, with the place of every value in it.

    Attributes:
        label: The file as the user named it.
        data: Plain dicts, lists and scalars.
        places: Where each key path was written.
        problems: What was wrong so far, with the path of each.
    """

    label: str
    data: dict[str, Any]
    places: dict[KeyPath, SourcePosition]
    problems: list[tuple[KeyPath, tuple[int, int], LocatedIssue]] = field(default_factory=list)

    def place(self, path: KeyPath) -> SourcePosition:
        """Return the place of a path, or of the nearest mapping around it."""
        while path not in self.places and path:
            path = path[:-1]
        return self.places.get(path, SourcePosition(self.label, self.label, (0, 0), ""))

    def add(self, fault: Issue) -> None:
        """Note a fault at the place of its path."""
        self.problems.append((fault.path, self.place(fault.path).order, self._problem(fault)))

    @contextmanager
    def attach_locations(self) -> Iterator[None]:
        """Give what is refused later than the spec was read the place of its key: resources that
        no machine has, a task that cannot be loaded.

        Raises:
            SpecError: Instead of a `UserError` that names keys.
        """
        try:
            yield
        except UserError as refused:
            if not all(fault.path for fault in refused.faults):
                raise  # about something beside the spec, such as an option
            raise SpecError(list(map(self._problem, refused.faults))) from refused

    def _problem(self, fault: Issue) -> LocatedIssue:
        place = self.place(fault.path)
        at_key = fault.at_key and fault.path in self.places
        where = place.key_where if at_key else place.where
        return LocatedIssue(where, dotted(fault.path), fault.message)

    def error(self) -> SpecError | None:
        """Return all problems as one error in the order of the file, or None."""
        if not self.problems:
            return None
        return SpecError([p for _, _, p in sorted(self.problems, key=lambda item: item[1])])

    def put(self, path: KeyPath, other: Document) -> None:
        """Replace the value at `path` by the one value that `other` holds under `()`.

        Missing mappings on the way are created. Where something else stands on the way, nothing is
        done: that is a
        problem of its own.
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
        self.places = {p: v for p, v in self.places.items() if p[:size] != path}
        self.problems = [item for item in self.problems if item[0][:size] != path]
        for inner, place in other.places.items():
            if inner:
                self.places[path + inner[1:]] = place._replace(order=AFTER_THE_FILE)
        for inner, _, problem in other.problems:
            key = dotted(path) + problem.key
            moved = LocatedIssue(problem.where, key, problem.message)
            self.problems.append((path + inner[1:], AFTER_THE_FILE, moved))

    def has_problem(self, path: KeyPath) -> bool:
        """Say whether the value at `path` was already found wrong."""
        return any(known == path for known, _, _ in self.problems)

    def extend(self, where: str, problems: Sequence[LocatedIssue] | str) -> None:
        """Note what is wrong with something beside the file, such as an option."""
        found = [LocatedIssue(where, "", problems)] if isinstance(problems, str) else problems
        self.problems += [((), AFTER_THE_FILE, problem) for problem in found]
