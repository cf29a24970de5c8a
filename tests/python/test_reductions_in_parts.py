"""Reductions of many elements to few: on a GPU several blocks work for each, in stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "capturing")

RUNS = 6  # the first without kernels, the last captured


@pytest.fixture(autouse=True)
def in_stages(plans_of_a_gpu) -> Iterator[None]:
    with helpers.counting() as counted:
        yield
    assert counted["kernels/prepared in stages"] > 0
    assert counted["captures_submitted"] > 0


def check(run: Callable[[list[Tensor]], list[Tensor]], inputs: list[Tensor]) -> None:
    """The same on the device as on the CPU in float64; `run` changes none of its inputs."""
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    mine = [t.to(helpers.DEVICE) for t in inputs]
    for t in (*wide, *mine):
        t.requires_grad_(t.is_floating_point())
    expected = run(wide)
    for _ in range(RUNS):
        made = run(mine)
        helpers.flush()
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a.cpu().to(b.dtype), b, rtol=1e-5, atol=1e-5)


def test_mean_of_everything():
    check(
        lambda ts: [(ts[0] * ts[0]).mean(), ts[0].amax(), ts[0].abs().sum()], [torch.randn(65_537)]
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm(layout):
    def run(ts: list[Tensor]) -> list[Tensor]:
        x, weight, bias, images = ts
        mean = torch.zeros_like(weight).detach()
        variance = torch.ones_like(weight).detach()
        y = F.batch_norm(x, mean, variance, weight, bias, training=True).relu()
        gradients = torch.autograd.grad((y * images).sum(), (x, weight, bias))
        return [y, mean, variance, *gradients]

    x, images = (torch.randn(5, 3, 64, 65).to(memory_format=layout) for _ in range(2))
    check(run, [x, torch.rand(3), torch.randn(3), images])


def test_gradient_of_a_bias():
    def run(ts: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(F.gelu(ts[0] + ts[1]).square().sum(), ts))

    check(run, [torch.randn(3000, 70), torch.randn(70)])


def test_norms_of_many_sizes():
    """One kernel for all; some of its calls go in parts, others at once."""
    sizes = (70_000, 3, 90_001, 256, 65_536, 1)
    check(
        lambda ts: list(torch._foreach_norm([t.detach() for t in ts])),
        [torch.randn(n) for n in sizes],
    )


def test_bits_stay_the_same():
    """However often they are computed, captured or not, in whatever order blocks run."""
    x = torch.randn(200_000).to(helpers.DEVICE)
    sums = []
    for _ in range(6):
        made = (x * 3).sum()
        helpers.flush()
        sums.append(made.item())
    assert len(set(sums[2:])) == 1


NAN, INF = float("nan"), float("inf")
# What is everywhere but at the begin, in the middle and at the end, and what is there; none: any
# number.
SPECIAL = [
    *((None, one, None, None) for one in (NAN, INF, -INF)),
    *((None, None, one, None) for one in (NAN, INF, -INF)),
    *((None, None, None, one) for one in (NAN, INF, -INF)),
    (None, INF, None, -INF),
    (None, -INF, INF, None),
    (None, NAN, None, INF),
    (None, -INF, None, NAN),
    (NAN, NAN, NAN, NAN),
    (INF, INF, INF, INF),
    (-INF, -INF, 2.0, -INF),
]


def layer_norm(x: Tensor, dim: int) -> Tensor:
    """Over the rows or, as batch norms are, over the columns."""
    if dim == 1:
        return F.layer_norm(x, x.shape[1:])
    return F.batch_norm(x, None, None, training=True)


FUNCTIONS: list[Callable[[Tensor, int], Tensor]] = [
    lambda x, dim: x.sum(dim),
    lambda x, dim: x.mean(dim),
    lambda x, dim: x.amax(dim),
    lambda x, dim: x.amin(dim),
    lambda x, dim: x.norm(2, dim),
    lambda x, dim: x.softmax(dim),
    lambda x, dim: x.log_softmax(dim),
    layer_norm,
]


@pytest.mark.parametrize("dim", [1, 0])
def test_nan_and_infinity(dim):
    """In the first part, a middle one and the last: kernels of a GPU and the host's are as ATen."""
    x = torch.randn(len(SPECIAL), 17_001)
    for row, (everywhere, *numbers) in zip(x, SPECIAL, strict=True):
        if everywhere is not None:
            row.fill_(everywhere)
        for at, number in zip((0, len(row) // 2, -1), numbers, strict=True):
            if number is not None:
                row[at] = number
    if dim == 0:
        x = x.t().contiguous()

    def gradients(x: Tensor) -> list[Tensor]:
        """Of what is not the same whatever x is."""
        x = x.detach().requires_grad_()
        y = [x.amax(dim).sum(), x.norm(2, dim).sum(), (x.softmax(dim) * x.detach()).sum()]
        return [gradient for each in y for gradient in torch.autograd.grad(each, x)]

    expected = [*(function(x, dim) for function in FUNCTIONS), *gradients(x)]
    mine = x.to(helpers.DEVICE)
    for emulated in (True, False):
        helpers.emulate_gpu(emulated)
        for _ in range(RUNS):
            made = [*(function(mine, dim) for function in FUNCTIONS), *gradients(mine)]
            helpers.flush()
        for a, b in zip(made, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4, equal_nan=True)
