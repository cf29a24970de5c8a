"""Programs that say "cuda", or "xla", and mean the device: what of it acts on acc.

Autocast regions and gradient scalers of these names, the functions and classes of torch.cuda
that torch.acc has as well, and `custom_fwd`. Not what decides where tensors go:
`torch.cuda.is_available` and `device_count` stay, and so do devices.

`TABLE` says what is wrapped and how; `_patches` does it. What was made before is `_switched_off`'s.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.amp import autocast_mode

from torchacc_device import _switched_off, acc

_DEVICE = "acc"
MEANT = ("cuda", "xla")

# They concern tensors of CUDA too, which draw from generators of their own.
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all")
# Of both modules, but not for us to answer: whether there is CUDA, and how much of it.
_KEPT = ("amp", "default_generators", "device_count", "init", "is_available", "is_initialized")


def _meant(device: Any) -> Any:
    """acc, where `device` names CUDA or XLA; everything else as it is."""
    if isinstance(device, str) and device.partition(":")[0] in MEANT:
        return _DEVICE + "".join(device.partition(":")[1:])
    if isinstance(device, torch.device) and device.type in MEANT:
        return torch.device(_DEVICE, device.index) if device.index is not None else _DEVICE
    return device


def _autocast_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(
        self: Any, device_type: Any, dtype: torch.dtype | None = None, *args: Any, **options: Any
    ) -> None:
        if dtype is None and device_type == "cuda":
            dtype = _chosen_for_cuda()
        original(self, _meant(device_type), dtype, *args, **options)

    return __init__


class _Untouched(threading.local):
    """What the dtype of CUDA's autocast is in a thread where the program has not set it."""

    dtype = torch.float16


_untouched = _Untouched()


def _chosen_for_cuda() -> torch.dtype | None:
    """What `torch.set_autocast_dtype("cuda", ...)` was told; None: nothing, and acc's counts."""
    dtype = torch.get_autocast_dtype("cuda")
    return None if dtype == _untouched.dtype else dtype


def _autocast_enter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Who asks for the state of CUDA's autocast (`is_autocast_enabled()`) gets that of acc's."""

    def __enter__(self: Any) -> Any:
        if self.device == "cuda":
            _switched_off.begin(self)
        result = original(self)
        if self.device == _DEVICE:
            before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            vars(self).setdefault("_of_cuda", []).append((*before, _untouched.dtype))
            _count(1)
            _set_autocast_of_cuda(self._enabled, self.fast_dtype, self.fast_dtype)
        return result

    return __enter__


def _autocast_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(self: Any, *error: Any) -> Any:
        if before := vars(self).get("_of_cuda"):
            _set_autocast_of_cuda(*before.pop())
            _count(-1)
        return original(self, *error)

    return __exit__


_regions = 0  # that are open, of all threads
_lock = threading.Lock()


def _count(more: int) -> None:
    global _regions
    with _lock:
        _regions += more


def is_inside_a_region() -> bool:
    """Whether some thread is in a region that has to end as it began."""
    return _regions > 0


def _set_autocast_of_cuda(enabled: bool, dtype: torch.dtype, untouched: torch.dtype) -> None:
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    _untouched.dtype = untouched


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    """The inputs that `custom_fwd(device_type="cuda", cast_inputs=...)` casts."""

    def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return original(value, _meant(device_type), dtype)

    return _cast


def _scaler_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, device: Any = "cuda", *args: Any, **options: Any) -> None:
        original(self, _meant(device), *args, **options)

    return __init__


def _ours(name: str) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        ours = getattr(acc, name)
        if isinstance(ours, type):
            return ours

        def call(*args: Any, **options: Any) -> Any:
            if name in _SEEDS:
                if _takes_seeds():
                    original(*args, **options)
                if acc._is_in_bad_fork():
                    # A worker of a DataLoader, which torch seeds: CUDA's functions take that, too.
                    return None
            return ours(*args, **options)

        return call

    return replace


class _EventKind(type):
    """`torch.cuda.Event`, whose options may be given by position; torch.Event's first is a device.

    What it makes are torch's own events, as those of `torch.acc.Event`: torch 2.11 takes no
    instances of subclasses.
    """

    def __call__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,  # concerns graphs that the program captures, which needs CUDA
    ) -> torch.Event:
        return torch.Event(
            enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Event)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, torch.Event)


def _event(original: type) -> type:
    names = {"__module__": original.__module__, "__doc__": original.__doc__}
    return _EventKind(original.__name__, (torch.Event,), names)


def _takes_seeds() -> bool:
    """Whether CUDA's own functions for seeds can be called.

    They ask for its generators at once where `is_initialized()` says that there are some, and that
    may be the answer of acc (_as_cuda_devices.py). Where CUDA is not in use they keep the seed.
    """
    in_use = torch.cuda._initialized and not torch.cuda._is_in_bad_fork()
    return in_use or not torch.cuda.is_initialized()


def _fork_rng(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.random.fork_rng`, whose default is all devices of CUDA."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fork_rng(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        named = given.arguments
        # As many devices as there are of CUDA: none, on most machines.
        if named["devices"] is None and named["device_type"] in MEANT:
            named.update(devices=range(acc.device_count()), device_type=_DEVICE)
        return original(*given.args, **given.kwargs)

    return fork_rng


def _shared_names(module: ModuleType) -> list[str]:
    return [
        name
        for name in acc.__all__
        if hasattr(module, name)
        and name not in _KEPT
        and name != "Event"  # its arguments are others: `_event`
        and not isinstance(getattr(acc, name), ModuleType)
    ]


TABLE: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (autocast_mode.autocast, "__init__", _autocast_init),
    (autocast_mode.autocast, "__enter__", _autocast_enter),
    (autocast_mode.autocast, "__exit__", _autocast_exit),
    (autocast_mode, "_cast", _cast),
    (torch.amp.GradScaler, "__init__", _scaler_init),
    (torch.random, "fork_rng", _fork_rng),
    (torch.cuda, "Event", _event),
    *(
        (module, name, _ours(name))
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random)
        for name in _shared_names(module)
    ),
)
