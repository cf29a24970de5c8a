"""Result geometry of common operators is known without PyTorch's Python kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests import helpers
from tests.helpers import DEVICE, drawn, run_python

pytestmark = pytest.mark.usefixtures("acc_only")

# What imports it, or torch._dynamo, takes 0.3 to 0.9 s. (torch.optim imports both by itself.)
NO_ALGEBRA = """
import sys
import torch.nn as nn
import torch.nn.functional as F

def ended(what):
    torch.acc.synchronize()
    assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules, what

def train(net, x, loss):
    net = net.to(DEVICE)
    loss(net(x.to(DEVICE))).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
            assert parameter.cpu().isfinite().all().item()
    net.zero_grad(set_to_none=False)

classes = torch.tensor([1, 0, 3, 2] * 2).to(DEVICE)
train(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(), nn.Linear(32, 4),
                    nn.ReLU(), nn.Softmax(-1)), torch.ones(8, 16), lambda y: y.square().mean())
ended("perceptron")
train(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2),
                    nn.ConvTranspose2d(8, 8, 2), nn.GroupNorm(2, 8), nn.Hardswish(),
                    nn.Upsample(scale_factor=2), nn.AvgPool2d(2), nn.LeakyReLU(),
                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
      torch.rand(8, 3, 16, 16), lambda y: F.cross_entropy(y, classes))
ended("convolutions")
train(nn.Sequential(nn.Embedding(8, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)),
      torch.tensor([[1, 2, 3], [4, 5, 6]]), lambda y: F.mse_loss(y, torch.zeros_like(y)))
ended("attention")
train(nn.Linear(4, 1), torch.rand(8, 4),
      lambda y: F.binary_cross_entropy_with_logits(y, (y > 0).float()))
ended("losses")

