"""Random numbers in generated kernels: those of docs/random.md, wherever elements are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
RUNS = 4  # the first without kernels


@pytest.fixture(autouse=True, params=["host", "GPU"])
def kernels(request, device, recording) -> Iterator[None]:
    """Those of the host, or those of a GPU, emulated."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # so that draws are alone
    helpers.emulate_gpu(on=request.param == "GPU")
    helpers.extension().capture_plans(None)  # drops plans: on a GPU those of the test before stay
    try:
        with helpers.counting() as counted:
            yield
    finally:
        helpers.emulate_gpu(on=False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)
    on_a_device = counted["kernels/prepared for a device"] > 0
    assert on_a_device == (request.param == "GPU" or helpers.kernels_of_a_gpu())


def position() -> tuple[int, int]:
    """Seed and offset of what the device draws next."""
    seed, offset = torch.acc.get_rng_state().view(torch.int64).tolist()
    return seed, offset


def drawn(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Output and mask of the CPU's kernel, of the numbers that the device draws next."""
    below = int((1 - p) * 2**32 + 0.5)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return torch.ops.acc.native_dropout(x, below, scale, *position())


def check(x: Tensor, p: float, use: Callable[[Tensor], Tensor], close: bool = False) -> None:
    """`use` of what dropout makes of x + 0, as if it had made it on the CPU."""
    y = x.to(helpers.DEVICE)
    for _ in range(RUNS):
        output, mask = drawn(x, p)
        with helpers.counting() as counted:
            mine, kept = torch.native_dropout(y + 0, p, True)
            used = use(mine)
            helpers.flush()
        assert torch.equal(kept.cpu(), mask)
        assert helpers.value_difference(mine.cpu(), output) is None
        if close:
            torch.testing.assert_close(used.cpu(), use(output), rtol=1e-5, atol=1e-5)
        else:
            assert helpers.value_difference(used.cpu(), use(output)) is None
    assert counted["kernel_launches"] > 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", (0.0, 0.1, 0.5, 1.0))
def test_elements(dtype, p):
    x = torch.linspace(-4, 4, 3001, dtype=dtype)
    x[7], x[8] = torch.nan, torch.inf
    check(x, p, lambda y: y.neg())


@pytest.mark.parametrize("n", (1, 2, 3, 5, 63, 64, 65, 127, 129, 1000, 4099))
def test_every_length(n):
    check(torch.randn(n), 0.4, lambda y: y.neg())


def test_rows_that_begin_in_the_middle_of_a_block():
    scale, shift = torch.randn(33), torch.randn(7, 1)

    def use(y: Tensor) -> Tensor:
        return y * scale.to(y.device) + shift.to(y.device)

    check(torch.randn(7, 33), 0.3, use)


@pytest.mark.parametrize("p", (0.2, 1.0))
def test_other_strides(p):
    check(torch.randn(9, 50).t(), p, lambda y: y.neg())
    check(torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last), p, lambda y: y.neg())
    check(torch.randn(4, 1, 30).expand(4, 6, 30), p, lambda y: y.neg())


@pytest.mark.parametrize("shape", [(5, 70), (40, 3), (130, 64), (3, 5, 33)], ids=str)
def test_with_reductions(shape):
    x = torch.randn(shape)
    check(x, 0.3, lambda y: y.sum(-1), close=True)
    check(x, 0.3, lambda y: y.sum(0), close=True)
    check(x, 0.3, lambda y: F.softmax(y, -1), close=True)
    check(x, 0.3, lambda y: F.layer_norm(y, shape[-1:]), close=True)


@pytest.mark.parametrize("columns", [3, 33, 40, 47, 48, 130])
def test_extremes_of_draws(columns):
    """Rows end within a vector, whose other lanes draw what is not the row's."""
    for _ in range(RUNS):
        x = torch.rand(64, columns, device=helpers.DEVICE)
        found = [x.amax(1), x.amin(1), x.amax(0)]
        # So unlike each other that a wrong maximum makes infinities.
        y = F.dropout(60 * torch.ones(64, columns, device=helpers.DEVICE), 0.9)
        softmax = y.softmax(1)
        helpers.flush()
        x, y = x.cpu(), y.cpu()
        for mine, expected in zip(found, [x.amax(1), x.amin(1), x.amax(0)], strict=True):
            assert torch.equal(mine.cpu(), expected)
        torch.testing.assert_close(softmax.cpu(), y.softmax(1))


def test_strided_draws():
    """Neither neighbours nor whole blocks: the loop goes along another dimension."""
    check(torch.randn(64, 50, 3).transpose(0, 2), 0.3, lambda y: y.neg())
    check(torch.randn(2, 64, 9, 9).to(memory_format=torch.channels_last), 0.3, lambda y: y.neg())


@pytest.mark.parametrize("dim", [0, 1])
def test_two_draws_and_a_reduction(dim):
    x = torch.randn(40, 65)
    y = x.to(helpers.DEVICE)
    for _ in range(RUNS):
        first = drawn(x, 0.5)[0]
        seed, offset = position()
        second = torch.ops.acc.native_dropout(x, 2**30, 4.0, seed, offset + 4)[0]
        mine = (F.dropout(y, 0.5) - F.dropout(y, 0.75)).square().sum(dim)
        helpers.flush()
        torch.testing.assert_close(mine.cpu(), (first - second).square().sum(dim))


