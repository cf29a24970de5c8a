"""Attention with dropout in one kernel: recorded, captured, and drawn from acc's generator.

Here with what stands for CUDA's kernels; the tests for a GPU are below.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

# A process of its own: which operators are recorded is decided when the device is first used.
BEGIN = """
import torch
from torch import nn
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
    assert drawn.device.type == "cpu" and drawn.tolist() == [11, 0, 0], drawn
    words = reference.words(2, 2, 11, 0)
    position = [int(a | b << 32) & 2**62 - 4 for a, b in words.astype(object)]
    assert philox.tolist() == position, (philox, position)
    (out * 2).sum().backward()

    place = torch.tensor(position)
    expected, expected_sums = fake_attention.forward(
        *given, 0.5, causal, scale, False, place, None, None
    )
    assert torch.equal(out.cpu(), expected) and torch.equal(sums.cpu(), expected_sums)
    assert out.stride() == expected.stride(), (out.stride(), expected.stride())
    gradients = fake_attention.backward(
        torch.full_like(expected, 2), *given, expected, expected_sums, 0.5, bias, causal, scale,
        False, place, None, None,
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


@pytest.mark.parametrize("what", [VALUES, FLASH], ids=["values", "flash"])
def test_values_gradients_and_where_it_draws(what) -> None:
    helpers.run_python(BEGIN + what, ACC_EXECUTOR="host")


@pytest.mark.parametrize("kernels", ["host", "gpu"])
def test_a_captured_step_draws_anew(kernels) -> None:
    emulated = "helpers.emulate_gpu()\n" if kernels == "gpu" else ""
    helpers.run_python(BEGIN + emulated + CAPTURED, ACC_EXECUTOR="host")


def test_a_step_that_is_replayed_draws_what_the_function_would() -> None:
    helpers.run_python(BEGIN + REPLAYED, ACC_EXECUTOR="host")


# --- on a GPU -----------------------------------------------------------------------------------

P = 0.25
CASES = {
    "flash": (torch.float16, False),
    "flash, bfloat16": (torch.bfloat16, False),
    "efficient": (torch.float32, False),
    "efficient, a mask": (torch.float16, True),
}


@pytest.fixture
def of_a_gpu(recording: str) -> str:
    if helpers.extension().executor_name() == "host":
        pytest.skip("hosts have no attention with dropout inside")
    return recording


def drop(device: str, dtype: torch.dtype, masked: bool, grad: bool = False) -> list[Tensor]:
    """Attention with the identity for values, so that it gives the probabilities; its operands."""
    torch.manual_seed(7)
    q, k = (torch.randn(4, 2, 64, 64).to(dtype).to(device) for _ in range(2))
    v = torch.eye(64, dtype=dtype).expand(4, 2, 64, 64).contiguous().to(device)
    mask = torch.randn(64, 64).to(dtype).to(device) if masked else None
    leaves = [each.requires_grad_(grad) for each in (q, k, v)]
    return [F.scaled_dot_product_attention(*leaves, attn_mask=mask, dropout_p=P), *leaves, mask]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_drops_by_the_seed(of_a_gpu, case) -> None:
    dtype, masked = CASES[case]
    out, q, k, _, mask = drop(of_a_gpu, dtype, masked)
    first = out.cpu()
    again, *_ = drop(of_a_gpu, dtype, masked)
    assert torch.equal(again.cpu(), first)
    # The next draw is another one.
    v = torch.eye(64, dtype=dtype, device=of_a_gpu).expand(4, 2, 64, 64)
    other = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=P).cpu()
    assert not torch.equal(other == 0, first == 0)
    scores = q.cpu().double() @ k.cpu().double().mT / 8
    if mask is not None:
        scores = scores + mask.cpu().double()
    shares = scores.softmax(-1)
    for made in (first, other):
        left = made != 0
        # 32,768 draws: five deviations. What is left is scaled; what underflows is not looked at.
        assert abs(float(left.double().mean()) - (1 - P)) < 5 * (P * (1 - P) / 32768) ** 0.5 + 1e-3
        expected = torch.where(left, shares / (1 - P), 0.0)
        torch.testing.assert_close(made.double(), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_drops_the_same_in_the_backward(of_a_gpu, case) -> None:
    dtype, masked = CASES[case]
    out, *leaves, mask = drop(of_a_gpu, dtype, masked, grad=True)
    weights = torch.randn(out.shape)
    (out * weights.to(dtype).to(of_a_gpu)).sum().backward()
    exact = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    scores = exact[0] @ exact[1].mT / 8
    if mask is not None:
        scores = scores + mask.cpu().double()
    times = (out.detach().cpu() != 0).double() / (1 - P)
    expected = scores.softmax(-1) * times @ exact[2]
    (expected * weights.to(dtype).double()).sum().backward()
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.cpu().double(), other.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_replays_it_with_new_draws(of_a_gpu, case) -> None:
    """The same numbers step by step and as a graph; none of them twice."""
    dtype, masked = CASES[case]
    _, q, k, v, mask = drop(of_a_gpu, dtype, masked)

    def steps() -> Tensor:
        torch.manual_seed(9)
        kept = []
        for _ in range(10):
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=P)
            kept.append((made * 2).cpu())
        return torch.stack(kept)

    extension = helpers.extension()
    extension.capture_plans(False)
    try:
        expected = steps()
        extension.capture_plans(True)
        with helpers.counting() as counted:
            found = steps()
    finally:
        extension.capture_plans(None)
    assert torch.equal(found, expected)
    assert len({each.ne(0).numpy().tobytes() for each in found}) == 10
    if extension.mode() != "nofuse":
        assert counted["captures_submitted"] > 0
        assert not [k for k in counted.after if k.startswith("not_captured/number") and counted[k]]


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
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=P)
    out.sum().backward()
    memory.synchronize()
    scores = 4 * length * length * 2
    assert memory.max_memory_allocated() - before < scores
