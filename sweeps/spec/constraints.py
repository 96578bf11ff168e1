"""Constraints between parameters: comparisons of arithmetic expressions, parsed without `eval`.

    train.batch_size * train.accumulation <= 512
    0.01 < task.low < task.high

A constraint has numbers, dotted keys, `+ - * / // %`, brackets, and `< <= > >= == !=`. Python
parses the text; every node is checked, and only these kinds of nodes are evaluated. What must not
live here: which keys exist (`search_checks`), and what happens to a point that violates a
constraint (`sweeps.search.suggest`).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sweeps.errors import UserError
from sweeps.formatting import shown

_LONGEST = 300  # characters; a longer text may overflow the stack of Python's parser
_RULE = (
    "a constraint compares expressions of numbers, keys and + - * / // %; write for example "
    "train.batch_size * train.accumulation <= 512"
)

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(frozen=True)
class Constraint:
    """One constraint; see `parse_constraint`."""

    text: str
    keys: tuple[str, ...]
    """The keys that it names, in the order of the text."""
    _tree: ast.Compare

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether values satisfy it: yes if a key has none, no if it cannot be computed."""
        if not all(key in values for key in self.keys):
            return True
        tree = self._tree
        try:
            numbers = [_number(node, values) for node in (tree.left, *tree.comparators)]
        except ArithmeticError:
            return False
        pairs = zip(tree.ops, numbers, numbers[1:], strict=False)
        return all(_COMPARISONS[type(op)](left, right) for op, left, right in pairs)


def parse_constraint(text: str) -> Constraint:
    """Parse a constraint."""
    if len(text) > _LONGEST:
        raise UserError(
            f"the constraint has {len(text)} characters; at most {_LONGEST} are allowed; write "
            "several constraints"
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        why = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise UserError(f"{shown(text)} cannot be read ({why}); {_RULE}") from None
    if not isinstance(tree, ast.Compare):
        raise UserError(f"{shown(text)} compares nothing; {_RULE}")
    keys: list[str] = []
    for node in (tree.left, *tree.comparators):
        _look_at(node, text, keys)
    if unknown := [op for op in tree.ops if type(op) not in _COMPARISONS]:
        name = type(unknown[0]).__name__.lower()
        raise UserError(f"{shown(text)} compares by '{name}'; {_RULE}")
    if not keys:
        raise UserError(f"{shown(text)} names no key; {_RULE}")
    return Constraint(text, tuple(dict.fromkeys(keys)), tree)


def _look_at(node: ast.expr, text: str, keys: list[str]) -> None:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.Name() | ast.Attribute() if (key := _key(node)) is not None:
            keys.append(key)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            _look_at(operand, text, keys)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            _look_at(left, text, keys)
            _look_at(right, text, keys)
        case _:
            part = ast.get_source_segment(text.strip(), node) or text
            raise UserError(f"{shown(part)} is neither a number nor a key; {_RULE}")


def _number(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=op, operand=operand):
            number = _number(operand, values)
            return -number if isinstance(op, ast.USub) else number
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(left, values), _number(right, values))
    key = _key(node)
    assert key is not None
    return values[key]


def _key(node: ast.expr) -> str | None:
    """Return the dotted key that a name or attribute node spells, or None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _key(node.value)) is not None:
        return f"{owner}.{node.attr}"
    return None