def test_two_draws_in_a_kernel():
    x = torch.randn(1000)
    y = x.to(helpers.DEVICE)
    for _ in range(RUNS):
        first = drawn(x, 0.5)[0]
        seed, offset = position()
        second = torch.ops.acc.native_dropout(x, 2**30, 4.0, seed, offset + 4)[0]
        mine = F.dropout(y, 0.5) + F.dropout(y, 0.75)
        helpers.flush()
        assert torch.equal(mine.cpu(), first + second)


def test_gradients_and_a_training_step_with_one_plan():
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Dropout(0.3), nn.Linear(48, 4))
        net.to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device)
        losses = []
        for i in range(8):
            net[2].p = 0.1 * i  # a number of the step
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [loss.cpu() for loss in losses]

    helpers.extension().skip_passes(helpers.BIT_BY_BIT)
    alone = run(helpers.DEVICE)
    helpers.extension().skip_passes("")
    with helpers.counting() as counted:
        together = run(helpers.DEVICE)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)
    assert counted["kernel_launches"] > 0
    assert counted["plans_built"] <= 3


INTEGERS = [
    (0, 9),
    (-7, -7),
    (0, 2**32 - 1),
    (-5, 2**32),
    (0, 2**63 - 1),
    (-(2**63), 2**63 - 1),
    # that no double is
    (2**53 + 1, 2**53 + 1),
    (2**60 + 1, 2**60 + 3),
    (-(2**53) - 1, 4),
    (2**63 - 100, 2**63 - 91),
]


@pytest.mark.parametrize(("low", "last"), INTEGERS, ids=str)
def test_integers(low, last):
    bits = (last - low + 1) % 2**64
    count = bits - 2**64 if bits >= 2**63 else bits
    for n in (1, 2, 33, 1000):
        check_integers(
            lambda device, n=n: torch.empty(n, dtype=torch.int64, device=device), low, last, count
        )
    check_integers(
        lambda device: torch.empty(5, 70, dtype=torch.int64, device=device).t(), low, last, count
    )


def check_integers(make: Callable[[str], Tensor], low: int, last: int, count: int) -> None:
    """Alone, and where the next operation needs them."""
    for after in (lambda t: t, lambda t: t ^ 5):
        for _ in range(RUNS):
            expected = after(
                torch.ops.acc.random_(make("cpu"), low if count else 0, count, *position())
            )
            with helpers.counting() as counted:
                mine = make(helpers.DEVICE)
                whole = last == 2**63 - 1
                mine = after(mine.random_(low, None if whole else last + 1))
                helpers.flush()
            assert torch.equal(mine.cpu(), expected)
    assert counted["kernel_launches"] == 1


# What fills a tensor, and the CPU's kernel for it, which takes seed and offset.
FILLS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "uniform": (
        lambda t: t.uniform_(-2, 0.1),
        lambda t, *draw: torch.ops.acc.uniform_(t, -2.0, 0.1, *draw),
    ),
    "normal": (
        lambda t: t.normal_(0.3, 1.7),
        lambda t, *draw: torch.ops.acc.normal_(t, 0.3, 1.7, *draw),
    ),
    "exponential": (
        lambda t: t.exponential_(1.3),
        lambda t, *draw: torch.ops.acc.exponential_(t, 1.3, *draw),
    ),
    "bernoulli": (
        lambda t: t.bernoulli_(0.25),
        lambda t, *draw: torch.ops.acc.bernoulli_(t, 2**30, *draw),
    ),
}


def check_fill(name: str, make: Callable[[str], Tensor], runs: int = RUNS) -> None:
    """The fill of an empty tensor, alone and with something computed of it."""
    fill, kernel = FILLS[name]
    for _ in range(runs):
        expected = kernel(make("cpu"), *position())
        with helpers.counting() as counted:
            mine = fill(make(helpers.DEVICE))
            helpers.flush()
        assert helpers.value_difference(mine.cpu(), expected) is None
    assert counted["kernel_launches"] == 1
    for _ in range(runs):
        expected = kernel(make("cpu"), *position())
        mine = fill(make(helpers.DEVICE)) * 2 - 1
        helpers.flush()
        assert helpers.value_difference(mine.cpu(), expected * 2 - 1) is None


@pytest.mark.parametrize("n", (1, 2, 3, 5, 63, 64, 65, 127, 129, 1000, 4099))
@pytest.mark.parametrize("name", FILLS)
def test_fills_of_every_length(name, n):
    check_fill(name, lambda device: torch.empty(n, device=device))


