"""Every operator that generated kernels know, in a chain, gives what eager CPU gives.

Exactly where the arithmetic is exact or rounded once by both; functions within 4 ULP of eager's or
of the correctly rounded value. With infinities, NaN, signed zeros and denormals among the elements.
Arithmetic in every type, the rest in those of `DTYPES`; with ACC_TEST_FULL=1 in all.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import helpers
from tests.python import test_reductions

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NUMBERS = [*FLOATS, torch.int64, torch.int32]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
if helpers.FULL:
    DTYPES += [torch.float64, torch.float16, torch.int32]

# Arguments of one call; "a", "b", "c" are tensors, "s" a tensor of no dimension, "m" a mask.
Call = tuple[Any, ...]

_COMPARED: list[Call] = [("a", "b"), ("a", "s")]
_WITH_NUMBER: list[Call] = [
    ("a", 1),
    ("a", 3),
    ("a", -1),
    ("a", -0.0),
    ("a", 2.5),
    ("a", math.inf),
    ("a", math.nan),
]
_SCALED: list[Call] = [("a", "b"), ("a", "s"), ("a", "b", {"alpha": 3}), ("a", "b", {"alpha": -1})]
_UNARY: list[Call] = [("a",)]

CALLS: dict[str, list[Call]] = {
    "aten::copy_": [("a", "b"), ("a", "s"), ("a", "m")],
    "aten::_to_copy": [("a", {"dtype": dtype}) for dtype in (*FLOATS, torch.int64, torch.bool)],
    "aten::clone": _UNARY,
    "aten::fill_.Scalar": [("a", 3), ("a", 0.1)],
    "aten::fill_.Tensor": [("a", "s")],
    "aten::zero_": _UNARY,
    "aten::add.Tensor": _SCALED,
    "aten::add.Scalar": [("a", 3), ("a", 0.1), ("a", 0.25, 3)],
    "aten::sub.Tensor": _SCALED,
    "aten::sub.Scalar": [("a", 3), ("a", 0.1), ("a", 0.25, 3)],
    "aten::rsub.Tensor": _SCALED,
    "aten::rsub.Scalar": [("a", 3), ("a", 0.1), ("a", 0.25, 3)],
    "aten::mul.Tensor": [("a", "b"), ("a", "s"), ("s", "b")],
    "aten::mul.Scalar": [("a", 3), ("a", 0.1), ("a", 0.0)],
    "aten::div.Tensor": [("a", "b"), ("a", "s")],
    "aten::div.Scalar": [("a", 3), ("a", 0.1), ("a", 0.0)],
    "aten::addcmul": [("a", "b", "c"), ("a", "b", "c", {"value": 0.3})],
    "aten::addcdiv": [("a", "b", "c"), ("a", "b", "c", {"value": 0.3})],
    "aten::lerp.Scalar": [("a", "b", 0.3), ("a", "b", 0.7), ("a", "b", 1)],
    "aten::lerp.Tensor": [("a", "b", "c")],
    "aten::neg": _UNARY,
    "aten::abs": _UNARY,
    "aten::sign": _UNARY,
    "aten::reciprocal": _UNARY,
    "aten::sqrt": _UNARY,
    "aten::rsqrt": _UNARY,
    "aten::pow.Tensor_Scalar": [
        ("a", e) for e in (0.5, 2, 3, -0.5, -1, -2, 2.0, 1.7, 0, 4, 5, -3, 1 / 3, math.inf)
    ],
    "aten::pow.Tensor_Tensor": _COMPARED,
    "aten::pow.Scalar": [(2, "b"), (0.3, "b"), (-2, "b"), (0, "b")],
    "aten::maximum": _COMPARED,
    "aten::minimum": _COMPARED,
    "aten::clamp": [("a", -1, 1), ("a", None, 0.5), ("a", -0.5, None), ("a", 2, -2), ("a", 0, 0)],
    "aten::clamp_min": [("a", -1), ("a", 0.5)],
    "aten::clamp_max": [("a", -1), ("a", 0.5)],
    **{f"aten::{name}.Tensor": _COMPARED for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"aten::{name}.Scalar": _WITH_NUMBER for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "aten::logical_not": _UNARY,
    "aten::logical_and": _COMPARED,
    "aten::logical_or": _COMPARED,
    "aten::logical_xor": _COMPARED,
    "aten::bitwise_not": _UNARY,
    "aten::bitwise_and.Tensor": _COMPARED,
    "aten::bitwise_or.Tensor": _COMPARED,
    "aten::bitwise_xor.Tensor": _COMPARED,
    "aten::where.self": [("m", "a", "b"), ("m", "a", "s"), ("m", "s", "b")],
    "acc::where_": [("a", "m", "b")],
    "aten::masked_fill.Scalar": [("a", "m", 0.5), ("a", "m", -math.inf), ("a", "m", 2)],
    "aten::masked_fill.Tensor": [("a", "m", "s")],
    **{
        f"aten::{name}": _UNARY
        for name in (
            "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh erf erfc "
            "floor ceil trunc round relu tanh sigmoid silu hardswish hardsigmoid mish"
        ).split()
    },
    "aten::threshold": [("a", 0.5, 0.25), ("a", 0, -7)],
    "aten::threshold_backward": [("a", "b", 0), ("a", "b", 0.5)],
    "aten::tanh_backward": [("a", "b")],
    "aten::sigmoid_backward": [("a", "b")],
    "aten::silu_backward": [("a", "b")],
    "aten::gelu": [("a",), ("a", {"approximate": "tanh"})],
    "aten::gelu_backward": [("a", "b"), ("a", "b", {"approximate": "tanh"})],
    "aten::leaky_relu": [("a",), ("a", 0.3)],
    "aten::leaky_relu_backward": [("a", "b", 0.3, False)],
    "aten::elu": [("a",), ("a", 0.7, 1.1, 1)],
    "aten::elu_backward": [
        ("a", 1, 1, 1, False, "b"),
        ("a", 0.7, 1.1, 2, False, "b"),
        ("a", 0.7, 1.1, 2, True, "b"),
    ],
    "aten::hardtanh_backward": [("a", "b", -1, 1)],
    "aten::hardswish_backward": [("a", "b")],
    "aten::hardsigmoid_backward": [("a", "b")],
    "aten::mish_backward": [("a", "b")],
    "aten::smooth_l1_loss_backward": [
        ("s", "a", "b", 0, 1.0),
        ("s", "a", "b", 1, 1.0),
        ("a", "b", "c", 2, 2.0),
    ],
    "aten::huber_loss_backward": [
        ("s", "a", "b", 0, 1.0),
        ("s", "a", "b", 1, 1.0),
        ("a", "b", "c", 2, 2.0),
    ],
    "aten::softplus": [("a",), ("a", 2, 3)],
    "aten::softplus_backward": [("a", "b", 1, 20), ("a", "b", 2, 3)],
    "aten::mse_loss_backward": [("s", "a", "b", 0), ("s", "a", "b", 1), ("a", "b", "c", 2)],
    "aten::native_dropout_backward": [("a", "m", 1.25)],
}

ARITHMETIC = ("aten::add.Tensor", "aten::mul.Tensor", "aten::clone", "aten::maximum")

# In which eager's value and the kernel's are the same bits, for float32 and float64: each rounds
# once, or in the same order.
EXACT = {
    name
    for name in CALLS
    if name.split("::")[1].rstrip("_").split(".")[0]
    in (
        "copy _to_copy clone fill zero add sub rsub mul div neg abs sign maximum minimum clamp "
        "clamp_min clamp_max eq ne lt le gt ge logical_not logical_and logical_or logical_xor "
        "bitwise_not bitwise_and bitwise_or bitwise_xor where masked_fill floor ceil trunc round "
        "relu threshold threshold_backward leaky_relu_backward hardtanh_backward"
    ).split()
    or name.startswith("aten::fill_")
}

# Their in-place forms write truths into floats: ATen's.
TRUTHS = {
    name
    for name in CALLS
    if name.startswith("aten::logical_") or name[6:9] in ("eq.", "ne.", "lt.", "le.", "gt.", "ge.")
}

# Differences of nearly equal numbers, in eager as well: their errors are measured against the
# product of 1 + |x| over the tensors.
CANCELLING = {"aten::gelu", "aten::gelu_backward", "aten::mish_backward"}

SPECIAL = [
    *(
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        1.0,
        -1.0,
        0.5,
        -0.5,
        2.5,
        -3.5,
        1e-3,
        88.8,
        -104.0,
    ),
    *(1e-40, -1e-40, 2.0**-149, 2.0**-126, 3.4e38, -3.4e38, 1e10, -1e10, 16777217.0, 65504.0, 7e4),
]


def values(dtype: torch.dtype, seed: int) -> Tensor:
    """[203]: special values, each seed in another order, between normal ones. Full and a rest."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (203,), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(-9, 10, (203,), generator=generator).to(dtype)
    made = torch.randn(203, generator=generator, dtype=torch.float64) * 3
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    count = len(SPECIAL)
    if seed == 0:
        made[: 2 * count] = special.repeat_interleave(2)
    else:
        made[: 2 * count] = special.repeat(2)[torch.randperm(2 * count, generator=generator)]
    return made.to(dtype)


