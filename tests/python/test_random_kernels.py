"""The kernels of the random operators: the documented mapping from elements to numbers.

They run on CPU tensors here, through `torch.ops.acc`, and are compared with a second implementation
of docs/random.md in NumPy. tests/python/test_random.py tests the operators on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scipy import stats

from tests import helpers

acc = torch.ops.acc

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.float64: 53}
SIZES = (1, 2, 3, 5, 127, 128, 129, 511, 512, 513, 5000)
SEED, OFFSET = 0x299F31D0A4093822, 0x0370734413198A2C


@pytest.fixture(autouse=True)
def loaded() -> None:
    """The library `acc` is there; the CPU self check of the harness has none."""
    if helpers.ON_ACC:
        helpers.load_device()
    elif not hasattr(acc, "uniform_"):
        pytest.skip("the device under test is the CPU: self check of the harness")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of intra-op threads; puts it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- the mapping, a second time ---------------------------------------------------------------


def philox(seed: int, offset: int, blocks: np.ndarray) -> np.ndarray:
    """Philox 4x32-10: the words of `blocks`, shape (n, 4) of uint64 below 2^32."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    x = [blocks & low, blocks >> half]
    x += [np.full_like(blocks, offset & 0xFFFFFFFF), np.full_like(blocks, offset >> 32)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [
            (b >> half) ^ x[1] ^ np.uint64(key[0]),
            b & low,
            (a >> half) ^ x[3] ^ np.uint64(key[1]),
            a & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(x, axis=1)


def below(p: float) -> int:
    """How many of the 2^32 words mean yes."""
    return int(p * 2**32 + 0.5)


def words(n: int, per_element: int = 1, seed: int = SEED, offset: int = OFFSET) -> np.ndarray:
    """The words of elements 0 .. n - 1, shape (n, per_element)."""
    blocks = np.arange((n * per_element + 3) // 4, dtype=np.uint64)
    return philox(seed, offset, blocks).reshape(-1)[: n * per_element].reshape(n, per_element)


def wide(n: int) -> np.ndarray:
    """64-bit words of n elements."""
    pairs = words(n, 2)
    return pairs[:, 0] | pairs[:, 1] << np.uint64(32)


def open_unit(n: int) -> np.ndarray:
    """Numbers in (0, 1), from 52 bits."""
    return ((wide(n) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def exact(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values).to(dtype)


def expected_normal(n: int, dtype: torch.dtype) -> np.ndarray:
    """Box and Muller, in double precision."""
    even = n + n % 2
    if dtype == torch.float64:
        bits = wide(even)
        radius = ((bits[::2] >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        angle = (bits[1::2] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    else:
        single = words(even)[:, 0]
        rounded = single[::2].astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
        radius, angle = rounded.astype(np.float64), single[1::2].astype(np.float64) * 2.0**-32
    r, phi = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
    return np.stack([r * np.cos(phi), r * np.sin(phi)], axis=1).reshape(-1)[:n]


def empty(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((n,), 99, dtype=dtype)


def test_philox_reference_gives_the_known_answers() -> None:
    def words_of(counter: list[int], key: list[int]) -> list[str]:
        block = np.array([counter[0] | counter[1] << 32], dtype=np.uint64)
        drawn = philox(key[0] | key[1] << 32, counter[2] | counter[3] << 32, block)
        return [f"{int(w):08x}" for w in drawn[0]]

    ones = 0xFFFFFFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert words_of([0] * 4, [0] * 2) == "6627e8d5 e169c58d bc57ac4c 9b00dbd8".split()
    assert words_of([ones] * 4, [ones] * 2) == "408f276d 41c83b0e a20bc7c6 6d5451fd".split()
    answer = "d16cfe09 94fdcceb 5001e420 24126ea1".split()
    assert words_of(pi, [0xA4093822, 0x299F31D0]) == answer


def test_kernel_gives_the_known_answer() -> None:
    drawn = acc.random_(torch.empty(2, dtype=torch.int64), 0, 0, 0, 0)
    bits = [int(v) & (2**64 - 1) for v in drawn]
    assert [f"{b:016x}" for b in bits] == ["e169c58d6627e8d5", "9b00dbd8bc57ac4c"]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform(n: int, dtype: torch.dtype) -> None:
    drawn = acc.uniform_(empty(n, dtype), 0.0, 1.0, SEED, OFFSET)
    if dtype == torch.float64:
        expected = (wide(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    else:
        digits = BITS[dtype]
        expected = (words(n)[:, 0] >> np.uint64(32 - digits)).astype(np.float64) * 2.0**-digits
    assert torch.equal(drawn, exact(expected, dtype))
    shifted = acc.uniform_(empty(n, dtype), -3.0, 5.0, SEED, OFFSET)
    assert torch.equal(shifted, (exact(expected, torch.float64) * 8 - 3).to(dtype).clamp(max=5))


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_never_reaches_its_upper_end(dtype: torch.dtype) -> None:
    near = torch.tensor(1.0, dtype=dtype)
    after = torch.nextafter(near, torch.tensor(2.0, dtype=dtype)).item()
    drawn = acc.uniform_(torch.empty(100_000, dtype=dtype), 1.0, after, 3, 0)
    assert torch.equal(drawn, torch.ones_like(drawn))
    drawn = acc.uniform_(torch.empty(400_000, dtype=dtype), 1.0, 2.0, 3, 0)
    assert drawn.max() < 2.0 and drawn.min() >= 1.0
    assert torch.equal(acc.uniform_(near.clone(), 7.0, 7.0, 1, 0), torch.tensor(7.0, dtype=dtype))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_normal(n: int, dtype: torch.dtype) -> None:
    drawn = acc.normal_(empty(n, dtype), 0.0, 1.0, SEED, OFFSET)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 4e-3}.get(dtype, 3e-2)
    expected = exact(expected_normal(n, dtype), torch.float64)
    torch.testing.assert_close(drawn.double(), expected, rtol=tolerance, atol=tolerance)
    scaled = acc.normal_(empty(n, dtype), 2.0, 0.5, SEED, OFFSET)
    torch.testing.assert_close(
        scaled.double(), expected * 0.5 + 2, rtol=tolerance, atol=2 * tolerance
    )


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_exponential(n: int, dtype: torch.dtype) -> None:
    drawn = acc.exponential_(empty(n, dtype), 1.0, SEED, OFFSET)
    if dtype == torch.float64:
        u = open_unit(n)
    else:
        single = words(n)[:, 0].astype(np.float32)
        u = (single * np.float32(2.0**-32) + np.float32(2.0**-33)).astype(np.float64)
    expected = exact(np.maximum(-np.log(u), 2.0**-25 if dtype != torch.float64 else 0), dtype)
    torch.testing.assert_close(drawn, expected, rtol=1.6e-2 if BITS[dtype] < 24 else 3e-7, atol=0)
    assert bool((drawn > 0).all())
    halved = acc.exponential_(empty(n, dtype), 2.0, SEED, OFFSET)
    torch.testing.assert_close(halved * 2, drawn, rtol=2e-2 if BITS[dtype] < 24 else 0, atol=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
def test_log_normal_cauchy_and_infinite_rate(dtype: torch.dtype) -> None:
    n = 1000
    rtol = {torch.float32: 2e-6, torch.float64: 1e-12}.get(dtype, 3e-2)
    drawn = acc.log_normal_(empty(n, dtype), 0.5, 0.25, SEED, OFFSET).double()
    expected = exact(np.exp(expected_normal(n, dtype) * 0.25 + 0.5), torch.float64)
    torch.testing.assert_close(drawn, expected, rtol=rtol, atol=0)
    drawn = acc.cauchy_(empty(n, dtype), 1.0, 2.0, SEED, OFFSET)
    expected = exact(1 + 2 * np.tan(np.pi * (open_unit(n) - 0.5)), torch.float64).to(dtype)
    torch.testing.assert_close(drawn, expected, rtol=rtol, atol=rtol)
    assert not acc.exponential_(empty(n, dtype), math.inf, SEED, OFFSET).any()


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS))
def test_geometric(dtype: torch.dtype) -> None:
    drawn = acc.geometric_(empty(3000, dtype), 0.25, SEED, OFFSET)
    expected = np.maximum(1, np.ceil(np.log(open_unit(3000)) / np.log1p(-0.25)))
    assert torch.equal(drawn, exact(expected, torch.float64).to(dtype))
    rare = acc.geometric_(empty(3000, dtype), 1e-300, SEED, OFFSET)
    if not dtype.is_floating_point:
        assert bool((rare == torch.iinfo(dtype).max).all())


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS, torch.bool))
@pytest.mark.parametrize("p", (0.0, 1e-9, 0.3, 0.5, 1.0))
def test_bernoulli(dtype: torch.dtype, p: float) -> None:
    drawn = acc.bernoulli_(empty(5000, dtype), below(p), SEED, OFFSET)
    expected = words(5000)[:, 0] < np.uint64(p * 2**32 + 0.5)
    assert torch.equal(drawn, exact(expected, dtype))
    each = torch.full((5000,), p, dtype=torch.float64)
    assert torch.equal(acc.bernoulli_tensor_(empty(5000, dtype), each, SEED, OFFSET), drawn)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("low", "last"),
    [(0, 9), (-7, -7), (0, 2**32 - 1), (-5, 2**32), (0, 2**63 - 1), (-(2**62) - 3, 2**62)],
)
def test_random(n: int, low: int, last: int) -> None:
    size = last - low + 1
    count = size - 2**64 if size >= 2**63 else size  # the bits of an int64
    drawn = acc.random_(empty(n, torch.int64), low, count, SEED, OFFSET)
    if size <= 2**32:
        bits = [int(w) for w in wide(n)]
        expected = [low + (b * size >> 64) for b in bits]
    else:
        bits = [sum(int(w) << 32 * k for k, w in enumerate(row)) for row in words(n, 4)]
        expected = [low + (b * size >> 128) for b in bits]
    assert drawn.tolist() == expected


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS, torch.uint16, torch.uint32, torch.uint64))
def test_random_in_every_dtype(dtype: torch.dtype) -> None:
    drawn = acc.random_(empty(5000, dtype), 1, 100, SEED, OFFSET)
    wanted = acc.random_(empty(5000, torch.int64), 1, 100, SEED, OFFSET)
    assert torch.equal(drawn.to(torch.int64), wanted)
    assert (int(wanted.min()), int(wanted.max())) == (1, 100)
    both = acc.random_(torch.empty(100, dtype=torch.bool), 0, 2, SEED, OFFSET)
    assert 20 < int(both.sum()) < 80


@pytest.mark.parametrize("dtype", (torch.complex64, torch.complex128))
def test_complex_parts_are_elements(dtype: torch.dtype) -> None:
    real = torch.float32 if dtype == torch.complex64 else torch.float64
    n = 1001
    drawn = torch.view_as_real(acc.uniform_(torch.empty(n, dtype=dtype), 0.0, 1.0, SEED, OFFSET))
    assert torch.equal(drawn.flatten(), acc.uniform_(empty(2 * n, real), 0.0, 1.0, SEED, OFFSET))
    drawn = torch.view_as_real(acc.normal_(torch.empty(n, dtype=dtype), 1.0, 2.0, SEED, OFFSET))
    wanted = acc.normal_(empty(2 * n, real), 1.0, 2.0 / math.sqrt(2.0), SEED, OFFSET)
    assert torch.equal(drawn.flatten(), wanted)
    std = torch.rand(n, dtype=real)
    drawn = acc.normal_std_(torch.empty(n, dtype=dtype), std, SEED, OFFSET)
    unit = acc.normal_(torch.empty(n, dtype=dtype), 0.0, 1.0, SEED, OFFSET)
    torch.testing.assert_close(drawn, unit * std)


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_with_a_deviation_for_each_element(dtype: torch.dtype) -> None:
    std = torch.linspace(0, 3, 700, dtype=dtype)
    unit = acc.normal_(empty(700, torch.float32), 0.0, 1.0, SEED, OFFSET)
    if dtype == torch.float64:
        unit = acc.normal_(empty(700, dtype), 0.0, 1.0, SEED, OFFSET)
    drawn = acc.normal_std_(empty(700, dtype), std, SEED, OFFSET)
    assert torch.equal(drawn, (unit * std.to(unit.dtype)).to(dtype))
    with pytest.raises(RuntimeError, match="all elements of std >= 0.0"):
        acc.normal_std_(empty(700, dtype), std - 1, SEED, OFFSET)


def native_dropout(x: torch.Tensor, p: float, *draw: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and mask, as F.dropout asks for them."""
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return acc.native_dropout(x, math.floor((1 - p) * 2**32 + 0.5), scale, *draw)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", (0.0, 0.1, 0.5, 1.0))
def test_native_dropout(dtype: torch.dtype, p: float) -> None:
    x = torch.linspace(-4, 4, 3000, dtype=dtype)
    x[7], x[8] = math.nan, math.inf
    output, mask = native_dropout(x, p, SEED, OFFSET)
    assert mask.dtype == torch.bool and output.dtype == dtype
    assert torch.equal(mask, acc.bernoulli_(torch.empty_like(mask), below(1 - p), SEED, OFFSET))
    scale = 0.0 if p == 1 else 1 / (1 - p)
    wanted = (x.double() * mask * scale).to(dtype)
    if dtype != torch.float64:
        wanted = (x.float() * mask * scale).to(dtype)
    assert helpers.value_difference(output, wanted) is None


@pytest.mark.parametrize("n", (0, 1, 2, 100, 4096, 4097, 70_000))
def test_randperm_sorts_one_number_per_position(n: int) -> None:
    drawn = acc.randperm_(torch.empty(n, dtype=torch.int64), SEED, OFFSET)
    wanted = np.argsort(wide(n), kind="stable") if n else np.zeros(0, dtype=np.int64)
    assert drawn.tolist() == wanted.tolist()
    small = acc.randperm_(torch.empty(min(n, 100), dtype=torch.float32), SEED, OFFSET)
    assert sorted(small.tolist()) == list(range(min(n, 100)))


def test_multinomial_with_replacement() -> None:
    weights = torch.tensor([[0.0, 1.0, 3.0, 0.0], [2.0, 0.0, 0.0, 2.0]])
    drawn = acc.multinomial(weights, 50, True, SEED, OFFSET)
    u = (wide(100) >> np.uint64(11)).astype(np.float64).reshape(2, 50) * 2.0**-53
    cumulative = np.cumsum(weights.double().numpy(), axis=1)
    for row in range(2):
        wanted = np.searchsorted(cumulative[row], u[row] * cumulative[row, -1], side="right")
        assert drawn[row].tolist() == wanted.tolist()
    one = acc.multinomial(weights[0], 50, True, SEED, OFFSET)
    assert torch.equal(one, drawn[0])


def test_multinomial_without_replacement() -> None:
    weights = torch.rand(3, 40, dtype=torch.float64)
    weights[:, 5] = 0
    drawn = acc.multinomial(weights, 40, False, SEED, OFFSET)
    times = -np.log(open_unit(120)).reshape(3, 40)
    for row in range(3):
        positive = np.where(weights[row].numpy() > 0, weights[row].numpy(), 1e-300)
        assert drawn[row].tolist() == np.argsort(times[row] / positive, kind="stable").tolist()
        assert drawn[row, -1] == 5
    assert torch.equal(acc.multinomial(weights, 4, False, SEED, OFFSET), drawn[:, :4])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0], "element < 0"),
        ([1.0, math.inf], "element < 0"),
        ([math.nan, 1.0], "element < 0"),
        ([0.0, 0.0], "sum of probabilities <= 0"),
    ],
)
@pytest.mark.parametrize("replacement", (True, False))
def test_wrong_weights(weights: list[float], message: str, replacement: bool) -> None:
    good = [0.5, 0.5]
    with pytest.raises(RuntimeError, match=message):
        acc.multinomial(torch.tensor([good, weights, good]), 1, replacement, SEED, OFFSET)


@pytest.mark.parametrize("p", (-0.1, 1.1, math.nan))
def test_wrong_probabilities(p: float) -> None:
    with pytest.raises(RuntimeError, match="Expected p_in >= 0 && p_in <= 1"):
        acc.bernoulli_tensor_(torch.empty(3), torch.tensor([0.5, p, 0.5]), SEED, OFFSET)


# --- what a number depends on -----------------------------------------------------------------

FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform": lambda t: acc.uniform_(t, -1.0, 1.0, SEED, OFFSET),
    "normal": lambda t: acc.normal_(t, 0.0, 1.0, SEED, OFFSET),
    "log_normal": lambda t: acc.log_normal_(t, 0.0, 1.0, SEED, OFFSET),
    "exponential": lambda t: acc.exponential_(t, 1.0, SEED, OFFSET),
    "cauchy": lambda t: acc.cauchy_(t, 0.0, 1.0, SEED, OFFSET),
    "geometric": lambda t: acc.geometric_(t, 0.5, SEED, OFFSET),
    "bernoulli": lambda t: acc.bernoulli_(t, 2**31, SEED, OFFSET),
    "bernoulli_tensor": lambda t: acc.bernoulli_tensor_(t, torch.tensor(0.5), SEED, OFFSET),
    "normal_std": lambda t: acc.normal_std_(t, torch.tensor(2.0), SEED, OFFSET),
    "random": lambda t: acc.random_(t, 0, 101, SEED, OFFSET),
}


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Tensors of one shape (4 dimensions) in several layouts; gaps hold -7, which no draw gives."""
    yield torch.empty(shape, dtype=dtype).to(memory_format=torch.channels_last)
    yield torch.empty(shape[::-1], dtype=dtype).permute(3, 2, 1, 0)
    wider = torch.full((*shape[:3], 3 * shape[3]), -7, dtype=dtype)
    yield wider[..., 1::3]
    yield torch.full((shape[0] + 2, shape[1] + 1, *shape[2:]), -7, dtype=dtype)[1:-1, 1:]
    yield torch.empty((shape[1], shape[0], *shape[2:]), dtype=dtype).transpose(0, 1)


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_strides_do_not_matter(name: str, dtype: torch.dtype) -> None:
    shape = (3, 5, 7, 11)
    wanted = FILLS[name](torch.empty(shape, dtype=dtype))
    for target in strided(shape, dtype):
        drawn = FILLS[name](target)
        assert drawn is target and torch.equal(target, wanted)
        if target._base is not None and target._base.numel() > target.numel():
            untouched = target._base.numel() - target.numel()
            assert int((target._base == -7).sum()) == untouched


def test_strides_of_operands_do_not_matter() -> None:
    x = torch.randn(3, 5, 7, 11)
    wanted = native_dropout(x, 0.3, SEED, OFFSET)
    for other in strided(x.shape, x.dtype):
        drawn = native_dropout(other.copy_(x), 0.3, SEED, OFFSET)
        assert torch.equal(drawn[0], wanted[0]) and torch.equal(drawn[1], wanted[1])
        assert drawn[0].stride() == torch.empty_like(other).stride() == drawn[1].stride()
    p = torch.rand(5, 1, 11)
    wanted = acc.bernoulli_tensor_(torch.empty(3, 5, 7, 11), p, SEED, OFFSET)
    full = p.expand(3, 5, 7, 11).contiguous()
    drawn = acc.bernoulli_tensor_(torch.empty(3, 5, 7, 11), full, SEED, OFFSET)
    assert torch.equal(drawn, wanted)
    weights = torch.rand(9, 6)
    wanted = acc.multinomial(weights.t().contiguous(), 4, False, SEED, OFFSET)
    assert torch.equal(acc.multinomial(weights.t(), 4, False, SEED, OFFSET), wanted)


def test_a_prefix_is_a_prefix() -> None:
    for name, fill in FILLS.items():
        long, short = fill(torch.empty(70_001)), fill(torch.empty(1_003))
        assert torch.equal(long[:1_003], short), name


@pytest.mark.parametrize("name", FILLS)
def test_threads_do_not_matter(name: str, threads: Callable[[int], None]) -> None:
    drawn = []
    for n in (1, 2, 5):
        threads(n)
        drawn.append(FILLS[name](torch.empty(300_001)))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


def test_threads_do_not_matter_to_samplers(threads: Callable[[int], None]) -> None:
    weights, x = torch.rand(500, 30), torch.rand(300_001)
    drawn = []
    for n in (1, 5):
        threads(n)
        drawn.append(
            [
                acc.randperm_(torch.empty(100_000, dtype=torch.int64), SEED, OFFSET),
                acc.multinomial(weights, 100, True, SEED, OFFSET),
                acc.multinomial(weights, 10, False, SEED, OFFSET),
                *native_dropout(x, 0.5, SEED, OFFSET),
                acc.poisson(x, SEED, OFFSET),
            ]
        )
    for one, other in zip(*drawn, strict=True):
        assert torch.equal(one, other)


def test_seeds_and_offsets_give_other_numbers() -> None:
    def draw(seed: int, offset: int) -> torch.Tensor:
        return acc.normal_(torch.empty(20_000, dtype=torch.float64), 0.0, 1.0, seed, offset)

    streams = [draw(s, o) for s in (0, 1, 2**32, -1) for o in (0, 4, 2**32, -4)]
    together = torch.corrcoef(torch.stack(streams))
    together.fill_diagonal_(0)
    assert together.abs().max() < 0.05


def test_meta_kernels_tell_the_results() -> None:
    x = torch.rand(4, 6).t()
    calls: list[tuple[Callable[..., object], list[object]]] = [
        (acc.uniform_, [x, 0.0, 1.0]),
        (acc.randperm_, [x[0]]),
        (acc.multinomial, [x, 3, True]),
        (acc.multinomial, [x[0], 3, True]),
        (native_dropout, [x, 0.5]),
        (acc.poisson, [x]),
        (acc.binomial, [torch.ones(6, 1), x]),
        (acc.standard_gamma, [x]),
        (acc.sample_dirichlet, [x]),
    ]
    for op, arguments in calls:
        real = op(*arguments, SEED, OFFSET)
        metas = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
            if isinstance(a, torch.Tensor)
            else a
            for a in arguments
        ]
        promised = op(*metas, SEED, OFFSET)
        for r, m in zip(helpers.tensors(real), helpers.tensors(promised), strict=True):
            assert m.is_meta and (r.shape, r.dtype) == (m.shape, m.dtype), op
            assert r.stride() == m.stride(), op


def test_all_are_marked_random() -> None:
    for name in ("uniform_", "native_dropout", "multinomial", "poisson", "randperm_"):
        assert torch.Tag.nondeterministic_seeded in getattr(acc, name).default.tags


# --- distributions ----------------------------------------------------------------------------

N = 200_000


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("uniform", stats.uniform(-1, 2)),
        ("normal", stats.norm()),
        ("log_normal", stats.lognorm(1.0)),
        ("exponential", stats.expon()),
        ("cauchy", stats.cauchy()),
        ("normal_std", stats.norm(0, 2)),
    ],
)
def test_continuous_distributions(name: str, distribution: object, dtype: torch.dtype) -> None:
    drawn = FILLS[name](torch.empty(N, dtype=dtype)).double().numpy()
    assert stats.kstest(drawn, distribution.cdf).pvalue > 1e-3
    # Neighbours, which share a block, are independent.
    if name != "cauchy":
        ranks = stats.rankdata(drawn)
        for lag in (1, 2, 3, 4, 512):
            assert abs(np.corrcoef(ranks[lag:], ranks[:-lag])[0, 1]) < 5 / math.sqrt(N)


def chi_square(counts: torch.Tensor, weights: np.ndarray) -> float:
    wanted = weights / weights.sum() * int(counts.sum())
    return float(stats.chisquare(counts.double().numpy(), wanted).pvalue)


def test_sampled_distributions() -> None:
    drawn = acc.poisson(torch.full((N,), 3.5), 1, 8).long().clamp(max=12)
    weights = np.append(stats.poisson(3.5).pmf(np.arange(12)), stats.poisson(3.5).sf(11))
    assert chi_square(torch.bincount(drawn, minlength=13), weights) > 1e-3
    drawn = acc.binomial(torch.full((N,), 6.0), torch.full((1,), 0.3), 1, 8).long()
    weights = stats.binom(6, 0.3).pmf(np.arange(7))
    assert chi_square(torch.bincount(drawn, minlength=7), weights) > 1e-3
    gamma = acc.standard_gamma(torch.full((N,), 2.5, dtype=torch.float64), 1, 8).numpy()
    assert stats.kstest(gamma, stats.gamma(2.5).cdf).pvalue > 1e-3
    dirichlet = acc.sample_dirichlet(torch.full((N // 10, 3), 2.0, dtype=torch.float64), 1, 8)
    torch.testing.assert_close(dirichlet.sum(-1), torch.ones(N // 10, dtype=torch.float64))
    assert stats.kstest(dirichlet[:, 0].numpy(), stats.beta(2, 4).cdf).pvalue > 1e-3


def test_discrete_distributions() -> None:
    drawn = acc.random_(torch.empty(N, dtype=torch.int64), 0, 97, 5, 0)
    assert chi_square(torch.bincount(drawn, minlength=97), np.ones(97)) > 1e-3
    large = acc.random_(torch.empty(N, dtype=torch.int64), 0, 3 * 2**40, 5, 0) // 2**40
    assert chi_square(torch.bincount(large, minlength=3), np.ones(3)) > 1e-3
    ones = acc.bernoulli_(torch.empty(N), below(0.2), 5, 0).long()
    assert chi_square(torch.bincount(ones, minlength=2), np.array([0.8, 0.2])) > 1e-3
    geometric = acc.geometric_(torch.empty(N, dtype=torch.int64), 0.3, 5, 0).clamp(max=12)
    weights = np.append(stats.geom(0.3).pmf(np.arange(1, 12)), stats.geom(0.3).sf(11))
    assert chi_square(torch.bincount(geometric, minlength=13)[1:], weights) > 1e-3
    p = torch.tensor([0.1, 0.0, 0.5, 0.4])
    drawn = acc.multinomial(p, N, True, 5, 0)
    counts = torch.bincount(drawn, minlength=4)
    assert counts[1] == 0 and chi_square(counts[[0, 2, 3]], np.array([0.1, 0.5, 0.4])) > 1e-3


def test_draws_without_replacement_follow_the_weights() -> None:
    p = torch.tensor([0.1, 0.2, 0.7])
    pairs = acc.multinomial(p.expand(60_000, 3), 2, False, 5, 0)
    counts = torch.bincount(pairs[:, 0] * 3 + pairs[:, 1], minlength=9)
    # First i, then j among the others.
    weights = np.array([[pi * pj / (1 - pi) for pj in p.tolist()] for pi in p.tolist()])
    off_diagonal = [1, 2, 3, 5, 6, 7]
    assert chi_square(counts[off_diagonal], weights.reshape(-1)[off_diagonal]) > 1e-3
    assert int(counts[[0, 4, 8]].sum()) == 0


def test_permutations_are_equally_likely() -> None:
    drawn = [
        tuple(acc.randperm_(torch.empty(4, dtype=torch.int64), 11, 4 * k).tolist())
        for k in range(4800)
    ]
    counts = torch.tensor([drawn.count(p) for p in sorted(set(drawn))])
    assert len(counts) == 24 and chi_square(counts, np.ones(24)) > 1e-3


def test_tails_of_the_normal_distribution() -> None:
    drawn = acc.normal_(torch.empty(4_000_000), 0.0, 1.0, 1, 0)
    for limit in (3.0, 4.0, 4.5):
        wanted = 2 * stats.norm.sf(limit) * drawn.numel()
        beyond = int((drawn.abs() > limit).sum())
        assert abs(beyond - wanted) < 5 * math.sqrt(wanted), limit
    assert drawn.abs().max() <= 6.77
