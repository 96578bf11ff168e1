"""Read a spec from YAML and overrides, with all checks that need neither the machine nor the data.

All problems are reported in one pass. What must not live here: the model (`sweep_spec`), parsing
YAML (`yaml_reader`), the wording of problems (`errors`).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from redaction.secrets import HIDDEN, redact_clipped
from sweeps.errors import Issue, KeyPath, LocatedIssue, SpecError, UserError
from sweeps.spec import automatic, yaml_reader
from sweeps.spec.cross_checks import cross_field_checks
from sweeps.spec.document import Document
from sweeps.spec.error_messages import describe_other_tool, key_path, translate
from sweeps.spec.space import Distribution
from sweeps.spec.space_parser import parse_distribution
from sweeps.spec.sweep_spec import LOADING, SweepSpec, spec_path, trial_yaml, version_fault

__all__ = [
    "SweepSpec",
    "load_spec",
    "load_with_positions",
    "parse_spec",
    "parse_with_positions",
    "trial_yaml",
]

MAX_OVERRIDE = 131_072
"""Characters of one `KEY=VALUE`: the limit of Linux for one argument of a command line."""


def load_spec(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    tracking_uri: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> SweepSpec:
    """Read and check a spec file. See `load_with_positions`."""
    return load_with_positions(
        path, overrides, name=name, tracking_uri=tracking_uri, environ=environ
    )[0]


def parse_spec(
    text: str,
    label: str,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    drawn: int | None = 0,
) -> SweepSpec:
    """Read a spec from text. See `parse_with_positions`."""
    return parse_with_positions(text, label, overrides, environ=environ, drawn=drawn)[0]


def load_with_positions(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    tracking_uri: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[SweepSpec, Document]:
    """Read and check a spec file; return the spec, and the document with all positions."""
    environ = os.environ if environ is None else environ
    doc = yaml_reader.read(path, environ)
    if message := describe_other_tool(doc.data):
        raise SpecError([LocatedIssue(doc.label, "", message)])
    return _validate(doc, overrides, {"name": name, "tracking-uri": tracking_uri}, environ)


def parse_with_positions(
    text: str,
    label: str,
    overrides: Sequence[str] = (),
    *,
    name: str | None = None,
    environ: Mapping[str, str] | None = None,
    drawn: int | None = 0,
) -> tuple[SweepSpec, Document]:
    """Read a spec from text; `label` stands for the file (`load_with_positions`)."""
    environ = os.environ if environ is None else environ
    doc = yaml_reader.parse(text, label, environ)
    return _validate(doc, overrides, {"name": name}, environ, drawn)


def _validate(
    doc: Document,
    overrides: Sequence[str],
    options: Mapping[str, str | None],
    environ: Mapping[str, str],
    drawn: int | None = 0,
) -> tuple[SweepSpec, Document]:
    _expand_short_forms(doc)
    for override in overrides:
        _override(doc, override, environ)
        _expand_short_forms(doc)
    for option, value in options.items():
        if value is not None:
            path = ("name",) if option == "name" else ("tracking", "uri")
            doc.put(path, yaml_reader.parse_text(value, f"--{option} {value}"))
    if message := version_fault(doc.data.get("version")):
        # Other problems of a newer version would not help the user.
        doc.problems.clear()
        doc.add(Issue(("version",), message))
        raise doc.error() or AssertionError
    doc.choices = automatic.resolve(doc.data)
    spec, faults = _all_faults(doc)
    if drawn is not None:
        faults += _cross_faults(doc, drawn)
    # A wrong key, or a value with a known problem, explains further problems of the same path.
    wrong_keys = {fault.path for fault in faults if fault.at_key}
    for fault in faults:
        inside = any(fault.path[:size] in wrong_keys for size in range(1, len(fault.path)))
        if not inside and not doc.has_problem(fault.path):
            doc.add(fault)
    if error := doc.error():
        raise error
    assert spec is not None
    return spec, doc


def _cross_faults(doc: Document, drawn: int) -> Iterator[Issue]:
    space: dict[str, Distribution | None] = {}
    raw = doc.data.get("space")
    for key, value in raw.items() if isinstance(raw, dict) else ():
        try:
            space[key] = parse_distribution(value)
        except UserError:
            space[key] = None  # the section's own validation reports it
    return cross_field_checks(
        SweepSpec, doc.data, space, lambda path, _value: doc.position(path).shown, drawn
    )


def _all_faults(doc: Document) -> tuple[SweepSpec | None, list[Issue]]:
    """Validate again without the wrong values, until there are no new problems.

    Pydantic runs a section's own check only if its fields are valid. Without the repetition the
    user would see its problem only after the others are corrected.
    """
    data = copy.deepcopy(doc.data)
    faults: list[Issue] = []
    dropped: set[str] = set()
    while True:
        try:
            spec = SweepSpec.model_validate(data, context=LOADING)
        except ValidationError as error:
            found = translate(
                SweepSpec, error, data, lambda path, _value: doc.position(path).shown
            )
        else:
            return (None if dropped else spec), faults
        # A message about a dropped value is about its default, and wrong.
        faults += [
            fault
            for fault in found
            if fault not in faults and not dropped & set(re.findall(r"\w+", fault.message))
        ]
        removed = {name for fault in found if (name := _drop(data, fault.path)) is not None}
        if not removed:
            return None, faults
        dropped |= removed
        dropped |= {part for fault in found for part in fault.path[-1:] if isinstance(part, str)}


def _drop(data: Any, path: KeyPath) -> str | None:
    """Remove the value of an issue, or its parent; return the removed key, or None."""
    if path[:1] == ("space",):
        path = path[:2]
    for index, part in enumerate(path):
        if not isinstance(data, dict) or part not in data:
            return None
        if index == len(path) - 1 or not isinstance(data[part], dict):
            del data[part]
            return str(part)
        data = data[part]
    return None


def _expand_short_forms(doc: Document) -> None:
    for section, key in automatic.short_forms(doc.data):
        doc.positions[section, key] = doc.positions[section,]


def _override(doc: Document, text: str, environ: Mapping[str, str]) -> None:
    if len(text) > MAX_OVERRIDE:
        doc.extend(
            f"-s {redact_clipped(text, 60)}",
            f"has {len(text)} characters; an override has at most {MAX_OVERRIDE}; keep data in a "
            "file, and write the file's name",
        )
        return
    key, equals, value = text.partition("=")
    path = key_path(key)
    where = f"-s {text}"
    if equals and path[0] in yaml_reader.HIDDEN_SECTIONS:
        where = f"-s {key}={HIDDEN}"
    if not equals:
        doc.extend(
            where, f"there is no '='; an override is KEY=VALUE; write -s {key or 'KEY'}=VALUE"
        )
        return
    path, message = spec_path(key)
    if message:
        doc.extend(where, [LocatedIssue(where, key, message)])
        return
    searched = doc.data.get("space")
    of, _, inner = path[-1].rpartition(".")
    if path[0] == "space" and isinstance(searched, dict) and of in searched:
        path = ("space", of, inner)  # what stands in or beside a distribution, such as a prior
    try:
        parsed = yaml_reader.parse_value(value, where, environ, path)
    except SpecError as error:
        doc.extend(where, error.problems)
        return
    if path[0] == "task" and len(path) > 1 and isinstance(doc.data.get("task"), str):
        doc.data["task"] = {"name": doc.data["task"]}
        doc.positions["task", "name"] = doc.positions["task",]
    if path[0] == "repeats" and len(path) > 1 and isinstance(doc.data.get("repeats"), int):
        doc.data["repeats"] = {"seeds": doc.data["repeats"]}
        doc.positions["repeats", "seeds"] = doc.positions["repeats",]
    doc.put(path, parsed)
