"""The lazy device as the front end sees it. The device's name stands here and nowhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from torchacc_device import _C


def device_type() -> str:
    """The type of the lazy device, as in `torch.device(device_type(), 0)`."""
    return "acc"


def lazy_device() -> torch.device:
    """The current lazy device of the calling thread, with its index: `device(type='acc', index=0)`.

    Raises NotImplementedError, a RuntimeError, when the process has no such device: what TorchAcc
    raises without torch_xla.
    """
    name = device_type()
    module = torch.get_device_module(name)
    if module.device_count() == 0:
        raise NotImplementedError(
            f"[lazy_device] there is no {name} device in this process. "
            "Run `python -m torchacc env` to see why."
        )
    return torch.device(name, module.current_device())


def is_lazy_device(device: torch.device | str | int) -> bool:
    """Whether `device` is a lazy device. An int is an index of the current accelerator."""
    return torch.device(device).type == device_type()


def is_lazy_tensor(tensor: Tensor) -> bool:
    """Whether `tensor` lives on a lazy device. Anything that is no tensor does not."""
    return isinstance(tensor, Tensor) and tensor.device.type == device_type()


def fetch_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of the parameters of `optimizer` that have one, in the order of its groups.

    The tensors share storage with `parameter.grad` and are detached from autograd.
    """
    return [
        parameter.grad.detach()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def reads_pinned_memory(device: torch.device) -> bool:
    """Whether copies between the host and `device` go faster from and to pinned memory.

    A GPU reads it at full speed, and while nobody waits. On hosts it would be one copy more.
    """
    return is_lazy_device(device) and _C.executor_name() == "cuda"
