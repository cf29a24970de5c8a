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
    if kind == ".json":
        try:
            return json.loads(text, object_pairs_hook=lambda pairs: _once_each(pairs, path))
        except json.JSONDecodeError as error:
            raise ValueError(f"[config] {path} is not JSON: {error}.") from None
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

    try:
        loaded = yaml.load(text, Loader)
        return {} if loaded is None else loaded
    except yaml.YAMLError as error:
        raise ValueError(f"[config] {path} is not YAML: {error}.") from None


def _once_each(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """The pairs as a mapping. Raises ValueError for a name twice: one would be ignored."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"[config] {path} has {twice} twice in one place. Leave one of them.")
    return made
