"""Equal calls and copies that nobody needs do not run; what the user sees and writes is his own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording")


def check(program: Callable[[Tensor], Any], x: Tensor) -> Counter[str]:
    """Runs a program on the CPU and three times on the device; the operators of the last plan."""
    expected = program(x.clone())
    for _ in range(3):
        given = x.to(helpers.DEVICE)
        helpers.flush()
        made = program(given)
        helpers.flush()
        helpers.assert_same(made, expected)
    plan = helpers.extension().plan_data(torch.acc.current_device())
    return Counter(node["op"].removeprefix("aten::").split(".")[0] for node in plan["nodes"])


X = torch.arange(24.0).reshape(4, 6) / 7


def test_a_copy_that_is_only_read_does_not_run():
    def program(x: Tensor) -> Tensor:
        return x.clone().cumsum(0) + x.clone()[:, 1:].t().cumsum(0).sum()

    assert check(program, X * 7)["copy_"] == 0  # sums that need no rounding


def test_a_copy_that_is_seen_is_a_copy():
    def program(x: Tensor) -> list[Tensor]:
        y = x.clone()
        x.add_(1)
        z = y.clone()
        y.mul_(2)
        return [x, y, z, z.clone()]

    assert check(program, X)["copy_"] == 3


def test_a_copy_onto_itself_is_nothing():
    """DistributedDataParallel does that with a buffer that travels alone."""
    x = X.to(helpers.DEVICE)
    y = x + 1
    helpers.flush()
    y += 1
    version = y._version
    with helpers.counting() as counted:
        y.copy_(y.view(-1).view(4, 6))
        y.t().copy_(y.t())
    assert counted["flushes"] == counted["nodes"] == counted["nodes_followed"] == 0
    assert y._version == version + 2
    bits = y.view(torch.int32)
    bits.copy_(y.detach())  # numbers of another type
    assert torch.equal(bits.cpu(), (X + 2).int())


def test_copies_from_the_cpu_are_dense():
    """Also where they wait for something, which with deterministic algorithms all do."""
    whole = torch.arange(24.0).reshape(4, 6)
    torch.use_deterministic_algorithms(True)
    try:
        for x in (whole[:, None].expand(4, 3, 6), whole[:, ::2], whole.t(), whole[1:3, 2:5]):
            y = x.to(helpers.DEVICE)
            assert y.stride() == torch.empty_like(x).stride()
            assert torch.equal(y.cpu(), x)
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_that_is_written_afterwards_is_distinct():
    def program(x: Tensor) -> list[Tensor]:
        a, b = x.clone(), x.clone()
        kept = a.cumsum(0)
        a[1:].zero_()
        return [kept, a.cumsum(0), b.cumsum(0), x]

    check(program, X)


def test_layouts_that_differ_are_copied():
    def program(x: Tensor) -> list[Tensor]:
        return [x.t().contiguous().view(-1).cumsum(0), x[:, ::2].contiguous().view(-1).cumsum(0)]

    assert check(program, X)["copy_"] == 2


def test_equal_calls_run_once():
    def program(x: Tensor) -> Tensor:
        return x.cumsum(0).mm(x.cumsum(0).t()) + x.cumsum(0).mm(x.cumsum(0).t())

    assert check(program, X)["cumsum"] == 1


def test_equal_calls_around_a_write_both_run():
    def program(x: Tensor) -> Tensor:
        before = x.cumsum(0)
        x[2] = 5
        return before - x.cumsum(0)

    assert check(program, X)["cumsum"] == 2


def test_random_calls_are_not_equal():
    x = X.to(helpers.DEVICE)
    a, b = torch.rand_like(x), torch.rand_like(x)
    assert not torch.equal(a.cpu(), b.cpu())


def test_a_cast_and_back_is_no_cast():
    def program(x: Tensor) -> Tensor:
        half = x.to(torch.bfloat16).cumsum(0)
        return half.float().to(torch.bfloat16).cumsum(1)

    assert check(program, X)["copy_"] == 1


def test_a_cast_that_rounds_stays():
    def program(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float().cumsum(0)

    assert check(program, X)["copy_"] == 2


def test_one_cast_for_three_products():
    # What autocast makes of the three projections of an attention.
    def program(x: Tensor) -> list[Tensor]:
        return [x.to(torch.bfloat16).mm(w) for w in (half, half * 2, half * 4)]

    half = (X.t() / 3).to(torch.bfloat16).to(helpers.DEVICE)
    with helpers.without_passes("widen"):  # it has casts of its own where nothing multiplies halves
        for _ in range(3):
            x = X.to(helpers.DEVICE)
            helpers.flush()
            made = program(x)
            helpers.flush()
        plan = helpers.extension().plan_data(torch.acc.current_device())
    assert [node["op"] for node in plan["nodes"]].count("aten::copy_") == 1
    assert len(made) == 3


def test_checkpointing_still_computes_again():
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.Softplus(), torch.nn.Linear(256, 64)
    ).to(helpers.DEVICE)
    x = torch.ones(512, 64, device=helpers.DEVICE, requires_grad=True)
    for _ in range(3):
        layers.zero_grad()
        x.grad = None
        loss = checkpoint(layers, x, use_reentrant=False).sum()
        loss.backward()
        helpers.flush()
    plan = helpers.extension().plan_data(torch.acc.current_device())
    assert [node["op"] for node in plan["nodes"]].count("aten::softplus") == 2
    assert loss.item() != 0
