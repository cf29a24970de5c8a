"""Device indices, and the current device of the calling thread."""

from __future__ import annotations

from typing import Any

import torch

from torchacc_device import _C

# What names a device: an index, "acc", "acc:1", a torch.device, or None for the current one.
Device = int | str | torch.device | None


# Types of devices beside acc that stand for it (_as_cuda.py).
other_names: tuple[str, ...] = ()


def device_index(device: Device, optional: bool = True) -> int:
    """The index that `device` names. A negative int stays as it is.

    Raises ValueError for a device of another type, and, unless `optional`, for one without an
    index.
    """
    if isinstance(device, int):
        return device
    if device is not None:
        named = torch.device(device)
        if named.type != "acc" and named.type not in other_names:
            raise ValueError(f"[torch.acc] expected an acc device, got {named}.")
        if named.index is not None:
            return named.index
    if not optional:
        raise ValueError(f"[torch.acc] expected a device with an index, got {device}.")
    return _C.current_device()


def device_count() -> int:
    """Number of devices; 0 is not possible: what stands in the way is raised as RuntimeError."""
    return _C.device_count()


def current_device() -> int:
    """Index of the calling thread's current device."""
    return _C.current_device()


def set_device(device: Device) -> None:
    """Makes `device` the calling thread's current device; a negative index does nothing."""
    index = device_index(device, optional=False)
    if index >= 0:
        _C.set_device(index)


class device:
    """`with torch.acc.device(1): ...`: the device is current inside; None or -1: no change."""

    def __init__(self, device: Device) -> None:
        self.idx = -1 if device is None else device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _C.exchange_device(self.idx)

    def __exit__(self, *exception: Any) -> bool:
        self.idx = _C.exchange_device(self.prev_idx)
        return False


class device_of(device):
    """`with torch.acc.device_of(x): ...` makes the device of a tensor or storage current.

    Does nothing for one that is not on acc.
    """

    def __init__(self, obj: Any) -> None:
        where = obj.device
        super().__init__(where if where.type == "acc" else None)


# The names that torch.cuda has for generic code.
_DeviceGuard = device


def _exchange_device(index: int) -> int:
    return _C.exchange_device(index)


_maybe_exchange_device = _exchange_device
