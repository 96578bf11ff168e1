"""The list of stopping rules: the only place where a rule is chosen by its name.

To add a rule, write its module and add one line to `RULES`. The spec then accepts the name and
the parameters of the rule, in the order of this list. What must not live here: what a rule does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from sweeps.stopping.asha import Asha, AshaPromote
from sweeps.stopping.hyperband import Hyperband
from sweeps.stopping.median import MedianStopping
from sweeps.stopping.pbt import Pb2, Pbt
from sweeps.stopping.rule import NoStopping, StoppingRule

RULES: dict[str, type[StoppingRule]] = {
    rule.name: rule
    for rule in (
        Asha,
        AshaPromote,
        Hyperband,
        MedianStopping,
        Pbt,
        Pb2,
        NoStopping,
    )
}
DEFAULT_RULE: type[StoppingRule] = Asha
"""The rule of a section `early_stopping` that names none."""
WITHOUT_SECTION: type[StoppingRule] = NoStopping
"""The rule of a spec without the section `early_stopping`."""


def rule_of(data: Mapping[str, Any]) -> type[StoppingRule]:
    """Return the rule of a spec, or the default rule: the schema reports an unknown name."""
    section = data.get("early_stopping")
    if not isinstance(section, Mapping):
        return WITHOUT_SECTION
    name = section.get("scheduler")
    return RULES.get(name, DEFAULT_RULE) if isinstance(name, str) else DEFAULT_RULE


def parameters(rules: Iterable[type[StoppingRule]]) -> dict[str, FieldInfo]:
    """Return the parameters of several rules, which may share some, in order of appearance."""
    found: dict[str, FieldInfo] = {}
    for rule in rules:
        for key, info in rule.model_fields.items():
            first = found.setdefault(key, info)
            assert _shape(first) == _shape(info), f"{rule.name} defines {key} differently"
    return found


def _shape(info: FieldInfo) -> tuple[Any, ...]:
    """Return what two definitions of one parameter must have in common."""
    return info.annotation, info.default, info.metadata, info.description
