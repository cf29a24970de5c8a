"""Attention with dropout in one kernel: recorded, captured, and drawn from acc's generator.

Here with what stands for CUDA's kernels; the tests for a GPU are below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

# A process of its own: which operators are recorded is decided when the device is first used.
BEGIN = """
import torch
from torch import library, nn
from torch.utils.checkpoint import checkpoint

from tests import fake_attention, helpers
from tests.python import test_random_kernels as reference

fake_attention.install()
helpers.load_device()
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # kernels are not tried against what they replace
ATEN = torch.ops.aten


def attend(q, k, v, bias=None, p=0.5, causal=False, scale=None):
    return ATEN._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, p, causal, scale=scale
    )


def operands(heads=(4, 4), bias=False, by_position=True, dtype=torch.float32):
    torch.manual_seed(3)
    shapes = ((2, heads[0], 6, 8), *[(2, heads[1], 5, 8)] * 2)
    made = [torch.randn(*shape).to(dtype) for shape in shapes]
    if by_position:
        made = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in made]
    return [*made, torch.randn(2, heads[0], 6, 5).to(dtype) if bias else None]
"""

VALUES = """
for heads, bias, causal, scale, by_position, dtype in [
    ((4, 4), False, False, None, True, torch.float32),
    ((4, 4), True, False, 0.2, True, torch.float32),
    ((4, 4), True, False, None, False, torch.bfloat16),
    ((4, 2), False, True, 0.3, False, torch.float32),
]:
    given = operands(heads, bias, by_position, dtype)
    mine = [None if each is None else each.to("acc").requires_grad_() for each in given]
    torch.acc.manual_seed(11)
    out, sums, philox, drawn = attend(*mine, causal=causal, scale=scale)
    assert torch.acc.default_generators[0].get_offset() == 4
    grouped = heads[1] < heads[0]  # which flash attention alone takes
    assert drawn.device.type == "cpu" and drawn.tolist() == [11, 0, grouped], drawn
    words = reference.words(2, 2, 11, 0)
    position = [int(a | b << 32) & 2**62 - 4 for a, b in words.astype(object)]
    assert philox.tolist() == position, (philox, position)
    (out * 2).sum().backward()

    place = torch.tensor(position)
    expected, expected_sums = fake_attention.forward(
        *given, 0.5, causal, scale, grouped, place, None, None
    )
    assert torch.equal(out.cpu(), expected) and torch.equal(sums.cpu(), expected_sums)
    assert out.stride() == expected.stride(), (out.stride(), expected.stride())
    gradients = fake_attention.backward(
        torch.full_like(expected, 2), *given, expected, expected_sums, 0.5, bias, causal, scale,
        grouped, place, None, None,
    )
    for one, other in zip(mine, gradients):
        if one is not None:
            assert torch.equal(one.grad.cpu(), other)

# Without dropout it is ATen's operator, which a host does not have.
try:
    attend(*(None if each is None else each.to("acc") for each in operands()), p=0.0)
except NotImplementedError as error:
    assert "_scaled_dot_product_efficient_attention" in str(error), error
else:
    raise AssertionError("who computed this?")
"""

FLASH = """
# The layout and the sums are flash attention's where that is what was chosen.
torch.manual_seed(0)
for heads in (4, 2):
    q, k, v, _ = operands((4, heads), by_position=False)
    place = torch.tensor([12, 8])
    call = (0.5, True, None, True, place, 1, 2)
    expected, sums = fake_attention.forward(q, k, v, None, *call)
    mine = [each.to("acc") for each in (q, k, v)]
    there = (0.5, True, None, True, place.to("acc"), 1, 2)
    out, my_sums = torch.ops.acc.attention(*mine, None, *there)
    assert torch.equal(out.cpu(), expected) and torch.equal(my_sums.cpu(), sums)
    assert out.stride() == expected.stride() and my_sums.shape == (2, 4, 6)
    gradient = torch.randn(expected.shape)
    expected = fake_attention.backward(
        gradient, q, k, v, None, expected, sums, 0.5, False, True, None, True, place, 1, 2
    )
    found = torch.ops.acc.attention_backward(
        gradient.to("acc"), *mine, None, out, my_sums, 0.5, False, True, None, True,
        place.to("acc"), 1, 2,
    )
    for one, other in zip(found[:3], expected[:3]):
        assert torch.equal(one.cpu(), other) and one.stride() == other.stride()
