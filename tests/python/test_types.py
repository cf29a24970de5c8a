"""Types of operands that the CPU's kernels refuse and Meta kernels let pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests import helpers
from tests.helpers import DEVICE

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
TYPES += [torch.uint8, torch.bool, torch.complex64]

OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name)
    for name in (
        *("abs", "floor", "round", "frac", "sign", "erf", "lgamma", "logit", "i0", "relu"),
        *("argmax", "max", "median", "trace", "det", "std", "nansum", "sum", "exp"),
    )
}
OF_ONE |= {
    "sort": lambda a: a.sort().values,
    "topk": lambda a: a.topk(2).values,
    "cummax": lambda a: a.cummax(0).values,
    "softmax": lambda a: a.softmax(0),
    "logcumsumexp": lambda a: a.logcumsumexp(0),
    **{name: getattr(F, name) for name in ("gelu", "silu", "elu", "hardswish", "softplus")},
    "in place": lambda a: a.clone().erf_(),
}
OF_TWO = [
    "lt",
    "fmax",
    "atan2",
    "hypot",
    "remainder",
    "bitwise_and",
    "nextafter",
    "gcd",
    "logaddexp",
]
OF_TWO += ["heaviside", "polar", "mm", "add", "true_divide", "pow"]


def compare(fn: Callable[..., torch.Tensor], *types: torch.dtype) -> bool:
    """Whether the CPU takes the types. acc has to do the same, in the call."""

    def call(where: str) -> torch.Tensor:
        return fn(*(torch.ones(3, 3).to(dtype).to(where) for dtype in types))

    try:
        expected = call("cpu")
    except (RuntimeError, TypeError) as error:
        with pytest.raises(type(error)) as caught:
            call(DEVICE)
        told = str(caught.value).splitlines()[0]
        assert told == str(error).splitlines()[0], types
        return False
    made = call(DEVICE)
    assert made.dtype == expected.dtype, types
    assert torch.equal(made.cpu().nan_to_num(), expected.nan_to_num()), types
    return True


@pytest.mark.parametrize("name", OF_ONE)
def test_a_type_is_refused_in_the_call(device: str, name: str) -> None:
    taken = [compare(OF_ONE[name], dtype) for dtype in TYPES]
    assert any(taken)


@pytest.mark.parametrize("name", OF_TWO)
def test_two_types_are_refused_in_the_call(device: str, name: str) -> None:
    fn = getattr(torch, name)
    taken = [compare(fn, a, b) for a in TYPES for b in TYPES]
    assert any(taken)


@pytest.mark.usefixtures("recording")
def test_a_kernel_is_asked_once_for_its_types(acc_only: str) -> None:
    def call(*shape: int) -> torch.Tensor:
        a = torch.ones(shape, dtype=torch.int16).to(acc_only)
        return a.lcm(a)

    with helpers.counting() as first:
        call(3, 4)
    with helpers.counting() as others:
        call(5, 6), call(3, 4), call(1, 2)
    assert (first["types_asked"], others["types_asked"]) == (1, 0)
    assert first["run_now"] == others["run_now"] == 0


@pytest.mark.usefixtures("recording")
def test_a_kernel_that_dislikes_the_values_it_is_asked_with(acc_only: str) -> None:
    # It is asked with zeros, which integers cannot be divided by.
    def call(n: int) -> torch.Tensor:
        full = torch.full((n,), 7, dtype=torch.int16, device=acc_only)
        return full.fmod(torch.full((n,), 4, dtype=torch.int16, device=acc_only))

    with helpers.counting() as first:
        assert call(3).tolist() == [3] * 3
    with helpers.counting() as others:
        made = call(5), call(4)
    assert (first["run_now"], others["run_now"]) == (1, 0)
    assert [m.tolist() for m in made] == [[3] * 5, [3] * 4]
    zero = torch.zeros(6, dtype=torch.int32, device=acc_only)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        zero.fmod(zero)


@pytest.mark.usefixtures("recording")
def test_large_operands_are_not_made_to_ask(acc_only: str) -> None:
    large = torch.ones(5 << 20, dtype=torch.int32).to(acc_only)
    with pytest.raises(RuntimeError, match="std and var"):
        large.std()
    with helpers.counting() as counted:
        made = [large.bitwise_xor(3) for _ in range(3)]
    # The first runs at once; then its types are known.
    assert (counted["types_asked"], counted["run_now"]) == (0, 1)
    assert [m[-1].item() for m in made] == [2] * 3


def test_a_call_on_nothing_says_nothing_of_types(device: str) -> None:
    for n in (0, 3):
        x = torch.ones(n, n, dtype=torch.bool, device=device)
        if n:
            with pytest.raises(RuntimeError, match="not implemented for 'Bool'"):
                x @ x
        else:
            assert (x @ x).cpu().shape == (0, 0)


def test_a_type_that_is_an_argument(device: str) -> None:
    x = torch.ones(3).to(device)
    assert x.sum(dtype=torch.float64).item() == 3
    assert x.long().sum(dtype=torch.float64).item() == 3
    for y in (x, x.long()):
        with pytest.raises(RuntimeError, match="not implemented for 'ComplexHalf'"):
            y.sum(dtype=torch.complex32)


@pytest.mark.parametrize("name", ["lt_", "copysign_", "heaviside_", "eq_"])
def test_two_types_in_place(device: str, name: str) -> None:
    taken = [compare(lambda a, b: getattr(a, name)(b), a, b) for a in TYPES for b in TYPES]
    assert any(taken)


def test_targets_of_another_type(device: str) -> None:
    p, target = torch.full((3,), 0.5).to(device), torch.ones(3).long().to(device)
    with pytest.raises(RuntimeError, match="Found dtype Long but expected Float"):
        F.binary_cross_entropy(p, target)
