"""Reductions in generated kernels: every operator of the table, every geometry, what joins them.

Sums are compared with a float64 run: the error may be twice eager's own, or two roundings of the
result. Sums here are taken in another order than ATen's, so equal bits are not asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording")

Program = Callable[..., Any]
aten = torch.ops.aten

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def error(mine: Tensor, exact: Tensor) -> float:
    """Relative error in the L2 norm; of all elements that are finite, which must be the same."""
    mine, exact = mine.detach().cpu().double(), exact.detach().double()
    finite = exact.isfinite()
    assert torch.equal(mine.isfinite(), finite)
    assert torch.equal(mine[~finite].nan_to_num(), exact[~finite].nan_to_num())
    norm = exact[finite].norm()
    return float((mine[finite] - exact[finite]).norm() / norm) if norm > 0 else 0.0


def check(program: Program, *inputs: Tensor, launches: int | None = 1, stages: int = 1) -> None:
    """Runs `program(*inputs)` in float64, in eager and four times on the device; the last run's
    launches of kernels are counted (None: any number but none), on a GPU those of all `stages`."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    exact = as_tuple(program(*[x.clone() for x in wide]))
    eager = as_tuple(program(*[x.clone() for x in inputs]))
    for _ in range(4):
        moved = [x.to(helpers.DEVICE) for x in inputs]
        helpers.synchronize()
        with helpers.counting() as counted:
            mine = as_tuple(program(*moved))
            helpers.flush()
        for i, (a, b, c) in enumerate(zip(mine, exact, eager, strict=True)):
            assert a.dtype == c.dtype and a.shape == c.shape and a.stride() == c.stride()
            if not a.is_floating_point():
                assert torch.equal(a.cpu(), c), f"result {i}"
                continue
            allowed = max(2 * error(c, b), 2 * torch.finfo(a.dtype).eps)
            assert error(a, b) <= allowed, f"result {i}: {error(a, b):.2g} > {allowed:.2g}"
    if launches is None:
        assert counted["kernel_launches"] > 0
    else:
        launches *= stages if helpers.kernels_of_a_gpu() else 1
        assert counted["kernel_launches"] == launches


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return helpers.drawn(*shape, device="cpu", seed=seed).to(dtype)


# --- operators --------------------------------------------------------------------------------

_X = (6, 5, 37)


def _norm_inputs(*shape: int) -> tuple[Tensor, ...]:
    c = shape[1]
    return drawn(*shape), drawn(c, seed=1), drawn(c, seed=2), drawn(c, seed=3), drawn(c).abs()


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Any:
    out = aten.native_batch_norm(x, weight, bias, mean, var, True, 0.1, 1e-5)
    return (*out, mean, var)


def _batch_norm_plain(x: Tensor, *_: Tensor) -> Any:
    return aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)


