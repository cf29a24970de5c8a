"""In-place operators on parts of a tensor are recorded where other parts of it are read.

ATen calls it too hard to tell whether two views share elements that are not dense; slices side by
side, and a view and itself, are what `boxes[:, 2:] -= boxes[:, :2]` consists of.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "recording")


def columns(z: Tensor) -> None:
    z[:, :2] += 1
    z[..., 0] *= 2
    z[:, 1:] *= 0.5
    z[::2, ::2] -= 3


def corners(z: Tensor) -> None:
    """Centres and sizes of boxes become their corners."""
    z[:, :2] -= z[:, 2:4] / 2
    z[:, 2:4] += z[:, :2]


def of_one_another(z: Tensor) -> None:
    z[:, 3] = z[:, 1]
    z[:, 2] = z[:, 0] + z[:, 2]
    z[:, 0] -= 1


def every_other(z: Tensor) -> None:
    z[:, ::2] *= z[:, 1::2]
    z[1:, 1] -= z[:-1, 0]


def blocks(z: Tensor) -> None:
    z[:2, :2] += z[2:4, 4:6]
    z[0, :3] += z[1, 3:]
    z[:, 3:] = z[:, :3]


IDIOMS: list[Callable[[Tensor], None]] = [columns, corners, of_one_another, every_other, blocks]


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_parts_that_are_apart_are_recorded(idiom):
    z = helpers.drawn(6, 6, device="cpu")
    mine = z.to(helpers.DEVICE)
    helpers.flush()
    with helpers.counting() as counted:
        idiom(mine)
        helpers.flush()
    idiom(z)
    assert torch.equal(mine.cpu(), z)
    assert counted["run_now"] == 0 and counted["flushes"] == 1


def test_circular_padding_is_recorded():
    x = helpers.drawn(2, 3, 6, 6, device="cpu")
    with helpers.counting() as counted:
        padded = F.pad(x.to(helpers.DEVICE), (1, 2, 2, 1), mode="circular")
        helpers.flush()
    assert torch.equal(padded.cpu(), F.pad(x, (1, 2, 2, 1), mode="circular"))
    assert counted["run_now"] == 0


def part_of(z: Tensor, draw: random.Random, shape: list[int]) -> Tensor:
    """A slice of `z` that has the shape, with steps of one or two."""
    for dim, length in enumerate(shape):
        step = draw.choice([1, 1, 2])
        begin = draw.randrange(z.shape[dim] - (length - 1) * step)
        picked = slice(begin, begin + (length - 1) * step + 1, step)
        z = z[(slice(None),) * dim + (picked,)]
    return z


@pytest.mark.parametrize("write", [Tensor.add_, Tensor.copy_])
@pytest.mark.parametrize("seed", range(15))
def test_random_parts_of_one_tensor(seed, write):
    """What shares elements in part runs at once, as ATen does it, and nothing else is wrong."""
    draw = random.Random(seed)
    recorded = 0
    for _ in range(20):
        z = torch.arange(8.0 * 9 * 5).view(8, 9, 5)
        mine = z.to(helpers.DEVICE)
        shape = [draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 2)]
        if draw.random() < 0.5:
            z, mine, shape = z.transpose(0, 2), mine.transpose(0, 2), shape[::-1]
        state = draw.getstate()
        to, of = (part_of(z, draw, shape) for _ in range(2))
        draw.setstate(state)
        with helpers.counting() as counted:
            write(*(part_of(mine, draw, shape) for _ in range(2)))
            helpers.flush()
        shared = set(to.flatten().tolist()) & set(of.flatten().tolist())
        same = torch.equal(to, of)
        write(to, of)
        recorded += counted["run_now"] == 0
        if not shared or same:
            assert torch.equal(mine.cpu(), z)
        else:
            assert counted["run_now"] == 1
    assert recorded > 0
