"""What of the Python around a captured step has to stay as it was, for replays to be right."""

from __future__ import annotations

import enum
import numbers
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchacc.device import device_type
from torchacc.reach import Reached, Variable, own_variables, reached
from torchacc_device import _C, _boundary, _patches

# Types whose values tell by == whether a setting changed; numbers of numpy are numbers, too.
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
)
_PLAIN_BASES = (numbers.Number, enum.Enum)
# Modules whose parts another module calls or reads.
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# Where a module has its members.
_MEMBERS = {"module": "_modules", "parameter": "_parameters", "buffer": "_buffers"}

# A variable with more entries is not looked into, nor are containers deeper within others.
_MOST_ENTRIES = 1000
_MOST_DEPTH = 4


class Guards:
    """Finds out, while calls of a function are recorded, what replays depend on."""

    def __init__(self, fn: object) -> None:
        self._fn = fn
        self._step = _C.CapturedStep((), [])
        # What the last recorded call met: the modules that it called, the optimizers that stepped
        # (None: nobody looks), the attributes of modules that it set, by id of the module and name,
        # and which tensors, by their ids, wanted gradients when it began.
        self._called: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] | None = None
        self._written: set[tuple[int, str]] = set()
        self._wanted_gradients: dict[int, bool] = {}
        # What variables were when the call before that ended, by owner and path.
        self._earlier: dict[tuple[int, tuple[Any, ...]], Any] = {}

    @contextmanager
    def recording(self, last: bool) -> Iterator[None]:
        """Within this the calling thread runs the function; `last`: the call may be kept."""
        thread = threading.get_ident()
        self._called.clear()

        def note(module: nn.Module, inputs: object) -> None:
            if threading.get_ident() == thread:
                self._called[id(module)] = module

        if last:
            self._wanted_gradients = self._find_wanted()
        noting = register_module_forward_pre_hook(note)
        try:
            with (
                _boundary.held(),
                _boundary.steps_noted() as self._stepped,
                _patches.attributes_written() as self._written,
            ):
                yield
        finally:
            noting.remove()

    def remember(self) -> None:
        """Notes what variables are after a call, for those that change from call to call."""
        self._earlier = {
            (id(owner), at): _remembered(value)
            for owner, path, whole, _ in self._variables()
            for at, value in _leaves(path, whole)
        }

    def forget(self) -> None:
        """Lets go of what was noted."""
        self._step = _C.CapturedStep((), [])
        self._called.clear()
        self._stepped = None
        self._written = set()
        self._wanted_gradients.clear()
        self._earlier.clear()

    def keep(self, step: _C.CapturedStep) -> None:
        """Tells the step what has to stay, and whose writes autograd has to notice."""
        self._step = step
        modules, tensors = [], []
        names: dict[int, str] = {}
        used: set[int] = set(self._called.keys())
        known = reached([self._fn, *self._called.values()])
        living = _C.living([nn.Module, torch.optim.Optimizer, torch.Tensor])
        living += [*known.modules, *known.optimizers, *known.tensors]
        for found in {id(each): each for each in living}.values():
            kind = type(found)
            if issubclass(kind, nn.Module):
                modules.append(found)
                if self._keep_members(found, names):
                    used.add(id(found))
            elif issubclass(kind, torch.optim.Optimizer):
                if self._keep_optimizer(found):
                    used.add(id(found))
            elif _is_plain_tensor(found):
                tensors.append(found)
        self._keep_tensors(tensors, known, names)
        if step.some_stayed:
            for tensor in known.tensors:
                text = names.get(id(tensor), "a tensor that the function knows")
                step.pin_arguments(tensor, text)
        self._keep_objects(known, used)
        self._keep_numbers()
        # What the call put into its mode itself may be in another one when it begins.
        kept = {owner for owner, key in self._written if key == "training"}
        for module in self._called.values():
            self._keep_mode(module, kept)
        for module in modules:
            self._keep_modes(module, kept)
        for owner, path, value, text in self._variables():
            if _leaves(path, value):
                self._keep_variable(owner, path, value, text, used)

    def _find_wanted(self) -> dict[int, bool]:
        # The collector does not tell of those that gc.freeze() was called for.
        found = [*_C.living([torch.Tensor]), *reached([self._fn]).tensors]
        return {
            id(each): each.requires_grad
            for each in found
            if _is_plain_tensor(each) or isinstance(each, nn.Parameter)
        }

    def _variables(self) -> Iterator[tuple[object, tuple[Any, ...], Any, str]]:
        """What the last recorded call could read: owner, path, value, description.

        That are variables of the function and of the forward of modules that it called, and plain
        values, tensors and arrays that these read of them by constants, but for what the call set
        itself, and members of these modules that are on the CPU.
        """
        for each in own_variables(self._fn):
            if self._may_stay(each):
                text = f"the variable '{each.text}' of the function"
                yield each.owner, each.path, each.value, text
        for module in list(self._called.values()):
            name = type(module).__name__
            for each in own_variables(module.forward):
                if self._may_stay(each):
                    yield each.owner, each.path, each.value, f"'{each.text}' of a {name}"
            for kind in ("parameter", "buffer"):
                for key, member in _members(module, kind).items():
                    if _is_on_host(member):
                        yield module, (_MEMBERS[kind], key), member, f"{kind} '{key}' of a {name}"

    def _may_stay(self, variable: Variable) -> bool:
        """Whether the call did not set it. Of what is read of others, plain values and tensors."""
        key, of_module = variable.path[-1], issubclass(type(variable.holder), nn.Module)
        if (id(variable.holder), key) in self._written or (of_module and key == "training"):
            return False
        value = variable.value
        if len(variable.path) == 1 or _is_plain(value):
            return True
        # Those in variables that are lists, tuples and dicts are found without being named.
        return variable.in_object and (_is_plain_tensor(value) or _is_array(value))

    def _keep_variable(
        self, owner: object, path: tuple[Any, ...], value: Any, text: str, used: set[int]
    ) -> bool:
        """Returns whether it, or all that is in it, has to stay."""
        step = self._step
        entries = None if _is_plain(value) else _entries(path, value)
        if entries is not None:
            kept = [
                self._keep_variable(owner, at, entry, f"{text}[{at[-1]!r}]", used)
                for at, entry in entries
                if not _is_plain(entry) or issubclass(type(value), tuple)
            ]
            whole = len(kept) == len(value) > 0 and all(kept)
            # A dict of anything else is asked by name: what is added beside it is not read.
            counts = not isinstance(value, dict) or all(
                issubclass(type(each), nn.Module) for each in value.values()
            )
            if whole and counts:
                step.keep_length(owner, path, f"the entries of {text}")
            return whole
        before = self._earlier.get((id(owner), path), _MISSING)
        if not _is_same(before, value):
            return False
        if _is_plain(value):
            step.keep_value(owner, path, text)
        elif issubclass(type(value), nn.Module):
            if not _is_used(value, used):
                return False
            step.keep_object(owner, path, text)
        elif issubclass(type(value), torch.optim.Optimizer):
            if id(value) not in used:
                return False
            step.keep_object(owner, path, text)
        elif _is_array(value) or value.device.type == "cpu":
            step.keep_contents(owner, path, text)
        else:
            # Another view of its memory is as good, but not one that is to get a gradient.
            return step.keep_variable(owner, path, value, text, self._said_by_others(value))
        return True

    def _keep_tensors(
        self, tensors: list[torch.Tensor], known: Reached, names: dict[int, str]
    ) -> None:
        """Tensors by themselves, wherever the function finds them. `names`: of modules' members."""
        of_function = {id(each) for each in known.tensors}
        for tensor in tensors:
            self._step.count_writes(tensor)
            if not _is_leaf(tensor):
                continue
            text = names.get(id(tensor))
            if tensor.grad is not None:
                self._step.count_writes(tensor.grad)
                self._step.keep_gradient(tensor, f"the gradient of {text or 'a tensor'}")
            if text is None and (tensor.requires_grad or id(tensor) in of_function):
                wanted = self._said_by_others(tensor)
                self._step.keep_place(tensor, "a tensor that the function uses", wanted)

    def _said_by_others(self, tensor: torch.Tensor) -> bool | None:
        """requires_grad of a tensor; None where the function itself sets it in each call."""
        wanted = self._wanted_gradients.get(id(tensor))
        return wanted if wanted == tensor.requires_grad else None

    def _keep_objects(self, known: Reached, used: set[int]) -> None:
        """The modules and optimizers that the function knows and uses, and where it finds them.

        Another one in the place of one of them has tensors that the step does not know, and what
        is captured goes on with those of the old one.
        """
        for module in known.modules:
            name = type(module).__name__
            leads = id(module) in used
            for key, child in _members(module, "module").items():
                if child is not None and _is_used(child, used):
                    text = f"module '{key}' of a {name}"
                    self._step.keep_object(module, ("_modules", key), text)
                    leads = True
            if leads:
                self._step.keep_alive(module, f"a {name} that the function used")
        for optimizer in known.optimizers:
            if id(optimizer) in used:
                text = f"the {type(optimizer).__name__} that the function used"
                self._step.keep_alive(optimizer, text)
        for owner, key in known.holders:
            value = object.__getattribute__(owner, "__dict__").get(key)
            is_module = issubclass(type(value), nn.Module)
            if type(owner).__weakrefoffset__ == 0 or not (
                _is_used(value, used) if is_module else id(value) in used
            ):
                continue
            name = type(owner).__name__
            kind = "module" if is_module else "optimizer"
            self._step.keep_object(owner, (key,), f"the {kind} '{key}' of a {name}")
            self._step.keep_alive(owner, f"a {name} that the function used")

    def _keep_numbers(self) -> None:
        """How many members the modules that were called have, and which of these are None."""
        found = list(self._called.values())
        for module in found:  # which grows meanwhile
            name = type(module).__name__
            for kind, place in _MEMBERS.items():
                members = _members(module, kind)
                self._step.keep_length(module, (place,), f"the {kind}s of a {name}")
                for key, member in members.items():
                    if member is None and (id(module), key) not in self._written:
                        self._step.keep_object(module, (place, key), f"{kind} '{key}' of a {name}")
                    elif kind == "module" and issubclass(type(member), _LISTS):
                        found.append(member)

    def _keep_members(self, module: nn.Module, names: dict[int, str]) -> bool:
        """Returns whether the step uses one."""
        name = type(module).__name__
        some = False
        for kind in ("parameter", "buffer"):
            for key, member in _members(module, kind).items():
                if member is None:
                    continue
                text = names[id(member)] = f"{kind} '{key}' of a {name}"
                # Where the function says it itself, it does not matter how a call begins.
                wanted = self._said_by_others(member)
                path = (_MEMBERS[kind], key)
                used = self._step.keep(module, path, member, text, wanted)
                if _is_wrapper(member) and id(module) in self._called:
                    self._step.keep_wrapper(module, path, text, wanted)
                some = some or used
        return some

    def _keep_mode(self, module: nn.Module, kept: set[int]) -> None:
        """train() or eval() of a module."""
        if id(module) in kept:
            return
        kept.add(id(module))
        text = f"the mode of a {type(module).__name__} (train() or eval(): 'training')"
        if "training" in module.__dict__:
            self._step.keep_value(module, ("training",), text)
            return
        self._step.keep_answer(module, "training", text)  # of a ScriptModule
        for child in module.children():
            self._keep_mode(child, kept)

    def _keep_modes(self, module: nn.Module, kept: set[int]) -> None:
        """Those of a module and its parts that is the step's alone: all its parameters are."""
        if id(module) in kept or "_parameters" not in module.__dict__:
            return
        parameters = list(module.parameters())
        if not parameters or not all(self._step.uses(each) for each in parameters):
            return
        for each in module.modules():
            self._keep_mode(each, kept)

    def _keep_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether it stepped and the step changes what it optimizes."""
        if self._stepped is not None and optimizer not in self._stepped:
            return False
        attributes = optimizer.__dict__
        name = type(optimizer).__name__
        changed = False
        for index, group in enumerate(attributes.get("param_groups", ())):
            changes = any(self._step.changes(each) for each in group["params"])
            # It stepped, and what tensors that are made of others hold is not looked for.
            if self._stepped is not None:
                changes = changes or any(map(_is_wrapper, group["params"]))
            if not changes:
                continue
            changed = True
            path = ("param_groups", index)
            text = f"the parameters of a group of {name}"
            self._step.keep_length(optimizer, (*path, "params"), text)
            for number in range(len(group["params"])):
                text = f"a parameter of a group of {name}"
                self._step.keep_object(optimizer, (*path, "params", number), text)
            for key in [key for key in group if key not in ("params", "param_names")]:
                self._keep_setting(optimizer, (*path, key), group[key], f"'{key}' of {name}")
        if not changed:
            return False
        text = f"the parameter groups of {name}"
        self._step.keep_length(optimizer, ("param_groups",), text)
        for parameter, state in list(attributes["state"].items()):
            if not isinstance(state, dict):
                continue
            for key, value in list(state.items()):
                if not isinstance(value, torch.Tensor):
                    continue
                path, text = ("state", parameter, key), f"state '{key}' of {name}"
                if _is_wrapper(value):
                    self._step.keep_wrapper(optimizer, path, text, None)
                else:
                    self._step.keep(optimizer, path, value, text)
        return True

    def _keep_setting(
        self, optimizer: torch.optim.Optimizer, path: tuple[Any, ...], value: Any, text: str
    ) -> None:
        if isinstance(value, torch.Tensor):
            # What a scheduler writes into a tensor on the CPU, a replay would not see.
            if value.device.type == "cpu":
                self._step.keep_contents(optimizer, path, text)
            else:
                self._step.keep(optimizer, path, value, text)
        elif isinstance(value, (int, float)) or _is_plain(value):
            # lr=1 and lr=1.0 are the same to an optimizer.
            self._step.keep_value(optimizer, path, text, exact=False)
        elif isinstance(value, (list, tuple)):
            self._step.keep_length(optimizer, path, f"the entries of {text}")
            for index, each in enumerate(value):
                self._keep_setting(optimizer, (*path, index), each, text)


_MISSING = object()


def _members(module: nn.Module, kind: str) -> dict[str, Any]:
    members = module.__dict__.get(_MEMBERS[kind])
    return members if issubclass(type(members), dict) else {}  # of a ScriptModule


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a text, a type, a device, None, of an enum, or a tuple of such."""
    kind = type(value)
    if kind in _PLAIN or (issubclass(kind, tuple) and all(map(_is_plain, value))):
        return True
    return issubclass(kind, _PLAIN_BASES)


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Of any tensor that is alive. A view that was made together with others, as FSDP's parameters
    are, cannot be asked once its base was written to: autograd refuses to have it.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _is_plain_tensor(value: Any) -> bool:
    """Whether it is a tensor that needs no other one, and has a shape."""
    kind = type(value)
    if kind is not torch.Tensor and not issubclass(kind, nn.Parameter):
        return False
    return not is_lazy(value) and not value.is_nested


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is made of others, as a DTensor is."""
    return is_traceable_wrapper_subclass(tensor)


def _is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "ndarray" and kind.__module__ == "numpy"


def _is_used(module: nn.Module, used: set[int]) -> bool:
    return any(id(each) in used for each in module.modules())


def _entries(path: tuple[Any, ...], value: Any) -> list[tuple[tuple[Any, ...], Any]] | None:
    """What is in a list, tuple or dict, with paths; None of what is none, or too large or deep."""
    kind = type(value)
    if not issubclass(kind, (list, tuple, dict)) or len(path) > _MOST_DEPTH:
        return None
    if len(value) > _MOST_ENTRIES:
        return None
    if issubclass(kind, dict):
        found = list(dict.items(value))  # another thread may add to it meanwhile
        return [((*path, key), each) for key, each in found if _is_plain(key)]
    return [((*path, index), each) for index, each in enumerate(value)]


def _leaves(path: tuple[Any, ...], value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """What in a variable has to stay on its own, with paths: nothing of a data set on the host."""
    found = list(islice(_all_leaves(path, value), _MOST_ENTRIES + 1))
    if len(found) > _MOST_ENTRIES:
        return []
    if found and found[0][0] == path:  # it is no container
        return found
    if sum(each.nbytes for _, each in found if _is_on_host(each)) <= _C.CapturedStep.most_bytes:
        return found
    return [(at, each) for at, each in found if not _is_on_host(each)]


def _all_leaves(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    entries = None if _is_plain(value) else _entries(path, value)
    if entries is None:
        yield path, value
        return
    for at, each in entries:
        yield from _all_leaves(at, each)


def _is_on_host(value: Any) -> bool:
    if _is_array(value):
        return True
    dense = _is_plain_tensor(value) and value.layout is torch.strided
    return dense and value.device.type == "cpu"


def _remembered(value: Any) -> Any:
    """What tells by `_is_same` whether a variable that has to stay has stayed; else `_MISSING`."""
    if _is_plain(value):
        return value
    if issubclass(type(value), (nn.Module, torch.optim.Optimizer)):
        return _identity(value)
    if _is_array(value):
        large = value.nbytes > _C.CapturedStep.most_bytes
        return _identity(value) if large else value.copy()
    if not _is_plain_tensor(value) or value.layout is not torch.strided:
        return _MISSING
    if value.device.type == device_type():
        return _place(value)
    if value.device.type != "cpu":
        return _MISSING
    if value.nbytes > _C.CapturedStep.most_bytes:
        return _identity(value), None if value.is_inference() else value._version
    return value.detach().clone(memory_format=torch.contiguous_format)


def _is_same(before: Any, value: Any) -> bool:
    if before is _MISSING:
        return False
    now = _remembered(value)
    if type(now) is not type(before):
        return False
    if isinstance(now, torch.Tensor):
        return _C.hold_the_same(now, before)
    if _is_array(now):
        alike = now.dtype == before.dtype and now.shape == before.shape
        return alike and now.tobytes() == before.tobytes()
    return now == before


def _identity(value: object) -> tuple[type, int]:
    return type(value), id(value)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor on acc lies."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride()