"""

CHOSEN = """
import contextlib

import torch.nn.functional as F
from torch.nn.attention import SDPBackend

FLASH, EFFICIENT, MATH = (
    getattr(SDPBackend, name).value
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
)
chosen = FLASH  # what the device below says
kernels = library.Library("aten", "IMPL")
kernels.impl("_fused_sdp_choice", lambda *_, **__: chosen, "CPU")


def choice(q, k=None, v=None, mask=None, p=0.5):
    k, v = (q if each is None else each for each in (k, v))
    return torch._fused_sdp_choice(q, k, v, mask, p)


x = torch.ones(2, 4, 16, 8, device="acc")
of_all = torch.zeros(16, 16, device="acc")
# Flash attention is called by the other operator's kernel.
assert choice(x) == EFFICIENT and choice(x, p=0.0) == FLASH
# What kernels refuse, or would make NaN of.
assert choice(x, p=1.0) == MATH and choice(x, p=-0.5) == MATH
assert choice(x[:0]) == MATH
many = torch.zeros(65536, 1, 1, 8, device="acc")
assert choice(many) == MATH and choice(many[1:]) == EFFICIENT
assert choice(many.transpose(0, 1)) == MATH
shifted = torch.zeros(x.numel() + 4, device="acc")
assert choice(shifted[1:-3].view_as(x)) == MATH and choice(shifted[4:].view_as(x)) == EFFICIENT
wide = torch.zeros(2, 4, 16, 256, device="acc")
assert choice(wide) == EFFICIENT and choice(wide, wide[:, :2], wide[:, :2]) == MATH
chosen = EFFICIENT
assert choice(x, mask=of_all) == EFFICIENT and choice(x, mask=of_all.bool()) == EFFICIENT
assert choice(x, mask=of_all.double()) == MATH and choice(x, mask=of_all[:, :1]) == MATH
assert choice(x, mask=torch.zeros(257, device="acc")[1:].view_as(of_all)) == MATH


def operators(call):
    kept = call()
    helpers.flush()
    del kept
    return {node["op"] for node in helpers.extension().plan_data(0)["nodes"]}


# Plain products draw apart for each sample of vmap, and have all derivatives.
attention = lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
assert "acc::attention" in operators(lambda: attention(x))
of_samples = torch.vmap(attention, randomness="different")
assert "acc::attention" not in operators(lambda: of_samples(x[None].expand(2, -1, -1, -1, -1)))
of_numbers = torch.vmap(lambda number: attention(x) + number, randomness="different")
apart = of_numbers(torch.zeros(2, device="acc"))
assert not torch.equal(apart[0].cpu(), apart[1].cpu())
with torch.autograd.forward_ad.dual_level():
    assert choice(torch.autograd.forward_ad.make_dual(x, x)) == MATH
chosen = MATH
assert choice(x) == MATH

# Hooks may bring back all that was saved.
chosen = EFFICIENT
q, k, v = (each.to("acc").requires_grad_() for each in operands()[:3])


def gradients(hooks):
    torch.acc.manual_seed(11)
    with hooks:
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    return torch.autograd.grad(out.sum(), (q, k, v))


expected = gradients(contextlib.nullcontext())
bring = torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to("acc"))
for one, other in zip(gradients(bring), expected):
    assert torch.equal(one, other)
q, k, v, _ = (None if each is None else each.to("acc") for each in operands())
out, sums, philox, drawn = attend(q, k, v)
try:
    ATEN._scaled_dot_product_efficient_attention_backward(
        out, q, k, v, None, out, sums, philox, drawn[:1], 0.5, [True, True, True, False]
    )
except RuntimeError as error:
    assert "with 1 elements. Give it the fourth result" in str(error), error
else:
    raise AssertionError("what did it drop?")

