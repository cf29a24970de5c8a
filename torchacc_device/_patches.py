"""The one module that assigns attributes of torch.

An acc tensor whose contents are not computed yet has an address that nobody may read. What reads
through the dispatcher is served there; the functions below hand addresses or bytes to Python past
it, or take bytes. Each is wrapped for acc tensors only: work is submitted first, then the original
runs on the tensor of the CPU or GPU that shares the memory, or on a copy. `data_ptr` of
UntypedStorage is not among them: it tells storages apart and must not submit anything.

Process groups that were made without a backend's name are told which one they have. A process that
trains alone has a process group that its program did not make (torchacc); when the program makes
its own, that one goes first.

One more function tells Meta kernels for which device they infer: where the layout of a result
differs between CPU and CUDA (FFTs, decompositions, embedding bags), they take CUDA for granted.

A GradScaler's step asks the device nothing (_scaling.py). What torch switches off where there is no
CUDA is noted, for acc to switch on (_switched_off.py). `torch.compile` leaves compiling to acc
where tensors are on it (_compile.py).

`LIST` names what is wrapped, `apply()` wraps, `undo()` puts everything back.

`LATER` names what is wrapped only once there is a reason: the environment says how
DistributedDataParallel is to exchange gradients, or a program imports FlexAttention, which names
the devices that it takes, or DTensors, which draw random numbers. `AS_CUDA` names what acts on acc
where a program says "cuda", once it is asked for; `DEVICES_AS_CUDA` what puts tensors on acc then.
Modules tell which of their attributes are set only while somebody asks (`attributes_written`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import _meta_registrations
from torch._C import DispatchKey
from torch.distributed import device_mesh, distributed_c10d
from torch.jit import _builtins
from torch.nn.parallel import DistributedDataParallel
from torch.utils.dlpack import DLDeviceType

from torchacc_device import (
    _C,
    _as_cuda,
    _as_cuda_devices,
    _compile,
    _devices,
    _imported,
    _scaling,
    _switched_off,
)

_DEVICE = "acc"
_ABSENT = object()

# Tensors with one of these keys are wrappers around others: they have no memory of their own.
_WRAPPERS = (
    DispatchKey.Python,
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchGradWrapper,
    DispatchKey.Functionalize,
)


def _has_acc_memory(tensor: torch.Tensor) -> bool:
    if tensor.device.type != _DEVICE or tensor.layout is not torch.strided:
        return False
    keys = torch._C._dispatch_keys(tensor)
    return not any(keys.has(key) for key in _WRAPPERS)


# It asks in the middle of each step whether a parameter is its shard again, and reads nothing.
_COMPARES_ADDRESSES = ("torch.distributed.fsdp._runtime_utils", "_catch_all_reshard")


def _name_of(frame: FrameType) -> tuple[str | None, str]:
    return frame.f_globals.get("__name__"), frame.f_code.co_name


def _data_ptr(original: Callable[..., int]) -> Callable[..., int]:
    def data_ptr(self: torch.Tensor) -> int:
        if self.device.type == _DEVICE and _has_acc_memory(self):
            caller = sys._getframe().f_back  # None: called from C++
            if caller is not None and _name_of(caller) == _COMPARES_ADDRESSES:
                return self.untyped_storage().data_ptr() + self.storage_offset() * self.itemsize
            return original(_C.alias(self))
        return original(self)

    return data_ptr


def _dlpack(original: Callable[..., Any]) -> Callable[..., Any]:
    def __dlpack__(self: torch.Tensor, **options: Any) -> Any:
        if not _has_acc_memory(self):
            return original(self, **options)
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        if options.get("stream") is not None and "torch.cuda.Event" in _before:
            # torch would let the reader's stream wait by what is acc's now.
            _C.synchronize(self.device.index)
            options["stream"] = -1
        return _exported(original, self, options)

    return __dlpack__


def _exported(export: Callable[..., Any], tensor: torch.Tensor, options: dict[str, Any]) -> Any:
    exported = export(_C.alias(tensor), **options)
    if options.get("copy") is not True:
        _C.share(tensor)  # not before: what is refused stays lazy
    return exported


def _to_dlpack(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_dlpack(data: torch.Tensor, **options: Any) -> Any:
        if not isinstance(data, torch.Tensor) or not _has_acc_memory(data):
            return original(data, **options)
        return _exported(original, data, options)

    return to_dlpack


def _from_dlpack(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What other libraries call an extension's device is not acc, as torch takes for granted."""

    def from_dlpack(*args: Any, **options: Any) -> torch.Tensor:
        made = original(*args, **options)
        if made.device.type == _DEVICE:
            raise BufferError(
                f"[torch.from_dlpack] this memory of another library is not of {_DEVICE}: a tensor "
                "can be made of memory of the CPU or a GPU only."
            )
        return made

    return from_dlpack


