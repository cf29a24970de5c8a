"""Numbers beside tensors: what ATen refuses to convert is an error in fused steps, too, and what
is no number, or decides more than a value, gives eager's result."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

OVERFLOWS = "cannot be converted to type .* overflow"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_numbers_that_a_type_of_fractions_cannot_hold(dtype):
    """A mask of -1e9 in float16 is an error, be it fused by then."""
    x = torch.linspace(-1, 1, 64).to(dtype)
    mask = torch.arange(64) > 3
    most = torch.finfo(dtype).max

    def masked(device: str, number: float) -> Tensor:
        return ((x.to(device) * 2).masked_fill(mask.to(device), number) + 1).cpu()

    def clamped(device: str, number: float) -> Tensor:
        return ((x.to(device) * 2).clamp(max=number) + 1).cpu()

    for program in (masked, clamped):
        for number in (*[-1.5] * 4, -most, most, float("inf"), -0.5):
            with helpers.counting() as counted:
                helpers.assert_same(program(helpers.DEVICE, number), program("cpu", number))
            # the last are numbers of the kernel that the first have
            assert counted["kernel_launches"] == 1 or number == -1.5 or helpers.runs_at_once()
        for number in (2.0 * most, -4.0 * most):
            for device in ("cpu", helpers.DEVICE, helpers.DEVICE):
                with pytest.raises(RuntimeError, match=OVERFLOWS):
                    program(device, number)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32], ids=str)
@pytest.mark.parametrize("where", ["cpu", helpers.DEVICE])
def test_a_number_in_a_tensor_that_the_type_cannot_hold(dtype: torch.dtype, where: str) -> None:
    x = (torch.arange(64) - 32).to(dtype)
    mask = torch.arange(64) > 3

    def masked(device: str, value: Tensor) -> Tensor:
        return ((x.to(device) * 2).masked_fill(mask.to(device), value) + 1).cpu()

    def filled(device: str, value: Tensor) -> Tensor:
        return ((x.to(device) * 2).fill_(value) + 1).cpu()

    def masked_in_place(device: str, value: Tensor) -> Tensor:
        return ((x.to(device) * 2).masked_fill_(mask.to(device), value) + 1).cpu()

    wide = torch.float32 if dtype.is_floating_point else torch.int64
    for number in (*[-3] * 4, 7):
        value = torch.tensor(number, dtype=wide)
        for program in (masked, masked_in_place, filled):
            helpers.assert_same(program(helpers.DEVICE, value.to(where)), program("cpu", value))
    value = torch.tensor(-(1 << 40), dtype=wide)
    for program in (masked, masked_in_place):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=OVERFLOWS):
                program(helpers.DEVICE, value.to(where))
    for _ in range(2):  # copied
        helpers.assert_same(filled(helpers.DEVICE, value.to(where)), filled("cpu", value))


SCALED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "add": lambda x, s: torch.add(x, x, alpha=s),
    "sub": lambda x, s: torch.sub(x, x, alpha=s),
    "rsub": lambda x, s: torch.rsub(x, x, alpha=s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x, value=s),
    "addcdiv": lambda x, s: torch.addcdiv(x, x, x, value=s),
    "lerp": lambda x, s: torch.lerp(x, x, s),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "softplus": F.softplus,
}


@pytest.mark.parametrize("name", SCALED)
def test_numbers_that_float32_cannot_hold(name: str) -> None:
    x = torch.ones(100)

    def program(device: str, number: float) -> Tensor:
        return (SCALED[name](x.to(device) * 2, number) * 3).cpu()

    for number in (0.5, 0.5, 0.5, 0.25, 1e38):
        helpers.assert_same(
            program(helpers.DEVICE, number).isfinite(), program("cpu", number).isfinite()
        )
    for device in ("cpu", helpers.DEVICE):
        with pytest.raises(RuntimeError, match=OVERFLOWS):
            program(device, 1e39)


def test_a_bound_that_is_no_number() -> None:
    """It is ignored where it is the only one."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    x[7] = math.nan

    def program(device: str, low: float | None, high: float | None) -> Tensor:
        return ((x.to(device) * 2).clamp(low, high) + 1).cpu()

    for bounds in ((None, 0.5), (-0.5, None), (-0.5, 0.5)):
        for low, high in [bounds] * 4 + [
            (low and math.nan, high and math.nan) for low, high in [bounds]
        ]:
            helpers.assert_same(program(helpers.DEVICE, low, high), program("cpu", low, high))


def test_a_slope_that_the_result_does_not_tell_the_sign_of() -> None:
    def step(device: str, slope: float) -> Tensor:
        x = torch.linspace(-1, 1, 100).to(device).requires_grad_()
        (F.leaky_relu_(x * 2, slope) * 3).sum().backward()
        return x.grad.cpu()

    for slope in (0.01, 0.01, 0.01, 0.25):
        helpers.assert_same(step(helpers.DEVICE, slope), step("cpu", slope))
    for device in ("cpu", helpers.DEVICE):
        with pytest.raises(RuntimeError, match="negative slope"):
            step(device, -0.5)


def test_a_channel_that_does_not_vary_without_eps() -> None:
    """Its deviation is 0, and so is, by ATen's rule, what it is divided by."""

    def step(device: str) -> list[Tensor]:
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        x[:, 1] = 0
        x = x.to(device).requires_grad_()
        y = F.instance_norm(x, eps=0.0)
        (y * y.detach()).sum().backward()
        return [y.detach().cpu(), x.grad.cpu()]

    expected = step("cpu")
    assert all(each.isfinite().all() for each in expected)
    for _ in range(4):
        for mine, theirs in zip(step(helpers.DEVICE), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_running_statistics_that_are_replaced() -> None:
    """With a momentum of 1, as in the first step of a mean over all steps."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 1e-4
    norm = nn.BatchNorm1d(4, momentum=1.0).to(helpers.DEVICE)
    mine = x.to(helpers.DEVICE)
    for _ in range(4):
        norm.reset_running_stats()
        norm(mine)
        for running, exact in ((norm.running_var, x.var(0)), (norm.running_mean, x.mean(0))):
            torch.testing.assert_close(running.cpu(), exact, rtol=1e-5, atol=0)


def test_numbers_that_are_to_be_conjugated_or_negated():
    """addmm gets them as they are in memory."""
    a, b = (torch.randn(3, 3, dtype=torch.complex64) for _ in range(2))
    z = torch.tensor(1 + 2j)
    numbers = [z, z.conj(), torch._neg_view(z), torch._neg_view(z.conj())]
    assert numbers[1].is_conj() and numbers[2].is_neg() and numbers[3].is_conj()
    for number in numbers:
        for _ in range(2):  # recorded, and then followed
            on_acc = torch.addmm(number, a.to(helpers.DEVICE), b.to(helpers.DEVICE))
            helpers.assert_same(on_acc.cpu(), torch.addmm(number, a, b))
