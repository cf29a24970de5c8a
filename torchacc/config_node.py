"""What the nodes of the configuration have in common: fields that are checked when assigned, and
that become plain values and come from them."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from typing_extensions import Self

Check = Callable[[Any], bool]

# What JSON and YAML hold as it is.
_PLAIN = (str, int, float, bool, type(None))


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_str(value: Any) -> bool:
    return isinstance(value, str)


def is_callable(value: Any) -> bool:
    return callable(value)


def optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def set_of(check: Check) -> Check:
    return lambda value: isinstance(value, (set, frozenset)) and all(check(v) for v in value)


def setting(default: Any, check: Check, what: str) -> Any:
    """A field with a plain default; `what` completes "should be ..."."""
    return field(default=default, metadata={"check": check, "what": what})


def made_setting(factory: Callable[[], Any], check: Check, what: str) -> Any:
    """A field whose default is made anew for each object."""
    return field(default_factory=factory, metadata={"check": check, "what": what})


def child(kind: type) -> Any:
    """A field that holds the next node of the tree."""
    return field(
        default_factory=kind,
        metadata={"check": lambda value: isinstance(value, kind), "what": f"a {kind.__name__}"},
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _shown(value: Any) -> str:
    return f"{_short(value)} ({type(value).__name__})"


def _is_set(check: Check, value: list[Any]) -> bool:
    try:
        return check(set(value))
    except TypeError:  # items that no set can hold
        return False


class Node:
    """Refuses unknown names and wrong types at the assignment."""

    # How the node is reached from the root, for messages: "dist.fsdp".
    _path = ""

    def __setattr__(self, name: str, value: Any) -> None:
        entry = type(self).__dataclass_fields__.get(name)
        if entry is None:
            raise AttributeError(f"{self._unknown(name)} Its value is {_short(value)}.")
        self._check(name, value)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Called only for a name that is not there.
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self._unknown(name))

    @classmethod
    def _where(cls, name: str) -> str:
        return f"{cls._path}.{name}" if cls._path else name

    @classmethod
    def _unknown(cls, name: str) -> str:
        known = [entry.name for entry in fields(cls)]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        advice = f"Did you mean {cls._where(close[0])}?" if close else "It has: " + ", ".join(known)
        return f"[config] there is no option {cls._where(name)}. {advice}"

    @classmethod
    def _check(cls, name: str, value: Any) -> None:
        metadata = cls.__dataclass_fields__[name].metadata
        if not metadata["check"](value):
            raise TypeError(
                f"[config] {cls._where(name)} should be {metadata['what']}, got {_shown(value)}."
            )

    @classmethod
    def _bad(cls, name: str, value: Any, rule: str) -> NoReturn:
        raise ValueError(f"[config] {cls._where(name)} = {_short(value)}: {rule}")

    @classmethod
    def _not_available(cls, name: str, value: Any, advice: str) -> NoReturn:
        raise NotImplementedError(
            f"[config] {cls._where(name)} = {_short(value)} is not available in this version. "
            f"{advice}"
        )

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and value < low:
            self._bad(name, value, f"should be at least {low}.")

    def to_dict(self) -> dict[str, Any]:
        """The options of this node and of all below it as what JSON and YAML can hold; sets are
        sorted lists.

        Raises ValueError for an option that holds something else (a module, a function).
        """
        return {entry.name: self._plain(entry.name) for entry in fields(self)}

    def _plain(self, name: str) -> Any:
        value = getattr(self, name)
        if isinstance(value, Node):
            return value.to_dict()
        if isinstance(value, (set, frozenset)) and all(isinstance(item, str) for item in value):
            value = sorted(value)
        plain = isinstance(value, _PLAIN)
        if isinstance(value, list):
            plain = all(isinstance(item, _PLAIN) for item in value)
            value = list(value)
        if isinstance(value, dict):
            plain = all(isinstance(item, _PLAIN) for pair in value.items() for item in pair)
            value = dict(value)
        if not plain:
            self._bad(name, value, "it cannot be written to a file: set it in the program.")
        return value

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """A new node with the options in `data`, as `to_dict` makes them; others have defaults.

        Lists stand for sets. Raises ValueError for a name that no option has (the message says
        which is meant), TypeError for a value of another type. What the values mean together is
        checked by `validate()`.
        """
        return cls._from(data, "")

    @classmethod
    def _from(cls, data: Mapping[str, Any], where: str) -> Self:
        # `where`: what `data` was read from, for messages.
        source = f" (in {where})" if where else ""
        if not isinstance(data, Mapping):
            raise TypeError(
                f"[config] {cls._path or 'the configuration'} should be a mapping of options, got "
                f"{_shown(data)}{source}."
            )
        node = cls()
        entries = cls.__dataclass_fields__
        for name, value in data.items():
            if name not in entries:
                told = f" Its value is {_short(value)}{source}."
                raise ValueError(cls._unknown(str(name)) + told)
            held = getattr(node, name)
            check = entries[name].metadata["check"]
            if isinstance(held, Node):
                value = held._from(value, where)
            elif isinstance(value, list) and not check(value) and _is_set(check, value):
                value = set(value)
            elif isinstance(value, (list, dict, set)):
                value = copy.copy(value)  # others may be made of the same data
            try:
                setattr(node, name, value)
            except TypeError as error:
                raise TypeError(f"{error}{source}") from None
        return node

    def validate(self) -> None:
        """Checks this node and all below it.

        Raises TypeError, ValueError, or NotImplementedError for what this version cannot do; the
        message names the field.
        """
        for entry in fields(self):
            value = getattr(self, entry.name)
            # Again, because a list or a set can change after it was assigned.
            self._check(entry.name, value)
            if isinstance(value, Node):
                value.validate()
        self._validate()

    def _validate(self) -> None:
        """The rules of this node beyond the types of its fields."""