def make_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that calls name."""
    made = {name: values(dtype, seed) for seed, name in enumerate("abc")}
    made["s"] = made["b"][-1].clone()
    made["m"] = values(torch.bool, 3)
    return made


def overload(name: str) -> Any:
    """The callable of "aten::add.Tensor"."""
    library, _, rest = name.partition("::")
    base, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, library), base), variant or "default")


def negated(t: Tensor) -> Tensor:
    """An exact operator that every type has."""
    return torch.logical_not(t) if t.dtype == torch.bool else torch.neg(t)


def chain(name: str, call: Call, inputs: dict[str, Tensor], in_place: bool) -> list[Tensor]:
    """The operator between two others; its result and what follows."""
    arguments = list(call)
    kwargs = arguments.pop() if isinstance(arguments[-1], dict) else {}
    target = arguments[0] if arguments[0] in ("a", "m") else "b"
    before = negated(inputs[target])
    given = [inputs[x] if isinstance(x, str) else x for x in arguments]
    given = [before if x is inputs[target] else x for x in given]
    result = overload(in_place_form(name) if in_place else name)(*given, **kwargs)
    return [result, negated(result)]


def in_place_form(name: str) -> str:
    """The operator that writes its first argument; empty if there is none."""
    base, dot, variant = name.partition(".")
    if base == "aten::pow":
        return {"Tensor_Scalar": "aten::pow_.Scalar", "Tensor_Tensor": "aten::pow_.Tensor"}.get(
            variant, ""
        )
    form = base + "_" + dot + variant
    try:
        overload(form)
    except AttributeError:
        return ""
    return "" if base.endswith("_") else form


def ordered(t: Tensor) -> Tensor:
    """Floats as integers whose difference counts the floats between them; both zeros are 0."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    bits = t.contiguous().view(word).to(torch.int64)
    lowest = torch.iinfo(word).min
    return torch.where(bits < 0, lowest - bits, bits)


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many steps two floating tensors are apart; NaN and NaN: 0, NaN and a number: many."""
    apart = (ordered(a) - ordered(b)).abs()
    apart = torch.where(a.isnan() & b.isnan(), 0, apart)
    return torch.where(a.isnan() != b.isnan(), 2**62, apart)


def wrong(
    mine: Tensor,
    eager: Tensor,
    reference: Tensor | None,
    exact: bool,
    scale: Tensor | None = None,
) -> str:
    """What is wrong with a result, or nothing.

    With `scale` an error of 4 ULP of it is allowed besides.
    """
    assert mine.dtype == eager.dtype and mine.shape == eager.shape
    if exact or not eager.is_floating_point():
        found = helpers.value_difference(mine, eager)
        return found[1] if found else ""
    apart = ulps(mine, eager)
    allowed = {torch.float32: 4, torch.float64: 4, torch.bfloat16: 1, torch.float16: 1}[eager.dtype]
    if reference is not None:
        apart = torch.minimum(apart, ulps(mine, reference))
    if scale is not None:
        error = (mine.double() - eager.double()).abs()
        apart[error <= 4 * torch.finfo(eager.dtype).eps * scale] = 0
    worst = int(apart.argmax())
    if int(apart[worst]) <= allowed:
        return ""
    return (
        f"element {worst}: {mine[worst].item()!r} instead of {eager[worst].item()!r}, "
        f"{int(apart[worst])} ULP"
    )


def in_eager(
    name: str, call: Call, inputs: dict[str, Tensor], in_place: bool
) -> list[Tensor] | None:
    """The chain's results; None when eager refuses the call."""
    try:
        return chain(name, call, inputs, in_place)
    except (RuntimeError, TypeError, NotImplementedError):
        return None


