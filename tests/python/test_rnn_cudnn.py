"""Layers that cuDNN has are recorded as one operator: with what stands for it where there is none.

Of a real one `test_rnn.py` compares values and gradients with the CPU's.
"""

from __future__ import annotations

import pytest

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

# A process of its own: which operators are recorded is decided when the device is first used.
BEGIN = """
import torch
from torch.nn.utils.rnn import pack_sequence

from tests import fake_cudnn, helpers

fake_cudnn.install()
helpers.emulate_gpu()
helpers.extension().capture_plans(True)
torch.set_num_threads(1)

NAMES = ("acc::cudnn_rnn", "acc::cudnn_rnn_backward")


def operators():
    nodes = helpers.extension().plan_data(torch.acc.current_device())["nodes"]
    return [[node["op"] for node in nodes].count(name) for name in NAMES]


def close(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
"""

TRAINED = """
CASES = [(kind, options) for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN) for options in (
    {}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True},
)] + [(torch.nn.RNN, {"nonlinearity": "relu"}), (torch.nn.LSTM, {"dtype": torch.float64})]


def trained(kind, options, device):
    torch.manual_seed(0)
    layer = kind(6, 5, **options).to(device)
    batches = torch.randn(6, 4, 3, 6, dtype=options.get("dtype", torch.float32)).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kept = []
    for x in batches:
        x.requires_grad_()
        output, last = layer(x)
        states = last if isinstance(last, tuple) else (last,)
        loss = sum(t.square().mean() for t in (output, *states))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept += [loss.detach(), output.detach(), x.grad]
    return [t.cpu() for t in (*kept, *layer.parameters())]


for kind, options in CASES:
    before = helpers.stats()
    with helpers.counting() as counted:
        mine = trained(kind, options, "acc")
    ends = {k for k in counted.after if k.startswith("flush_") and "/" not in k and counted[k]}
    assert ends <= {"flush_step", "flush_read"}, (kind, options, ends)
    close(mine, trained(kind, options, "cpu"))
assert len(fake_cudnn.asked) == len(CASES), fake_cudnn.asked
assert counted["captures_submitted"] > 0
"""


def test_training_gives_the_cpu_s_numbers_and_asks_cudnn_once() -> None:
    helpers.run_python(BEGIN + TRAINED, ACC_EXECUTOR="host", timeout=300)


CHOSEN = """
def runs(layer, *given, grad=True, **options):
    with torch.set_grad_enabled(grad):
        layer(*given)
        kept = layer(*given)
        helpers.flush()
    return operators()[0]


x = torch.randn(4, 3, 6, device="acc")
half = torch.bfloat16
assert runs(torch.nn.LSTM(6, 5).to("acc"), x) == 1
asked = len(fake_cudnn.asked)
assert fake_cudnn.asked[-1][5] is True
assert runs(torch.nn.LSTM(6, 5).to("acc"), x) == 1 and len(fake_cudnn.asked) == asked
assert runs(torch.nn.LSTM(6, 5).to("acc"), x[:3]) == 1 and len(fake_cudnn.asked) == asked + 1
assert runs(torch.nn.LSTM(6, 5).to("acc"), x, grad=False) == 1
assert fake_cudnn.asked[-1][5] is False
assert runs(torch.nn.LSTM(6, 5).to("acc").eval(), x, grad=False) == 1
assert runs(torch.nn.GRU(6, 5, 2, dropout=0.5).to("acc").eval(), x, grad=False) == 1
assert runs(torch.nn.GRU(6, 5, dropout=0.0).to("acc"), x) == 1
# The rest goes step by step.
assert runs(torch.nn.LSTM(6, 5).to("acc").eval(), x) == 0
assert runs(torch.nn.GRU(6, 5, 2, dropout=0.5).to("acc"), x) == 0
assert runs(torch.nn.LSTM(6, 5, proj_size=2).to("acc"), x) == 0
assert runs(torch.nn.LSTM(6, 5).to("acc"), pack_sequence([x[:, 0], x[:2, 1]])) == 0
with torch.backends.cudnn.flags(enabled=False):
    assert runs(torch.nn.LSTM(6, 5).to("acc"), x) == 0
# What cuDNN has not: here, layers in bfloat16.
assert runs(torch.nn.LSTM(6, 5, dtype=half).to("acc"), x.to(half)) == 0
assert fake_cudnn.asked[-1][6] == half
with torch.autocast("acc", dtype=torch.float16):
    assert runs(torch.nn.LSTM(6, 5).to("acc"), x) == 1
assert fake_cudnn.asked[-1][6] == torch.float16
"""


def test_what_is_cudnn_s_and_what_goes_step_by_step() -> None:
    helpers.run_python(BEGIN + CHOSEN, ACC_EXECUTOR="host", timeout=300)


TWICE = """
def gradients(device, reads):
    torch.manual_seed(0)
    layer = torch.nn.LSTM(6, 5).to(device)
    x = torch.randn(4, 3, 6).to(device)
    output, (h, _) = layer(x)
    first = torch.autograd.grad(output.sum(), layer.parameters(), retain_graph=True)
    if reads:
        first[0].cpu()
    second = torch.autograd.grad(h.square().sum(), layer.parameters())
    return [t.cpu() for t in (*first, *second)]


for reads in (False, True):
    for _ in range(4):
        mine = gradients("acc", reads)
    close(mine, gradients("cpu", reads))

layer = torch.nn.GRU(6, 5).to("acc")
x = torch.randn(4, 3, 6, device="acc", requires_grad=True)
grad, = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
try:
    grad.sum().backward()
except NotImplementedError as error:
    assert "torch.backends.cudnn.flags(enabled=False)" in str(error)
else:
    raise AssertionError("second derivatives of cuDNN's")
with torch.backends.cudnn.flags(enabled=False):
    grad, = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    grad.sum().backward()
"""


def test_a_second_backward_has_what_the_first_has_written_and_none_has_derivatives() -> None:
    helpers.run_python(BEGIN + TWICE, ACC_EXECUTOR="host", timeout=300)
