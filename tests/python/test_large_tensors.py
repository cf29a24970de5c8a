"""Tensors of more elements than 32 bits count."""

from __future__ import annotations

import pytest
import torch

from tests import helpers

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("acc_only", "recording")]

BEYOND = 2**31 + 77


def at_the_ends(x: torch.Tensor) -> list[int]:
    return [x[i].item() for i in (0, 1, 2**31 - 1, 2**31, BEYOND - 2, BEYOND - 1)]


def test_operators_reach_all_elements():
    """In place, for the sake of memory: 2 GiB."""
    x = torch.ones(BEYOND, dtype=torch.int8, device=helpers.DEVICE)
    x[2**31 :] = 3
    x.mul_(5).sub_(2)  # one kernel
    assert at_the_ends(x) == [3, 3, 3, 13, 13, 13]
    x[BEYOND - 3] = 14
    assert (x.amax().item(), x.argmax().item()) == (14, BEYOND - 3)


def test_rows_and_columns_beyond():
    """Of a matrix whose last rows are."""
    columns = 2**16
    x = torch.ones(BEYOND // columns + 2, columns, dtype=torch.int8, device=helpers.DEVICE)
    x[-1] = 7
    assert x.amax(1)[-2:].tolist() == [1, 7]
    assert set(x.amax(0).tolist()) == {7}
    assert x.t()[-1, -2:].tolist() == [1, 7]


@pytest.mark.parametrize("columns", [1000, 50_000])
def test_softmax_of_rows_beyond(columns):
    """Rows that a block holds, and longer ones."""
    if helpers.extension().executor_name() != "cuda":
        pytest.skip("4 GiB, and as much for the result")
    row = torch.randn(columns, device=helpers.DEVICE, dtype=torch.float16)
    x = torch.zeros(BEYOND // columns + 2, columns, dtype=torch.float16, device=helpers.DEVICE)
    x[-1] = row
    y = x.softmax(1)
    torch.testing.assert_close(y[-1].cpu(), row.float().softmax(0).half().cpu())
    torch.testing.assert_close(y[-2].cpu(), torch.full((columns,), 1 / columns).half())
