"""The one module that assigns attributes of torch.

An acc tensor whose contents are not computed yet has an address that nobody may read. What reads
through the dispatcher is served there; the functions below hand addresses or bytes to Python past
it, or take bytes. Each is wrapped for acc tensors only: work is submitted first, then the original
runs on the tensor of the CPU or GPU that shares the memory, or on a copy. `data_ptr` of
UntypedStorage is not among them: it tells storages apart and must not submit anything.

One more function tells Meta kernels for which device they infer: where the layout of a result
differs between CPU and CUDA (FFTs, decompositions, embedding bags), they take CUDA for granted.

`LIST` names what is wrapped, `apply()` wraps, `undo()` puts everything back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _meta_registrations
from torch._C import DispatchKey
from torch.utils.dlpack import DLDeviceType

from torchacc_device import _C

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


def _data_ptr(original: Callable[..., int]) -> Callable[..., int]:
    def data_ptr(self: torch.Tensor) -> int:
        if self.device.type == _DEVICE and _has_acc_memory(self):
            return original(_C.alias(self))
        return original(self)

    return data_ptr


def _dlpack(original: Callable[..., Any]) -> Callable[..., Any]:
    def __dlpack__(self: torch.Tensor, **options: Any) -> Any:
        if not _has_acc_memory(self):
            return original(self, **options)
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return original(_C.share(self), **options)

    return __dlpack__


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


_WRAPPED: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (torch.Tensor, "data_ptr", _data_ptr),
    (torch.Tensor, "__dlpack__", _dlpack),
    (torch.Tensor, "__dlpack_device__", _dlpack_device),
    (torch.UntypedStorage, "_write_file", _write_file),
    (torch.UntypedStorage, "_set_from_file", _set_from_file),
    (torch.UntypedStorage, "_share_fd_cpu_", _share),
    (torch.UntypedStorage, "_share_filename_cpu_", _share),
    (torch.UntypedStorage, "_share_cuda_", _share),
    (_meta_registrations, "device_hint", _device_hint),
)

# Everything that is wrapped, by its full name.
LIST: tuple[str, ...] = tuple(
    f"torch.{owner.__name__.removeprefix('torch.')}.{name}" for owner, name, _ in _WRAPPED
)

# What the owner's own __dict__ held before, by full name; _ABSENT where it inherited.
_before: dict[str, Any] = {}


def applied() -> tuple[str, ...]:
    """The names in `LIST` that are wrapped now."""
    return tuple(name for name in LIST if name in _before)


def apply() -> None:
    """Wraps everything in `LIST`; a second call does nothing."""
    for full_name, (owner, name, wrap) in zip(LIST, _WRAPPED, strict=True):
        if full_name in _before:
            continue
        original = getattr(owner, name)
        wrapper = functools.wraps(original)(wrap(original))
        _before[full_name] = vars(owner).get(name, _ABSENT)
        setattr(owner, name, wrapper)


def undo() -> None:
    """Puts back what `apply` has replaced; a second call does nothing."""
    for full_name, (owner, name, _) in zip(LIST, _WRAPPED, strict=True):
        before = _before.pop(full_name, None)
        if before is _ABSENT:
            delattr(owner, name)
        elif before is not None:
            setattr(owner, name, before)
