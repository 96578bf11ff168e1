"""Read YAML 1.2 with the position of every value; overrides are YAML, too.

A spec is plain data: no tags, no objects, no duplicate keys, and limits on size, depth and number
of values. `ruamel.yaml` parses it, `yaml_scalars` its scalars. Single values can be replaced in
the text of a file, which keeps its comments. What must not live here: the meaning of the keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError
from ruamel.yaml.events import AliasEvent, DocumentStartEvent
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.util import load_yaml_guess_indent

from redaction.secrets import HIDDEN, is_secret
from sweeps.errors import Issue, KeyPath, LocatedIssue, SpecError, dotted
from sweeps.formatting import cut, quoted
from sweeps.spec.document import AFTER_THE_FILE, Document, SourcePosition
from sweeps.spec.error_messages import key_path
from sweeps.spec.yaml_scalars import LEADING_ZERO, NULL, resolve

MAX_BYTES = 1024 * 1024
MAX_VALUES = 10_000
MAX_DEPTH = 32
MAX_CHARACTERS = 8 * MAX_BYTES
"""The limit for all values together, after aliases and variables are expanded. Nested values count
at each level."""

HIDDEN_SECTIONS = {"notify"}
"""Messages show no value of these sections: a mistyped one may be a secret of any form."""
_REFERENCES = {("notify", "webhook")}
"""Keys whose `${NAME}` stays a reference: the value is a secret and is not stored."""
_VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)\}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read(path: Path, environ: Mapping[str, str]) -> Document:
    """Read a spec file."""
    label = str(path)
    try:
        label.encode()
    except UnicodeEncodeError:
        raise _single(
            label,
            "a part of it is not UTF-8, which Ray requires of a command line; use a path that is "
            "UTF-8",
        ) from None
    if path.suffix == ".py":
        raise _single(
            label,
            "is Python, and a spec is a YAML file; write one whose task is "
            f"`{path.stem}:NAME`, a class or a loop in it (`sweep init` writes an example); "
            "or sweep a function in the file itself: `from sweeps import Sweep`, then "
            '`Sweep(function, {"lr": ...}, mode="min", trials=20).run()`',
        )
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _single(
            label,
            "there is no such file; a spec is a YAML file; `sweep init` writes one to start from",
        ) from None
    except OSError as error:
        raise _single(
            label, f"cannot be read ({error.strerror}); a spec is a YAML file; name a readable one"
        ) from None
    if len(raw) > MAX_BYTES:
        raise _single(
            label,
            f"is larger than {MAX_BYTES} bytes; a spec is a short file; keep data in "
            "files of its own",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _single(
            label,
            f"byte {error.start} (0x{raw[error.start]:02x}) is not UTF-8; a spec is "
            "UTF-8 text; save the file as UTF-8",
        ) from None
    return parse(text, label, environ)


def parse(text: str, label: str, environ: Mapping[str, str]) -> Document:
    """Read one YAML mapping from text; see `read`."""

    def where(line: int, column: int) -> str:
        return f"{label}:{line}:{column}"

    node = _compose(text, where)
    if node is None or (isinstance(node, ScalarNode) and _is_plain(node) and node.value in NULL):
        raise _single(
            where(1, 1),
            "the file is empty; a spec is a mapping of keys; `sweep init` writes one "
            "to start from",
        )
    if not isinstance(node, MappingNode):
        got = "a single value" if isinstance(node, ScalarNode) else "a list"
        raise _single(
            where(*_place(node.start_mark)),
            f"the top level is {got}; a spec is a mapping of keys; begin with `name: my_sweep`",
        )
    return _Builder(label, where, environ, text).document(node)


def parse_value(
    text: str, where: str, environ: Mapping[str, str], key: KeyPath = ("",)
) -> Document:
    """Read the VALUE of an override: a YAML scalar, or a flow list or mapping."""
    node = _compose(text, lambda _line, _column: where)
    start = StreamMark(where, 0, 0, 0)
    name = ScalarNode("", "", start, start)
    outer = MappingNode("", [(name, node or ScalarNode("", "", start, start))], start, start)
    return _Builder(where, lambda _line, _column: where, environ, text, key).document(outer)


def parse_text(value: str, where: str) -> Document:
    """Wrap a text that is not YAML, such as an option's value; see `parse_value`."""
    return Document(
        where, {"": value}, {("",): SourcePosition(where, where, AFTER_THE_FILE, quoted(value))}
    )


def _single(where: str, message: str) -> SpecError:
    return SpecError([LocatedIssue(where, "", message)])


_Where = Callable[[int, int], str]


