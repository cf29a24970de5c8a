"""Large products are made by what is faster on this machine; values and settings are eager's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

ROWS, TERMS, COLUMNS = 512, 384, 256


@pytest.fixture
def faster(device: str) -> None:
    """For tests of the other products themselves: skips where ATen's are taken."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("acc::linear", "CPU"):
        pytest.skip("no library is known to multiply faster than ATen on this processor")


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operators() -> Counter[str]:
    """The operators of the last plan."""
    plan = helpers.extension().plan_data(torch.acc.current_device())
    return Counter(node["op"] for node in plan["nodes"])


def run(program: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The result of the third run on the device, whose plan is fused, and eager's."""
    for _ in range(3):
        moved = [each.to(helpers.DEVICE) for each in inputs]
        helpers.flush()
        made = program(*moved)
        helpers.flush()
    return made, program(*inputs)


@pytest.mark.parametrize("alpha", [1, 2.0, 0.0])
def test_a_product_that_is_added_with_a_factor(device, alpha):
    """0 times infinity is no number, which a product that accumulates would not say."""
    infinite = torch.full((4, 4), torch.inf)
    made, expected = run(
        lambda s, a, b: torch.add(s, a @ b, alpha=alpha), normal(4, 4), infinite, torch.ones(4, 4)
    )
    assert torch.equal(made.cpu(), expected) or (made.isnan().all() and expected.isnan().all())


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "mm": (torch.mm, (ROWS, TERMS), (TERMS, COLUMNS)),
    "transposed right": (lambda a, b: a @ b.t(), (ROWS, TERMS), (COLUMNS, TERMS)),
    "rows from 1": (lambda a, b: a[1:] @ b, (ROWS, TERMS), (TERMS, COLUMNS)),
    "columns apart": (lambda a, b: a @ b[:, :COLUMNS], (ROWS, TERMS), (TERMS, 2 * COLUMNS)),
    "read and changed": (lambda a, b: (a @ b).mul_(2), (ROWS, TERMS), (TERMS, COLUMNS)),
}


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("name", PRODUCTS)
def test_values(faster, name):
    program, left, right = PRODUCTS[name]
    made, expected = run(program, normal(*left), normal(*right, seed=2))
    torch.testing.assert_close(made.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert made.stride() == expected.stride()
    assert operators()["acc::linear"] == 1


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_trains(faster, bias):
    """Its gradients are those of a double precision layer as nearly as eager's are."""
    layers, gradients = {}, {}
    for kind in ("exact", "eager", helpers.DEVICE):
        torch.manual_seed(3)
        layer = nn.Linear(TERMS, COLUMNS, bias=bias)
        layers[kind] = layer.double() if kind == "exact" else layer
        device = helpers.DEVICE if kind == helpers.DEVICE else "cpu"
        layer.to(device)
        x = normal(ROWS, TERMS).to(device, layer.weight.dtype).requires_grad_()
        for _ in range(3):
            layer.zero_grad()
            x.grad = None
            layer(x).square().mean().backward()
            helpers.flush()
        gradients[kind] = [x.grad, *(p.grad for p in layer.parameters())]
    found = operators()
    assert (found["acc::linear"], found["aten::mm"] + found["aten::addmm"]) == (2, 1)
    for exact, eager, mine in zip(*gradients.values(), strict=True):
        error = (eager - exact).norm()
        assert (mine.cpu() - exact).norm() <= 2 * error


@pytest.mark.usefixtures("recording")
def test_small_products_are_atens(device):
    run(torch.mm, normal(64, 64), normal(64, 64))
    assert operators()["aten::mm"] == 1


@pytest.mark.usefixtures("recording")
def test_rows_that_lie_apart_are_not_copied(device):
    made, expected = run(lambda a, b: a[:, :TERMS] @ b, normal(ROWS, 2 * TERMS), normal(TERMS, 256))
    assert operators()["aten::mm"] == 1
    torch.testing.assert_close(made.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("recording")
def test_gradients_of_one_input_add_up(faster):
    """Of layers that share it: each product is made alone, and the sum is a kernel's."""
    w = [normal(COLUMNS, TERMS, seed=i).requires_grad_() for i in range(3)]

    def program(x: Tensor, *weights: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        total = sum((x @ weight.t()).square().sum() for weight in weights)
        return torch.autograd.grad(total, x)[0]

    made, expected = run(program, normal(ROWS, TERMS), *(each.detach() for each in w))
    torch.testing.assert_close(made.cpu(), expected, rtol=1e-4, atol=1e-2)
    assert operators()["acc::linear"] == 6


@pytest.mark.usefixtures("recording")
def test_gradients_accumulate_in_the_views_of_a_bucket(device):
    """As DDP's gradient_as_bucket_view has them: products add to the bucket itself."""
    x = normal(9, 5)
    weight, bias = normal(7, 5), normal(7, seed=2)
    expected = []
    for place in ("cpu", device):
        w, b = (nn.Parameter(t.to(place)) for t in (weight, bias))
        bucket = torch.zeros(42, device=place)
        w.grad, b.grad = bucket[:35].view(7, 5), bucket[35:]
        moved = x.to(place)
        for _ in range(4):
            bucket.zero_()
            helpers.flush()
            for factor in (1.0, 2.0):
                (torch.nn.functional.linear(moved, w, b) * factor).square().sum().backward()
            helpers.flush()
        assert w.grad.data_ptr() == bucket.data_ptr()
        expected.append(bucket.cpu())
    torch.testing.assert_close(expected[1], expected[0], rtol=1e-5, atol=1e-4)
    assert operators()["aten::addmm_"] == 2


def test_results_that_are_kept_stay(faster):
    a, b = normal(ROWS, TERMS), normal(TERMS, COLUMNS)
    right = b.to(helpers.DEVICE)
    kept = []
    for i in range(5):
        kept.append((a * i).to(helpers.DEVICE) @ right)
        helpers.flush()
    for i, each in enumerate(kept):
        torch.testing.assert_close(each.cpu(), (a * i) @ b, rtol=1e-4, atol=1e-3)


def test_a_bias_of_another_shape(device):
    """Not a row: ATen's own."""
    inputs = normal(ROWS, COLUMNS), normal(ROWS, TERMS), normal(TERMS, COLUMNS)
    made, expected = run(torch.addmm, *inputs)
    assert torch.equal(made.cpu(), expected)


def test_without_onednn_products_are_eagers(device):
    with torch.backends.mkldnn.flags(enabled=False):
        made, expected = run(torch.mm, normal(ROWS, TERMS), normal(TERMS, COLUMNS))
    assert torch.equal(made.cpu(), expected)


def test_less_precise_products_are_eagers(device):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        made, expected = run(torch.mm, normal(ROWS, TERMS), normal(TERMS, COLUMNS))
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(made.cpu(), expected)


@pytest.mark.usefixtures("recording")  # where each operator runs at once, it is eager's
@pytest.mark.parametrize("threads", [1, 2])
def test_signals_during_a_product_leave_the_memory_alone(faster, threads):
    """oneDNN's gemm keeps a heap address in the stack pointer (see kernels/library/linear.cpp)."""
    done = helpers.run_python(
        f"""
import signal, time
torch.set_num_threads({threads})
ticks = 0
def tick(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
a = torch.rand(700, 700).to(DEVICE)
end = time.monotonic() + 3
while time.monotonic() < end or ticks <= 20:
    total = (a @ a @ a).sum().item()
signal.setitimer(signal.ITIMER_REAL, 0)
a = a.cpu().double()
print(abs(total / (a @ a @ a).sum().item() - 1) < 1e-5)
"""
    )
    assert done.stdout.split() == ["True"]
