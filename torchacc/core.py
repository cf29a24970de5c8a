"""Names that TorchAcc's package `core` has, beside those of `torchacc` itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchacc.boundary import mark_step, sync
from torchacc.device import fetch_gradients, is_lazy_device, is_lazy_tensor, lazy_device
from torchacc.loader import AsyncLoader, move_to_device

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


def send_cpu_data_to_device(
    datas: Sequence[Tensor], device: torch.device | str, input_sharding: object = None
) -> list[Tensor]:
    """Copies of the tensors `datas` on `device`.

    Raises NotImplementedError when `input_sharding`, which is of SPMD programs, is given.
    """
    if input_sharding is not None:
        raise NotImplementedError(
            "[send_cpu_data_to_device] input_sharding is not available in this version. "
            "Leave it None."
        )
    return [move_to_device(data, torch.device(device)) for data in datas]
