"""PyTorch Lightning on the lazy device: `Trainer(strategy=torchacc.lightning.LazyStrategy())`.

Needs the package `lightning`. Import this module by its name; `import torchacc` does not.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from torchacc.device import device_type, is_lazy_device, lazy_device
from torchacc.patch import patch


class LazyAccelerator(Accelerator):
    """What Lightning asks about a kind of device."""

    def setup_device(self, device: torch.device) -> None:
        if not is_lazy_device(device):
            raise ValueError(
                f"[lightning] this accelerator trains on {device_type()}, and the strategy has the "
                f"device {device}. Pass strategy=torchacc.lightning.LazyStrategy()."
            )
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        torch.get_device_module(device_type()).empty_cache()

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices)) if isinstance(devices, int) else [int(d) for d in devices]

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(device_type(), index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.get_device_module(device_type()).device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.get_device_module(device_type()).is_available()

    @staticmethod
    def name() -> str:
        return device_type()

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        return dict(torch.get_device_module(device_type()).memory_stats(device))


class LazyStrategy(SingleDeviceStrategy):
    """One process that trains on a lazy device, the current one unless `device` says otherwise.

    Lightning's mixed precision names CUDA for every device that is not of its own;
    `torchacc.patch()`, which is called here, has that act on the lazy device.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        chosen = lazy_device() if device is None else torch.device(device)
        super().__init__(device=chosen, accelerator=LazyAccelerator())
        patch()