x = torch.rand(4, 6).to(DEVICE)
y = (x.abs() * 2 + 1).sqrt().log() - x.mean(1, keepdim=True) / 3
y = y + (1 - y.detach()).clamp(-1, 1)
y.add_(1).mul_(2).div_(3).neg_().exp_().clamp_(min=0)
y = torch.where(y > 1, y, 0.0).masked_fill(y == 2, 1.0)
y = torch.cat([y, torch.stack([x[0], x[1]])]).cumsum(0).triu().flip(0).roll(1, 0).repeat(2, 1)
x[x > 0.5] = 1.0
x[:, 1] = x[0, 0]
torch.mul(x, 2, out=torch.empty_like(x))
(y.std(), y.var(0), y.norm(), y.logsumexp(1), y.isnan().any(), y.isfinite().all(), y.argmax(1))
(y.sort(), y.topk(2), y.amax(0), y % 2, y // 2, ~(y > 0) & (y < 1), y.reciprocal(), y.round())
(torch.arange(0, 4, device=DEVICE), F.one_hot(classes, 4), y.gather(1, torch.zeros_like(y).long()))
nn.init.trunc_normal_(y)
ended("operators")
"""


def test_a_first_step_imports_no_symbolic_algebra() -> None:
    run_python(NO_ALGEBRA, fresh=True)


SHAPES = [((3, 1, 4), (2, 1)), ((2, 3), (3,)), ((), (2,)), ((0, 3), (1, 3)), ((4, 1), (1, 5))]
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.int64),
    (torch.int32, torch.bool),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.complex64),
]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("types", PAIRS, ids=str)
def test_binary_operators_promise_what_eager_makes(
    name: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    for left, right in SHAPES:
        a = torch.ones(left, dtype=types[0])
        b = torch.ones(right, dtype=types[1])
        if name == "sub" and torch.bool in types:
            continue
        expected = getattr(torch, name)(a.mT if a.dim() > 1 else a, 3)
        made = getattr(torch, name)(a.to(DEVICE).mT if a.dim() > 1 else a.to(DEVICE), 3)
        assert (made.shape, made.stride(), made.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        expected = getattr(torch, name)(a, b)
        made = getattr(torch, name)(a.to(DEVICE), b.to(DEVICE))
        assert (made.shape, made.stride(), made.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        assert torch.equal(made.cpu(), expected)


def test_layer_norm_promises_what_eager_makes(unfused: None) -> None:
    for shape, dims in [((2, 3, 4), (4,)), ((2, 3, 4), (3, 4)), ((0, 4), (4,)), ((4,), (4,))]:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = torch.randn(shape, dtype=dtype)
            for view in (x, x.mT.contiguous().mT if x.dim() > 1 else x):
                expected = torch.native_layer_norm(view, dims, None, None, 1e-5)
                made = torch.native_layer_norm(view.to(DEVICE), dims, None, None, 1e-5)
                for a, b in zip(made, expected, strict=True):
                    assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                    assert torch.equal(a.cpu(), b)


def test_wrong_arguments_say_so_at_the_line() -> None:
    x = torch.ones(2, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match="must match the size"):
        x + torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match="normalized_shape"):
        torch.nn.functional.layer_norm(x, (4,))


MIXED = [
    (torch.int64, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bool, torch.float32),
    (torch.float32, torch.complex64),
    (torch.int64, torch.int64),
    (torch.bool, torch.bool),
    (torch.float32, torch.float32),
]
OF_TWO = ["add", "div", "eq", "logical_and", "remainder", "copysign", "xlogy", "heaviside"]
OF_TWO += ["complex", "polar", "floor_divide", "ldexp"]
TYPES_REFUSED = ["heaviside", "logaddexp", "remainder", "copysign", "xlogy", "complex", "polar"]
TYPES_REFUSED += ["floor_divide"]
CALLS = {
    "where": lambda a, b: torch.where(a > 0, a, b),
    "add out": lambda a, b: torch.add(
        a, b, out=torch.empty(0, dtype=torch.result_type(a, b), device=a.device)
    ),
    "eq out": lambda a, b: torch.eq(a, b, out=torch.empty(0, device=a.device)),
}


@pytest.mark.parametrize("types", MIXED, ids=str)
@pytest.mark.parametrize("name", [*OF_TWO, *CALLS, "logaddexp"])
def test_expanded_operands_of_two_types_promise_what_eager_makes(
    name: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    # The CPU's iterator copies the operand that is of another type, which lays it out anew.
    function = CALLS[name] if name in CALLS else getattr(torch, name)
    compared = 0
    for order_a in itertools.permutations(range(3)):
        for order_b in itertools.permutations(range(3)):
            for expand in range(3):
                left = (torch.rand(3, 3, 3) * 3 + 1).to(types[0])
                right = (torch.rand(3, 3, 3) * 3 + 1).to(types[1])

                def run(device: str) -> torch.Tensor:
                    a = left.to(device).permute(order_a)
                    b = right.to(device).permute(order_b)
                    if expand == 1:
                        a = a[:, :1].expand(3, 3, 3)
                    if expand == 2:
                        b = b[:1].expand(3, 3, 3)
                    return function(a, b)

                try:
                    expected = run("cpu")
                except RuntimeError:
                    with pytest.raises(RuntimeError):
                        run(DEVICE)
                    continue
                made = run(DEVICE)
                assert made.stride() == expected.stride(), (order_a, order_b, expand)
                assert torch.equal(made.cpu().nan_to_num(), expected.nan_to_num())
                compared += 1
    assert compared in (0, 108)
    assert compared or name in TYPES_REFUSED


SCATTERS = {
    "select": lambda x: x.select_scatter(torch.ones(3).to(x.device), 0, 1),
    "slice": lambda x: x.slice_scatter(torch.ones(1, 3).to(x.device), 0, 0, 1),
    "diagonal": lambda x: x.diagonal_scatter(torch.ones(3).to(x.device)),
    "as_strided": lambda x: x.as_strided_scatter(torch.ones(2).to(x.device), (2,), (2,)),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_scattering_into_what_is_expanded_or_has_gaps(name: str) -> None:
    bases = {
        "one element": lambda x: x[:1, :1].expand(3, 3),
        "rows": lambda x: x[:1].expand(3, 3),
        "columns": lambda x: x[:, :1].expand(3, 3),
        "transposed": lambda x: x[:3].t(),
        "gaps": lambda x: x[::2],
    }
    for base, view in bases.items():
        x = torch.arange(18.0).reshape(6, 3)
        if base == "columns":
            x = x[:3].clone()
        expected = SCATTERS[name](view(x))
        made = SCATTERS[name](view(x.to(DEVICE)))
        assert made.stride() == expected.stride(), base
        assert torch.equal(made.cpu(), expected), base
    gradients = []
    for device in (DEVICE, "cpu"):
        leaf = torch.ones(3, 3, device=device, requires_grad=True)
        SCATTERS[name](leaf).sum().backward()  # the gradient that comes is expanded
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0].cpu(), gradients[1])


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_over_one_dimension_in_any_layout(transposed: bool) -> None:
    convolve = F.conv_transpose1d if transposed else F.conv1d
    for turned in itertools.product((False, True), repeat=2):
        for length, kernel, channels in ((9, 3, 16), (9, 1, 16), (9, 3, 1)):
            x = torch.randn(2, channels, length)
            weight = torch.randn(*((channels, 4) if transposed else (4, channels)), kernel)
            results = []
            for device in ("cpu", DEVICE):
                leaves = []
                for t, turn in zip((x, weight), turned, strict=True):
                    t = t.transpose(1, 2).contiguous().transpose(1, 2) if turn else t
                    leaves.append(t.to(device).requires_grad_())
                y = convolve(*leaves)
                results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
            for expected, made in zip(*results, strict=True):
                assert made.stride() == expected.stride(), (turned, length, kernel, channels)
                assert torch.equal(made.cpu(), expected)


def test_out_arguments_that_the_meta_kernel_does_not_resize() -> None:
    def split(device: str) -> list[torch.Tensor]:
        out = [torch.empty(0, device=device) for _ in range(2)]
        torch.split_with_sizes_copy(torch.ones(3, 3, device=device), [1, 2], out=out)
        return out

    def unbind(device: str) -> list[torch.Tensor]:
        out = [torch.empty(0, device=device) for _ in range(3)]
        torch.unbind_copy(torch.ones(3, 3, device=device), out=out)
        return out

    def frexp(device: str) -> list[torch.Tensor]:
        out = torch.empty(0, device=device), torch.empty(0, dtype=torch.int32, device=device)
        return list(torch.frexp(torch.tensor(3.0, device=device), out=out))

    def ldexp(device: str) -> list[torch.Tensor]:
        exponent = torch.tensor(2.0, dtype=torch.half, device=device)
        return [torch.ldexp(torch.tensor([3, 1], device=device), exponent)]

    def angle(device: str) -> list[torch.Tensor]:
        return [torch.ones(4, 3, dtype=torch.cfloat, device=device).t().angle()]

    for function in (split, unbind, frexp, ldexp, angle):
        for made, expected in zip(function(DEVICE), function("cpu"), strict=True):
            assert made.stride() == expected.stride() and made.dtype == expected.dtype
            assert torch.equal(made.cpu(), expected)


@pytest.mark.parametrize(
    "shape", [(1, 16, 11, 11), (2, 16, 1, 1), (3, 1, 4, 4), (1, 3, 2, 4, 4), (1, 4, 9), (4, 6)]
)
def test_batch_norm_has_the_strides_of_eager(shape):
    """In every order of dimensions, and where the stride of a dimension of one element says
    nothing."""

    def strides(device: str) -> list[tuple[int, ...]]:
        found = []
        for order in itertools.permutations(range(len(shape))):
            x = drawn(*[shape[i] for i in order], device=device)
            x = x.permute([order.index(i) for i in range(len(shape))])
            for batch in {x.stride()[0], 16} if shape[0] == 1 else {x.stride()[0]}:
                image = x.as_strided(shape, (batch, *x.stride()[1:]))
                found.append(F.batch_norm(image, None, None, training=True).stride())
        return found

    assert strides(DEVICE) == strides("cpu")


@pytest.mark.parametrize("shape", [(6, 1), (1, 6), (1,), (1, 1), (5, 1, 3), (2, 0, 1)], ids=str)
def test_norms_over_single_elements(shape):
    x = drawn(*shape, device="cpu")
    for dim in [*range(-len(shape), len(shape)), tuple(range(-len(shape), 0))]:
        for keepdim in (False, True):
            expected = torch.linalg.vector_norm(x, 2, dim, keepdim)
            made = torch.linalg.vector_norm(x.to(DEVICE), 2, dim, keepdim)
            assert made.shape == expected.shape
            torch.testing.assert_close(made.cpu(), expected)


@pytest.mark.parametrize("shape", [(9, 1), (1, 3, 5), (3, 4, 2), (3, 0)], ids=str)
def test_flipped_tensors_keep_their_order(shape):
    whole = drawn(*shape, device="cpu")
    turned = drawn(*shape[::-1], device="cpu").permute(*range(len(shape))[::-1])
    for x in (whole, turned, whole[::2][:1], whole.expand(2, *shape)):
        expected = x.flip(0)
        made = x.to(DEVICE).flip(0)
        assert (made.shape, made.stride()) == (expected.shape, expected.stride())
        assert torch.equal(made.cpu(), expected)


def test_losses_check_their_numbers_at_each_call():
    x, y = (drawn(9, device=DEVICE, seed=seed) for seed in (0, 1))
    for loss, name, wrong in ((F.huber_loss, "delta", 0.0), (F.smooth_l1_loss, "beta", -1.0)):
        for _ in range(3):
            loss(x, y, **{name: 1.0}).item()
        with pytest.raises(RuntimeError, match=f"{name}"):
            loss(x, y, **{name: wrong}).item()


def channels_last(*shape: int) -> torch.Tensor:
    return torch.rand(shape).to(memory_format=torch.channels_last)


# What is told without Python, where it is easily told wrongly.
LAYOUTS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]] = {
    "arange of large integers": lambda to: torch.arange(
        10**18, 10**18 + 5, device=to(torch.ones(())).device
    ),
    "arange beyond 2^53": lambda to: torch.arange(
        2**53, 2**53 + 3, device=to(torch.ones(())).device
    ),
    "arange of floats": lambda to: torch.arange(0, 1, 0.1, device=to(torch.ones(())).device),
    "arange downwards": lambda to: torch.arange(7, 0, -3, device=to(torch.ones(())).device),
    "arange into a matrix": lambda to: torch.arange(6, out=to(torch.zeros(2, 3).long())),
    "zeros in place of values": lambda to: torch.ops.aten.zero(
        to(torch.rand(4, 2, 3).permute(1, 2, 0))
    ),
    "roll of no elements": lambda to: to(torch.zeros(0, 3).t()).roll(1, 0),
    "roll in two directions": lambda to: to(channels_last(2, 3, 4, 5)).roll((1, 1), (2, 3)),
    "roll of everything": lambda to: to(channels_last(2, 3, 4, 5)).roll(3),
    "roll by nothing": lambda to: to(channels_last(2, 3, 4, 5)).roll(5, 3),
    "flip of a slice": lambda to: to(torch.rand(4, 6))[:, ::2].flip(0),
    "stack along a new last dimension": lambda to: torch.stack([to(torch.rand(3, 4).t())] * 2, 2),
    "stack of channels last": lambda to: torch.stack([to(channels_last(2, 3, 4, 5))] * 2, 1),
    "masked fill": lambda to: to(torch.rand(3, 4).t()).masked_fill(to(torch.rand(2, 4, 3)) > 2, 1),
    "where": lambda to: torch.where(to(torch.rand(4, 3).t()) > 0.5, to(torch.rand(4, 3).t()), 0.0),
    "repeat": lambda to: to(torch.rand(3, 4).t()).repeat(2, 1, 3),
    "deviation": lambda to: to(channels_last(2, 3, 4, 5)).std((1, 3)),
    "gradient of dropout": lambda to: torch.ops.aten.native_dropout_backward(
        to(torch.ones(3, 4).t()), to(torch.ones(4, 3)).bool(), 2.0
    ),
    "gradient of group norm": lambda to: torch.ops.aten.native_group_norm_backward(
        to(channels_last(2, 4, 3, 5)),
        to(channels_last(2, 4, 3, 5)),
        to(torch.ones(2, 2)),
        to(torch.ones(2, 2)),
        to(torch.ones(4)),
        2,
        4,
        15,
        2,
        [True, True, True],
    )[0],
    "quotient that is rounded down": lambda to: to(torch.arange(5)) // 2,
    "difference to a number": lambda to: 1.5 - to(torch.arange(5)),
    "in-place by the functional form": lambda to: to(torch.rand(3, 4).t()).reciprocal_().pow_(2),
    "comparison in place": lambda to: to(torch.rand(3, 4)).gt_(0.5),
    "out of another type": lambda to: torch.mul(
        to(torch.rand(3)), 2, out=to(torch.zeros(3).double())
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_those_of_eager(name: str) -> None:
    torch.manual_seed(1)
    expected = LAYOUTS[name](lambda tensor: tensor)
    torch.manual_seed(1)
    made = LAYOUTS[name](lambda tensor: helpers.clone_to(tensor, DEVICE))
    assert (made.shape, made.stride(), made.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )
    torch.testing.assert_close(made.cpu(), expected)
