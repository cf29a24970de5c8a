"""Memory of the acc device: the part of `torch.acc` that torch.cuda.memory is.

All sizes are bytes. Reading a number submits what was recorded. Counted is what tensors hold, and
while a step runs what it makes on the way; an operator's own scratch is not counted on the host. A
tensor that nothing was ever written to takes no memory.
"""

from __future__ import annotations

from typing import Any

import torch

from torchacc_device import _C
from torchacc_device._devices import Device, device_index

__all__ = [
    "empty_cache",
    "host_memory_stats",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
]


def memory_stats(device: Device = None) -> dict[str, Any]:
    """All statistics of the device's allocator, by the names that torch.accelerator.memory_stats
    has, for example "allocated_bytes.all.peak"; and "captured_bytes.all.current", what captured
    steps have."""
    index = device_index(device)
    stats = dict(torch.accelerator.memory_stats(index))
    stats["captured_bytes.all.current"] = _C.captured_bytes(index)
    return stats


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors hold."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Device = None) -> int:
    """The largest `memory_allocated` since the start or `reset_peak_memory_stats`."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Device = None) -> int:
    """Bytes that the allocator has taken from the device; on the host those that tensors hold."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: Device = None) -> int:
    """The largest `memory_reserved` since the start or `reset_peak_memory_stats`."""
    return memory_stats(device)["reserved_bytes.all.peak"]


# torch.cuda's older names.
memory_cached = memory_reserved
max_memory_cached = max_memory_reserved


def reset_peak_memory_stats(device: Device = None) -> None:
    """Peaks begin again at the current values."""
    _C.reset_peak_memory_stats(device_index(device))


reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """The "allocated" and "freed" totals begin again at 0."""
    _C.reset_accumulated_memory_stats(device_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of the device; on the host those of the machine or container."""
    return _C.mem_get_info(device_index(device))


def empty_cache() -> None:
    """Gives memory that no tensor uses back to the system."""
    _C.empty_cache()


def host_memory_stats() -> dict[str, Any]:
    """Statistics of pinned host memory, for example "allocated_bytes.current"."""
    return dict(sorted(_C.host_memory_stats().items()))


def reset_peak_host_memory_stats() -> None:
    """Peaks of pinned host memory begin again at the current values."""
    _C.reset_peak_host_memory_stats()


def reset_accumulated_host_memory_stats() -> None:
    """Totals of pinned host memory begin again at 0."""
    _C.reset_accumulated_host_memory_stats()


_ROWS = (
    ("allocated_bytes", "Allocated memory", True),
    ("reserved_bytes", "Reserved memory", True),
    ("allocation", "Allocations", False),
)
_COLUMNS = ("current", "peak", "allocated", "freed")


def _size(number: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 10_000:
            return f"{number} {unit}"
        number //= 1024
    return f"{number} TiB"


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """A printable table of the device's memory; `abbreviated` leaves the totals out."""
    index = device_index(device)
    stats = memory_stats(index)
    columns = _COLUMNS[:2] if abbreviated else _COLUMNS
    titles = {"allocated": "total", "freed": "freed"}
    lines = [f"acc:{index} memory".ljust(20) + "".join(f"{titles.get(c, c):>14}" for c in columns)]
    for key, title, is_size in _ROWS:
        numbers = [stats[f"{key}.all.{column}"] for column in columns]
        texts = [_size(n) if is_size else str(n) for n in numbers]
        lines.append(title.ljust(20) + "".join(f"{text:>14}" for text in texts))
    lines.append(f"{'Captured steps':20}{_size(stats['captured_bytes.all.current']):>14}")
    lines.append(f"out of memory {stats['num_ooms']} times, {stats['num_alloc_retries']} retries")
    return "\n".join(lines) + "\n"