@pytest.fixture(scope="module", autouse=True)
def compiled_together() -> None:
    """The kernels of all chains."""

    def run(name: str, call: Call, dtype: torch.dtype, in_place: bool) -> list[Tensor]:
        moved = {k: v.to(helpers.DEVICE) for k, v in make_inputs(dtype).items()}
        return chain(name, call, moved, in_place)

    for dtype in [*NUMBERS, torch.bool]:
        names = CALLS if dtype in DTYPES else ARITHMETIC
        helpers.compile_together(
            [
                functools.partial(run, name, call, dtype, in_place)
                for name in names
                for call in CALLS[name]
                for in_place in (False, True)
                if not in_place or (in_place_form(name) and call[0] in ("a", "m"))
                if in_eager(name, call, make_inputs(dtype), in_place) is not None
            ]
        )


def check(name: str, call: Call, dtype: torch.dtype, in_place: bool) -> bool | None:
    """Compares one chain. Whether it ran as one kernel; None when eager refuses the call."""
    inputs = make_inputs(dtype)
    eager = in_eager(name, call, inputs, in_place)
    if eager is None:
        return None
    reference: list[Tensor] | None = None
    if dtype.is_floating_point and dtype != torch.float64 and eager[0].is_floating_point():
        wide = {k: v if k == "m" else v.double() for k, v in inputs.items()}
        reference = [t.to(eager[0].dtype) for t in chain(name, call, wide, in_place)]
    moved = {k: v.to(helpers.DEVICE) for k, v in inputs.items()}
    scale = None
    if name in CANCELLING:
        scale = math.prod(1 + inputs[x].double().abs() for x in call if isinstance(x, str))
    exact = name in EXACT and dtype in (torch.float32, torch.float64)
    fused = False
    for _ in range(3):
        helpers.synchronize()
        with helpers.counting() as counted:
            mine = chain(name, call, moved, in_place)
            helpers.flush()
        fused = counted["kernel_launches"] == 1
        for i, result in enumerate(mine):
            right = None if reference is None else reference[i]
            text = wrong(result.cpu(), eager[i], right, exact, scale)
            what = (
                f"{name}{'_' if in_place else ''}{call} {dtype} {'fused' if fused else 'unfused'}"
            )
            assert not text, f"{what}, result {i}: {text}"
    return fused


