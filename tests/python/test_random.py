"""Random operators on the device: every way to draw, errors, gradients, plans, training steps.

What a number is made of is tested in test_random_kernels.py; generators in test_generator.py.
"""

from __future__ import annotations

import math
import os
import struct
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import counting, flush, synchronize

pytestmark = pytest.mark.usefixtures("acc_only")

acc = torch.ops.acc
KEPT = math.floor(0.6 * 2**32 + 0.5)  # of 2^32 words, with a dropout of 0.4
DEVICE = "acc"
RECORDS = os.environ.get("ACC_MODE", "full") != "eager"


@pytest.fixture(autouse=True)
def same_seed() -> None:
    torch.manual_seed(1234)


def state() -> tuple[int, int]:
    """Seed and offset of the default generator, as operators take them."""
    return struct.unpack("<qq", bytes(torch.acc.get_rng_state().tolist()))


def full(*shape: int, value: float = 0.5, **options: object) -> torch.Tensor:
    return torch.full(shape, value, device=DEVICE, **options)


def below(p: float) -> int:
    """How many of the 2^32 words mean yes."""
    return int(p * 2**32 + 0.5)


def like(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    """What a fill writes into, on the CPU."""
    return torch.empty(shape or (4, 5), dtype=dtype)


# --- every operator draws the documented numbers ----------------------------------------------

# The operator on the device, and the numbers that its kernel gives on the CPU for (seed, offset).
Pair = tuple[Callable[[], torch.Tensor], Callable[[int, int], torch.Tensor]]
WEIGHTS = torch.tensor([[0.1, 0.0, 0.9], [0.5, 0.3, 0.2]])

DRAWS: dict[str, Pair] = {
    "rand": (
        lambda: torch.rand(4, 5, device=DEVICE),
        lambda s, o: acc.uniform_(like(), 0.0, 1.0, s, o),
    ),
    "rand_like": (
        lambda: torch.rand_like(full(4, 5)),
        lambda s, o: acc.uniform_(like(), 0.0, 1.0, s, o),
    ),
    "randn": (
        lambda: torch.randn(4, 5, device=DEVICE),
        lambda s, o: acc.normal_(like(), 0.0, 1.0, s, o),
    ),
    "randn_double": (
        lambda: torch.randn(4, 5, device=DEVICE, dtype=torch.float64),
        lambda s, o: acc.normal_(like(torch.float64), 0.0, 1.0, s, o),
    ),
    "randn_complex": (
        lambda: torch.randn(4, 5, device=DEVICE, dtype=torch.complex64),
        lambda s, o: acc.normal_(like(torch.complex64), 0.0, 1.0, s, o),
    ),
    "randn_like": (
        lambda: torch.randn_like(full(4, 5).half()),
        lambda s, o: acc.normal_(like(torch.float16), 0.0, 1.0, s, o),
    ),
    "normal_floats": (
        lambda: torch.normal(2.0, 3.0, (4, 5), device=DEVICE),
        lambda s, o: acc.normal_(like(), 2.0, 3.0, s, o),
    ),
    "randint": (
        lambda: torch.randint(3, 10, (4, 5), device=DEVICE),
        lambda s, o: acc.random_(like(torch.int64), 3, 7, s, o),
    ),
    "randint_like": (
        lambda: torch.randint_like(full(4, 5), 10),
        lambda s, o: acc.random_(like(), 0, 10, s, o),
    ),
    "random_": (
        lambda: full(4, 5).random_(),
        lambda s, o: acc.random_(like(), 0, 2**24 + 1, s, o),
    ),
    "random_to": (
        lambda: full(4, 5).to(torch.uint8).random_(7),
        lambda s, o: acc.random_(like(torch.uint8), 0, 7, s, o),
    ),
    "random_bool": (
        lambda: full(4, 5).bool().random_(),
        lambda s, o: acc.random_(like(torch.bool), 0, 2, s, o),
    ),
    "random_whole_range": (
        lambda: full(4, 5).long().random_(-(2**63), None),
        lambda s, o: acc.random_(like(torch.int64), 0, 0, s, o),
    ),
    "random_from": (
        lambda: full(4, 5).to(torch.int8).random_(-5, None),
        lambda s, o: acc.random_(like(torch.int8), -5, 133, s, o),
    ),
    "uniform_": (
        lambda: full(4, 5).uniform_(-2, 3),
        lambda s, o: acc.uniform_(like(), -2.0, 3.0, s, o),
    ),
    "normal_": (
        lambda: full(4, 5).bfloat16().normal_(1, 2),
        lambda s, o: acc.normal_(like(torch.bfloat16), 1.0, 2.0, s, o),
    ),
    "log_normal_": (
        lambda: full(4, 5).log_normal_(0.5, 0.25),
        lambda s, o: acc.log_normal_(like(), 0.5, 0.25, s, o),
    ),
    "exponential_": (
        lambda: full(4, 5).exponential_(2),
        lambda s, o: acc.exponential_(like(), 2.0, s, o),
    ),
    "cauchy_": (
        lambda: full(4, 5).cauchy_(1, 2),
        lambda s, o: acc.cauchy_(like(), 1.0, 2.0, s, o),
    ),
    "geometric_": (
        lambda: full(4, 5).int().geometric_(0.25),
        lambda s, o: acc.geometric_(like(torch.int32), 0.25, s, o),
    ),
    "bernoulli_": (
        lambda: full(4, 5).bernoulli_(0.25),
        lambda s, o: acc.bernoulli_(like(), below(0.25), s, o),
    ),
    "bernoulli_tensor_": (
        lambda: full(4, 5).int().bernoulli_(torch.linspace(0, 1, 5, device=DEVICE)),
        lambda s, o: acc.bernoulli_tensor_(like(torch.int32), torch.linspace(0, 1, 5), s, o),
    ),
    "bernoulli_cpu_probabilities": (
        lambda: full(4, 5).bernoulli_(torch.linspace(0, 1, 5)),
        lambda s, o: acc.bernoulli_tensor_(like(), torch.linspace(0, 1, 5), s, o),
    ),
    "bernoulli": (
        lambda: torch.bernoulli(full(4, 5, value=0.3)),
        lambda s, o: acc.bernoulli_(like(), below(0.3), s, o),
    ),
    "bernoulli_p": (
        lambda: torch.bernoulli(full(4, 5), 0.3),
        lambda s, o: acc.bernoulli_(like(), below(0.3), s, o),
    ),
    "bernoulli_out": (
        lambda: torch.bernoulli(full(4, 5, value=0.3), out=torch.empty(0, device=DEVICE).int()),
        lambda s, o: acc.bernoulli_(like(torch.int32), below(0.3), s, o),
    ),
    "rand_out": (
        lambda: torch.rand(4, 5, out=torch.empty(0, device=DEVICE)),
        lambda s, o: acc.uniform_(like(), 0.0, 1.0, s, o),
    ),
    "randperm": (
        lambda: torch.randperm(100, device=DEVICE),
        lambda s, o: acc.randperm_(like(torch.int64, 100), s, o),
    ),
    "randperm_dtype": (
        lambda: torch.randperm(100, device=DEVICE, dtype=torch.int16),
        lambda s, o: acc.randperm_(like(torch.int16, 100), s, o),
    ),
    "randperm_out": (
        lambda: torch.randperm(9, out=torch.empty(0, device=DEVICE, dtype=torch.int64)),
        lambda s, o: acc.randperm_(like(torch.int64, 9), s, o),
    ),
    "multinomial": (
        lambda: torch.multinomial(WEIGHTS.to(DEVICE), 9, True),
        lambda s, o: acc.multinomial(WEIGHTS, 9, True, s, o),
    ),
    "multinomial_out": (
        lambda: torch.multinomial(
            WEIGHTS.to(DEVICE), 2, out=torch.empty(0, device=DEVICE, dtype=torch.int64)
        ),
        lambda s, o: acc.multinomial(WEIGHTS, 2, False, s, o),
    ),
    "normal_mean": (
        lambda: torch.normal(full(4, 5, value=7.0), 2.0),
        lambda s, o: acc.normal_(like(), 0.0, 2.0, s, o) + 7,
    ),
    "normal_std": (
        lambda: torch.normal(7.0, full(4, 5, value=2.0)),
        lambda s, o: acc.normal_std_(like(), torch.tensor(2.0), s, o) + 7,
    ),
    "normal_both": (
        lambda: torch.normal(full(4, 1, value=7.0), full(5, value=2.0)),
        lambda s, o: acc.normal_std_(like(), torch.tensor(2.0), s, o) + 7,
    ),
    "normal_both_out": (
        lambda: torch.normal(
            full(4, 1, value=7.0),
            full(5, value=2.0),
            out=torch.empty(0, device=DEVICE, dtype=torch.float64),
        ),
        lambda s, o: acc.normal_std_(like(torch.float64), torch.tensor(2.0), s, o) + 7,
    ),
    "poisson": (
        lambda: torch.poisson(full(4, 5, value=3.0)),
        lambda s, o: acc.poisson(torch.full((4, 5), 3.0), s, o),
    ),
    "binomial": (
        lambda: torch.binomial(full(4, 1, value=9.0), full(5, value=0.3)),
        lambda s, o: acc.binomial(torch.full((4, 1), 9.0), torch.full((5,), 0.3), s, o),
    ),
    "standard_gamma": (
        lambda: torch._standard_gamma(full(4, 5, value=2.5)),
        lambda s, o: acc.standard_gamma(torch.full((4, 5), 2.5), s, o),
    ),
    "sample_dirichlet": (
        lambda: torch._sample_dirichlet(full(4, 5, value=2.5)),
        lambda s, o: acc.sample_dirichlet(torch.full((4, 5), 2.5), s, o),
    ),
    "dropout": (
        lambda: nn.functional.dropout(full(4, 5, value=3.0), 0.4),
        lambda s, o: acc.native_dropout(torch.full((4, 5), 3.0), KEPT, 1 / 0.6, s, o)[0],
    ),
    "native_dropout_mask": (
        lambda: torch.native_dropout(full(4, 5, value=3.0), 0.4, None)[1],
        lambda s, o: acc.native_dropout(torch.full((4, 5), 3.0), KEPT, 1 / 0.6, s, o)[1],
    ),
    "rrelu": (
        lambda: nn.functional.rrelu(full(4, 5, value=-1.0), 0.1, 0.3, True),
        lambda s, o: -acc.uniform_(like(), 0.1, 0.3, s, o),
    ),
    # The functional forms that tracing makes.
    "functional_uniform": (
        lambda: torch.ops.aten.uniform(full(4, 5), 0.0, 2.0),
        lambda s, o: acc.uniform_(like(), 0.0, 2.0, s, o),
    ),
    "functional_normal": (
        lambda: torch.ops.aten.normal_functional(full(4, 5), 0.0, 2.0),
        lambda s, o: acc.normal_(like(), 0.0, 2.0, s, o),
    ),
    "functional_exponential": (
        lambda: torch.ops.aten.exponential(full(4, 5), 2.0),
        lambda s, o: acc.exponential_(like(), 2.0, s, o),
    ),
    "functional_random": (
        lambda: torch.ops.aten.random.to(full(4, 5), 9),
        lambda s, o: acc.random_(like(), 0, 9, s, o),
    ),
    "functional_bernoulli": (
        lambda: torch.ops.aten.bernoulli.Tensor(full(4, 5), full(5, value=0.3)),
        lambda s, o: acc.bernoulli_(like(), below(0.3), s, o),
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_the_kernels(name: str) -> None:
    draw, kernel = DRAWS[name]
    draw()  # the first call of some operators learns the shape of its result
    for _ in range(3):
        seed, offset = state()
        drawn = draw()
        assert state() == (seed, offset + 4)
        assert drawn.device.type == DEVICE
        wanted = kernel(seed, offset)
        assert drawn.dtype == wanted.dtype and drawn.shape == wanted.shape
        assert torch.equal(drawn.cpu(), wanted)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_recorded_and_repeat(name: str) -> None:
    draw, _ = DRAWS[name]
    draw()
    flush()
    saved = torch.acc.get_rng_state()
    with counting() as c:
        first, second = draw(), draw()
    if RECORDS:
        assert c["run_now"] == 0, "ran at once instead of being recorded"
    torch.acc.set_rng_state(saved)
    assert torch.equal(draw(), first) and torch.equal(draw(), second)
    torch.manual_seed(77)
    assert torch.equal(draw(), (torch.manual_seed(77), draw())[1])


def test_operators_on_one_stream_differ() -> None:
    a, b = torch.rand(50, device=DEVICE), torch.rand(50, device=DEVICE)
    assert not torch.equal(a, b)
    x = full(1000)
    assert not torch.equal(nn.functional.dropout(x), nn.functional.dropout(x))


def test_a_dropped_draw_still_moves_the_stream() -> None:
    torch.rand(5, device=DEVICE)
    second = torch.rand(5, device=DEVICE)
    torch.manual_seed(1234)
    kept = torch.rand(5, device=DEVICE)
    assert torch.equal(torch.rand(5, device=DEVICE), second) and not torch.equal(kept, second)


def test_views_are_filled_in_place() -> None:
    x = torch.zeros(6, 4, device=DEVICE)
    seed, offset = state()
    x[:, 1].uniform_()
    x.t()[2].normal_()
    got = x.cpu()
    assert torch.equal(got[:, 1], acc.uniform_(torch.empty(6), 0.0, 1.0, seed, offset))
    assert torch.equal(got[:, 2], acc.normal_(torch.empty(6), 0.0, 1.0, seed, offset + 4))
    assert not got[:, [0, 3]].any()


def test_empty_tensors_draw_nothing() -> None:
    before = state()
    x = torch.empty(0, 3, device=DEVICE)
    for drawn in (x.uniform_(), x.normal_(), torch.rand(0, device=DEVICE), torch.bernoulli(x)):
        assert drawn.numel() == 0
    assert torch.randperm(0, device=DEVICE).shape == (0,)
    assert torch.multinomial(x, 2, True).shape == (0, 2)
    assert torch.poisson(x).shape == torch._standard_gamma(x).shape == (0, 3)
    assert torch.native_dropout(x, 0.5, True)[0].shape == (0, 3)
    assert state() == before


def test_memory_formats_are_kept() -> None:
    x = torch.rand(2, 3, 4, 5, device=DEVICE).to(memory_format=torch.channels_last)
    seed, offset = state()
    output, mask = torch.native_dropout(x, 0.5, True)
    assert output.stride() == mask.stride() == x.stride()
    wanted = acc.native_dropout(x.cpu(), 2**31, 2.0, seed, offset)
    assert torch.equal(output.cpu(), wanted[0]) and torch.equal(mask.cpu(), wanted[1])


# --- errors -----------------------------------------------------------------------------------

Bad = Callable[[str], object]
half, i8, u8, i64 = torch.float16, torch.int8, torch.uint8, torch.int64


def on(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape or (3,), dtype=dtype, device=device)


BAD: dict[str, Bad] = {
    "uniform_order": lambda d: on(d).uniform_(2, 1),
    "uniform_span": lambda d: on(d).uniform_(-3e38, 3e38),
    "uniform_range": lambda d: on(d, dtype=half).uniform_(0, 1e6),
    "uniform_nan": lambda d: on(d).uniform_(math.nan, 1),
    "uniform_int": lambda d: on(d, dtype=torch.int32).uniform_(),
    "normal_std": lambda d: on(d).normal_(0, -1),
    "normal_nan": lambda d: on(d).normal_(0, math.nan),
    "normal_int": lambda d: on(d, dtype=torch.int32).normal_(),
    "normal_mean_std": lambda d: torch.normal(on(d), -1.0),
    "normal_mean_int": lambda d: torch.normal(on(d, dtype=i64), 1.0),
    "normal_std_int": lambda d: torch.normal(0.0, on(d, dtype=i64)),
    "normal_std_complex": lambda d: torch.normal(0.0, on(d, dtype=torch.complex64)),
    "normal_shapes": lambda d: torch.normal(on(d, 2), on(d, 3)),
    "log_normal_std": lambda d: on(d).log_normal_(0, 0),
    "log_normal_int": lambda d: on(d, dtype=i64).log_normal_(),
    "exponential_zero": lambda d: on(d).exponential_(0),
    "exponential_nan": lambda d: on(d).exponential_(math.nan),
    "exponential_int": lambda d: on(d, dtype=i64).exponential_(),
    "cauchy_sigma": lambda d: on(d).cauchy_(0, 0),
    "cauchy_int": lambda d: on(d, dtype=i64).cauchy_(),
    "geometric_zero": lambda d: on(d).geometric_(0),
    "geometric_one": lambda d: on(d).geometric_(1),
    "geometric_bool": lambda d: on(d, dtype=torch.bool).geometric_(0.5),
    "bernoulli_range": lambda d: on(d).bernoulli_(1.5),
    "bernoulli_complex": lambda d: on(d, dtype=torch.complex64).bernoulli_(0.5),
    "bernoulli_int": lambda d: torch.bernoulli(on(d, dtype=i64)),
    "bernoulli_p_int": lambda d: on(d).bernoulli_(on(d, dtype=i64)),
    "bernoulli_shape": lambda d: on(d).bernoulli_(on(d, 2)),
    "random_empty": lambda d: on(d).random_(3, 3),
    "random_zero": lambda d: on(d).random_(0),
    "random_high": lambda d: on(d, dtype=u8).random_(0, 300),
    "random_low": lambda d: on(d, dtype=u8).random_(-1, 3),
    "random_bool": lambda d: on(d, dtype=torch.bool).random_(0, 3),
    "random_whole": lambda d: on(d, dtype=i8).random_(-(2**63), None),
    "random_float_from": lambda d: on(d).random_(2**25, None),
    "random_complex": lambda d: on(d, dtype=torch.complex64).random_(),
    "random_uint16": lambda d: on(d, dtype=torch.uint16).random_(),
    "randint_empty": lambda d: torch.randint(5, 5, (2,), device=d),
    "randperm_negative": lambda d: torch.randperm(-1, device=d),
    "randperm_float": lambda d: torch.randperm(2**24 + 3, dtype=torch.float32, device=d),
    "randperm_half": lambda d: torch.randperm(3000, dtype=half, device=d),
    "randperm_int8": lambda d: torch.randperm(200, dtype=i8, device=d),
    "randperm_bool": lambda d: torch.randperm(5, dtype=torch.bool, device=d),
    "multinomial_int": lambda d: torch.multinomial(on(d, dtype=i64), 1),
    "multinomial_rank": lambda d: torch.multinomial(on(d, 2, 2, 2), 1),
    "multinomial_scalar": lambda d: torch.multinomial(on(d).sum(), 1, True),
    "multinomial_many": lambda d: torch.multinomial(on(d), 4),
    "multinomial_none": lambda d: torch.multinomial(on(d), 0),
    "multinomial_no_categories": lambda d: torch.multinomial(on(d, 3, 0), 2, True),
    "multinomial_out": lambda d: torch.multinomial(on(d), 1, out=on(d, 0)),
    "native_dropout_p": lambda d: torch.native_dropout(on(d), 1.5, True),
    "dropout_p": lambda d: torch.dropout(on(d), -0.5, True),
    "native_dropout_int": lambda d: torch.native_dropout(on(d, dtype=torch.int32), 0.5, True),
    "poisson_int": lambda d: torch.poisson(on(d, dtype=i64)),
    "binomial_int": lambda d: torch.binomial(on(d, dtype=i64), on(d)),
    "binomial_mixed": lambda d: torch.binomial(on(d, dtype=torch.float64), on(d)),
    "gamma_int": lambda d: torch._standard_gamma(on(d, dtype=i64)),
    "dirichlet_int": lambda d: torch._sample_dirichlet(on(d, dtype=i64)),
    "rrelu_order": lambda d: nn.functional.rrelu(on(d), 0.5, 0.1, True),
    "rrelu_int": lambda d: nn.functional.rrelu(on(d, dtype=torch.int32), 0.1, 0.3, True),
    "rrelu_noise": lambda d: torch._C._nn.rrelu_with_noise(on(d), on(d, 2), 0.1, 0.3, True),
    "overlap": lambda d: on(d, 1).expand(3).uniform_(),
    "bernoulli_overlap": lambda d: (lambda x: x.bernoulli_(x.t()))(on(d, 3, 3)),
    "leaf": lambda d: on(d).requires_grad_().uniform_(),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_pytorchs_own_and_come_at_once(name: str) -> None:
    with pytest.raises(Exception) as wanted:
        BAD[name]("cpu")
    before = state()
    with pytest.raises(Exception) as raised:
        BAD[name](DEVICE)
    assert raised.type is wanted.type
    assert str(raised.value).splitlines()[0] == str(wanted.value).splitlines()[0]
    assert state() == before, "a refused call moved the stream"
    assert torch.rand(3, device=DEVICE).sum().item() > 0


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: on(d).random_(0, 2**24 + 2),
        lambda d: on(d, dtype=half).random_(0, 2**12),
    ],
)
def test_warnings_about_precision_are_kept(draw: Bad) -> None:
    with pytest.warns(UserWarning, match="precision limitations"):
        draw(DEVICE)


@pytest.mark.parametrize(
    ("low", "high"), [(2**24 - 3, 2**24 + 100), (-(2**40) - 1, -(2**40) + 2**20), (2**60 + 1, None)]
)
def test_large_integers_in_floats_stay_in_their_range(low: int, high: int | None) -> None:
    dtype = torch.float64 if high is None else torch.float32
    if high is None:
        low, high = 2**53 - 1000, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = full(5000, dtype=dtype).random_(low, high)
    values = [int(v) for v in drawn.tolist()]
    assert low <= min(values) and max(values) < (2**53 + 1 if high is None else high)


def test_errors_in_data_come_when_the_step_runs() -> None:
    """And leave the device usable: as for CUDA, nothing waits for the data."""
    for draw, message in [
        (lambda: torch.bernoulli(full(3, value=1.5)), "p_in >= 0 && p_in <= 1"),
        (lambda: torch.multinomial(full(3, value=-1.0), 1), "element < 0"),
        (lambda: torch.multinomial(full(3, value=0.0), 1, True), "sum of probabilities <= 0"),
        (lambda: torch.normal(0.0, full(3, value=-1.0)), "all elements of std >= 0.0"),
        (lambda: torch.poisson(full(3, value=-1.0)), "invalid Poisson rate"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            drawn = draw()
            drawn.cpu()
        assert torch.rand(3, device=DEVICE).sum().item() > 0


# --- gradients --------------------------------------------------------------------------------


def test_dropout_passes_gradients_through_what_it_kept() -> None:
    x = torch.randn(500, device=DEVICE, requires_grad=True)
    y = nn.functional.dropout(x, 0.25)
    y.backward(torch.full_like(y, 3.0))
    kept = y.detach() != 0
    scale = torch.where(kept, 1 / 0.75, 0.0)
    torch.testing.assert_close(y.detach(), x.detach() * scale)
    torch.testing.assert_close(x.grad, 3 * scale)
    assert 0.6 < kept.float().mean().item() < 0.9


@pytest.mark.parametrize("p", (0.0, 1.0))
@pytest.mark.parametrize("train", (True, False))
def test_sure_dropout_equals_eager(p: float, train: bool) -> None:
    x = torch.randn(40)
    wanted = nn.functional.dropout(x, p, train)
    assert torch.equal(nn.functional.dropout(x.to(DEVICE), p, train).cpu(), wanted)
    output, mask = torch.native_dropout(x.to(DEVICE), p, train)
    wanted_output, wanted_mask = torch.native_dropout(x, p, train)
    assert torch.equal(output.cpu(), wanted_output) and torch.equal(mask.cpu(), wanted_mask)


@pytest.mark.parametrize(
    "drop",
    [
        nn.Dropout(0.5),
        nn.Dropout1d(0.5),
        nn.Dropout2d(0.5),
        nn.Dropout3d(0.5),
        nn.AlphaDropout(0.5),
        nn.FeatureAlphaDropout(0.5),
        nn.Dropout(0.5, inplace=True),
        nn.RReLU(),
    ],
    ids=lambda m: type(m).__name__ + ("_" if getattr(m, "inplace", False) else ""),
)
def test_modules_that_draw(drop: nn.Module) -> None:
    x = torch.randn(8, 16, 3, 3, device=DEVICE)
    if isinstance(drop, nn.Dropout3d | nn.FeatureAlphaDropout):
        x = x.unsqueeze(-1)
    if isinstance(drop, nn.Dropout1d):
        x = x.flatten(2)
    leaf = x.clone().requires_grad_()
    saved = torch.acc.get_rng_state()
    y = drop(leaf * 1)
    y.sum().backward()
    assert leaf.grad.isfinite().all() and not torch.equal(y.detach(), x)
    torch.acc.set_rng_state(saved)
    assert torch.equal(drop(leaf.detach() * 1), y.detach())
    assert torch.equal(drop.eval()(x.clone()), drop.eval()(x.cpu().clone()).to(DEVICE))
    drop.train()


def test_complex_dropout() -> None:
    x = torch.randn(200, dtype=torch.complex64, device=DEVICE)
    y = nn.functional.dropout(x, 0.5)
    kept = y != 0
    torch.testing.assert_close(y[kept], 2 * x[kept])
    assert 60 < int(kept.sum()) < 140


def test_rrelu_keeps_its_noise_for_the_backward_pass() -> None:
    x = torch.randn(300, device=DEVICE, requires_grad=True)
    y = nn.functional.rrelu(x, 0.1, 0.4, True)
    y.sum().backward()
    slope = (y / x).detach()
    torch.testing.assert_close(x.grad, slope)
    negative = x.detach() <= 0
    assert bool((slope[~negative] == 1).all())
    assert 0.1 <= slope[negative].min().item() and slope[negative].max().item() <= 0.4001


def test_samples_pass_gradients_as_eager_does() -> None:
    rate = full(50, value=2.0, requires_grad=True)
    torch.poisson(rate).sum().backward()
    assert not rate.grad.any()
    alpha = full(2000, value=2.0, requires_grad=True)
    torch.distributions.Gamma(alpha, 1.0).rsample().mean().backward()
    # d E[x] / d alpha = 1 for a rate of 1.
    assert abs(alpha.grad.sum().item() - 1) < 0.2
    p = full(50, value=0.5, requires_grad=True)
    torch.bernoulli(p).sum().backward()
    assert not p.grad.any()


def test_gradient_through_a_reparameterised_normal() -> None:
    mean, std = full(30, requires_grad=True), full(30, requires_grad=True)
    seed, offset = state()
    torch.distributions.Normal(mean, std).rsample().sum().backward()
    assert torch.equal(mean.grad.cpu(), torch.ones(30))
    assert torch.equal(std.grad.cpu(), acc.normal_(torch.empty(30), 0.0, 1.0, seed, offset))


# --- distributions ----------------------------------------------------------------------------

N = 20_000


@pytest.mark.parametrize(
    ("made", "cdf"),
    [
        (lambda d: torch.distributions.Normal(d(1.0), d(2.0)), stats.norm(1, 2).cdf),
        (lambda d: torch.distributions.Uniform(d(-1.0), d(3.0)), stats.uniform(-1, 4).cdf),
        (lambda d: torch.distributions.Exponential(d(2.0)), stats.expon(scale=0.5).cdf),
        (lambda d: torch.distributions.Laplace(d(0.0), d(1.0)), stats.laplace.cdf),
        (lambda d: torch.distributions.Gumbel(d(0.0), d(1.0)), stats.gumbel_r.cdf),
        (lambda d: torch.distributions.Gamma(d(2.0), d(1.0)), stats.gamma(2).cdf),
        (lambda d: torch.distributions.Beta(d(2.0), d(3.0)), stats.beta(2, 3).cdf),
        (lambda d: torch.distributions.Cauchy(d(0.0), d(1.0)), stats.cauchy.cdf),
        (lambda d: torch.distributions.StudentT(d(4.0)), stats.t(4).cdf),
        (lambda d: torch.distributions.VonMises(d(0.0), d(2.0)), stats.vonmises(2).cdf),
    ],
    ids=lambda value: "",
)
def test_torch_distributions(made: Callable[..., object], cdf: Callable[..., object]) -> None:
    distribution = made(lambda value: torch.tensor(value, device=DEVICE))
    drawn = distribution.sample((N,))
    assert drawn.device.type == DEVICE
    assert stats.kstest(drawn.cpu().double().numpy(), cdf).pvalue > 1e-3


def test_discrete_torch_distributions() -> None:
    def tensor(*values: float) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    p = tensor(0.2, 0.3, 0.5)
    counts = torch.distributions.Categorical(p).sample((N,)).bincount(minlength=3).cpu().numpy()
    assert stats.chisquare(counts, np.array([0.2, 0.3, 0.5]) * N).pvalue > 1e-3
    total = torch.distributions.Multinomial(50, p).sample((100,))
    assert bool((total.sum(-1) == 50).all())
    for distribution, mean in [
        (torch.distributions.Poisson(tensor(4.0)), 4.0),
        (torch.distributions.Binomial(10, tensor(0.3)), 3.0),
        (torch.distributions.Geometric(tensor(0.25)), 3.0),
        (torch.distributions.Bernoulli(tensor(0.7)), 0.7),
        (torch.distributions.Dirichlet(tensor(1.0, 2.0, 3.0)), 1 / 3),
    ]:
        drawn = distribution.sample((N,))
        spread = 5 * float(distribution.variance.max().sqrt()) / math.sqrt(N)
        assert abs(drawn.mean().item() - mean) < spread


def test_initialisers() -> None:
    x = torch.empty(60, 40, device=DEVICE)
    assert abs(nn.init.xavier_normal_(x).std().item() - math.sqrt(2 / 100)) < 0.01
    assert nn.init.kaiming_uniform_(x).abs().max().item() <= math.sqrt(6 / (40 * 6)) * 2.5
    assert nn.init.trunc_normal_(x, std=1.0, a=-1.0, b=1.0).abs().max().item() <= 1.0
    q = nn.init.orthogonal_(x)
    torch.testing.assert_close((q.t() @ q).cpu(), torch.eye(40), atol=1e-5, rtol=0)
    assert int((nn.init.sparse_(x, 0.5) == 0).sum()) == 30 * 40


# --- steps and plans --------------------------------------------------------------------------


class Model(nn.Module):
    """Two layers with a dropout; `again` recomputes the first in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5))
        self.last = nn.Linear(32, 3)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            x = checkpoint(self.first, x, use_reentrant=False, preserve_rng_state=True)
        else:
            x = self.first(x)
        return self.last(x)


def train(steps: int, again: bool = False) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the gradients of the last step."""
    torch.manual_seed(3)
    model = Model(again).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 6, device=DEVICE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [value.item() for value in losses], [p.grad.cpu() for p in model.parameters()]


@pytest.mark.usefixtures("unfused")  # the first steps of the first run have no kernels yet
def test_a_training_run_repeats() -> None:
    first, second = train(8), train(8)
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_checkpointing_draws_the_same_masks() -> None:
    plain, again = train(4), train(4, again=True)
    assert plain[0] == again[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], again[1], strict=True))


def test_fork_rng_restores_the_stream() -> None:
    before = state()
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.manual_seed(99)
        inside = torch.rand(4, device=DEVICE)
    assert state() == before
    torch.manual_seed(99)
    assert torch.equal(inside, torch.rand(4, device=DEVICE))


def test_masks_change_from_step_to_step_in_one_plan() -> None:
    x = torch.ones(64, device=DEVICE)
    masks = []
    for step in range(30):
        y = nn.functional.dropout(x, 0.1 + 0.01 * step)
        z = torch.randn(8, device=DEVICE).add_(torch.rand(8, device=DEVICE))
        flush()
        masks.append(tuple((y != 0).tolist()))
        del y, z
        if step == 4:
            synchronize()
            counted = counting()
            c = counted.__enter__()
    counted.__exit__(None, None, None)
    assert len(set(masks)) == 30
    assert c["plans_built"] == 0, "seeds, offsets or probabilities made new plans"


def test_equal_draws_are_not_merged() -> None:
    a = torch.zeros(100, device=DEVICE)
    b = torch.zeros(100, device=DEVICE)
    g = torch.Generator(device=DEVICE)
    g.manual_seed(5)
    a.uniform_(generator=g)
    b.uniform_(generator=g)
    assert not torch.equal(a, b)
    g.manual_seed(5)
    assert torch.equal(b.uniform_(generator=g), a)


# --- coverage ---------------------------------------------------------------------------------

# Random operators without a kernel of ours and without a decomposition: fused kernels of one
# backend, which no other device can run.
ELSEWHERE = (
    "_cudnn_",
    "_efficient_attention_forward",
    "_fill_mem_eff_dropout_mask_",
    "_flash_attention_forward",
    "_fused_sdp_choice",
    "_lstm_mps",
    "_nested_tensor_softmax_with_shape",
    "_scaled_dot_product_",
    "_triton_scaled_dot_attention",
    "miopen_rnn",
)


def test_every_random_operator_of_this_torch_has_a_home() -> None:
    missing, opaque = [], []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, base, None)
        op = getattr(packet, overload or "default", None)
        if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
            continue
        if base.startswith(ELSEWHERE):
            continue

        def has(key: str, name: str = name) -> bool:
            return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

        ours = has("PrivateUse1")
        composed = has("CompositeExplicitAutograd")
        composed = composed or has("CompositeExplicitAutogradNonFunctional")
        if not ours and not composed and not has("CompositeImplicitAutograd"):
            missing.append(name)
        if ours and composed:
            opaque.append(name)
    assert missing == [], "these would draw from another generator: csrc/aten/random.cpp"
    assert opaque == [], "recorded whole, these would draw from the CPU's generator"
