"""Streams and events of the acc device: the part of `torch.acc` that torch.cuda.streams is.

Operators are recorded in program order whatever stream is current, so waiting for an event between
streams costs nothing. `query`, `synchronize` and `elapsed_time` submit what was recorded before.
"""

from __future__ import annotations

from typing import Any

import torch

from torchacc_device import _C
from torchacc_device._devices import Device, device, device_index

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "set_stream",
    "stream",
]


class Stream(torch.Stream):
    """A stream of an acc device.

    `device`: as in torch.acc.device, None for the current one. `priority`: lower is more urgent,
    0 is normal; only the CUDA executor acts on it.
    """

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        where = torch.device("acc", device_index(device))
        made = super().__new__(cls, device=where, priority=priority, **kwargs)
        made.priority = priority
        return made

    # Streams that torch hands out were not made here.
    priority: int = 0

    @property
    def cuda_stream(self) -> int:
        """The `cudaStream_t`, as torch.cuda.Stream's; 0 for CUDA's default stream and on hosts."""
        return self.native_handle or 0

    def __repr__(self) -> str:
        return f"torch.acc.Stream(device={self.device}, stream_id={self.stream_id})"


# The class itself: torch 2.11 compares types where it takes an event, and so refuses instances of
# subclasses. Its default device is the accelerator, which acc is.
Event = torch.Event


def _as_stream(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def current_stream(device: Device = None) -> Stream:
    """The current stream of the calling thread on `device`."""
    return _as_stream(torch.accelerator.current_stream(device_index(device)))


def default_stream(device: Device = None) -> Stream:
    """The stream that is current on `device` unless another was set."""
    stream_id, index, device_type = _C.default_stream(device_index(device))
    return Stream(stream_id=stream_id, device_index=index, device_type=device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Makes `stream` and its device the current ones; None: no change."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """`with torch.acc.stream(s): ...`: `s` and its device are current inside; None: no change."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device = device(self.stream.device)
        self._device.__enter__()
        self._before = current_stream(self.stream.device)
        set_stream(self.stream)

    def __exit__(self, *exception: Any) -> None:
        if self.stream is None:
            return
        set_stream(self._before)
        self._device.__exit__(*exception)


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context manager inside which `stream` is current; None: no change."""
    return StreamContext(stream)
