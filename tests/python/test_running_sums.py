"""Softmaxes on a GPU: their sum runs along while the largest element is looked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording", "kernels_of_a_gpu")

# Of a result, which half types round, or of 1 where it is less.
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
LARGEST = torch.finfo(torch.float32).max
INFINITY = float("inf")


def logsumexp(x: Tensor, dim: int) -> Tensor:
    """As programs write it."""
    most = x.amax(dim, keepdim=True)
    return (x - most).exp().sum(dim, keepdim=True).log() + most


FUNCTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "logsumexp": logsumexp,
}

# Along which dimension of what shape: a column of threads each, and a row of elements apart.
APART = [((50, 33), 0), ((3, 1, 5), 1), ((2, 101, 7), 1), ((1, 700, 40), 1)]
# Of two operands a block holds 14,464 elements of float32 on no GPU, of half types twice that.
LONG = {4: (14_465, 16_001), 2: (28_932, 31_001)}


def compare(function: Callable[[Tensor, int], Tensor], x: Tensor, y: Tensor, dim: int) -> None:
    """Beside ATen's in double precision, of their sum, which a kernel rounds to no half type."""
    mine = [each.to(helpers.DEVICE) for each in (x, y)]
    for _ in range(3):
        made = function(mine[0] + mine[1], dim)
        helpers.flush()
    bound = CLOSE[x.dtype]
    expected = function((x.float() + y.float()).double(), dim).to(x.dtype)
    torch.testing.assert_close(made.cpu(), expected, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_every_length(name, dtype):
    shapes = [*APART, *(((1, length), 1) for length in LONG[dtype.itemsize])]
    for shape, dim in shapes:
        x, y = (torch.randn(shape).to(dtype) for _ in range(2))
        compare(FUNCTIONS[name], 4 * x, y, dim)


def rows(length: int) -> dict[str, Tensor]:
    """What makes the largest so far move often, seldom, or be no number."""
    count = torch.arange(length, dtype=torch.float32)
    made = {
        "rising slowly": count / length,
        "rising": count * (200 / length),
        "rising steeply": count * 3,
        "falling": count * -0.01,
        "of all sizes": torch.randn(length) * 10.0 ** (count % 38),
        "largest numbers": torch.where(count % 7 == 3, LARGEST, -LARGEST),
        "smallest numbers": torch.full((length,), -LARGEST),
        "equal": torch.full((length,), 1e4),
    }
    for number in (INFINITY, -INFINITY, float("nan")):
        for places in ("first", "last", "most", "all"):
            row = torch.randn(length)
            chosen = {"first": count < 1, "last": count > length - 2, "most": count != length // 3}
            row[chosen.get(places, count >= 0)] = number
            made[f"{number} {places}"] = row
    half = torch.where(count < length / 2, -INFINITY, INFINITY)
    return made | {"both infinities": half, "-inf, then numbers": half.clamp(max=1.0)}


@pytest.mark.parametrize("length", [5, 700, LONG[4][0]])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_every_order(name, length):
    """In columns of threads, and in rows that no block holds."""
    for what, row in rows(length).items():
        shape, dim = ((length, 1), 0) if length < 1000 else ((1, length), 1)
        x = row.view(shape)
        if dim == 0:
            x = x.repeat(1, 3)
        try:
            compare(FUNCTIONS[name], x, torch.zeros_like(x), dim)
        except AssertionError as error:
            raise AssertionError(what) from error