def _compose(text: str, where: _Where) -> Node | None:
    """Return the tree of the only document in `text`; None if it has none."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Composer = partial(_Composer, where)
    try:
        found: Node | None = yaml.compose(text)
        return found
    except SpecError:
        raise
    except ReaderError as error:
        # The parser refuses a control character and gives its offset in the text.
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise _single(
            where(line, column),
            f"character {error.character:#04x} is not allowed; YAML is printable "
            "text; remove it, or write it as an escape in double quotes",
        ) from None
    except MarkedYAMLError as error:
        raise _syntax_error(error, text, where) from None
    except (YAMLError, ValueError, OverflowError) as error:
        # ValueError and OverflowError: chr() raises them for an invalid escape.
        raise _single(
            where(1, 1), f"not YAML ({cut(str(error))}); see https://yaml.org for the rules"
        ) from None


def _syntax_error(error: MarkedYAMLError, text: str, where: _Where) -> SpecError:
    mark, context = error.problem_mark or error.context_mark, error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    problem = str(error.problem or error.context)
    opener = {"flow sequence": "[", "flow mapping": "{", "quoted scalar": "quote"}
    opened = next((sign for name, sign in opener.items() if name in str(error.context)), None)
    lines = text.splitlines()
    if "'\\t'" in problem or (line <= len(lines) and re.match(r" *\t", lines[line - 1])):
        message = (
            "there is a tab where YAML expects spaces; indentation is spaces only; replace "
            "the tab by two spaces"
        )
    elif opened and context and "unknown escape" not in problem:
        line, column = context.line + 1, context.column + 1
        sign = f"'{opened}'" if opened != "quote" else "a quote"
        message = (
            f"{sign} is opened here and not closed properly ({problem}); every bracket "
            "and quote must be closed; close it"
        )
    elif "mapping values are not allowed" in problem:
        message = (
            "a second ':' in one value, or a wrong indentation; keys of one mapping "
            "start in one column; align it, or put the text in quotes"
        )
    else:
        message = (
            f"not YAML ({problem}); values with special characters need quotes; "
            "correct the line, or quote the text"
        )
    return _single(where(line, column), message)


class _Composer(Composer):
    """Compose the nodes of one document, and refuse what a spec must not hold."""

    def __init__(self, where: _Where, loader: Any) -> None:
        super().__init__(loader)
        self.warn_double_anchors = False
        self.where, self.count = where, 0

    def compose_document(self) -> Any:
        found = super().compose_document()
        if self.parser.check_event(DocumentStartEvent):
            raise _single(
                self._at(self.parser.peek_event()),
                "a second document begins; a spec is one document; remove the line '---'",
            )
        return found

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        self.count += 1
        if self.depth > MAX_DEPTH or self.count > MAX_VALUES:
            raise _too_much(self._at(event), deep=self.depth > MAX_DEPTH)
        if isinstance(event, AliasEvent):
            found = self.anchors.get(event.anchor)
            if found is None or found.end_mark is None:  # or the alias is inside of its anchor
                raise _single(
                    self._at(event),
                    f"*{event.anchor} refers to nothing; an alias needs an anchor "
                    f"&{event.anchor} before it; write the value, or put a text with "
                    "* in quotes",
                )
        elif event.tag is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            raise _single(
                self._at(event),
                f"the tag {cut(tag)} is refused; a spec is plain data and holds no "
                "objects; remove the tag",
            )
        node = super().compose_node(parent, index)
        is_key = isinstance(parent, MappingNode) and index is None
        if is_key and not isinstance(node, ScalarNode):
            raise _single(
                self._at(event), "a key is a list or a mapping; keys are text; write a plain word"
            )
        return node

    def _at(self, event: Any) -> str:
        return self.where(*_place(event.start_mark))


def _place(mark: Any) -> tuple[int, int]:
    """Return line and column, which count from 1."""
    return mark.line + 1, mark.column + 1


def _is_plain(node: ScalarNode) -> bool:
    return node.style is None


class _Builder:
    """Turns nodes into data; problems of single values are collected, not raised."""

    def __init__(
        self,
        label: str,
        where: _Where,
        environ: Mapping[str, str],
        source: str,
        key: KeyPath | None = None,
    ) -> None:
        self.doc = Document(label, {}, {})
        self.key = key  # of an override, whose own paths begin with an empty key
        self.where = where
        self.environ = environ
        self.source = source
        self.count = self.num_characters = 0
        self.refused: set[str] = set()  # variables of the current scalar

    def document(self, node: MappingNode) -> Document:
        self.doc.data = self.value(node, (), _place(node.start_mark), 0)
        return self.doc

    def _in_spec(self, path: KeyPath) -> KeyPath:
        """Return a path of this document as a path of the spec."""
        return path if self.key is None else (*self.key, *path[1:])

    def _text(self, node: ScalarNode | CollectionNode) -> str:
        """Return what a value is in a message: its text, or what kind it is."""
        if isinstance(node, ScalarNode):
            return str(node.value)
        if not node.flow_style:
            return "a mapping" if isinstance(node, MappingNode) else "a list"
        return " ".join(self.source[node.start_mark.index : node.end_mark.index].split())

    def _shown(self, node: ScalarNode | CollectionNode, path: KeyPath) -> str:
        text = self._text(node)
        if text and HIDDEN_SECTIONS.intersection(self._in_spec(path)[:1]):
            return HIDDEN
        if not isinstance(node, ScalarNode):
            return cut(text)
        if not _is_plain(node) or isinstance(resolve(text), str):
            return quoted(text)
        return "null" if text in NULL else cut(text)

    def value(self, node: Any, path: KeyPath, key_mark: tuple[int, int], depth: int) -> Any:
        """Return the value of a node, and store its position.

        Values are counted again here: an alias is one event, and stands for many values.
        """
        mark, text = _place(node.start_mark), self._text(node)
        if isinstance(node, ScalarNode) and _is_plain(node) and not text:
            mark = key_mark  # for an empty value the parser gives the next token's position
        self.doc.positions[path] = SourcePosition(
            self.where(*mark), self.where(*key_mark), mark, self._shown(node, path)
        )
        self.count += 1
        if self.count > MAX_VALUES or depth > MAX_DEPTH:
            raise _too_much(self.where(*mark), deep=depth > MAX_DEPTH)
        self._add_characters(text, mark)
        if isinstance(node, ScalarNode):
            return self.scalar(node, path, mark)
        if not isinstance(node, MappingNode):
            return [
                self.value(element, (*path, index), _place(element.start_mark), depth + 1)
                for index, element in enumerate(node.value)
            ]
        data: dict[str, Any] = {}
        first: dict[str, tuple[int, int]] = {}
        for name, child in node.value:
            key, at = name.value, _place(name.start_mark)
            inner = (*path, key)
            self._add_characters(key, at)
            if key in first:
                message = (
                    f"the key '{cut(key)}' is on line {first[key][0]} and again on line {at[0]}; "
                    "a key may appear only once; remove one of them"
                )
                # Added under a path of its own, so that the first value is still checked.
                problem = LocatedIssue(self.where(*at), dotted(inner), message)
                self.doc.problems.append(((*inner, "again"), at, problem))
                continue
            first[key] = at
            data[key] = self.value(child, inner, at, depth + 1)
        return data

    def _add_characters(self, text: str, mark: tuple[int, int]) -> None:
        self.num_characters += len(text)
        if self.num_characters > MAX_CHARACTERS:
            raise _single(
                self.where(*mark),
                f"the values have more than {MAX_CHARACTERS} characters, aliases and variables "
                "counted in full; a spec is a short file; keep data in files of its own",
            )

    def scalar(self, node: ScalarNode, path: KeyPath, mark: tuple[int, int]) -> Any:
        self.refused.clear()

        def expanded(match: re.Match[str]) -> str:
            text = self.variable(match, path)
            self._add_characters(text, mark)
            return text

        text = _VARIABLE.sub(expanded, node.value)
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            self.doc.add(
                Issue(
                    path,
                    f"{quoted(text)} has half a character (a lone surrogate); text is Unicode; "
                    "write the character itself",
                )
            )
            return ""
        if not _is_plain(node):
            return text
        if LEADING_ZERO.fullmatch(text):
            number = str(int(text[:4300]))
            message = (
                f"{cut(text)} begins with a zero; some readers take such a number as "
                f"octal; write {cut(number)}, or '{cut(text)}' in quotes for text"
            )
            self.doc.add(Issue(path, message))
        value = resolve(text)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            self.doc.add(
                Issue(
                    path,
                    f"{cut(text)} is too large; whole numbers have at most 63 bits; write a "
                    "smaller number",
                )
            )
            return 0
        return value

    def variable(self, match: re.Match[str], path: KeyPath) -> str:
        name = match[1]
        if name is None:
            return "${"
        if self._in_spec(path) in _REFERENCES:
            return match[0]
        if not _VARIABLE_NAME.fullmatch(name):
            fault = (
                f"${{{cut(name)}}} names no variable; a name is letters, digits and '_'; "
                f"write $${{ for the characters ${{"
            )
        elif is_secret(name):
            fault = (
                f"${{{cut(name)}}} looks like a secret; a spec is stored and tracked "
                f"unencrypted; let the task read {cut(name)} from the environment"
            )
        elif name not in self.environ:
            fault = (
                f"${{{cut(name)}}} is not set; variables come from the environment; run "
                f"`export {cut(name)}=...` first, or write the value"
            )
        else:
            return self.environ[name]
        if name not in self.refused:
            self.refused.add(name)
            self.doc.add(Issue(path, fault))
        return match[0]


def _too_much(where: str, *, deep: bool) -> SpecError:
    if deep:
        return _single(
            where, f"is nested deeper than {MAX_DEPTH} levels; a spec is flat; remove levels"
        )
    return _single(
        where,
        f"holds more than {MAX_VALUES} values, aliases counted in full; a spec is a "
        "short file; remove aliases or keep data in files of its own",
    )


def with_values(text: str, changes: Iterable[Sequence[str]]) -> str | None:
    """Return the text with other values, and its comments; None if a change fits no mapping."""
    yaml = YAML()
    yaml.width, yaml.preserve_quotes = MAX_CHARACTERS, True
    data, indent, offset = load_yaml_guess_indent(text, yaml=yaml)
    if offset is not None:
        yaml.indent(sequence=indent, offset=offset)
    for key, value in changes:
        *above, last = key_path(key)
        inner = data
        for part in above:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                return None
        inner[last] = yaml.load(value)
    written = StringIO()
    yaml.dump(data, written)
    return written.getvalue()
