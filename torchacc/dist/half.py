"""Half precision in sharded training: what `compute.fp16` and `compute.bf16` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchacc.device import device_type


def in_half(half: torch.dtype | None, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` under autocast to `half`, with float32 tensors as its results.

    As it is where `half` is None, and inside an autocast region of the program's own, which says
    what is computed in which type.
    """
    if half is None or torch.is_autocast_enabled(device_type()):
        return forward

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type(), half):
            output = forward(*args, **kwargs)
        return tree_map(_in_float32, output)

    return call


def _in_float32(each: Any) -> Any:
    half = isinstance(each, Tensor) and each.dtype in (torch.float16, torch.bfloat16)
    return each.float() if half else each
