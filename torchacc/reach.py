"""What a function knows without its arguments: tensors, modules, optimizers."""

from __future__ import annotations

import dis
import functools
import inspect
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

# How much is looked at.
_MOST_OBJECTS = 100_000

# Packages whose classes and functions know no tensors of a program.
_LIBRARIES = ("builtins", "torch", "torchacc", "torchacc_device", "numpy")

_MISSING = object()


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


@dataclass(frozen=True)
class Variable:
    """A variable that a function reads, or what it reads of one by constant names and keys.

    `path` leads to it from `owner`: the key there, then keys of dicts, indices of lists and tuples
    and names of attributes. `text`: as the code says it. `holder`: what has it in the end.
    `in_object`: it is read of a variable, and not of a list, tuple or dict (of such) only.
    """

    owner: object
    path: tuple[Any, ...]
    value: Any
    text: str
    holder: object
    in_object: bool = False


def own_variables(fn: object) -> Iterator[Variable]:
    """The variables that a function itself reads and does not set.

    They are globals (the owner is their dict), those of functions around it (a cell), and
    attributes of the object whose method it is, also those that other methods of it read which it
    calls by `self` or `super()`, and properties. Of a partial and of a decorated function or method
    (`functools.wraps`), those of the function within; of another object that can be called, those
    of its `__call__`; none of a module or of what is no Python.

    Of each, also what the code reads by constants (`cfg.lr`, `cfg["lr"]`, `cfg.get("lr")`,
    `nets[0].cfg.lr`; by a local name of one of these, too, that is set once): in a dict, list or
    tuple, among the attributes of an object's own, of a class of the program or of one of its
    files, or a part of a module.
    """
    owner, fn = _unwrapped(fn)
    if type(fn) is not FunctionType:
        return
    names = _names_in(fn.__code__)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # it is not set
            continue
        if name not in names.set:
            yield Variable(cell, (name,), value, name, cell)
            yield from _within(cell, (name,), value, ("around", name), names)
    for name in names.globals:
        if name in fn.__globals__ and name not in names.set:
            value = fn.__globals__[name]
            yield Variable(fn.__globals__, (name,), value, name, fn.__globals__)
            yield from _within(fn.__globals__, (name,), value, ("global", name), names)
    if type(owner).__weakrefoffset__ == 0:
        return
    attributes = _attributes(owner)
    bases = type(owner).__mro__
    every = _Names()
    seen: set[FunctionType] = set()
    found = [(fn, _place_of(fn, bases))]
    while found:
        method, place = found.pop()
        if method in seen:
            continue
        seen.add(method)
        names = _names_in(method.__code__)
        every.take(names)
        for name in names.attributes:
            if name not in attributes:
                found += _methods(bases, name, 0)
        for name in names.of_super:
            found += _methods(bases, name, place + 1)
    for name in every.attributes:
        if name in attributes and name not in every.set_attributes:
            yield Variable(owner, (name,), attributes[name], name, owner)
    yield from _within(owner, (), owner, ("first", ""), every)


def _within(
    owner: object, path: tuple[Any, ...], value: object, root: _Step, names: _Names
) -> Iterator[Variable]:
    """What the code reads of a variable, or of the object whose method it is (`path` is empty)."""
    for first, *steps in names.reads:
        if first == root:
            found = _follow(Variable(owner, path, value, root[1], owner), steps, names)
            if found is not None and len(found.path) > 1:
                yield found


def _follow(found: Variable, steps: Iterable[_Step], names: _Names) -> Variable | None:
    for kind, key in steps:
        if key in (names.set_attributes if kind == "." else names.set_keys):
            return None
        member = _member(found.value, kind, key)
        if member is None:
            return None
        at, value = member
        text = f"{found.text}.{key}" if kind == "." else f"{found.text}[{key!r}]"
        path = (*found.path, *at)
        of_object = found.path and not issubclass(type(found.value), (dict, list, tuple))
        in_object = found.in_object or bool(of_object)
        found = Variable(found.owner, path, value, text.removeprefix("."), found.value, in_object)
    return found


