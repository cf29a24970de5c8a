"""Rows that a kernel goes through several times: on a GPU a block holds what it has read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import helpers, nvidia

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording")

# Of the largest number; a half type's is rounded twice.
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# The emulator's blocks hold rows of float32 of up to 12,160 elements, of half types twice that.
SHAPES = [(3, 64), (5, 101), (9, 999), (2, 4096), (1, 12_160), (1, 12_161), (1, 16_001)]


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], torch.full_like(x[0], 1.5), torch.ones_like(x[0]))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": layer_norm,
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:]),
}


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> list[Tensor]:
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y, x, g)]


@pytest.mark.usefixtures("kernels_of_a_gpu")
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_backward(name, dtype):
    """Beside ATen's, of every length; rows that begin at no whole word, too."""
    for rows, columns in SHAPES:
        for first in (0, 1):
            inputs = [torch.randn(first + rows * columns).to(dtype)[first:] for _ in range(2)]
            x, g = (each.view(rows, columns) for each in inputs)
            expected = gradient(FUNCTIONS[name], x.clone().requires_grad_(), g)
            mine = [each.to(helpers.DEVICE) for each in (x, g)]
            for _ in range(3):
                made = gradient(FUNCTIONS[name], mine[0].detach().requires_grad_(), mine[1])
                helpers.flush()
            for a, b in zip(made, expected, strict=True):
                bound = CLOSE[dtype] * float(b.abs().max())
                torch.testing.assert_close(a.cpu(), b, rtol=0, atol=bound)


@pytest.mark.usefixtures("kernels_of_a_gpu")
@pytest.mark.parametrize("columns", [4096, 12_161])
def test_nan_and_infinity(columns):
    """In some rows, before and behind what is held."""
    x = torch.randn(6, columns)
    for row, number in enumerate([float("nan"), float("inf"), -float("inf")]):
        x[2 * row, 0] = number
        x[2 * row + 1, -1] = number
    mine = x.to(helpers.DEVICE)
    for function in FUNCTIONS.values():
        for _ in range(3):
            made = function(mine)
            helpers.flush()
        torch.testing.assert_close(made.cpu(), function(x), equal_nan=True)


def residual(x: Tensor) -> list[Tensor]:
    """What a later phase reads is what an earlier one wrote."""
    made = x + 1
    return [made, FUNCTIONS["rms_norm"](made)]


def both(x: Tensor, g: Tensor, w: Tensor) -> list[Tensor]:
    """Forward and backward in one kernel."""
    return gradient(lambda x: F.layer_norm(x, w.shape, w), x, g)


# How many operands their kernels read, and how often all phases together.
READS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], object], int, int]] = {
    "softmax": (lambda x, g, w: x.softmax(1), 1, 3),
    "log_softmax": (lambda x, g, w: x.log_softmax(1), 1, 3),
    "softmax, backward": (
        lambda x, g, w: torch.ops.aten._softmax_backward_data(g, x, 1, x.dtype), 2, 4,
    ),
    "log_softmax, backward": (
        lambda x, g, w: torch.ops.aten._log_softmax_backward_data(g, x, 1, x.dtype), 2, 3,
    ),
    "layer_norm": (lambda x, g, w: F.layer_norm(x, w.shape, w, w), 2, 4),
    "layer_norm, both": (lambda x, g, w: both(x.requires_grad_(), g, w), 3, 10),
    "residual": (lambda x, g, w: residual(x), 1, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_each_operand_is_read_once(name, tmp_path):
    """In the instructions: those of memory that are left where all of a row is held."""
    function, operands, reads = READS[name]
    x, g = (torch.randn(9, 1000).to(helpers.DEVICE) for _ in range(2))
    w = torch.rand(1000).to(helpers.DEVICE)
    kernels = nvidia.kernels_of(lambda: function(x, g, w))
    held = [text.replace("slot < slots", "true") for text in kernels.texts]
    assert held != kernels.texts
    for architecture in nvidia.ARCHITECTURES if helpers.FULL else ("sm_90",):
        made = nvidia.make(kernels, architecture, tmp_path)
        assert not nvidia.faults(made)
        assert [kernel.wide_loads for kernel in made.values()] == [reads]
        made = nvidia.make(kernels._replace(texts=held), architecture, tmp_path)
        assert [kernel.wide_loads for kernel in made.values()] == [operands]
        (code,) = nvidia.code_of(tmp_path / f"{architecture}.cubin").values()
        assert "STS.128" in code
        assert "LDS.128" in code
