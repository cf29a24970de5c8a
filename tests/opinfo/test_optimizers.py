"""PyTorch's own database of optimizers on the device: parameters and states of the CPU.

float32 and bfloat16; with `ACC_TEST_FULL=1` float64 too. Every implementation (one by one, lists,
fused) is compared with the same one of the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from tests import helpers
from tests.opinfo.check import on_both

DTYPES = [torch.float32, torch.bfloat16] + ([torch.float64] if helpers.FULL else [])
SHAPES = [(4, 3), (5,), ()]
STEPS = 7

# SparseAdam takes sparse gradients only, which acc has not.
OPTIMIZERS = [info for info in optim_db if not info.only_supports_sparse_grads]


def implementations(info: OptimizerInfo) -> list[dict[str, bool]]:
    """The options that choose an implementation."""
    others = [name for name in ("foreach", "fused") if name in info.supported_impls]
    return [dict.fromkeys(others, False), *({name: True} for name in others)]


def train(
    info: OptimizerInfo, options: dict[str, Any], dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """Parameters and states after some steps with given gradients."""
    torch.manual_seed(0)
    shapes = SHAPES[:1] if info.optim_cls is getattr(torch.optim, "Muon", None) else SHAPES
    parameters = [torch.randn(s).to(device, dtype).requires_grad_() for s in shapes]
    gradients = [[torch.randn(s).to(device, dtype) for s in shapes] for _ in range(3)]
    optimizer = info.optim_cls(parameters, **helpers.copy_tree(options, "cpu"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p - 1).square().sum() for p in parameters)
        loss.backward()
        return loss

    for step in range(STEPS):
        if step % 3 == 2:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if info.step_requires_closure:
            optimizer.step(closure)
            continue
        for parameter, gradient in zip(parameters, gradients[step % 3], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    states = [v for p in parameters for _, v in sorted(optimizer.state[p].items())]
    return [p.detach() for p in parameters] + helpers.tensors(states)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("info", OPTIMIZERS, ids=lambda info: info.optim_cls.__name__)
def test_an_optimizer(
    one_thread: None, device: str, info: OptimizerInfo, dtype: torch.dtype
) -> None:
    found = []
    for sample in info.optim_inputs_func(device="cpu"):
        for implementation in implementations(info):
            options = {**sample.kwargs, **implementation}
            told = on_both(lambda where, o=options: train(info, o, dtype, where))
            assert told is not None, f"{options}: the CPU raises"
            found += [f"{options}: {text}" for text in told]
    assert not found, "\n".join(found)