def _dlpack_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def __dlpack_device__(self: torch.Tensor) -> tuple[Any, int]:
        if not _has_acc_memory(self):
            return original(self)
        if _C.executor_name() == "host":
            return (DLDeviceType.kDLCPU, 0)
        return (DLDeviceType.kDLCUDA, self.device.index)

    return __dlpack_device__


def _write_file(original: Callable[..., Any]) -> Callable[..., Any]:
    def _write_file(self: torch.UntypedStorage, *args: Any, **options: Any) -> Any:
        return original(self.cpu() if self.device.type == _DEVICE else self, *args, **options)

    return _write_file


def _set_from_file(original: Callable[..., Any]) -> Callable[..., Any]:
    def _set_from_file(self: torch.UntypedStorage, *args: Any, **options: Any) -> Any:
        if self.device.type != _DEVICE:
            return original(self, *args, **options)
        read = torch.UntypedStorage(self.nbytes())
        original(read, *args, **options)
        return self.copy_(read)

    return _set_from_file


def _share(original: Callable[..., Any]) -> Callable[..., Any]:
    def share(self: torch.UntypedStorage, *args: Any, **options: Any) -> Any:
        if self.device.type == _DEVICE:
            raise RuntimeError(
                f"[torch.multiprocessing] memory of {self.device} cannot be shared with another "
                "process. Send tensor.cpu() and move it to the device there."
            )
        return original(self, *args, **options)

    return share


def _device_hint(original: Callable[..., str]) -> Callable[..., str]:
    def device_hint(tensor: torch.Tensor) -> str:
        return "cpu" if _C.inferring() and _C.executor_name() == "host" else original(tensor)

    return device_hint


def _carries_acc(group: Any) -> bool:
    return any(device.type == _DEVICE for device in getattr(group, "_device_types", ()))


_without_timeout = ContextVar("without_timeout", default=False)


def without_timeout() -> bool:
    """Whether the program has given no timeout to the group that is being made."""
    return _without_timeout.get()


def _named_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """A group that was made without a backend's name, or with several, knows ours by its default.

    torch looks for NCCL only and takes Gloo, which such a group does not have;
    DistributedDataParallel and SyncBatchNorm ask.

    A program that has told its device makes groups of other backends too: torch asks those for
    what they have for that device. Gloo says that it serves CUDA, and has nothing for acc.
    """

    def make(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **of: Any) -> Any:
        device = of.get("device_id")
        if device is not None and device.type == _DEVICE:
            served = distributed_c10d.BackendConfig(backend).get_device_backend_map()
            of["device_id"] = device if _DEVICE in served else None
        # Where the program gives none torch has put this very object there by now; one that the
        # program gives may be equal.
        default = distributed_c10d.default_pg_timeout
        token = _without_timeout.set(of.get("timeout") is default)
        try:
            made = original(size, rank, ranks, backend, *args, **of)
        finally:
            _without_timeout.reset(token)
        group = made[0]
        if _carries_acc(group):
            group._set_default_backend(distributed_c10d.ProcessGroup.BackendType.CUSTOM)
        return made

    return make


def _replacing_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(*args: Any, **options: Any) -> Any:
        # Set to None by `undo`, which functions that were bound before know nothing of.
        put_back = _before_group() if _before_group is not None else None
        try:
            return original(*args, **options)
        except BaseException:
            if put_back is not None and not distributed_c10d.is_initialized():
                put_back()
            raise

    return init_process_group


