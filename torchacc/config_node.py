"""What the nodes of the configuration have in common: fields that are checked when assigned."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from torchacc import config_file

if TYPE_CHECKING:
    from typing_extensions import Self

Check = Callable[[Any], bool]


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


def _shown(value: Any) -> str:
    text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({type(value).__name__})"


class Node:
    """Refuses unknown names and wrong types at the assignment."""

    # How the node is reached from the root, for messages: "dist.fsdp".
    _path = ""

    def __setattr__(self, name: str, value: Any) -> None:
        entry = type(self).__dataclass_fields__.get(name)
        if entry is None:
            raise AttributeError(self._unknown(name))
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
        raise ValueError(f"[config] {cls._where(name)} = {value!r}: {rule}")

    @classmethod
    def _not_available(cls, name: str, value: Any, advice: str) -> NoReturn:
        raise NotImplementedError(
            f"[config] {cls._where(name)} = {value!r} is not available in this version. {advice}"
        )

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and value < low:
            self._bad(name, value, f"should be at least {low}.")

    def to_dict(self) -> dict[str, Any]:
        """The options of this node and of all below it as plain values; sets are sorted lists.

        Raises ValueError for an option that holds a module or a function.
        """
        return config_file.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """A new node with the options in `data`, as `to_dict` makes them; others have defaults.

        Raises ValueError for a name that no option has, TypeError for a value of another type. What
        the values mean together is checked by `validate()`.
        """
        return config_file.from_dict(cls, data)

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
