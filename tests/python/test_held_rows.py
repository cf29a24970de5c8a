"""Rows that a kernel goes through several times: on a GPU a block holds what it has read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

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


class Reads(NamedTuple):
    """A kernel's instructions that read 16 bytes of memory."""

    function: Callable[[Tensor, Tensor, Tensor], object]
    fetched: int  # into a block's memory
    taken: int  # into registers, where a row is held: of operands that one phase has
    again: int  # into registers, of what does not fit
    running: int = 0  # of those, what a row that no GPU holds does without: its sum runs along


READS = {
    "softmax": Reads(lambda x, g, w: x.softmax(1), 1, 0, 3, 1),
    "log_softmax": Reads(lambda x, g, w: x.log_softmax(1), 1, 0, 3, 1),
    "softmax, backward": Reads(
        lambda x, g, w: torch.ops.aten._softmax_backward_data(g, x, 1, x.dtype), 2, 0, 4
    ),
    "log_softmax, backward": Reads(
        lambda x, g, w: torch.ops.aten._log_softmax_backward_data(g, x, 1, x.dtype), 1, 4, 1 + 4
    ),
    "layer_norm": Reads(lambda x, g, w: F.layer_norm(x, w.shape, w, w), 1, 4, 1 + 1 + 4),
    "layer_norm, both": Reads(lambda x, g, w: both(x.requires_grad_(), g, w), 3, 0, 10),
    "residual": Reads(lambda x, g, w: residual(x), 0, 4, 1),
}


def of_rows(texts: list[str], running: str) -> list[str]:
    """What is left of kernels for rows so long that sums run along, or for others."""
    known = f"constexpr bool running = {running};"
    return [re.sub("const bool running = .*;", known, text) for text in texts]


@pytest.mark.parametrize("name", READS)
def test_each_operand_is_read_once(name, tmp_path):
    """In the instructions: those of memory that are left where all of a row is held.

    And, where none of it is, once for the largest element and its sum.
    """
    reads = READS[name]
    x, g = (torch.randn(9, 1000).to(helpers.DEVICE) for _ in range(2))
    w = torch.rand(1000).to(helpers.DEVICE)
    kernels = nvidia.kernels_of(lambda: reads.function(x, g, w))
    short = kernels._replace(texts=of_rows(kernels.texts, "false"))
    long = kernels._replace(texts=of_rows(kernels.texts, "true"))
    assert (long != short) == (reads.running > 0)
    held = [text.replace("slot < slots", "true") for text in short.texts]
    assert held != short.texts
    for architecture in nvidia.ARCHITECTURES if helpers.FULL else ("sm_90",):
        assert not nvidia.faults(nvidia.make(kernels, architecture, tmp_path))
        read = reads.fetched + reads.taken + reads.again
        made = nvidia.make(short, architecture, tmp_path)
        assert [kernel.wide_loads for kernel in made.values()] == [read]
        made = nvidia.make(long, architecture, tmp_path)
        assert [kernel.wide_loads for kernel in made.values()] == [read - reads.running]
        made = nvidia.make(kernels._replace(texts=held), architecture, tmp_path)
        assert [kernel.wide_loads for kernel in made.values()] == [reads.fetched + reads.taken]
        (code,) = nvidia.code_of(tmp_path / f"{architecture}.cubin").values()
        assert architecture == "sm_75" or code.count("LDGSTS.E.BYPASS.128") == reads.fetched
        assert "STS.128" in code or reads.fetched
        assert re.search(r"LDS\.(U\.)?128", code)


# Words of 16 bytes of each operand, four of one and two of several.
TOGETHER: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], object], int]] = {
    "sum": (lambda x, g, w: x.sum(1), 4),
    "amax": (lambda x, g, w: x.amax(1), 4),
    "sum of all": (lambda x, g, w: x.square().sum(), 4),
    "product": (lambda x, g, w: (x * g).sum(1), 2 * 2),
    "three": (lambda x, g, w: (x * g + w).sum(1), 2 * 3),
}
GENERATIONS = nvidia.ARCHITECTURES if helpers.FULL else ("sm_90",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TOGETHER)
def test_a_thread_asks_for_several_words_at_once(name, dtype, tmp_path):
    """One that waited for each would leave memory idle."""
    function, together = TOGETHER[name]
    x, g = (torch.randn(9, 1000).to(helpers.DEVICE, dtype) for _ in range(2))
    w = torch.rand(1000).to(helpers.DEVICE, dtype)
    kernels = nvidia.kernels_of(lambda: function(x, g, w))
    for architecture in GENERATIONS:
        (kernel,) = nvidia.make(kernels, architecture, tmp_path).values()
        assert kernel.spilled == 0
        (code,) = nvidia.code_of(tmp_path / f"{architecture}.cubin").values()
        # sm_120's compiler may use the first word before it asks for the others together.
        assert max(nvidia.under_way(code)) >= together - (architecture == "sm_120")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", READS)
def test_a_row_is_asked_for_at_once(name, dtype, tmp_path):
    """Copies wait for nothing in the loop that begins them."""
    reads = READS[name]
    x, g = (torch.randn(9, 1000).to(helpers.DEVICE, dtype) for _ in range(2))
    w = torch.rand(1000).to(helpers.DEVICE, dtype)
    kernels = nvidia.kernels_of(lambda: reads.function(x, g, w))
    for architecture in GENERATIONS:
        (kernel,) = nvidia.make(kernels, architecture, tmp_path).values()
        assert kernel.spilled == 0
        (code,) = nvidia.code_of(tmp_path / f"{architecture}.cubin").values()
        blocks = re.split(r"^\.L_x_\d+:$", code, flags=re.M)
        copying = [block for block in blocks if "LDGSTS" in block]
        assert copying or architecture == "sm_75" or dtype == torch.float32 and reads.fetched == 0
        assert not any("DEPBAR" in block for block in copying)
        if dtype == torch.float32:
            assert max(nvidia.under_way(code)) >= reads.taken
