"""Half precision in sharded training: what `compute.fp16` and `compute.bf16` do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchacc.device import device_type
from torchacc.utils.utils import apply_to_tensors


class _InHalf:
    """A `forward` under autocast to `half`, with float32 tensors as its results.

    As it is inside an autocast region: of the program's own, which says what is computed in which
    type, or of a unit around this one. An object and not a closure, so that modules can be copied.
    """

    def __init__(self, half: torch.dtype, forward: Callable[..., Any]) -> None:
        self.half, self.forward = half, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A region with `enabled=False` looks like none. It cannot mean that nothing is in half
        # precision: the parameters are, and autocast makes what meets them fit.
        if torch.is_autocast_enabled(device_type()):
            return self.forward(*args, **kwargs)
        with torch.autocast(device_type(), self.half):
            output = self.forward(*args, **kwargs)
        return apply_to_tensors(_in_float32, output)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)


def run_in_half(half: torch.dtype | None, units: Iterable[nn.Module]) -> None:
    """From now on each of `units` computes in half precision, whoever calls it.

    The units are the modules whose parameters travel together, in this type. A method of the model
    that calls some of them needs no region of its own, like `forward`. None changes nothing.
    """
    if half is not None:
        for unit in units:
            unit.forward = _InHalf(half, unit.forward)  # type: ignore[method-assign]


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