def _monitored(original: Callable[..., None]) -> Callable[..., None]:
    """torch asks for a group of the name "gloo"; on a host the transport of ours is one."""

    def monitored_barrier(
        group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        chosen = group or distributed_c10d._get_default_group()
        if not _carries_acc(chosen):
            return original(group, timeout, wait_all_ranks)
        carrier = _DEVICE if _C.executor_name() == "host" else "cpu"
        if all(device.type != carrier for device in chosen._device_types):
            raise ValueError(
                "[monitored_barrier] on a GPU the group needs Gloo beside NCCL, which cannot say "
                f"who is missing: make it with init_process_group('cpu:gloo,{_DEVICE}:{_DEVICE}'), "
                "or call barrier()."
            )
        options: dict[str, Any] = {"wait_all_ranks": wait_all_ranks}
        if timeout is not None:
            distributed_c10d._check_valid_timeout(timeout)
            options["timeout"] = timeout
        return chosen._get_backend(torch.device(carrier)).monitored_barrier(**options)

    return monitored_barrier


def _unwrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL has torch compare what ranks call, by a group around each.

    Ours compare that themselves. One around them ends without submitting what was recorded, and
    hides what they have beside collectives.
    """

    def _create_process_group_wrapper(wrapped_pg: Any, *args: Any, **options: Any) -> Any:
        if isinstance(wrapped_pg, _C.ProcessGroupACC):
            return wrapped_pg
        return original(wrapped_pg, *args, **options)

    return _create_process_group_wrapper


def _setting_timeout(original: Callable[..., None]) -> Callable[..., None]:
    """torch looks for Gloo on the CPU and NCCL on CUDA."""

    def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        chosen = distributed_c10d._get_default_group() if group is None else group
        if not _carries_acc(chosen):
            return original(timeout, group)
        if any(device.type != _DEVICE for device in chosen._device_types):
            original(timeout, group)
        chosen._get_backend(torch.device(_DEVICE)).set_timeout(timeout)

    return _set_pg_timeout


def _splitting(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch asks for NCCL's way to split a group; ours are made like any group of some ranks."""

    def split_group(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        parent = parent_pg or distributed_c10d._get_default_group()
        if not _carries_acc(parent):
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc)
        if not split_ranks or not all(split_ranks):
            raise ValueError("[split_group] split_ranks has to name at least one rank in each list")
        everyone = distributed_c10d.get_process_group_ranks(parent)
        here = distributed_c10d.get_group_rank(parent, distributed_c10d.get_rank())
        mine = next((sorted(ranks) for ranks in split_ranks if here in ranks), None)
        if mine is None:
            return None
        if len(set(mine)) < len(mine) or not 0 <= mine[0] <= mine[-1] < len(everyone):
            raise ValueError(
                f"[split_group] {mine} should be ranks of the group, 0 to {len(everyone) - 1}, "
                "each of them once"
            )
        ranks = [everyone[rank] for rank in mine]
        return _split_off(parent, ranks, timeout, pg_options, group_desc)

    return split_group


def _split_off(
    parent: Any, ranks: list[int], timeout: timedelta | None, options: Any, desc: str | None
) -> Any:
    """The group of `ranks`, some of the parent's. They make it, and the others need not be here.

    As `new_group` does with use_local_synchronization, but for the name: torch takes that from how
    many groups each process is in, and those that are in unlike numbers would not find each other.
    """
    backend = distributed_c10d.Backend(distributed_c10d.get_backend_config(parent))
    timeout = distributed_c10d._get_default_timeout(backend) if timeout is None else timeout
    distributed_c10d._check_valid_timeout(timeout)
    world = distributed_c10d._world
    rank = distributed_c10d.get_rank()
    text = "_".join(map(str, ranks)).encode()
    place = f"split/{hashlib.sha1(text, usedforsecurity=False).hexdigest()}"
    # How many of these ranks there were before: each of them counts the same.
    made = world.pg_map[parent][1].add(f"{place}/{rank}", 1)
    default = distributed_c10d._get_default_group()
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        ranks,
        backend,
        world.pg_map[default][1],
        f"{parent.group_name}/{place}/{made}",
        options,
        timeout=timeout,
        device_id=default.bound_device_id,
        group_desc=desc,
    )
    world.pg_group_ranks[group] = {each: number for number, each in enumerate(ranks)}
    return group


_WRAPPED: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (torch.Tensor, "data_ptr", _data_ptr),
    (torch.Tensor, "__dlpack__", _dlpack),
    (torch.Tensor, "__dlpack_device__", _dlpack_device),
    (torch.Tensor, "__dlpack_c_exchange_api__", _C.dlpack_exchange_api),
    (torch._C, "_to_dlpack", _to_dlpack),
    (torch._C, "_to_dlpack_versioned", _to_dlpack),
    (torch._C, "_from_dlpack", _from_dlpack),
    # the first one of these under the names by which programs know it
    (torch.utils.dlpack, "to_dlpack", _to_dlpack),
    (torch, "to_dlpack", _to_dlpack),
    (torch.UntypedStorage, "_write_file", _write_file),
    (torch.UntypedStorage, "_set_from_file", _set_from_file),
    (torch.UntypedStorage, "_share_fd_cpu_", _share),
    (torch.UntypedStorage, "_share_filename_cpu_", _share),
    (torch.UntypedStorage, "_share_cuda_", _share),
    (_meta_registrations, "device_hint", _device_hint),
    (torch.amp.GradScaler, "scale", _scaling.noting_scaler),
    (torch.amp.GradScaler, "update", _scaling.ending_step),
    (torch.amp.GradScaler, "_maybe_opt_step", _scaling.without_read),
    (torch.amp.GradScaler, "_unscale_grads_", _scaling.with_others),
    (torch.amp.GradScaler, "_check_scale_growth_tracker", _scaling.with_scale),
    (torch.amp.GradScaler, "load_state_dict", _switched_off.noting_state),
    (torch.cuda.amp.common, "amp_definitely_not_available", _switched_off.noting),
    (torch._TorchCompileInductorWrapper, "__call__", _compile.instead_of_inductor),
    (torch._TorchCompileWrapper, "__init__", _compile.registering),
    (distributed_c10d, "_new_process_group_helper", _named_backend),
    (distributed_c10d, "_create_process_group_wrapper", _unwrapped),
    (distributed_c10d, "_set_pg_timeout", _setting_timeout),
    # both, and from the start: programs bind the function when they are imported
    (distributed_c10d, "init_process_group", _replacing_group),
    (torch.distributed, "init_process_group", _replacing_group),
    (distributed_c10d, "monitored_barrier", _monitored),
    (torch.distributed, "monitored_barrier", _monitored),
    (distributed_c10d, "split_group", _splitting),
    (torch.distributed, "split_group", _splitting),
    (device_mesh, "split_group", _splitting),  # bound when it was imported
)