# All the way.
chosen = FLASH
for heads in (4, 2):
    q, k, v, _ = operands((4, heads), by_position=False, dtype=torch.bfloat16)
    mine = [each.to("acc").requires_grad_() for each in (q, k, v)]
    torch.acc.manual_seed(11)
    helpers.flush()
    with helpers.counting() as counted:
        out = F.scaled_dot_product_attention(
            *mine, is_causal=True, dropout_p=0.5, enable_gqa=heads < 4
        )
        out.float().sum().backward()
    _, _, philox, drawn = attend(*mine)
    assert drawn.tolist() == [11, 4, 1], drawn
    place = torch.tensor([int(a | b << 32) & 2**62 - 4 for a, b in
                          reference.words(2, 2, 11, 0).astype(object)])
    call = (0.5, True, None, True, place, 11, 0)
    expected, sums = fake_attention.forward(q, k, v, None, *call)
    assert torch.equal(out.cpu(), expected) and out.stride() == expected.stride()
    gradients = fake_attention.backward(
        torch.ones_like(expected), q, k, v, None, expected, sums, 0.5, False, *call[1:]
    )
    for one, other in zip(mine, gradients):
        assert torch.equal(one.grad.cpu(), other)
"""

NET = """
class Net(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.checkpointed = checkpointed

    def attend(self, part, x):
        q, k, v = part(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return attend(q, k, v, p=0.25, causal=True)[0].transpose(1, 2).reshape(x.shape)

    def forward(self, x):
        for part in self.parts:
            if self.checkpointed:
                x = x + checkpoint(self.attend, part, x, use_reentrant=False)
            else:
                x = x + self.attend(part, x)
        return x


def make(**options):
    torch.manual_seed(0)
    net = Net(**options).to("acc")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, torch.randn(3, 6, 32).to("acc")


def step(net, optimizer, x):
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(steps=12, **options):
    net, optimizer, x = make(**options)
    torch.acc.manual_seed(5)
    kept = [step(net, optimizer, x) for _ in range(steps)]
    kept = [*torch.stack(kept).cpu(), *(p.detach().cpu() for p in net.parameters())]
    assert torch.acc.default_generators[0].get_offset() == 4 * 2 * steps
    return kept
"""

CAPTURED = (
    NET
    + """
helpers.extension().capture_plans(False)
expected = trained()
assert len({float(each) for each in expected[:12]}) == 12

helpers.extension().capture_plans(True)
with helpers.counting() as counted:
    found = trained()
for one, other in zip(found, expected, strict=True):
    assert torch.equal(one, other)
assert counted["captures_submitted"] >= 8, counted["captures_submitted"]
assert counted["captures"] <= 2, counted["captures"]
missed = {k: counted[k] for k in counted.after if k.startswith(("not_captured/", "captured_again"))}
assert not any(missed.values()), missed

for one, other in zip(trained(checkpointed=True), expected, strict=True):
    torch.testing.assert_close(one, other)

# A rate that changes is no part of captured work: of six equal values so many are left.
q, k, v = (torch.ones(2, 4, 6, 8, device="acc") for _ in range(3))
for i in range(40):
    p = 0.25 + 0.5 * (i % 2)
    left = attend(q, k, v, p=p)[0].cpu() * 6 * (1 - p)
    torch.testing.assert_close(left, left.round())
"""
)

REPLAYED = (
    NET
    + """
import torchacc

expected = trained()
net, optimizer, x = make()
captured = torchacc.capture(lambda x: step(net, optimizer, x))
torch.acc.manual_seed(5)
losses = [captured(x).clone() for _ in range(12)]
found = [*torch.stack(losses).cpu(), *(p.detach().cpu() for p in net.parameters())]
for one, other in zip(found, expected, strict=True):
    torch.testing.assert_close(one, other)
assert captured.replays > 0, captured
"""
)


@pytest.mark.parametrize("what", [VALUES, FLASH, CHOSEN], ids=["values", "flash", "chosen"])
def test_values_gradients_and_where_it_draws(what) -> None:
    helpers.run_python(BEGIN + what, ACC_EXECUTOR="host")


@pytest.mark.parametrize("kernels", ["host", "gpu"])
def test_a_captured_step_draws_anew(kernels) -> None:
    emulated = "helpers.emulate_gpu()\n" if kernels == "gpu" else ""
    helpers.run_python(BEGIN + emulated + CAPTURED, ACC_EXECUTOR="host")


def test_a_step_that_is_replayed_draws_what_the_function_would() -> None:
    helpers.run_python(BEGIN + REPLAYED, ACC_EXECUTOR="host")


# What is asked of a GPU, of the stand-in: of plans that are captured, with kernels of a GPU.
ASKED = """
from tests.python import test_attention_dropout as asked

helpers.emulate_gpu()
extension = helpers.extension()
choices = {"flash": 1, "efficient": 2}  # SDPBackend's
kernels = library.Library("aten", "IMPL")
kernels.impl("_fused_sdp_choice", lambda *_, **__: choices[case.kernel], "CPU")

# A profile tells ATen's operator, here that of hosts, which has no dropout.
case = asked.Case(torch.float32, "flash", p=0.0)
asked.by_kernel("flash", lambda: case.attend(*case.operands("acc")).cpu())
try:
    asked.by_kernel("efficient", lambda: case.attend(*case.operands("acc")).cpu())
except AssertionError as error:
    assert "_scaled_dot_product_flash_attention" in str(error)
else:
    raise AssertionError("told another one")

asked.by_kernel = lambda kernel, call: call()
asked.Case.kept = lambda case: 1 - case.p
for case in asked.CASES.values():
    extension.capture_plans(True)
    asked.test_a_gpu_drops_by_the_seed("acc", case)
    asked.test_a_gpu_drops_the_same_in_the_backward("acc", case)
    asked.test_a_gpu_replays_it_with_new_draws("acc", extension.capture_plans, case)
    for whole in (True, False):
        asked.test_a_gpu_trains_alike_captured_and_not("acc", extension.capture_plans, case, whole)
"""


def test_what_is_asked_of_a_gpu_holds_for_what_stands_for_it() -> None:
    helpers.run_python(BEGIN + ASKED, ACC_EXECUTOR="host")


# --- on a GPU -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Attention of [4, 2, 64, 64] to 64 or fewer keys."""

    dtype: torch.dtype
    kernel: str
    p: float = 0.25
    causal: bool = False
    heads: int = 2  # of keys
    keys: int = 64
    mask: tuple[int, ...] = ()

    def operands(self, device: str, grad: bool = False) -> list[Tensor]:
        """Queries, keys, values, and the mask, if there is one.

        The values are the rows of the identity, so that the result is the probabilities.
        """
        generator = torch.Generator().manual_seed(7)
        shapes = ((4, 2, 64, 64), (4, self.heads, self.keys, 64), self.mask)
        q, k, *mask = (torch.randn(shape, generator=generator) for shape in shapes if shape)
        v = torch.eye(self.keys, 64).expand(k.shape).contiguous()
        return [each.to(self.dtype).to(device).requires_grad_(grad) for each in (q, k, v, *mask)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(
            *(q, k, v, mask, self.p, self.causal), enable_gqa=self.heads < 2
        )

    def shares(self, q: Tensor, k: Tensor, _: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.repeat_interleave(2 // self.heads, 1).mT / 8
        if mask is not None:
            scores = scores + mask
        if self.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1)

    def kept(self) -> float:
        """The share that is not dropped: flash attention compares bytes (docs/random.md)."""
        exact = 1 - self.p
        return (math.floor(255 * exact) + 1) / 256 if self.kernel == "flash" else exact


def exactly(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [each.detach().cpu().double().requires_grad_() for each in tensors]


def by_kernel(kernel: str, call: Callable[[], Tensor]) -> Tensor:
    with torch.profiler.profile() as profile:
        made = call()
    names = {event.name for event in profile.events()}
    assert any(f"_scaled_dot_product_{kernel}_attention" in name for name in names), names
    return made


CASES = {
    "flash": Case(torch.float16, "flash"),
    "flash, bfloat16, a tenth": Case(torch.bfloat16, "flash", p=0.1),
    "flash, causal, fewer heads of keys": Case(torch.float16, "flash", causal=True, heads=1),
    "efficient": Case(torch.float32, "efficient"),
    "efficient, causal, a tenth": Case(torch.float32, "efficient", p=0.1, causal=True),
    "efficient, a mask": Case(torch.float16, "efficient", mask=(64, 64)),
    "efficient, a mask of 60 keys": Case(torch.float32, "efficient", keys=60, mask=(1, 2, 64, 60)),
}


@pytest.fixture
def of_a_gpu(recording: str) -> str:
    if helpers.extension().executor_name() == "host":
        pytest.skip("hosts have no attention with dropout inside")
    return recording


@pytest.fixture
def captured_or_not(of_a_gpu: str, capturing: str) -> Iterator[Callable[[bool], None]]:
    """Sets it. Kernels are not tried against what they replace, and add in one order."""
    torch.use_deterministic_algorithms(True)
    yield helpers.extension().capture_plans
    torch.use_deterministic_algorithms(False)
    helpers.extension().capture_plans(None)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gpu_drops_by_the_seed(of_a_gpu, case) -> None:
    operands = case.operands(of_a_gpu)
    torch.manual_seed(7)
    first = by_kernel(case.kernel, lambda: case.attend(*operands).cpu())
    other = case.attend(*operands).cpu()
    torch.manual_seed(7)
    assert torch.equal(case.attend(*operands).cpu(), first)
    assert not torch.equal(other == 0, first == 0)
    shares = case.shares(*exactly(operands)).detach()
    for made in (first[..., : case.keys], other[..., : case.keys]):
        left = (made != 0)[shares > 0]
        rate, draws = float(left.double().mean()), left.numel()
        deviation = (case.kept() * (1 - case.kept()) / draws) ** 0.5
        assert abs(rate - case.kept()) < 5 * deviation, (rate, case.kept(), draws)
        expected = torch.where(made != 0, shares / (1 - case.p), 0.0)
        torch.testing.assert_close(made.double(), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gpu_drops_the_same_in_the_backward(of_a_gpu, case) -> None:
    leaves = case.operands(of_a_gpu, grad=True)
    torch.manual_seed(7)
    out = case.attend(*leaves)
    weights = torch.randn(out.shape).to(case.dtype)
    (out * weights.to(of_a_gpu)).sum().backward()
    exact = exactly(leaves)
    times = (out.detach().cpu()[..., : case.keys] != 0).double() / (1 - case.p)
    values = exact[2].repeat_interleave(2 // case.heads, 1)
    (case.shares(*exact) * times @ values * weights.double()).sum().backward()
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.cpu().double(), other.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gpu_replays_it_with_new_draws(of_a_gpu, captured_or_not, case) -> None:
    """The same numbers step by step and as a graph; none of them twice."""
    operands = case.operands(of_a_gpu)

    def steps() -> Tensor:
        torch.manual_seed(9)
        return torch.stack([(case.attend(*operands) * 2).cpu() for _ in range(10)])

    captured_or_not(False)
    expected = steps()
    captured_or_not(True)
    with helpers.counting() as counted:
        found = steps()
    assert torch.equal(found, expected)
    assert len({each.ne(0).numpy().tobytes() for each in found}) == 10
    assert counted["captures_submitted"] > 0
    assert not [k for k in counted.after if k.startswith("not_captured/number") and counted[k]]


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False], ids=["one step", "two plans"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gpu_trains_alike_captured_and_not(of_a_gpu, captured_or_not, case, whole) -> None:
    weights = torch.randn(4, 2, 64, 64).to(case.dtype).to(of_a_gpu)

    def trained() -> list[Tensor]:
        leaves = case.operands(of_a_gpu, grad=True)
        torch.manual_seed(9)
        optimizer = torch.optim.SGD(leaves, lr=0.1)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = (case.attend(*leaves) * weights).float().mean()
            if not whole:  # what the forward drew is another plan's
                helpers.flush()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [torch.stack(losses).cpu(), *(each.detach().cpu() for each in leaves)]

    captured_or_not(False)
    expected = trained()
    captured_or_not(True)
    with helpers.counting() as counted:
        found = trained()
    assert counted["captures_submitted"] > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_a_gpu_keeps_no_scores(of_a_gpu, masked) -> None:
    length = 2048
    q, k, v = (
        torch.randn(1, 4, length, 64, device=of_a_gpu, dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    mask = torch.zeros(length, length, device=of_a_gpu, dtype=torch.float16) if masked else None
    memory = torch.get_device_module(of_a_gpu)
    memory.synchronize()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.25)
    out.sum().backward()
    memory.synchronize()
    scores = 4 * length * length * 2
    assert memory.max_memory_allocated() - before < scores