def test_the_table_is_complete():
    known = set(helpers.extension().operators_with_formulas())
    # tests/python/test_drawing_kernels.py
    fills = ("bernoulli_", "exponential_", "normal_", "random_", "uniform_")
    elsewhere = {"acc::native_dropout", *(f"acc::{name}" for name in fills)}
    assert set(CALLS) | set(test_reductions.CALLS) == known - elsewhere
    assert not set(CALLS) & set(test_reductions.CALLS)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_in_a_chain(name, dtype):
    fused = {call_of(call): check(name, call, dtype, False) for call in CALLS[name]}
    if dtype == torch.float32:
        apart = {call for call, one_kernel in fused.items() if one_kernel is False}
        assert not apart
    if in_place_form(name):
        for call in CALLS[name]:
            if call[0] in ("a", "m"):
                one_kernel = check(name, call, dtype, True)
                assert one_kernel is not False or dtype != torch.float32 or name in TRUTHS, call


def call_of(call: Call) -> str:
    return ", ".join(map(str, call))


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_arithmetic_is_fused_in_every_type(dtype):
    for name in ARITHMETIC:
        assert check(name, ("a", "b")[: 1 if name == "aten::clone" else 2], dtype, False), name


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("exponent", [0.5, -0.5])
def test_powers_that_are_roots(dtype, exponent):
    """ATen takes the root in all types but float16, which shows at -inf and -0."""
    x = torch.tensor([-math.inf, -0.0, 0.0, math.inf, -1.0, 4.0], dtype=dtype)
    for _ in range(3):
        mine = (x.to(helpers.DEVICE) ** exponent * 2).cpu()
    eager = x**exponent * 2
    assert torch.equal(mine.isnan(), eager.isnan())
    numbers = ~eager.isnan()
    assert torch.equal(mine[numbers], eager[numbers])
    assert torch.equal(mine[numbers].signbit(), eager[numbers].signbit())


def test_the_measure_of_distance():
    one = torch.tensor([1.0, 0.0, -0.0, math.nan, math.nan])
    other = torch.tensor([1.0 + 2.0**-23, -0.0, 2.0**-149, math.nan, 1.0])
    assert ulps(one, other).tolist() == [1, 0, 1, 0, 2**62]
    assert wrong(one[:1], other[:1], None, True)
    assert not wrong(one[:1], other[:1], None, False)
