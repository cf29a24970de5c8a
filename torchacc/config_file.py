"""A configuration as plain values, and in a file of JSON or YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torchacc.config_node import Node

    Kind = TypeVar("Kind", bound=Node)

_PLAIN = (str, int, float, bool, type(None))


def to_dict(node: Node) -> dict[str, Any]:
    """The options of `node` and of all below it, as what JSON and YAML can hold; sets are lists.

    Raises ValueError for an option that holds something else (a module, a function).
    """
    made: dict[str, Any] = {}
    for entry in fields(node):
        value = getattr(node, entry.name)
        made[entry.name] = (
            to_dict(value) if is_dataclass(value) else _plain(node, entry.name, value)
        )
    return made


def _plain(node: Node, name: str, value: Any) -> Any:
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
        node._bad(name, value, "it cannot be written to a file: set it in the program.")
    return value


def from_dict(kind: type[Kind], data: Mapping[str, Any], where: str = "") -> Kind:
    """A node of the class `kind` with the options in `data`, and its defaults for others.

    Lists stand for sets. `where`: what `data` was read from, for messages. Nothing is validated
    but names and types.

    Raises:
        ValueError: there is no such option; the message says which is meant.
        TypeError: the value of an option is of another type.
    """
    source = f" (in {where})" if where else ""
    if not isinstance(data, Mapping):
        raise TypeError(
            f"[config] {kind._path or 'the configuration'} should be a mapping of options, got "
            f"{data!r} ({type(data).__name__}){source}."
        )
    node = kind()
    entries = kind.__dataclass_fields__
    for name, value in data.items():
        if name not in entries:
            raise ValueError(kind._unknown(str(name)) + f" Its value is {value!r}{source}.")
        held = getattr(node, name)
        check = entries[name].metadata["check"]
        if is_dataclass(held):
            value = from_dict(type(held), value, where)
        elif isinstance(value, list) and not check(value) and _is_set(check, value):
            value = set(value)
        try:
            setattr(node, name, value)
        except TypeError as error:
            raise TypeError(f"{error}{source}") from None
    return node


def _is_set(check: Any, value: list[Any]) -> bool:
    try:
        return bool(check(set(value)))
    except TypeError:  # items that no set can hold
        return False


def read(path: str | Path) -> Mapping[str, Any]:
    """What stands in a file of JSON (*.json) or YAML (*.yaml, *.yml).

    Empty YAML is a mapping without options.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is neither, or its text is not what its name says.
        ImportError: it is YAML, and there is no PyYAML.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise ValueError(
            f"[config] {path} should be a .json, .yaml or .yml file: its name says how it is read."
        )
    text = path.read_text(encoding="utf-8")
    if kind == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"[config] {path} is not JSON: {error}.") from None
    try:
        import yaml
    except ImportError:
        raise ImportError(
            f"[config] {path} is YAML, which needs PyYAML: pip install pyyaml, or write JSON."
        ) from None
    try:
        loaded = yaml.safe_load(text)
        return {} if loaded is None else loaded
    except yaml.YAMLError as error:
        raise ValueError(f"[config] {path} is not YAML: {error}.") from None
