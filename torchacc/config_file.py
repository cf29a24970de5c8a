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
