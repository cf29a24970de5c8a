"""What a function knows without its arguments: tensors, modules, optimizers."""

from __future__ import annotations

import dis
import functools
import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

# How much is looked at.
_MOST_OBJECTS = 100_000

# Packages whose classes and functions know no tensors of a program.
_LIBRARIES = ("builtins", "torch", "torchacc", "torchacc_device", "numpy")


@dataclass
class Reached:
    """What was found.

    `holders`: the program's objects that have modules or optimizers as attributes, and the names.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    holders: list[tuple[object, str]] = field(default_factory=list)


def reached(roots: Iterable[object]) -> Reached:
    """What functions and objects know by their variables, and by those of these.

    Variables are closures, defaults, globals and names of modules that the code mentions,
    attributes of objects and of their classes, members of modules, and elements of containers.
    """
    result = Reached()
    seen: set[int] = set()
    found = list(roots)
    while found and len(seen) < _MOST_OBJECTS:
        each = found.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)  # isinstance would ask the object, and some do things then
        if issubclass(kind, torch.Tensor):
            result.tensors.append(each)
            continue
        if issubclass(kind, nn.Module):
            result.modules.append(each)
        elif issubclass(kind, torch.optim.Optimizer):
            result.optimizers.append(each)
        if not _of_library(kind):
            attributes = _attributes(each)
            for name, value in list(attributes.items()):
                if issubclass(type(value), (nn.Module, torch.optim.Optimizer)):
                    result.holders.append((each, name))
        found += _variables(each)
    return result


def own_variables(fn: object) -> Iterator[tuple[object, str, Any]]:
    """The variables that a function itself reads and does not set: owner, name and value.

    They are globals (the owner is their dict), those of functions around it (a cell), and
    attributes of the object whose method it is, also those that other methods of it read which it
    calls by `self` or `super()`, and properties. Of a partial and of a decorated function or method
    (`functools.wraps`), those of the function within; of another object that can be called, those
    of its `__call__`; none of a module or of what is no Python.
    """
    owner, fn = _unwrapped(fn)
    if type(fn) is not FunctionType:
        return
    names = _names_in(fn.__code__)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            if name not in names.set:
                yield cell, name, cell.cell_contents
        except ValueError:  # it is not set
            pass
    for name in names.globals:
        if name in fn.__globals__ and name not in names.set:
            yield fn.__globals__, name, fn.__globals__[name]
    if type(owner).__weakrefoffset__ == 0:
        return
    attributes = _attributes(owner)
    bases = type(owner).__mro__
    read: dict[str, None] = {}
    assigned: set[str] = set()
    seen: set[FunctionType] = set()
    found = [(fn, _place_of(fn, bases))]
    while found:
        method, place = found.pop()
        if method in seen:
            continue
        seen.add(method)
        names = _names_in(method.__code__)
        assigned |= names.set_attributes
        for name in names.attributes:
            if name in attributes:
                read[name] = None
            else:
                found += _methods(bases, name, 0)
        for name in names.of_super:
            found += _methods(bases, name, place + 1)
    for name in read:
        if name not in assigned:
            yield owner, name, attributes[name]


def _unwrapped(fn: object) -> tuple[object, object]:
    """The function that a call runs in the end, and the object whose method it is, or None."""
    owner = None
    while True:
        kind = type(fn)
        if kind is MethodType:
            owner, fn = fn.__self__, fn.__func__
        elif isinstance(fn, functools.partial):
            fn = fn.func
        elif kind is FunctionType:
            if not hasattr(fn, "__wrapped__"):
                return owner, fn
            fn = fn.__wrapped__
        else:
            call = inspect.getattr_static(kind, "__call__", None)
            if type(call) is not FunctionType or issubclass(kind, nn.Module) or _of_library(kind):
                return owner, fn
            owner, fn = fn, call


def _place_of(fn: FunctionType, bases: tuple[type, ...]) -> int:
    """Which class defines a method: `super()` in it begins behind that one."""
    for place, base in enumerate(bases):
        if any(method is fn for method, _ in _methods((base,), fn.__name__, 0)):
            return place
    return 0


def _methods(bases: tuple[type, ...], name: str, begin: int) -> list[tuple[FunctionType, int]]:
    """What runs where an attribute of that name is looked for from a base on, and its base."""
    for place in range(begin, len(bases)):
        if name not in vars(bases[place]):
            continue
        method = vars(bases[place])[name]
        if type(method) is property:
            method = method.fget
        elif type(method) is functools.cached_property:
            method = method.func
        _, method = _unwrapped(method)
        return [(method, place)] if type(method) is FunctionType else []
    return []


class _Names:
    """The names that a function has: of variables, and of attributes of its first argument."""

    def __init__(self, code: CodeType) -> None:
        self.globals: list[str] = []
        self.set: set[str] = set()
        self.attributes: list[str] = []
        self.of_super: list[str] = []  # attributes of what `super` returns
        self.set_attributes: set[str] = set()  # of whatever object
        self._first = code.co_varnames[0] if code.co_argcount > 0 else None
        self._add(code)

    def _add(self, code: CodeType) -> None:
        before = None
        supers = False  # `super` was read, and no attribute of a call's result since
        for each in dis.get_instructions(code):
            kind, name = each.opname, each.argval
            if kind == "EXTENDED_ARG":
                continue
            if kind == "LOAD_GLOBAL":
                supers = supers or name == "super"
                if name not in self.globals:
                    self.globals.append(name)
            elif kind in ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF"):
                self.set.add(name)
            elif kind in ("STORE_ATTR", "DELETE_ATTR"):
                self.set_attributes.add(name)
            elif kind.startswith("LOAD_SUPER"):
                self.of_super.append(name)
                supers = False
            elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
                if self._is_first(before):
                    if name not in self.attributes:
                        self.attributes.append(name)
                elif supers and before is not None and before.opname.startswith("CALL"):
                    self.of_super.append(name)
                    supers = False
            before = each
        for constant in code.co_consts:
            if type(constant) is CodeType:
                self._add(constant)

    def _is_first(self, each: dis.Instruction | None) -> bool:
        """Whether the instruction leaves the first argument on top: some have two variables."""
        if each is None or not ("LOAD_FAST" in each.opname or each.opname == "LOAD_DEREF"):
            return False
        last = each.argval[-1] if type(each.argval) is tuple else each.argval
        return last == self._first


# Modules of one class have one forward.
@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> _Names:
    return _Names(code)


def _attributes(each: object) -> dict[str, Any]:
    kind = type(each)
    if kind.__dictoffset__ == 0 or issubclass(kind, (type, ModuleType)):
        return {}
    attributes = object.__getattribute__(each, "__dict__")
    return attributes if issubclass(type(attributes), dict) else {}


def _variables(each: object) -> Iterable[object]:
    kind = type(each)
    if kind in (str, bytes, int, float, bool, type(None)) or issubclass(kind, ModuleType):
        return ()
    if kind is FunctionType:
        return () if _of_library(each) else _variables_of_function(each)
    if kind is MethodType:
        return (each.__self__, each.__func__)
    if kind in (staticmethod, classmethod):
        return (each.__func__,)
    if kind is property:
        return (each.fget,)
    if issubclass(kind, functools.partial):
        return (each.func, *each.args, *each.keywords.values())
    if issubclass(kind, dict):
        return list(dict.values(each))
    if issubclass(kind, (list, tuple, set, frozenset, deque)):
        return list(each)
    if issubclass(kind, type):
        return () if _of_library(each) else list(vars(each).values())
    found: list[object] = list(kind.__mro__)
    found += _attributes(each).values()
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if type(slots) is str else slots:
            slot = vars(base).get(name)
            if hasattr(slot, "__objclass__"):
                found.append(_get(slot, each))
    return found


def _variables_of_function(fn: FunctionType) -> Iterator[object]:
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is not set
            pass
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()
    names = set(_names(fn.__code__))
    for name in names & fn.__globals__.keys():
        value = fn.__globals__[name]
        yield value
        if type(value) is ModuleType and not _is_library(value.__name__):
            yield from (vars(value)[inner] for inner in names & vars(value).keys())


def _names(code: CodeType) -> Iterator[str]:
    """Of globals and attributes, in what is defined within as well."""
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _names(constant)


def _get(slot: object, owner: object) -> object:
    try:
        return slot.__get__(owner)
    except AttributeError:  # it is not set
        return None


def _of_library(definition: type | FunctionType) -> bool:
    return _is_library(str(definition.__module__))


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
