"""Names that TorchAcc's package `core` has, which are those of `torchacc` itself."""

from torchacc.boundary import mark_step, sync
from torchacc.device import fetch_gradients, is_lazy_device, is_lazy_tensor, lazy_device
from torchacc.loader import AsyncLoader
from torchacc.serialization import send_cpu_data_to_device

__all__ = [
    "AsyncLoader",
    "fetch_gradients",
    "is_lazy_device",
    "is_lazy_tensor",
    "lazy_device",
    "mark_step",
    "send_cpu_data_to_device",
    "sync",
]
