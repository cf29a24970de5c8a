"""The module `torch.acc`: what torch.cuda has, wherever it makes sense on this device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator

from torchacc_device import _C, amp, memory, random, streams
from torchacc_device._devices import (
    Device,
    current_device,
    device,
    device_count,
    device_index,
    device_of,
    set_device,
)
from torchacc_device._devices import (
    _DeviceGuard as _DeviceGuard,
)
from torchacc_device._devices import (
    _exchange_device as _exchange_device,
)
from torchacc_device._devices import (
    _maybe_exchange_device as _maybe_exchange_device,
)
from torchacc_device.memory import (
    empty_cache,
    host_memory_stats,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_host_memory_stats,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_host_memory_stats,
    reset_peak_memory_stats,
)
from torchacc_device.random import (
    _get_rng_state_offset as _get_rng_state_offset,
)
from torchacc_device.random import (
    _set_rng_state_offset as _set_rng_state_offset,
)
from torchacc_device.random import (
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torchacc_device.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

AcceleratorError = torch.AcceleratorError
OutOfMemoryError = torch.OutOfMemoryError

default_generators: tuple[Generator, ...]


def is_available() -> bool:
    """Whether there is at least one acc device. Never raises."""
    try:
        return _C.device_count() > 0
    except RuntimeError:
        return False


def is_initialized() -> bool:
    """Whether this process has used the device."""
    return _C.is_initialized()


def init() -> None:
    """Chooses the executor now instead of at the first use.

    Raises RuntimeError when the device cannot be used: ACC_EXECUTOR=cuda without a usable GPU, or
    a process that was forked after its parent had used the device.
    """
    _C.init()


_lazy_init = init


def _lazy_call(call: Callable[[], Any], **kwargs: Any) -> None:
    """Runs `call` now: nothing here has to wait for the device to come into being."""
    call()


def _is_in_bad_fork() -> bool:
    """Whether this process was forked after its parent had used the device."""
    return _C.is_in_bad_fork()


def synchronize(device: Device = None) -> None:
    """Submits what was recorded on `device` and waits until it is done.

    Raises what a failing operator raised, with its name and the line that recorded it.
    """
    _C.synchronize(device_index(device))


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """What `get_device_properties` returns. `total_memory` is in bytes; the compute capability is
    0.0 and `multi_processor_count` the number of cores on the host executor."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Name, compute capability, memory and size of `device`."""
    return DeviceProperties(**_C.device_properties(device_index(device)))


def get_device_name(device: Device = None) -> str:
    """The name of the GPU, or of the host executor with its processor."""
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """The compute capability (major, minor); (0, 0) on the host executor."""
    found = get_device_properties(device)
    return found.major, found.minor


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Whether two different devices copy to each other; they always do, if need be by the host."""
    first, second = device_index(device), device_index(peer_device)
    for index in (first, second):
        if not 0 <= index < device_count():
            raise ValueError(f"[torch.acc] there is no device acc:{index}.")
    return first != second


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast may use on acc; float32 for what half precision is too little for
    within a region of it, as CUDA's autocast takes it.
    """
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 works; without emulation: whether the hardware multiplies it."""
    if including_emulation:
        return True
    if _C.executor_name() == "cuda":
        return get_device_capability()[0] >= 8
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_tf32_supported() -> bool:
    """Whether the hardware has TF32."""
    return _C.executor_name() == "cuda" and get_device_capability()[0] >= 8


def is_current_stream_capturing() -> bool:
    """False: graphs are captured when recorded work is submitted, never by the user."""
    return False


def get_arch_list() -> list[str]:
    """The GPU architectures that the library brings code for: none, kernels are made on demand."""
    return []


def ipc_collect() -> None:
    """Does nothing: memory of acc tensors is not shared between processes."""


# What torch.cuda has and this module has not, and why.
_ABSENT = {
    "ExternalStream": "streams of other libraries cannot be waited for by recorded work",
    "device_memory_used": "use mem_get_info()",
    "get_per_process_memory_fraction": "memory is not limited per process",
    "get_sync_debug_mode": "torchacc_device._C.stats() counts every flush by its reason",
    "memory_snapshot": "the allocator of the backend has it: torch.cuda.memory_snapshot()",
    "set_per_process_memory_fraction": "memory is not limited per process",
    "set_sync_debug_mode": "torchacc_device._C.stats() counts every flush by its reason",
    "utilization": "ask the driver: nvidia-smi, or torch.cuda.utilization()",
}


def __getattr__(name: str) -> Any:
    # Made when they are asked for: the number of devices depends on the executor.
    if name == "default_generators":
        return tuple(_C.default_generator(index) for index in range(device_count()))
    # torch.utils.checkpoint asks for this name to know whether there is a random state to save.
    if name == "_initialized":
        return is_initialized()
    why = f": {_ABSENT[name]}" if name in _ABSENT else ""
    raise AttributeError(f"module 'torch.acc' has no attribute '{name}'{why}")


__all__ = [
    "AcceleratorError",
    "DeviceProperties",
    "Event",
    "OutOfMemoryError",
    "Stream",
    "StreamContext",
    "amp",
    "can_device_access_peer",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "host_memory_stats",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "random",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "streams",
    "synchronize",
]