@pytest.mark.parametrize("name", FILLS)
def test_fills_of_other_strides(name):
    def channels_last(device: str) -> Tensor:
        return torch.empty(2, 3, 6, 5, device=device, memory_format=torch.channels_last)

    check_fill(name, channels_last)
    check_fill(name, lambda device: torch.empty(33, 7, device=device).t())


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64, torch.int32, torch.bool))
def test_bernoulli_of_types_that_kernels_make(dtype):
    fill, kernel = FILLS["bernoulli"]
    for _ in range(RUNS):
        expected = kernel(torch.empty(1003, dtype=dtype), *position())
        with helpers.counting() as counted:
            mine = fill(torch.empty(1003, dtype=dtype, device=helpers.DEVICE))
            helpers.flush()
        assert torch.equal(mine.cpu(), expected)
    assert counted["kernel_launches"] == 1


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ("normal", "exponential"))
def test_fills_in_half_precision(name, dtype):
    """Drawn in float32 and rounded once, where they are stored."""
    fill, kernel = FILLS[name]
    close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    for n in (1, 63, 1003):
        for _ in range(RUNS):
            expected = kernel(torch.empty(n, dtype=dtype), *position())
            with helpers.counting() as counted:
                mine = fill(torch.empty(n, dtype=dtype, device=helpers.DEVICE))
                helpers.flush()
            assert torch.equal(mine.cpu(), expected)
            expected = kernel(torch.empty(n, dtype=dtype), *position()) * 2 + 1
            mine = fill(torch.empty(n, dtype=dtype, device=helpers.DEVICE)) * 2 + 1
            helpers.flush()
            torch.testing.assert_close(mine.cpu(), expected, **close)
        assert counted["kernel_launches"] == 1


UNDRAWN = [
    *((name, torch.float64) for name in ("uniform", "normal", "exponential")),
    *(("uniform", dtype) for dtype in HALVES),
]


@pytest.mark.parametrize(("name", "dtype"), UNDRAWN, ids=str)
def test_what_kernels_do_not_draw_is_the_same_number(name, dtype):
    """The operator draws; its neighbours are kernels."""
    fill, kernel = FILLS[name]
    for _ in range(RUNS):
        expected = kernel(torch.empty(1003, dtype=dtype), *position()) * 2 + 1
        mine = fill(torch.empty(1003, dtype=dtype, device=helpers.DEVICE)) * 2 + 1
        helpers.flush()
        assert helpers.value_difference(mine.cpu(), expected) is None


def test_uniform_numbers_stay_below_their_end():
    """Where rounding gives the end, it is the begin."""
    after = torch.tensor(1.0).nextafter(torch.tensor(2.0)).item()
    for _ in range(RUNS):
        made = torch.empty(5000, device=helpers.DEVICE).uniform_(1.0, after) + 0
        helpers.flush()
        assert made.cpu().eq(1).all()


@pytest.mark.parametrize("shape", [(5, 70), (40, 3), (3, 5, 33)], ids=str)
@pytest.mark.parametrize("dim", [-1, 0])
def test_normal_numbers_and_reductions(shape, dim):
    """As in a variational autoencoder: noise of the mean's shape."""
    mean = torch.randn(shape)
    y = mean.to(helpers.DEVICE)
    for _ in range(RUNS):
        noise = torch.ops.acc.normal_(torch.empty(shape), 0.0, 1.0, *position())
        mine = (y + 0.5 * torch.randn_like(y)).square().sum(dim)
        helpers.flush()
        torch.testing.assert_close(mine.cpu(), (mean + 0.5 * noise).square().sum(dim))


def test_a_column_of_draws():
    """One number for each row, of which nothing varies along it: stochastic depth."""
    x = torch.randn(6, 3, 40)
    y = x.to(helpers.DEVICE)
    for _ in range(RUNS):
        kept = torch.ops.acc.bernoulli_(torch.empty(6, 1, 1), 2**31, *position()) / 0.5
        mine = y * torch.empty(6, 1, 1, device=helpers.DEVICE).bernoulli_(0.5).div_(0.5)
        helpers.flush()
        assert torch.equal(mine.cpu(), x * kept)


def test_other_ranges_are_the_same_plan():
    """As of a buffer that fills."""

    def draws(sizes: range) -> None:
        for size in sizes:
            made = torch.randint(size, 3 * size, (100,), device=helpers.DEVICE) + 1
            helpers.flush()
            assert made.min().item() > size
            assert made.max().item() <= 3 * size

    draws(range(10, 15))
    with helpers.counting() as counted:
        draws(range(1000, 1010))
    assert counted["plans_built"] == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_permutations_are_the_same_wherever_they_are_made(device, dtype):
    """On a GPU kernels draw the numbers of the positions, and ATen's sort makes their order."""
    prepared = helpers.stats().get("kernels/prepared for a device", 0)
    for n in (1, 2, 7, 5000):
        for _ in range(RUNS):
            wanted = torch.ops.acc.randperm_(torch.empty(n, dtype=dtype), *position())
            with helpers.counting() as counted:
                made = torch.randperm(n, dtype=dtype, device=device)
                helpers.flush()
            assert torch.equal(made.cpu(), wanted)
            launches = counted["kernel_launches"]
    kernels_of_a_gpu = helpers.stats().get("kernels/prepared for a device", 0) > prepared
    assert (launches > 0) == kernels_of_a_gpu
