"""Calls something when a module has been imported, for modules that torch itself imports late."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder(MetaPathFinder):
    """Finds the module as the other finders do, and has `call` behind its execution."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self.name, self.call = name, call

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = (each for each in sys.meta_path if not isinstance(each, _Finder))
        found = (each.find_spec(name, path, target) for each in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Calls `call` with the module: now, if it is there, and at the end of each import of it."""
    if name in sys.modules:
        call(sys.modules[name])
    sys.meta_path.insert(0, _Finder(name, call))


def forget(name: str) -> None:
    """Nothing is called any more when the module is imported."""
    sys.meta_path[:] = [
        each for each in sys.meta_path if not (isinstance(each, _Finder) and each.name == name)
    ]
