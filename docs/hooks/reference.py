"""Make the pages below `reference/` from the code, when the site is built.

The command line comes from Typer, the spec from pydantic's JSON schema, exit codes from the
docstrings in `sweeps/errors.py`, and the Python API from `sweeps.__all__` and
`trainable.__all__`. What must not live here: words about a command, a key or a code; they stand
beside it in the code.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_LOG = logging.getLogger("mkdocs.hooks.reference")  # a warning fails a strict build
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minLength": "characters at least",
    "maxLength": "characters at most",
}
_TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "array": "list",
    "object": "mapping",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def command_line() -> str:
    """Return the page of all commands, as Typer writes it."""
    made = subprocess.run(
        [sys.executable, "-m", "typer", "sweeps.cli.app", "utils", "docs", "--name", "sweep"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    made = re.sub(r"(?m)^Example: (.+)$", r"Example: `\1`", made)
    return made.replace("# `sweep`", "# Command line", 1)


def spec() -> str:
    """Return the page of all keys of a spec, section by section."""
    from sweeps.spec.space import KINDS
    from sweeps.spec.spec import SweepSpec

    schema = SweepSpec.model_json_schema()
    page = ["# Spec", _sentence(schema), *_section(schema, schema["$defs"], "")]
    page += ["## Distributions", "The values of `space`.", ""]
    page += ["| Form | Draws |", "|---|---|"]
    page += [f"| `{kind.form}` | {kind.draws} |" for kind in KINDS.values()]
    return "\n".join(page) + "\n"


def exit_codes() -> str:
    """Return the page of exit codes."""
    rows = {0: "Done."}
    for name, member in griffe.load("sweeps.errors").members.items():
        if isinstance(member, griffe.Attribute) and name.isupper():
            if member.docstring is None:
                _LOG.warning("sweeps.errors.%s has no docstring; write one below it", name)
            rows[int(str(member.value))] = _line(
                member.docstring.value if member.docstring else ""
            )
    table = [f"| {code} | {meaning} |" for code, meaning in sorted(rows.items())]
    signals = [
        "| 129 | Interrupted by SIGHUP, when the terminal is closed. |",
        "| 130 | Interrupted by SIGINT, as Ctrl-C sends it. |",
        "| 143 | Interrupted by SIGTERM. |",
    ]
    return "\n".join(["# Exit codes", "", "| Code | Meaning |", "|---|---|", *table, *signals, ""])


def python_api() -> str:
    """Return the page of public names, which mkdocstrings fills."""
    import sweeps
    import trainable

    page = ["# Python API", ""]
    for title, package in (("Sweeps", sweeps), ("Tasks and training runs", trainable)):
        module = package.__name__
        found = griffe.load(module)
        page += [f"## {title}", "", f"Import these names from `{module}`.", ""]
        for name in package.__all__:
            if not found[name].has_docstring:
                _LOG.warning("%s.%s has no docstring; a public name needs one", module, name)
            page += [f"::: {module}.{name}", ""]
    return "\n".join(page)


PAGES: dict[str, Callable[[], str]] = {
    "reference/command-line.md": command_line,
    "reference/spec.md": spec,
    "reference/exit-codes.md": exit_codes,
    "reference/python-api.md": python_api,
}


def _section(schema: dict[str, Any], models: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the table of one section and then the sections inside it."""
    fields = schema["properties"]
    inner = {
        name: models[_model(field)] for name, field in fields.items() if _nests(field, models)
    }
    required = schema.get("required", [])
    yield ""
    yield "| Key | Type | Default | Meaning |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        key = f"{path}{name}"
        if name in inner:
            anchor = key.replace(".", "")
            yield f"| [`{key}`](#{anchor}) | section | | {_sentence(inner[name])} |"
            continue
        if not _sentence(field):
            _LOG.warning("the key %s has no docstring; write one below the field", key)
        default = _default(field, required=name in required)
        yield f"| `{key}` | {_type(field, models)} | {default} | {_sentence(field)} |"
    yield ""
    for name, model in inner.items():
        yield f"## {path}{name}"
        yield ""
        yield _sentence(model)
        yield from _section(model, models, f"{path}{name}.")


def _model(field: dict[str, Any]) -> str:
    return str(field.get("$ref", "")).rpartition("/")[2]


def _nests(field: dict[str, Any], models: dict[str, Any]) -> bool:
    """Whether a field is a section of its own, and no value that is written in one word."""
    return _model(field) in models and _model(field) not in ("Interval", "Distribution")


def _type(field: dict[str, Any], models: dict[str, Any]) -> str:
    """Return the type and the limits of a field in words."""
    if _model(field) == "Interval":
        return "interval: `1 epoch`, `100 steps`, `30 seconds`"
    if _model(field) == "Distribution":
        return "[distribution](#distributions)"
    for union in ("anyOf", "oneOf"):
        if union in field:
            return " or ".join(dict.fromkeys(_type(one, models) for one in field[union]))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    words = _TYPES.get(field.get("type", ""), "any value")
    items = field.get("items")
    if items and field.get("type") == "array":
        words = f"list of: {_type(items, models)}"
    values = field.get("additionalProperties")
    if isinstance(values, dict):
        words = f"mapping to: {_type(values, models)}"
    limits = [f"{text} {field[name]}" for name, text in _LIMITS.items() if name in field]
    return ", ".join([words, *limits])


def _default(field: dict[str, Any], *, required: bool) -> str:
    if required:
        examples = field.get("examples")
        return f"required; for example `{examples[0]}`" if examples else "required"
    if "default" not in field:
        return ""
    default = field["default"]
    if _model(field) == "Interval":
        default = f"{default['count']} {default['unit']}"
    text = default if isinstance(default, str) else json.dumps(default)
    return f"`{text}`"


def _sentence(described: dict[str, Any]) -> str:
    return _line(described.get("description", ""))


def _line(text: str) -> str:
    """Return text as one line that fits into a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
