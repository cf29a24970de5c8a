"""Programs that put tensors on "cuda", and mean the device: what of it goes to acc.

Strings are read as such where they are used, and where `torch.device` makes a device of them, so
that every device that a program gets to see is one of acc. A device that is CUDA's stays CUDA's:
only a tensor of CUDA can have told it, and a kernel that acc calls with such tensors may use it.

Functions are wrapped one by one. A `TorchFunctionMode` would see all of them at once, but it also
sees every other function, for five microseconds each, and it is one thread's, while a backward
or a loader has threads of its own.

`TABLE` says what is wrapped and how; `_patches` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.jit import annotations
from torch.utils._device import _device_constructors

from torchacc_device import _C, acc
from torchacc_device._as_cuda import MEANT

_DEVICE = "acc"
_TENSOR_TYPES = "torch.cuda."


def named(device: Any) -> Any:
    """The name of an acc device, where `device` is the name of one of CUDA or XLA; else itself."""
    if isinstance(device, str):
        kind, colon, index = device.partition(":")
        if kind in MEANT:
            return _DEVICE + colon + index
    return device


def _by_keyword(original: Callable[..., Any]) -> Callable[..., Any]:
    """For functions whose `device` is a keyword."""

    def call(*args: Any, **options: Any) -> Any:
        if isinstance(options.get("device"), str):
            options["device"] = named(options["device"])
        return original(*args, **options)

    return call


def _first(original: Callable[..., Any]) -> Callable[..., Any]:
    """For methods whose `device` is a keyword or the first argument."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if args:
            if isinstance(args[0], str):
                args = (named(args[0]), *args[1:])
        elif isinstance(options.get("device"), str):
            options["device"] = named(options["device"])
        return original(self, *args, **options)

    return call


