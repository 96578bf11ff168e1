"""Record which keys of its configuration a custom loop reads.

`record_reads(config)` returns a `TrialConfig` that behaves as the given one and records each key
that is read: by attribute, by item or by iteration. `model_dump`, `vars`, copies, pickles and
`**config.task.arguments` read a whole section. Printing does not count as reading.
What must not live here: the error for a key that was never read (`custom_loop.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

from pydantic import BaseModel

from trainable.config import TaskConfig, TrialConfig

_PASSED = frozenset({"__class__", "__pydantic_fields_set__", "__pydantic_private__"})


class Reads:
    """The dotted keys that were read.

    Attributes:
        keys: The keys that were read. A section read as a whole stands for all keys below it.
        missing: Arguments of the task that were read but do not exist.
    """

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.missing: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether a key, one above it or one below it was read."""
        return any(
            f"{key}.".startswith(f"{read}.") or f"{read}.".startswith(f"{key}.")
            for read in self.keys
        )


def record_reads(config: TrialConfig) -> tuple[TrialConfig, Reads]:
    """Return a configuration that records what is read from it, and the record."""
    reads = Reads()
    return cast("TrialConfig", _section(config, "", reads)), reads


class _Source:
    """The plain section behind a section that records its reads."""

    __slots__ = ("plain", "prefix", "reads", "sections")

    def __init__(self, plain: BaseModel, prefix: str, reads: Reads) -> None:
        self.plain, self.prefix, self.reads = plain, prefix, reads
        self.sections: dict[str, Any] = {}
        for name in type(plain).model_fields:
            value = getattr(plain, name)
            if isinstance(value, BaseModel):
                self.sections[name] = _section(value, f"{prefix}{name}.", reads)
        if isinstance(plain, TaskConfig):
            self.sections["arguments"] = _Arguments(plain.arguments, prefix, reads)

    def whole(self) -> BaseModel:
        """Record that all keys of the section were read, and return the plain section."""
        self.reads.keys.update(f"{self.prefix}{name}" for name in type(self.plain).model_fields)
        self.reads.keys.update(f"{self.prefix}{name}" for name in self.plain.model_extra or ())
        return self.plain


def _source(section: object) -> _Source:
    return cast("_Source", object.__getattribute__(section, "__pydantic_private__")["source"])


def _section(plain: BaseModel, prefix: str, reads: Reads) -> BaseModel:
    kind = _recording_class(type(plain))
    made = kind.__new__(kind)
    private = {"source": _Source(plain, prefix, reads)}
    object.__setattr__(made, "__pydantic_private__", private)
    object.__setattr__(made, "__pydantic_fields_set__", plain.model_fields_set)
    return made


@cache
def _recording_class(kind: type[BaseModel]) -> type[BaseModel]:
    """Return a subclass of a section's class whose objects record what is read from them.

    An attribute that is not a field or a property comes from the plain section, and counts as a
    read of the whole section.
    """

    def __getattribute__(self: Any, name: str) -> Any:
        if name in _PASSED:
            return object.__getattribute__(self, name)
        source = _source(self)
        if name in source.sections:
            return source.sections[name]
        plain = source.plain
        if name in kind.model_fields or name in (plain.model_extra or ()):
            source.reads.keys.add(f"{source.prefix}{name}")
            return getattr(plain, name)
        found = getattr(kind, name, None)
        if isinstance(found, property) and not hasattr(BaseModel, name):
            return object.__getattribute__(self, name)  # the property reads fields of `self`
        if name in namespace:
            return object.__getattribute__(self, name)
        if hasattr(plain, name):
            return getattr(source.whole(), name)
        source.reads.missing.add(f"{source.prefix}{name}")
        return getattr(plain, name)  # raises as the plain section does

    def whole(self: Any) -> BaseModel:
        return _source(self).whole()

    def compare(self: Any, other: object) -> bool:
        other = whole(other) if type(other) is type(self) else other
        return bool(whole(self) == other)

    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__getattribute__": __getattribute__,
        "__iter__": lambda self: iter(cast("Any", whole(self))),
        "__eq__": compare,
        "__hash__": lambda self: hash(whole(self)),
        "__copy__": whole,
        "__deepcopy__": lambda self, memo=None: whole(self).__deepcopy__(memo),
        "__reduce_ex__": lambda self, protocol: (_plain, (whole(self),)),  # noqa: ARG005
        "__repr__": lambda self: repr(_source(self).plain),
        "__str__": lambda self: str(_source(self).plain),
    }
    # A plain Python subclass: pydantic builds no schema, and isinstance holds.
    return type.__new__(type(kind), kind.__name__, (kind,), namespace)


def _plain(section: BaseModel) -> BaseModel:
    return section


class _Arguments(dict[str, Any]):
    """The task's arguments as a dict that records what is read from it."""

    def __init__(self, arguments: dict[str, Any], prefix: str, reads: Reads) -> None:
        super().__init__(arguments)
        self._prefix, self._reads = prefix, reads

    def _record(self, key: object) -> None:
        known = dict.__contains__(self, key)
        (self._reads.keys if known else self._reads.missing).add(f"{self._prefix}{key}")

    def _all(self) -> dict[str, Any]:
        plain = {key: dict.__getitem__(self, key) for key in dict.keys(self)}
        self._reads.keys.update(f"{self._prefix}{key}" for key in plain)
        return plain

    def __getitem__(self, key: str) -> Any:
        self._record(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._record(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._record(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._record(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._record(key)
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def keys(self) -> Any:
        return self._all().keys()

    def values(self) -> Any:
        return self._all().values()

    def items(self) -> Any:
        return self._all().items()

    def popitem(self) -> tuple[str, Any]:
        self._all()
        return super().popitem()

    def copy(self) -> dict[str, Any]:
        return self._all()

    def __or__(self, other: Any) -> Any:
        return self._all() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._all()

    def __eq__(self, other: object) -> bool:
        return self._all() == other

    __hash__ = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self._all(),)
