"""A tensor of a half type has one value: what reads it in the kernel that stores it reads that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "recording", "one_thread")

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_compensated_sum(dtype: torch.dtype) -> None:
    """What an addition loses is kept and added later (W. Kahan, 1965)."""

    def program(device: str) -> list[Tensor]:
        total = torch.ones(4096, dtype=dtype, device=device)
        lost = torch.zeros_like(total)
        update = torch.full_like(total, 1e-4)
        for _ in range(200):
            lost.add_(update)
            before = total.clone()
            total.add_(lost)
            before.sub_(total)
            lost.add_(before)
            helpers.flush()
        return [total.cpu(), lost.cpu()]

    total, lost = program(helpers.DEVICE)
    torch.testing.assert_close(
        total.double() + lost.double(), torch.full((4096,), 1.02).double(), rtol=2e-3, atol=0
    )
    assert total[0] > 1


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_changed_is_what_memory_shows(dtype: torch.dtype) -> None:
    def program(device: str) -> list[Tensor]:
        x = torch.linspace(1, 2, 1000).to(dtype).to(device)
        helpers.flush()
        before = x.clone()
        x.mul_(0.999)
        return [(x != before).cpu(), x.cpu()]

    for _ in range(3):
        helpers.assert_same(program(helpers.DEVICE), program("cpu"))


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_what_is_computed_again_is_what_was_seen(shift: float) -> None:
    """A maximum that ATen found in memory is among the elements that are computed once more."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.to(helpers.DEVICE)
    wide = torch.zeros(1024, 1024, device=helpers.DEVICE)
    for _ in range(5):
        y = x * 1.7
        if shift:  # of which the product before was never in memory
            y = y + shift
        highest = y.max(1, keepdim=True).values
        peak = x.float() @ wide @ wide
        found = x * (y == highest)
        del y  # nobody's but the step's
        assert (found != 0).sum().item() >= 256
        del peak