def _batch_norm_backward(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Any:
    def backward(weight: Tensor | None, mask: list[bool]) -> Any:
        found = aten.native_batch_norm_backward(
            x * 2 + 1, x, weight, None, None, mean, var, True, 1e-5, mask
        )
        return [t for t, wanted in zip(found, mask, strict=True) if wanted]

    return (
        *backward(weight, [True] * 3),
        *backward(weight, [True, False, False]),
        *backward(None, [True, False, False]),
        *backward(weight, [False, True, True]),
    )


def _batch_norm_evaluated(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor
) -> Any:
    scaled = aten.native_batch_norm(x * 2, weight, bias, mean, var, False, 0.1, 1e-5)
    plain = aten.native_batch_norm(x * 2, None, None, mean, var, False, 0.1, 1e-5)
    return (*scaled, *plain)


def _batch_norm_evaluated_backward(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor
) -> Any:
    def backward(weight: Tensor | None, mask: list[bool]) -> Any:
        found = aten.native_batch_norm_backward(
            x * 2 + 1, x, weight, mean, var, None, None, False, 1e-5, mask
        )
        return [t for t, wanted in zip(found, mask, strict=True) if wanted]

    return (
        *backward(weight, [True] * 3),
        *backward(weight, [True, False, False]),
        *backward(None, [True, False, False]),
        *backward(weight, [False, True, True]),
    )


def _group_norm(groups: int, weighted: tuple[bool, bool]) -> Program:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        sizes = (x.shape[0], x.shape[1], x[0, 0].numel())
        w, b = (t if use else None for t, use in zip((weight, bias), weighted, strict=True))
        return aten.native_group_norm(x, w, b, *sizes, groups, 1e-5)

    return program


def _group_norm_backward(groups: int, mask: list[bool], weighted: bool = True) -> Program:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        sizes = (x.shape[0], x.shape[1], x[0, 0].numel())
        w, b = (weight, bias) if weighted else (None, None)
        out, mean, rstd = aten.native_group_norm(x, w, b, *sizes, groups, 1e-5)
        found = aten.native_group_norm_backward(out * 2 + 1, x, mean, rstd, w, *sizes, groups, mask)
        return tuple(t for t, wanted in zip(found, mask, strict=True) if wanted)

    return program


_GROUPED = [((4, 6, 7, 7), 3), ((4, 6, 7, 7), 1), ((4, 6, 9), 6), ((5, 8), 2), ((5, 8), 1)]


def _classes(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, targets of which every fourth is ignored, and the number of the others."""
    generator = torch.Generator().manual_seed(3)
    where = (shape[0], *shape[2:])
    target = torch.randint(shape[1], where, generator=generator)
    target.view(-1)[::4] = 1
    return drawn(*shape), target, (target != 1).sum().float()


def _nll_backward(op: Program, reduction: int) -> Program:
    def program(x: Tensor, target: Tensor, count: Tensor) -> Any:
        grad = x[:, 0] if reduction == 0 else x.sum()
        return op(grad, x, target, None, reduction, 1, count) * 2

    return program


def _layer_norm_backward(masks: list[bool]) -> Program:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        shape = list(weight.shape)
        out, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        found = aten.native_layer_norm_backward(
            out * 2 + x, x, shape, mean, rstd, weight, bias, masks
        )
        return tuple(t for t, wanted in zip(found, masks, strict=True) if wanted)

    return program


CALLS: dict[str, list[tuple[Program, tuple[Tensor, ...]]]] = {
    "aten::sum": [(torch.sum, (drawn(*_X),))],
    "aten::sum.dim_IntList": [
        (lambda x, d=d, k=k: x.sum(d, keepdim=k), (drawn(*_X),))
        for d in (0, 1, 2, -1, (0, 2), (1, 2), (0, 1), (0, 1, 2))
        for k in (True, False)
    ]
    + [(lambda x: x.sum(1, dtype=torch.float64), (drawn(*_X),))],
    "aten::mean": [(torch.mean, (drawn(*_X),))],
    "aten::mean.dim": [(lambda x, d=d: x.mean(d), (drawn(*_X),)) for d in (0, 1, 2, (0, 2))],
    "aten::amax": [(lambda x, d=d: x.amax(d), (drawn(*_X),)) for d in (0, 1, 2, (0, 2))],
    "aten::amin": [(lambda x, d=d: x.amin(d), (drawn(*_X),)) for d in (0, 1, 2, (0, 2))],
    "aten::linalg_vector_norm": [
        (lambda x, d=d: torch.linalg.vector_norm(x, 2, d), (drawn(*_X),)) for d in (None, 0, 2)
    ],
    "aten::mse_loss": [
        (lambda x, y, r=r: F.mse_loss(x, y, reduction=r), (drawn(*_X), drawn(*_X, seed=1)))
        for r in ("mean", "sum")
    ],
    **{
        f"aten::{loss.__name__}": [
            (lambda x, y, loss=loss, r=r: loss(x, y, r, 0.7) * 2, (drawn(*_X), drawn(*_X, seed=1)))
            for r in (0, 1, 2)
        ]
        for loss in (aten.smooth_l1_loss, aten.huber_loss)
    },
    "aten::_softmax": [(lambda x, d=d: x.softmax(d), (drawn(*_X) * 5,)) for d in (0, 1, 2)],
    "aten::_softmax_backward_data": [
        (lambda g, x, d=d: aten._softmax_backward_data(g, x.softmax(d), d, x.dtype), pair)
        for d in (0, 1, 2)
        for pair in [(drawn(*_X), drawn(*_X, seed=1))]
    ],
    "aten::_log_softmax": [(lambda x, d=d: x.log_softmax(d), (drawn(*_X) * 5,)) for d in (0, 1, 2)],
    "aten::_log_softmax_backward_data": [
        (lambda g, x, d=d: aten._log_softmax_backward_data(g, x.log_softmax(d), d, x.dtype), pair)
        for d in (0, 1, 2)
        for pair in [(drawn(*_X), drawn(*_X, seed=1))]
    ],
    "aten::native_layer_norm": [
        (lambda x, w, b: aten.native_layer_norm(x, list(w.shape), w, b, 1e-5), inputs)
        for inputs in [(drawn(*_X), drawn(37, seed=1), drawn(37, seed=2))]
    ]
    + [
        (lambda x, w, b: aten.native_layer_norm(x, list(w.shape), w, None, 1e-5), inputs)
        for inputs in [(drawn(*_X), drawn(5, 37, seed=1), drawn(5, 37, seed=2))]
    ]
    + [(lambda x: aten.native_layer_norm(x, [37], None, None, 1e-5), (drawn(*_X),))],
    "aten::native_layer_norm_backward": [
        (_layer_norm_backward(mask), (drawn(*_X), drawn(*shape, seed=1), drawn(*shape, seed=2)))
        for mask in ([True] * 3, [True, False, False], [False, True, True], [True, True, False])
        for shape in ((37,), (5, 37))
    ],
    "aten::native_batch_norm": [
        (program, _norm_inputs(*shape))
        for program in (_batch_norm, _batch_norm_plain, _batch_norm_evaluated)
        for shape in ((6, 5), (6, 5, 37), (4, 3, 7, 7), (2, 40, 3, 3))
    ],
    "aten::native_batch_norm_backward": [
        (program, _norm_inputs(*shape))
        for program in (_batch_norm_backward, _batch_norm_evaluated_backward)
        for shape in ((6, 5), (4, 3, 7, 7))
    ],
    "aten::native_group_norm": [
        (_group_norm(groups, weighted), _norm_inputs(*shape)[:3])
        for shape, groups in _GROUPED
        for weighted in ((True, True), (True, False), (False, False))
    ],
    "aten::native_group_norm_backward": [
        (_group_norm_backward(groups, mask), _norm_inputs(*shape)[:3])
        for shape, groups in _GROUPED
        for mask in ([True] * 3, [True, False, False], [False, True, True], [True, True, False])
    ]
    + [
        (_group_norm_backward(groups, [True, False, False], False), _norm_inputs(*shape)[:3])
        for shape, groups in _GROUPED
    ],
    "aten::nll_loss_backward": [
        (_nll_backward(aten.nll_loss_backward, reduction), _classes(23, 37))
        for reduction in (0, 1, 2)
    ],
    "aten::nll_loss2d_backward": [
        (_nll_backward(aten.nll_loss2d_backward, reduction), _classes(3, 5, 7, 18))
        for reduction in (0, 1, 2)
    ],
}


@pytest.fixture(scope="module")
def compiled_together() -> None:
    """The kernels of all operators."""

    def run(program: Program, inputs: tuple[Tensor, ...]) -> Any:
        return program(*[x.to(helpers.DEVICE) for x in inputs])

    helpers.compile_together(
        [functools.partial(run, *call) for calls in CALLS.values() for call in calls]
    )


@pytest.mark.usefixtures("compiled_together")
@pytest.mark.parametrize("name", CALLS)
def test_operator(name):
    for program, inputs in CALLS[name]:
        check(program, *inputs, launches=None)
        plan = helpers.extension().plan_data(torch.acc.current_device())
        alone = [step["nodes"][0] for step in plan["steps"] if step["kernel"] is None]
        assert name not in [plan["nodes"][node]["op"] for node in alone]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.sum(1),
        lambda x: x.mean(0),
        lambda x: x.amax(1),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: (x * 2).sum(1) + 1,
    ],
)
def test_half_types_are_summed_in_float32(program, dtype):
    check(program, drawn(40, 50, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8], ids=str)
def test_integers(dtype):
    x = (drawn(20, 33) * 3).to(torch.int64).remainder(7).to(dtype)
    check(lambda x: x.sum(1), x)
    check(lambda x: x.sum(0), x)
    if dtype in (torch.int64, torch.int32):
        check(lambda x: (x * 2).amax(1) - x.amin(1), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_extrema_of_rows_of_every_length(dtype):
    """What fills a vector behind the end of a row is none of them."""
    for n in range(2, 71):
        x = (drawn(3, n).abs() + 1).to(dtype)
        check(lambda x: ((x * 2).amax(1), (x * 2).amin(1), (-x).amax(1)), x, launches=None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_extrema_of_the_extreme_integers(dtype):
    info = torch.iinfo(dtype)
    for dim in (0, 1):
        for value in (info.min, info.max):
            x = torch.full((40, 41), value, dtype=dtype)
            check(lambda x, dim=dim: (x.clone() * 1).amax(dim), x)
            check(lambda x, dim=dim: (x.clone() * 1).amin(dim), x)


# --- geometry ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_every_length(dim):
    def program(*xs: Tensor) -> list[Tensor]:
        found = []
        for x in xs:
            found += [(x * 2).sum(dim) + 1, x.softmax(dim)]
            helpers.flush()
        return found

    inputs = []
    for n in range(1, 70, 3):
        inputs += [drawn(n, 3 + n % 5), drawn(3 + n % 7, n)]
    check(program, *inputs, launches=None)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 2),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "every second": lambda x: x[:, ::2, :, ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
    "last dimension first": lambda x: x.permute(3, 0, 1, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_through_a_view(name):
    view = VIEWS[name]

    def program(x: Tensor) -> list[Tensor]:
        y = view(x)
        return [(y * 2).sum((0, 2)), (y * 2).mean(3), y - y.amax((1, 2), keepdim=True), y.sum()]

    check(program, drawn(4, 6, 8, 34), launches=None)


def test_more_rows_than_one_thread_takes():
    x = drawn(3000, 77)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        check(lambda x: (x * 2).softmax(1), x)
        check(lambda x: (x * 2).sum(0), x, stages=2)


def test_the_sum_does_not_depend_on_threads():
    x = drawn(3000, 177).to(helpers.DEVICE)
    found = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        for _ in range(4):  # the last with kernels
            y = x * 2
            last = (y.sum(0), y.sum(1), y.mean())
            helpers.synchronize()
        found.append(last)
    helpers.assert_same(found[1], found[0])
    helpers.assert_same(found[2], found[0])


def test_long_sums_keep_their_digits():
    x = torch.full((3, 900_000), 0.1)
    check(lambda x: (x * 1).sum(1), x, stages=2)
    check(lambda x: (x * 1).sum(0), x.T.contiguous(), stages=2)


def gradients(program: Program, weighted: bool = False) -> Program:
    """Those of the input, and of a weight and a bias per column, for a gradient like the input."""

    def run(x: Tensor) -> Any:
        leaves = [x.detach().requires_grad_()]
        if weighted:
            columns = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
            leaves += [(columns * 0.5**k).sin().requires_grad_() for k in range(2)]
        out = program(*leaves)
        return torch.autograd.grad(out, leaves, x.detach().roll(1, 0).view(out.shape))

    return run


ACCURATE: dict[str, Program] = {
    "sum": lambda x: [x.sum(0), x.sum(1), x.view(-1, 8, x.shape[1]).sum((0, 2)), x.sum()],
    "mean": lambda x: [x.mean(0), x.mean(1)],
    "norm": lambda x: [torch.linalg.vector_norm(x, 2, dim) for dim in (0, 1)],
    "variance": lambda x: [(x - x.mean(dim, True)).square().mean(dim) for dim in (0, 1)],
    "mean square error": lambda x: [F.mse_loss(x, x.roll(1, 0))],
    "softmax": lambda x: [x.softmax(0), x.softmax(1)],
    "log-softmax": lambda x: [x.log_softmax(0), x.log_softmax(1)],
    "layer norm": lambda x: [F.layer_norm(x, x.shape[1:])],
    "RMS norm": lambda x: [F.rms_norm(x, x.shape[1:])],
    "group norm": lambda x: [F.group_norm(x.view(-1, 4, 16), 2)],
    "batch norm": lambda x: [F.batch_norm(x, None, None, training=True)],
    "gradient of softmax": gradients(lambda x: x.softmax(1)),
    "gradient of log-softmax": gradients(lambda x: x.log_softmax(1)),
    "gradients of layer norm": gradients(lambda x, w, b: F.layer_norm(x, w.shape, w, b), True),
    "gradients of RMS norm": gradients(lambda x, w, b: F.rms_norm(x, w.shape, w) + b, True),
    "gradients of batch norm": gradients(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), True
    ),
    "gradients of group norm": gradients(lambda x, w, b: F.group_norm(x, 2, w, b), True),
}


# Minutes on the emulator of GPUs.
many_sums = pytest.mark.skipif(helpers.EMULATED and not helpers.FULL, reason="make test-full")


@many_sums
@pytest.mark.parametrize("name", ACCURATE)
def test_at_least_as_accurate_as_aten(name):
    """In the root mean square over eight draws. Gradients may have one and a half epsilons of
    their own, since what stands around their sums is written in another order.
    """
    program = ACCURATE[name]
    eps = 1.5 * torch.finfo(torch.float32).eps if name.startswith("gradient") else 0.0
    for shape in ((304, 1000), (4096, 64), (64, 4096)):
        found = []
        for seed in range(8):
            x = drawn(*shape, seed=seed) + seed % 2
            exact, eager = program(x.double()), program(x)
            moved = x.to(helpers.DEVICE)
            for _ in range(4):
                mine = program(moved)
                helpers.synchronize()
            found.append(
                [
                    (error(a, b) ** 2, error(c, b) ** 2)
                    for a, b, c in zip(mine, exact, eager, strict=True)
                ]
            )
        for i, draws in enumerate(zip(*found, strict=True)):
            ours, atens = (sum(squares) for squares in zip(*draws, strict=True))
            assert 0 < ours <= max(atens, 8 * eps**2), f"result {i} of {shape}"


@many_sums
def test_sums_of_float64_are_at_least_as_accurate_as_atens():
    generator = torch.Generator().manual_seed(3)
    for rows, columns, dim in ((1 << 16, 64, 0), (8, 1 << 18, 1), (1 << 18, 8, 0)):
        x = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
        sums = [math.fsum(kept) for kept in x.movedim(dim, 1).tolist()]
        exact = torch.tensor(sums, dtype=torch.float64)
        moved = x.to(helpers.DEVICE)
        for _ in range(4):
            with helpers.counting() as counted:
                mine = [(moved * 1).sum(dim), (moved * 1).mean(dim)]
                helpers.flush()
        assert counted["kernel_launches"] > 0
        assert 0 < error(mine[0], exact) <= error(x.sum(dim), exact)
        assert error(mine[1], exact / x.shape[dim]) <= error(x.mean(dim), exact / x.shape[dim])


# --- special values ---------------------------------------------------------------------------


def test_nan_and_infinity_go_through():
    x = drawn(9, 50)
    x[1, 3] = torch.nan
    x[2, 4] = torch.inf
    x[3, 5] = -torch.inf
    x[4, :] = -torch.inf
    reductions = (lambda x: x.amax(1), lambda x: x.amin(1), lambda x: x.sum(1), lambda x: x.amax(0))
    for program in (*reductions, lambda x: x.softmax(1), lambda x: x.log_softmax(1)):
        check(program, x)
    for program in (*reductions, lambda x: x.sum(0)):
        check(program, x.double())


# --- what is joined ---------------------------------------------------------------------------

JOINED: dict[str, tuple[Program, tuple[tuple[int, ...], ...]]] = {
    "before and behind": (lambda x: ((x * 2 + 1).sum(1) * 3).relu(), ((20, 50),)),
    "centred": (lambda x: x - x.mean(1, keepdim=True), ((20, 50),)),
    "standardised": (
        lambda x: (
            (x - x.mean(1, keepdim=True))
            * ((x - x.mean(1, keepdim=True)).pow(2).mean(1, keepdim=True) + 1e-5).rsqrt()
        ),
        ((20, 50),),
    ),
    "softmax by hand": (
        lambda x: (
            (x - x.amax(1, keepdim=True)).exp()
            / (x - x.amax(1, keepdim=True)).exp().sum(1, keepdim=True)
        ),
        ((20, 50),),
    ),
    "RMS norm by hand": (
        lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * w,
        ((4, 5, 33), (33,)),
    ),
    "columns": (lambda x: x * 2 - (x * 2).mean(0), ((20, 50),)),
    "in place behind the sum": (
        lambda x: x.clone().sub_(x.sum(1, keepdim=True)).mul_(2),
        ((20, 50),),
    ),
    "channels": (lambda x, b: (x + b.view(1, -1, 1)).mean((0, 2)), ((4, 6, 20), (6,))),
    "two sums of one product": (lambda x: (x * x).sum(1) / x.sum(1), ((20, 50),)),
    "loss": (lambda x, y: (x * 2 - y).pow(2).mean(), ((20, 50), (20, 50))),
}


@pytest.mark.parametrize("name", JOINED)
def test_is_one_kernel(name):
    program, shapes = JOINED[name]
    check(program, *[drawn(*shape, seed=i) for i, shape in enumerate(shapes)])


def test_sums_over_different_dimensions_are_two_kernels():
    check(lambda x: ((x * 2).sum(0), (x * 2).sum(1)), drawn(20, 50), launches=2)


FIXED = drawn(4, 6, 9, 9, seed=7)


def trained(program: Program, *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = program(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach() * 2 + 1)]


@pytest.mark.parametrize(
    ("name", "program", "shapes", "launches"),
    [
        (
            "batch norm and ReLU",
            lambda x, w, b: F.batch_norm(x * 2, None, None, w, b, True).relu(),
            ((4, 6, 9, 9), (6,), (6,)),
            1,
        ),
        (
            "batch norm, residual and ReLU",
            lambda x, w, b, r: (F.batch_norm(x * 2, None, None, w, b, True) + r).relu(),
            ((4, 6, 9, 9), (6,), (6,), (4, 6, 9, 9)),
            1,
        ),
        # The second kernel sums over rows: the gradients of weight and bias.
        ("layer norm", lambda x, w, b: F.layer_norm(x, (50,), w, b), ((20, 50), (50,), (50,)), 2),
        ("RMS norm", lambda x, w: F.rms_norm(x, (50,), w), ((20, 50), (50,)), 2),
        ("softmax", lambda x, w: (x * w).softmax(-1), ((20, 50), (20, 50)), 1),
        ("log-softmax", lambda x: x.log_softmax(1), ((20, 50),), 1),
        ("log-softmax of one class", lambda x: x.log_softmax(1)[:, 3], ((20, 50),), None),
        (
            "batch norm outside of training",
            lambda x, w, b: F.batch_norm(x * 2, w.detach() * 0, b.detach().abs() + 1, w, b).relu(),
            ((4, 6, 9, 9), (6,), (6,)),
            1,
        ),
        # The second kernel sums over samples: the gradients of weight and bias.
        (
            "group norm and ReLU",
            lambda x, w, b: F.group_norm(x * 2, 3, w, b).relu(),
            ((4, 6, 9, 9), (6,), (6,)),
            2,
        ),
        ("instance norm", lambda x: F.instance_norm(x * 2).relu(), ((4, 6, 9, 9),), 1),
        (
            "batch norm without weights",
            lambda x: F.batch_norm(x * 2, None, None, None, None, True).relu(),
            ((4, 6, 9, 9),),
            1,
        ),
        (
            "batch norm with frozen weights",
            lambda x, w, b: (
                F.batch_norm(x * 2, None, None, w.detach(), b.detach(), True).relu()
                * w.view(6, 1, 1)
                + b.view(6, 1, 1)
            ),
            ((4, 6, 9, 9), (6,), (6,)),
            1,
        ),
        (
            "batch norm of an input without a gradient",
            lambda w, b: F.batch_norm(FIXED.to(w) * 2, None, None, w, b, True).relu(),
            ((6,), (6,)),
            1,
        ),
        (
            "the same outside of training",
            lambda w, b: F.batch_norm(
                FIXED.to(w) * 2, w.detach() * 0, b.detach().abs() + 1, w, b
            ).relu(),
            ((6,), (6,)),
            1,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_forward_and_backward(name, program, shapes, launches):
    inputs = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    check(lambda *xs: trained(program, *xs), *inputs, launches=launches)


def test_a_bias_without_a_weight():
    x, bias, mean = drawn(4, 3, 5, 5), drawn(3, seed=1), drawn(3, seed=2)

    def program(x: Tensor, bias: Tensor, mean: Tensor) -> list[Tensor]:
        return [
            F.batch_norm(x * 2, mean, mean.abs() + 1, None, bias).relu(),
            F.batch_norm(x * 2, None, None, None, bias, True).relu(),
            F.batch_norm(x * 2, mean.clone(), mean.abs() + 1, None, bias, True).relu(),
            F.instance_norm(x * 2, None, None, None, bias).relu(),
            F.group_norm(x * 2, 3, None, bias).relu(),
            F.layer_norm(x * 2, (3, 5, 5), None, bias.view(3, 1, 1).expand(3, 5, 5)).relu(),
        ]

    check(program, x, bias, mean, launches=None)


def test_sums_beside_operands_with_strides(recwarn):
    """The names of both count from 0 in the text of a kernel."""

    def program(*xs: Tensor) -> list[Tensor]:
        product = torch.ones_like(xs[0])
        made = []
        for x in xs:
            product = product * (x[:, ::2] if x.shape[1] == 128 else x)
            made.append(product.sum(1))
        return made

    for strided in range(1, 6):
        check(program, *[drawn(8, 128 if i == strided else 64, seed=i) for i in range(6)])
    assert not [str(w.message) for w in recwarn if "compiler" in str(w.message)]


# --- classes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(20, 50), (3, 21, 5, 40)], ids=str)
def test_cross_entropy_does_not_write_the_gradient_of_the_loss(shape, reduction):
    """Forward is the log-softmax and a library call, backward one kernel."""
    x, target, _ = _classes(*shape)

    def program(x: Tensor, target: Tensor) -> list[Tensor]:
        leaf = (x * 2).detach().requires_grad_()
        loss = F.cross_entropy(leaf, target, ignore_index=1, reduction=reduction)
        helpers.flush()
        return [loss.detach(), *torch.autograd.grad(loss.sum(), leaf)]

    check(program, x, target, launches=2)


@pytest.mark.usefixtures("outlives_wrong_data")
def test_a_target_that_is_no_class_is_an_error():
    x, target, _ = _classes(20, 50)
    target[7] = 50
    for _ in range(4):
        leaf = x.to(helpers.DEVICE).requires_grad_()
        with pytest.raises(IndexError, match="Target 50 is out of bounds"):
            F.cross_entropy(leaf, target.to(helpers.DEVICE)).backward()
            helpers.synchronize()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_targets_are_ignored(reduction):
    """Their mean is not a number, and their gradient zero."""
    x = drawn(20, 50)
    target = torch.full((20,), 7)

    def program(x: Tensor, target: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        loss = F.cross_entropy(leaf, target, ignore_index=7, reduction=reduction)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), leaf)]

    check(program, x, target, launches=None)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(20, 50), (20, 1), (3, 5, 4, 6), (3, 5, 7)], ids=str)
def test_cross_entropy_of_every_type(shape, dtype):
    x, target, _ = _classes(*shape)

    def program(x: Tensor, target: Tensor) -> list[Tensor]:
        leaf = (x * 2).detach().requires_grad_()
        loss = F.nll_loss(leaf, target)
        return [loss.detach(), *(g * 2 for g in torch.autograd.grad(loss, leaf))]

    if shape[1] == 1:
        target.zero_()
    check(program, x.to(dtype), target, launches=None)


@pytest.mark.parametrize("shape", [(3, 8, 1, 1), (3, 8, 5, 5), (1, 8, 5, 5)], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_group_norm_of_channels_last(shape, frozen):
    """ATen's backward of such images without their gradient ends the process."""

    def program(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        image = (x * 2).to(memory_format=torch.channels_last).detach().requires_grad_()
        leaves = (
            [image] if frozen else [image, *(t.detach().requires_grad_() for t in (weight, bias))]
        )
        given = (weight, bias) if frozen else leaves[1:]
        out = F.group_norm(image, 4, *given).relu()
        return [g.flatten() for g in torch.autograd.grad(out.square().sum(), leaves)]

    check(program, drawn(*shape), drawn(8, seed=1), drawn(8, seed=2), launches=None)


# --- memory that is read and written ----------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 7), (64, 48), (300, 1000)], ids=str)
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.softmax(1) * x,
        lambda x: x.clone().mul_(x.softmax(1)),
        lambda x: (x.exp().sum(1, keepdim=True) * x + x.exp(), (x * x.exp()).sum(1)),
        lambda x: (x.tanh() * x.sigmoid().mean(1, keepdim=True), x.sigmoid() * x.amax(1, True)),
    ],
)
def test_functions_that_wait_in_a_result_leave_the_operands_alone(program, shape):
    def changed(x: Tensor) -> Any:
        x = x * 2
        helpers.flush()
        return program(x)

    check(changed, drawn(*shape), launches=None)
    in_place = drawn(*shape)

    def over_itself(x: Tensor) -> Tensor:
        x = x.clone()
        helpers.flush()
        return x.mul_(x.softmax(1))

    check(over_itself, in_place, launches=None)


def test_memory_that_a_later_pass_reads_is_written_last():
    def program(x: Tensor) -> list[Tensor]:
        x = x.clone()
        helpers.flush()
        first = x.sum(1, keepdim=True)
        x.sub_(first)
        second = x.abs().sum(1, keepdim=True)
        x.div_(second)
        return [x, first, second]

    check(program, drawn(20, 50), launches=None)


def test_what_was_read_before_it_was_overwritten():
    def program(x: Tensor) -> list[Tensor]:
        x = x.clone()
        helpers.flush()
        y = x * 2
        mean = y.mean(1, keepdim=True)
        x.copy_(mean.expand_as(x))
        return [x, y - mean]

    check(program, drawn(20, 50), launches=None)


def test_running_statistics_are_written_once():
    def program(x: Tensor, mean: Tensor, var: Tensor) -> list[Tensor]:
        mean, var = mean.clone(), var.clone()
        for _ in range(3):
            F.batch_norm(x * 2, mean, var, None, None, True)
        return [mean, var]

    check(program, drawn(8, 6, 20), drawn(6), drawn(6).abs(), launches=None)
