"""Mixed precision: `torch.amp` with the lazy device filled in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from torchacc.device import lazy_device
from torchacc_device import amp
from torchacc_device.amp import autocast, custom_bwd, custom_fwd

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class GradScaler(amp.GradScaler):
    """`torch.amp.GradScaler` on the lazy device, with TorchAcc's arguments.

    Its scale is on the device from the start.

    Args:
        init_scale: the first scale.
        growth_factor: the scale is multiplied by it after `growth_interval` steps without overflow;
            above 1.
        backoff_factor: and by this after a step with one; below 1.
        growth_interval: in steps.
        enabled: without it nothing is scaled, and `step` calls `optimizer.step()`.
        use_zero_grad: a step with an overflow is not skipped, but taken with gradients of zero:
            momenta, counts of steps and weight decay go on.

    Raises:
        AssertionError: `growth_factor` is not above 1, or `backoff_factor` not below 1.
        RuntimeError: there is no lazy device for this process.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._zeroes = use_zero_grad
        if enabled:
            self._lazy_init_scale_growth_tracker(lazy_device())

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`optimizer.step()`, unless a gradient has overflowed; see torch.amp.GradScaler.step."""
        if not (self._zeroes and self.is_enabled()):
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError(
                "[GradScaler] step takes no closure, whose gradients would not be scaled: call "
                "scaler.scale(loss).backward() before, and step without it."
            )
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "[GradScaler] step was called since the last update: call update once per step."
            )
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        for device, overflow in state["found_inf_per_device"].items():
            _zero_where(optimizer, device, overflow)
        result = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result


def _zero_where(optimizer: Optimizer, device: torch.device, overflow: Tensor) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.device == device:
                gradient.masked_fill_(overflow != 0, 0)