def _cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    def cuda(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        if isinstance(device, torch.device) and device.type in MEANT:
            return original(self, device, non_blocking, memory_format=memory_format)
        device = _DEVICE if device is None else named(device)
        return self.to(device, non_blocking=non_blocking, memory_format=memory_format)

    return cuda


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor.type("torch.cuda.FloatTensor")`: torch has such names for acc as well."""

    def type(self: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(dtype, _TensorType):
            dtype = f"{_TENSOR_TYPES}{dtype.__name__}"
        if isinstance(dtype, str) and dtype.startswith(_TENSOR_TYPES):
            dtype = f"torch.{_DEVICE}.{dtype.removeprefix(_TENSOR_TYPES)}"
        return original(self, dtype, *args, **options)

    return type


class _TensorType(type):
    """The kind of `torch.cuda.FloatTensor` and its like, which old programs make tensors by."""

    def __call__(cls, *args: Any, **options: Any) -> torch.Tensor:
        return getattr(torch, cls.__name__)(*args, **options).to(_DEVICE)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.type() == f"torch.{_DEVICE}.{cls.__name__}"


def _default_type(original: Callable[..., None]) -> Callable[..., None]:
    """`torch.set_default_tensor_type("torch.cuda.FloatTensor")`, which is a dtype and a device."""

    def set_default_tensor_type(t: Any, /) -> None:
        name = t.__name__ if isinstance(t, _TensorType) else t
        if isinstance(t, _TensorType) or (isinstance(t, str) and t.startswith(_TENSOR_TYPES)):
            torch.set_default_dtype(getattr(torch, name.removeprefix(_TENSOR_TYPES)).dtype)
            torch.set_default_device(_DEVICE)
            return
        original(t)
        if torch.get_default_device().type == _DEVICE:
            torch.set_default_device(None)

    return set_default_tensor_type


def _tensor_type(original: type) -> type:
    return _TensorType(original.__name__, (), {"__module__": original.__module__})


def _is_cuda(original: Any) -> property:
    def is_cuda(self: torch.Tensor) -> bool:
        return self.device.type == _DEVICE or original.__get__(self)

    return property(is_cuda, doc=original.__doc__)


def _class(original: type) -> type:
    """Stands for a class of torch that makes its objects from a device.

    Modules that are imported later look types of objects up in tables that they made with it.
    """

    class Kind(type):
        def __eq__(cls, other: Any) -> bool:
            return other is cls or other is original

        def __hash__(cls) -> int:
            return hash(original)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, original)

        def __call__(cls, *args: Any, **options: Any) -> Any:
            args = tuple(named(value) for value in args)
            return original(*args, **{name: named(value) for name, value in options.items()})

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    names = {
        "__module__": "torch",  # of Generator it is torch._C, where pickle would find the original
        "__doc__": original.__doc__,
        "__wrapped__": original,
    }
    return Kind(original.__name__, (), {**names, "__qualname__": original.__qualname__})


def _annotation(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.jit.script compares annotations with `torch.device` as it is now.

    Functions that were imported before, torch's own among them, are annotated with the original.
    """

    def try_ann_to_type(ann: Any, *args: Any, **options: Any) -> Any:
        for kind in (torch.device, torch.Generator):
            if ann is getattr(kind, "__wrapped__", kind):
                ann = kind
        return original(ann, *args, **options)

    return try_ann_to_type


def _location(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where torch.load puts what was saved on a GPU, or what it is told to put there."""

    def restore(storage: Any, location: Any) -> Any:
        return original(storage, named(location))

    return restore


def _backend(original: Callable[..., None]) -> Callable[..., None]:
    """Process groups of a program that asks for NCCL: acc's, which has NCCL carry it on a GPU."""

    def __init__(self: Any, backend: Any) -> None:
        parts = [part.split(":") for part in str(backend).split(",")]
        if [["nccl"]] == parts:
            backend = _DEVICE
        elif all(len(part) == 2 for part in parts):
            backend = ",".join(
                f"{_DEVICE}:{_DEVICE}" if kind == "cuda" and name == "nccl" else f"{kind}:{name}"
                for kind, name in parts
            )
        original(self, distributed_c10d.Backend(backend))

    return __init__


def _ours(name: str) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            return getattr(acc, name)(*args, **options)

        return call

    return replace


def _start_cuda(original: Callable[..., None]) -> Callable[..., None]:
    def _lazy_init() -> None:
        if _C.executor_name() == "host":
            raise _needs_cuda("this call")
        original()

    return _lazy_init


def _without_cuda(answer: Callable[[], Any]) -> Callable[[Any], Any]:
    """Functions that look at CUDA itself because `is_available()` says that it is there."""

    def replace(original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            return answer() if _C.executor_name() == "host" else original(*args, **options)

        return call

    return replace


def _unlimited() -> None:
    raise _needs_cuda(
        "set_per_process_memory_fraction", "Leave it out: memory is not limited per process."
    )


def _refused(name: str, instead: str) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        def __new__(cls: type, *args: Any, **options: Any) -> Any:
            raise _needs_cuda(f"torch.cuda.{name}", instead)

        def call(*args: Any, **options: Any) -> Any:
            raise _needs_cuda(f"torch.cuda.{name}", instead)

        if isinstance(original, type):
            return type(original.__name__, (), {"__new__": __new__, "__doc__": original.__doc__})
        return call

    return replace


def _needs_cuda(what: str, instead: str = "") -> RuntimeError:
    return RuntimeError(
        f"[torch.cuda] {what} needs CUDA itself, and what this program says of cuda acts on the "
        f"device {_DEVICE}. {instead or 'Leave it out, or run the program without torchacc.'}"
    )


_CAPTURED = (
    "Leave it out: recorded steps are replayed anyway, on a GPU as CUDA graphs; "
    "torchacc.capture leaves out their Python, too."
)
_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
_NEW = ("empty", "empty_strided", "full", "ones", "tensor", "zeros")


def _factories() -> list[tuple[Any, str]]:
    """The functions of torch that make a tensor on a device: by torch's own list, and others."""
    owners = {"torch._C._fft": torch.fft, "torch.nested": torch.nested}
    found = []
    for function in _device_constructors():
        name = function.__name__.removeprefix("fft_")
        found.append((owners.get(function.__module__, torch), name))
    found += [(torch, f"{name}_like") for name in _LIKE]
    found += [(torch.Tensor, f"new_{name}") for name in _NEW]
    found += [(torch, "normal"), (torch.nested, "as_nested_tensor"), (torch.nn.Module, "to_empty")]
    return sorted(found, key=lambda pair: (pair[0].__name__, pair[1]))


TABLE: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    *((owner, name, _by_keyword) for owner, name in _factories()),
    (torch.Tensor, "to", _first),
    (torch.Tensor, "pin_memory", _first),
    (torch.Tensor, "is_pinned", _first),
    (torch.nn.Module, "to", _first),
    (torch.Tensor, "cuda", _cuda),
    (torch.Tensor, "type", _type),
    (torch.Tensor, "is_cuda", _is_cuda),
    *((torch.cuda, f"{name}Tensor", _tensor_type) for name in _TYPES),
    (torch, "set_default_tensor_type", _default_type),
    (torch, "device", _class),
    (torch, "Generator", _class),
    (annotations, "try_ann_to_type", _annotation),
    (torch.serialization, "default_restore_location", _location),
    (distributed_c10d.BackendConfig, "__init__", _backend),
    *((torch.cuda, name, _ours(name)) for name in ("device_count", "init", "is_available")),
    (torch.cuda, "is_initialized", _ours("is_initialized")),
    (torch.cuda, "_lazy_init", _start_cuda),
    (torch.backends.cudnn, "version", _without_cuda(lambda: None)),
    *(
        (module, "set_per_process_memory_fraction", _without_cuda(_unlimited))
        for module in (torch.cuda, torch.cuda.memory)
    ),
    (torch.cuda, "CUDAGraph", _refused("CUDAGraph", _CAPTURED)),
    (torch.cuda, "graph", _refused("graph", _CAPTURED)),
    (torch.cuda, "make_graphed_callables", _refused("make_graphed_callables", _CAPTURED)),
)
