"""A configuration in a file of JSON or YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"[config] {path} is not text in UTF-8: {error}.") from None
    language, parse = ("JSON", _json) if kind == ".json" else ("YAML", _yaml)
    try:
        return parse(text, path)
    except ImportError:
        raise
    except _Twice as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        # What is nested a thousand times, a number of a thousand digits, the 45th of a month: what
        # the parsers raise of these does not say where they read it.
        raise ValueError(f"[config] {path} is not {language}: {error}.") from None


def _json(text: str, path: Path) -> Any:
    return json.loads(text, object_pairs_hook=lambda pairs: _once_each(pairs, path))


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ImportError(
            f"[config] {path} is YAML, which needs PyYAML: pip install pyyaml, or write JSON."
        ) from None

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            _once_each([(key.value, None) for key, _ in node.value if key.id == "scalar"], path)
            return node

    loaded = yaml.load(text, Loader)
    return {} if loaded is None else loaded


class _Twice(ValueError):
    """A name stands twice in one place."""


def _once_each(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """The pairs as a mapping. Raises _Twice for a name twice: one would be ignored."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Twice(f"[config] {path} has {twice} twice in one place. Leave one of them.")
    return made