def _exchanging(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        if _construct is None or all(p.device.type != _DEVICE for p in module.parameters()):
            original(self, module, *args, **options)
        else:
            _construct(original, self, module, *args, **options)

    return __init__


_WRAPPED_LATER: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (DistributedDataParallel, "__init__", _exchanging),
)


def _takes_acc(original: Callable[..., None]) -> Callable[..., None]:
    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != _DEVICE:
            original(query, key, value)

    return _validate_device


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch moves the state of the device's generator to the device and back, at each draw.

    On a GPU that waits for all work that was submitted before. The state of a generator that it is
    given stays where it is.
    """

    def _distribute_region(self: Any, spec: Any, generator: torch.Generator | None = None) -> Any:
        if generator is None and self._device.type == _DEVICE:
            generator = _C.default_generator(_C.current_device())
        return original(self, spec, generator)

    return _distribute_region


# In modules that torch imports late; to import the first takes half a second. The module, a class
# of it or "", the name there, and how it is wrapped.
_WRAPPED_ONCE_IMPORTED: tuple[tuple[str, str, str, Callable[[Any], Any]], ...] = (
    ("torch.nn.attention.flex_attention", "", "_validate_device", _takes_acc),
    (
        "torch.distributed.fsdp.sharded_grad_scaler",
        "ShardedGradScaler",
        "update",
        _scaling.ending_step,
    ),
    (
        "torch.distributed.tensor._random",
        "OffsetBasedRNGTracker",
        "_distribute_region",
        _drawing,
    ),
)


def _full_name(owner: Any, name: str) -> str:
    prefix = "" if owner is torch else f"{owner.__name__.removeprefix('torch.')}."
    return f"torch.{prefix}{name}"


# Everything that is wrapped, by its full name; and what is wrapped when there is a reason.
LIST: tuple[str, ...] = tuple(_full_name(owner, name) for owner, name, _ in _WRAPPED)
LATER: tuple[str, ...] = (
    *(_full_name(owner, name) for owner, name, _ in _WRAPPED_LATER),
    *(
        f"torch.{kind}.{name}" if kind else f"{module}.{name}"
        for module, kind, name, _ in _WRAPPED_ONCE_IMPORTED
    ),
)
AS_CUDA: tuple[str, ...] = tuple(_full_name(owner, name) for owner, name, _ in _as_cuda.TABLE)
DEVICES_AS_CUDA: tuple[str, ...] = tuple(
    _full_name(owner, name) for owner, name, _ in _as_cuda_devices.TABLE
)

# What the owner's own __dict__ held before, by full name; _ABSENT where it inherited.
_before: dict[str, Any] = {}


# Called before a program makes its default process group; what it returns, if that fails.
_before_group: Callable[[], Callable[[], None] | None] | None = None
# Called with DistributedDataParallel's own `__init__` and its arguments, for modules on acc.
_construct: Callable[..., None] | None = None


def applied() -> tuple[str, ...]:
    """The names in all these lists that are wrapped now."""
    return tuple(name for name in (*LIST, *LATER, *AS_CUDA, *DEVICES_AS_CUDA) if name in _before)


def apply() -> None:
    """Wraps everything in `LIST`; a second call does nothing."""
    _apply(_WRAPPED)
    for module, kind, name, wrap in _WRAPPED_ONCE_IMPORTED:
        _imported.forget(module)
        _imported.when_imported(module, functools.partial(_apply_to_imported, kind, name, wrap))


def _apply_to_imported(
    kind: str, name: str, wrap: Callable[[Any], Any], module: ModuleType
) -> None:
    owner = getattr(module, kind) if kind else module
    full_name = _full_name(owner, name)
    if getattr(getattr(owner, name), "__wrapped__", None) is not _before.get(full_name, _ABSENT):
        _before.pop(full_name, None)  # of a module that was there before
    _apply(((owner, name, wrap),))


def before_group(call: Callable[[], Callable[[], None] | None]) -> None:
    """From now on `call` runs before the default process group is made.

    It may return what puts things back when none could be made.
    """
    global _before_group
    _before_group = call


def apply_exchanging(construct: Callable[..., None]) -> None:
    """From now on `construct(original, self, module, ...)` makes DistributedDataParallel's."""
    global _construct
    _construct = construct
    _apply(_WRAPPED_LATER)


