"""The question that programs for TorchAcc ask before they use what is lazy."""

from __future__ import annotations

import torch

from torchacc.device import device_type


def is_torch_xla_available() -> bool:
    """Whether `backend = 'lazy'`, `mark_step` and `syncfree` can be used: there is a lazy device.

    torch_xla itself is not needed for them, and may or may not be installed.
    """
    return torch.get_device_module(device_type()).device_count() > 0
