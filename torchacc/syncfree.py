"""torch's SGD, Adam and AdamW, whose steps are skipped on the device.

They are what `torch.optim` has under these names, with one more argument of `step`. With a
GradScaler those of `torch.optim` do the same; these are for loops that look for overflows
themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.optim
from torch import Tensor

from torchacc_device import _scaling

__all__ = ["SGD", "Adam", "AdamW"]


def _step(
    optimizer: torch.optim.Optimizer,
    kind: type[torch.optim.Optimizer],
    closure: Callable[[], Any] | None,
    found_inf: Tensor | None,
) -> Any:
    step: Any = kind.step
    # torch wraps the steps of a class once it has made one of it, for hooks. It has wrapped ours.
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    if found_inf is None:
        return step(optimizer, closure)
    if closure is not None:
        raise RuntimeError(
            f"[syncfree] {type(optimizer).__name__}.step takes a closure or found_inf, not both: a "
            "closure computes gradients that nobody has looked at for overflows."
        )
    if not isinstance(found_inf, Tensor) or found_inf.numel() != 1:
        shown = tuple(found_inf.shape) if isinstance(found_inf, Tensor) else repr(found_inf)
        raise ValueError(
            f"[syncfree] {type(optimizer).__name__}.step: found_inf is a tensor of one element, 0 "
            f"where no gradient has overflowed, not {shown}."
        )
    return _scaling.step_unless(optimizer, found_inf.reshape(()), lambda: step(optimizer))


class SGD(torch.optim.SGD):
    """`torch.optim.SGD`; `step(found_inf=x)` changes nothing where the tensor x is not 0."""

    def step(
        self, closure: Callable[[], Any] | None = None, found_inf: Tensor | None = None
    ) -> Any:
        """torch's step, unless `found_inf`, of one element, is not 0.

        Raises RuntimeError for both arguments, ValueError for another `found_inf`.
        """
        return _step(self, torch.optim.SGD, closure, found_inf)


class Adam(torch.optim.Adam):
    """`torch.optim.Adam`; `step(found_inf=x)` changes nothing where the tensor x is not 0."""

    def step(
        self, closure: Callable[[], Any] | None = None, found_inf: Tensor | None = None
    ) -> Any:
        """torch's step, unless `found_inf`, of one element, is not 0.

        Raises RuntimeError for both arguments, ValueError for another `found_inf`.
        """
        return _step(self, torch.optim.Adam, closure, found_inf)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`; `step(found_inf=x)` changes nothing where the tensor x is not 0."""

    def step(
        self, closure: Callable[[], Any] | None = None, found_inf: Tensor | None = None
    ) -> Any:
        """torch's step, unless `found_inf`, of one element, is not 0.

        Raises RuntimeError for both arguments, ValueError for another `found_inf`.
        """
        return _step(self, torch.optim.AdamW, closure, found_inf)


for _kind in (SGD, Adam, AdamW):
    _scaling.keeps_state_on_device(_kind)