def _member(value: object, kind: str, key: Any) -> tuple[tuple[Any, ...], Any] | None:
    """What an object has, without asking it: the path there, and what it is."""
    owner = type(value)
    if issubclass(owner, dict):
        # Some of the program's dicts have their entries as attributes.
        as_entry = kind == "[" or not any(key in vars(base) for base in owner.__mro__)
        found = dict.get(value, key, _MISSING) if as_entry else _MISSING
        return None if found is _MISSING else ((key,), found)
    if issubclass(owner, (list, tuple)):
        inside = kind == "[" and type(key) is int and 0 <= key < len(value)
        return ((key,), value[key]) if inside else None
    attributes: Mapping[str, Any] = _attributes(value)
    if issubclass(owner, (type, ModuleType)):
        attributes = vars(value)
        name = "__module__" if issubclass(owner, type) else "__name__"
        if _is_library(str(attributes.get(name))):
            return None
    if kind == ".":
        found = attributes.get(key, _MISSING)
        if found is not _MISSING:
            return (key,), found
    elif not issubclass(owner, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return None
    parts = attributes.get("_modules") if issubclass(owner, nn.Module) else None
    found = parts.get(str(key), _MISSING) if issubclass(type(parts), dict) else _MISSING
    return None if found is _MISSING else (("_modules", str(key)), found)


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


# Of what code reads: an attribute (".") or an entry ("["), and its name or key. The first one says
# what kind of variable it begins with: "global", "around" or "first", the first argument.
_Step = tuple[str, Any]


class _Names:
    """The names that functions have: of variables, and of what they read of these by constants."""

    def __init__(self) -> None:
        self.globals: dict[str, None] = {}
        self.set: set[str] = set()
        self.attributes: dict[str, None] = {}  # of the first argument
        self.of_super: list[str] = []  # attributes of what `super` returns
        self.set_attributes: set[str] = set()  # of whatever object
        self.set_keys: set[Any] = set()
        self.reads: dict[tuple[_Step, ...], None] = {}

    def take(self, other: _Names) -> None:
        """Adds those of another method of the same object."""
        self.attributes |= other.attributes
        self.set_attributes |= other.set_attributes
        self.set_keys |= other.set_keys
        self.reads |= other.reads

    def add(
        self, code: CodeType, first: str | None, around: dict[str, tuple[_Step, ...]] | None = None
    ) -> None:
        """Adds those of the code.

        Args:
            code: a function's, and of those within it.
            first: what it calls the first argument.
            around: what local names of the code around it name, if it is read of a variable.
        """
        instructions = list(_instructions(code))
        stored = Counter(name for kind, name in instructions if kind.startswith(_STORES))
        stored.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        known = {name: read for name, read in (around or {}).items() if name in code.co_freevars}
        top: tuple[_Step, ...] = ()  # what is on top of the stack; nothing if not known
        below: tuple[_Step, ...] = ()  # the same below a constant on top
        key: Any = None
        before = ""
        supers = False  # `super` was read, and no attribute of a call's result since
        for kind, name in instructions:
            was, top = top, ()
            if kind == "LOAD_GLOBAL":
                supers = supers or name == "super"
                self.globals[name] = None
                top = (("global", name),)
            elif kind == "LOAD_DEREF" or kind.startswith("LOAD_FAST"):
                if name == first:
                    top = (("first", ""),)
                else:
                    top = known.get(name, (("around", name),) if kind == "LOAD_DEREF" else ())
            elif kind in ("STORE_GLOBAL", "DELETE_GLOBAL", "DELETE_DEREF"):
                self.set.add(name)
            elif kind.startswith(_STORES):
                if kind == "STORE_DEREF":
                    self.set.add(name)
                if was and stored[name] == 1:
                    known[name] = was
            elif kind in ("STORE_ATTR", "DELETE_ATTR"):
                self.set_attributes.add(name)
            elif kind.startswith("LOAD_SUPER"):
                self.of_super.append(name)
                supers = False
            elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
                if was:
                    top = (*was, (".", name))
                    self.reads[top] = None
                    if was == (("first", ""),):
                        self.attributes[name] = None
                elif supers and before.startswith("CALL"):
                    self.of_super.append(name)
                    supers = False
            elif kind == "LOAD_CONST":
                below, key = was, name if type(name) in (str, int) else None
                if key is not None and was and was[-1] == (".", "get"):
                    self.reads[(*was[:-1], ("[", key))] = None
            elif before == "LOAD_CONST" and key is not None:
                if kind == "BINARY_SUBSCR" and below:
                    top = (*below, ("[", key))
                    self.reads[top] = None
                elif kind in ("STORE_SUBSCR", "DELETE_SUBSCR", *_COPIES):
                    self.set_keys.add(key)
            before = kind
        for constant in code.co_consts:
            if type(constant) is CodeType:
                self.add(constant, first, known)


# What gives local names.
_STORES = ("STORE_FAST", "STORE_DEREF")
# `x[key] += 1` copies the key, to write it back.
_COPIES = ("COPY", "DUP_TOP_TWO")


def _instructions(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Names and arguments; of those that are two in one, both."""
    for each in dis.get_instructions(code):
        if each.opname == "EXTENDED_ARG":
            continue
        if type(each.argval) is tuple and "_FAST" in each.opname:
            begin = each.opname.index("_FAST_") + len("_FAST_")
            yield each.opname[: begin - 1], each.argval[0]
            yield each.opname[begin:], each.argval[1]
        else:
            yield each.opname, each.argval


# Modules of one class have one forward.
@functools.lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> _Names:
    names = _Names()
    names.add(code, code.co_varnames[0] if code.co_argcount > 0 else None)
    return names


def _attributes(each: object) -> dict[str, Any]:
    kind = type(each)
    if kind.__dictoffset__ == 0 or issubclass(kind, (type, ModuleType)):
        return {}
    try:
        attributes = object.__getattribute__(each, "__dict__")
    except AttributeError:  # type variables, of Python 3.12 on, hide theirs
        return {}
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