def apply_as_cuda() -> list[str]:
    """From now on what acts on CUDA in a program acts on acc (_as_cuda.py).

    Returns what to say of what was made before and does not.
    """
    _apply(_as_cuda.TABLE)
    _devices.other_names = _as_cuda.MEANT
    return _switched_off.switch_on()


def apply_devices_as_cuda() -> list[str]:
    """From now on devices that are called "cuda" are acc's, too (_as_cuda_devices.py)."""
    refused = apply_as_cuda()
    _apply(_as_cuda_devices.TABLE)
    for function in _wrapped_builtins():
        _builtins._register_builtin(function, _builtins._find_builtin(function.__wrapped__))
    return refused


def _wrapped_builtins() -> list[Any]:
    """What stands for functions that torch.jit.script knows by their identity."""
    found = [getattr(owner, name) for owner, name, _ in _as_cuda_devices.TABLE]
    return [f for f in found if _builtins._find_builtin(getattr(f, "__wrapped__", None))]


# Which attributes of modules are set, by id and name: a set for each who wants to know.
_noted: list[set[tuple[int, str]]] = []
_noting = threading.Lock()


@contextlib.contextmanager
def attributes_written() -> Iterator[set[tuple[int, str]]]:
    """Notes which attributes of modules are set meanwhile, by any thread: id and name."""
    noted: set[tuple[int, str]] = set()
    with _noting:
        if not _noted:
            _apply(NOTED)
        _noted.append(noted)
    try:
        yield noted
    finally:
        with _noting:
            _noted[:] = [each for each in _noted if each is not noted]
            if not _noted:
                _undo(NOTED)


def _noting_attributes(original: Callable[..., None]) -> Callable[..., None]:
    def set_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
        for noted in list(_noted):
            noted.add((id(module), name))
        original(module, name, value)

    return set_attribute


NOTED = ((torch.nn.Module, "__setattr__", _noting_attributes),)


def undo_as_cuda() -> None:
    """Takes `apply_as_cuda` and `apply_devices_as_cuda` back; a second call does nothing."""
    for function in _wrapped_builtins():
        _builtins._get_builtin_table().pop(id(function), None)
    _undo((*_as_cuda.TABLE, *_as_cuda_devices.TABLE))
    _switched_off.switch_off()
    _devices.other_names = ()


def _apply(wrapped: tuple[tuple[Any, str, Callable[[Any], Any]], ...]) -> None:
    for owner, name, wrap in wrapped:
        full_name = _full_name(owner, name)
        if full_name in _before:
            continue
        original = getattr(owner, name)
        wrapper = wrap(original)
        if isinstance(wrapper, FunctionType):
            wrapper = functools.wraps(original)(wrapper)
            if isinstance(owner, ModuleType):  # builtins call their class, which pickle looks for
                wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
        _before[full_name] = vars(owner).get(name, _ABSENT)
        setattr(owner, name, wrapper)


def undo() -> None:
    """Puts back what was replaced; a second call does nothing."""
    global _before_group, _construct
    _before_group = _construct = None
    undo_as_cuda()
    for module, kind, name, wrap in _WRAPPED_ONCE_IMPORTED:
        _imported.forget(module)
        if module in sys.modules:
            there = sys.modules[module]
            _undo(((getattr(there, kind) if kind else there, name, wrap),))
    _undo((*_WRAPPED, *_WRAPPED_LATER))


def _undo(wrapped: tuple[tuple[Any, str, Callable[[Any], Any]], ...]) -> None:
    for owner, name, _ in wrapped:
        before = _before.pop(_full_name(owner, name), None)
        if before is _ABSENT:
            delattr(owner, name)
        elif before is not None:
            setattr(owner, name, before)
