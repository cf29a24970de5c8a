"""Storages that grow, shrink and change owners while work on them is pending: as on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tests.helpers import assert_same, counting, extension, same

pytestmark = pytest.mark.usefixtures("device")


def grow_in_the_middle(device: str) -> list[torch.Tensor]:
    x = torch.arange(4.0, device=device)
    before = x * 2
    x.add_(1)
    x.resize_(6)
    x[4:] = 7
    return [before, x, x.sum()]


def shrink_keeps_the_storage(device: str) -> list[object]:
    x = torch.arange(6.0, device=device)
    x.mul_(2)
    x.resize_(2, 2)
    size = x.untyped_storage().size()
    x.add_(1)
    x.resize_(6)
    return [x, size]


def a_view_grows(device: str) -> list[object]:
    base = torch.arange(6.0, device=device)
    view = base[4:]
    view.mul_(3)
    view.resize_(5)  # beyond the end of the storage that it shares
    view[2:] = -1
    base.add_(1)
    return [base, view, view.storage_offset(), base.untyped_storage().size()]


def a_view_grows_within_its_storage(device: str) -> list[object]:
    base = torch.arange(8.0, device=device)
    view = base[1:3]
    view.resize_(2, 3)
    view.add_(10)
    return [base, view, base.untyped_storage().size()]


def views_of_a_grown_storage(device: str) -> list[torch.Tensor]:
    base = torch.arange(4.0, device=device)
    head, tail = base[:2], base[2:]
    head.add_(1)
    base.resize_(8)
    base[4:] = 0
    tail.mul_(5)  # still the same storage
    return [base, head, tail]


def shapes_and_formats(device: str) -> list[object]:
    x = torch.arange(24.0, device=device)
    x.resize_(1, 2, 3, 4, memory_format=torch.channels_last)
    y = x + 1
    return [x, y, x.stride(), torch.empty(3, device=device).resize_as_(y).stride()]


def out_of_another_size(device: str) -> list[object]:
    a = torch.arange(6.0, device=device)
    out = torch.zeros(2, device=device)
    part = out[:1]
    part.add_(4)
    torch.add(a, a, out=out)
    part.mul_(2)
    return [out, part, out.shape]


def set_to_a_pending_storage(device: str) -> list[torch.Tensor]:
    x, y = torch.zeros(2, device=device), torch.arange(4.0, device=device)
    old = x.view(2)
    y.mul_(3)
    x.add_(1)
    x.set_(y)
    x.sub_(1)
    old.add_(5)
    return [x, y, old]


def set_beyond_the_end(device: str) -> list[object]:
    y = torch.arange(4.0, device=device)
    y.add_(1)
    z = torch.empty(0, device=device)
    z.set_(y.untyped_storage(), 1, (5,), (1,))
    z[3:] = 9
    return [y, z, y.untyped_storage().size()]


def set_to_nothing(device: str) -> list[object]:
    x = torch.ones(3, device=device)
    kept = x.view(3)
    x.add_(1)
    x.set_()
    kept.mul_(4)
    return [kept, x.shape, x.untyped_storage().size()]


def emptied_while_a_result_depends_on_it(device: str) -> list[object]:
    x = torch.arange(4.0, device=device)
    x.mul_(2)
    y = x + 1
    x.untyped_storage().resize_(0)
    z = y * 2
    x.untyped_storage().resize_(16)
    x.fill_(3)
    return [x, y, z]


def emptied_with_views(device: str) -> list[object]:
    x = torch.arange(4.0, device=device)
    view = x[1:3]
    total = view.sum()
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(32)
    x.copy_(torch.ones(4))
    view.add_(2)
    return [x, view, total]


def a_saved_tensor_is_emptied_and_filled(device: str) -> list[torch.Tensor | None]:
    w = torch.arange(3.0, device=device).requires_grad_()
    full = (w * 2).detach().requires_grad_()
    loss = (full**3).sum()
    copy = full.detach().clone()
    full.untyped_storage().resize_(0)
    full.untyped_storage().resize_(12)
    full.data.copy_(copy)
    loss.backward()
    return [loss, full.grad]


CASES: list[Callable[[str], object]] = [
    grow_in_the_middle,
    shrink_keeps_the_storage,
    a_view_grows,
    a_view_grows_within_its_storage,
    views_of_a_grown_storage,
    shapes_and_formats,
    out_of_another_size,
    set_to_a_pending_storage,
    set_beyond_the_end,
    set_to_nothing,
    emptied_while_a_result_depends_on_it,
    emptied_with_views,
    a_saved_tensor_is_emptied_and_filled,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_on_the_cpu(device, case):
    for _ in range(3):  # built, met again, followed
        same(case, device)


@pytest.mark.usefixtures("recording")
def test_emptying_a_storage_submits_nothing(acc_only):
    """Sharded training frees and makes parameters in every layer: that may not end the step."""
    x = torch.ones(4, device=acc_only)
    extension().flush()
    with counting() as counted:
        y = x * 2
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(16)
        x.fill_(5)
        z = x + y
    assert counted["flushes"] == 0
    assert z.tolist() == [7.0] * 4


def random_program(seed: int, device: str) -> list[torch.Tensor]:
    """Thirty random operations on tensors that share storages; what grows is written at once."""
    draw = random.Random(seed)
    tensors = [torch.arange(float(n), device=device) for n in (3, 6, 8)]
    for step in range(30):
        x = draw.choice(tensors)
        kind = draw.randrange(9)
        if kind == 0:
            old, new = x.numel(), draw.randrange(1, 12)
            held = x.untyped_storage().size() // 4
            x.resize_(new)
            first = max(0, min(held - x.storage_offset(), new))
            if new > old and first < new:
                x[first:] = step
        elif kind == 1 and x.numel() > 1:
            start = draw.randrange(x.numel())
            tensors.append(x.view(-1)[start : start + draw.randrange(1, 5)])
        elif kind == 2:
            y = draw.choice(tensors)
            x.set_(y)
        elif kind == 3:
            tensors.append(x * 2)
        elif kind == 4 and x.untyped_storage().size() > 0:
            nbytes = x.untyped_storage().size()
            whole = torch.empty(0, device=device).set_(x.untyped_storage())
            total = whole.sum()
            x.untyped_storage().resize_(0)
            x.untyped_storage().resize_(nbytes)
            whole.fill_(step)
            tensors.append(total.view(1))
        elif kind == 5 and x.untyped_storage().size() > 0:
            held = x.untyped_storage().size()
            x.untyped_storage().resize_(held + 8)
            torch.empty(0, device=device).set_(x.untyped_storage())[held // 4 :] = step
        elif kind == 6:
            x.set_()
            x.resize_(2)
            x.fill_(step)
        elif kind == 7:
            out = draw.choice(tensors)
            if out.untyped_storage()._cdata != x.untyped_storage()._cdata:
                torch.add(x, 1, out=out.view(-1)[:0])
        else:
            x.mul_(0.5).add_(step)
        if len(tensors) > 8:
            del tensors[draw.randrange(len(tensors))]
    return tensors


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_random_programs(device, seed):
    for program in range(seed, seed + 20):
        expected = random_program(program, "cpu")
        actual = random_program(program, device)
        assert_same(actual, expected, what=f"program {program}")
        for mine, theirs in zip(actual, expected, strict=True):
            assert mine.untyped_storage().size() == theirs.untyped_storage().size(), program
            assert mine.storage_offset() == theirs.storage_offset(), program
