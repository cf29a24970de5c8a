"""`torchacc.verify`: a step operator by operator against ATen's; a wrong kernel is named."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

import torchacc
from tests import helpers
from tests.terminal import said_to

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

F = torch.nn.functional

# A compiler that gets every tanh wrong by a thousandth.
WRONG_TANH = r"""#!/bin/sh
for each; do
  if [ -f "$each" ] && grep -q 'long end)' "$each" 2>/dev/null; then
    sed -i 's/= tanh_f32(\(v[0-9]*\));/= tanh_f32(\1) * 1.001f;/' "$each"
  fi
done
exec g++ "$@"
"""

WRONG_STEP = """
import json, torchacc
w = torch.linspace(-1, 1, 4096, device=DEVICE, requires_grad=True)
o = torch.optim.SGD([w], lr=0.5)
def step():
    scaled = w * 2
    hidden = scaled.tanh()  # two lines below the first one of step
    (hidden + w).square().sum().backward()
    o.step()
    return "returned"
found = torchacc.verify(step)
first = found.mismatches[0]
expected = torch.linspace(-1, 1, 4096, requires_grad=True)
((expected * 2).tanh() + expected).square().sum().backward()
state = torch.allclose(w.detach().cpu(), expected.detach() - 0.5 * expected.grad, atol=1e-5)
out, x = torch.zeros(2, 4096, device=DEVICE), torch.linspace(-1, 1, 4096, device=DEVICE)
def parts():  # of one tensor
    out[0].copy_(x)
    out[1].copy_(x)
    out[0].tanh_()
    out[1].mul_(2)
of_parts = torchacc.verify(parts)
in_parts = [bool(of_parts), torch.allclose(out[0].cpu(), x.cpu().tanh(), atol=1e-5)]
code = step.__code__
line = f"{code.co_filename}:{code.co_firstlineno + 2} in step"
print(json.dumps([line, in_parts, bool(found), found.result, state, str(found), first.operator,
                  first.place, first.value, first.kernel, [name for name, _ in first.fused],
                  first.error, first.tolerance, first.wrong]))
"""


class Net(torch.nn.Module):
    """Convolution, normalisation, dropout, a product: what fuses, and what does not."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8 * 6 * 6, 10)

    def forward(self, x):
        x = F.gelu(self.norm(self.conv(x)))
        return self.head(F.dropout(x, 0.3, self.training).flatten(1))


def training(device):
    torch.manual_seed(1)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = helpers.drawn(4, 3, 6, 6, device=device)
    labels = torch.tensor([1, 2, 3, 4], device=device)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def test_a_right_step_verifies_and_is_done_once(device):
    (model, step), (other, same) = training(device), training(device)
    states = []
    for first, second in ((step, lambda: torchacc.verify(step)), (same, same)):
        torch.manual_seed(5)
        first()
        states.append((second(), torch.acc.get_rng_state()))
    (found, drawn), (loss, drawn_by_same) = states
    assert found, str(found)
    assert found.operators > 20 and found.values > found.operators
    if torchacc.report().mode == "full":
        assert found.kernels > 3
    assert "values compared: as ATen's" in str(found)
    torch.testing.assert_close(found.result.cpu(), loss.cpu())
    assert torch.equal(drawn, drawn_by_same)
    for mine, theirs in zip(*map(helpers.state_tensors, (model, other)), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-4)


def test_a_wrong_kernel_is_found_and_named_with_its_line(device, tmp_path: Path):
    if helpers.extension().executor_name() != "host":
        pytest.skip("the kernels of a GPU come from NVRTC")
    tmp_path.chmod(0o700)
    compiler = tmp_path / "compiler"
    compiler.write_text(WRONG_TANH)
    compiler.chmod(0o755)
    done = helpers.run_python(
        WRONG_STEP, ACC_CACHE_DIR=str(tmp_path / "cache"), ACC_CXX=str(compiler), ACC_MODE="full"
    )
    (
        expected,
        in_parts,
        right,
        result,
        state,
        text,
        operator,
        place,
        value,
        kernel,
        fused,
        error,
        tolerance,
        wrong,
    ) = json.loads(done.stdout.splitlines()[-1])
    assert in_parts == [False, True]  # found, and as ATen's afterwards
    assert not right
    assert result == "returned"
    assert state, "the state is that of a right step"
    assert operator == "aten::tanh" and value == "result 0"
    assert place == expected
    assert kernel and "aten::tanh" in fused
    assert 5e-4 < error < 2e-3 and tolerance < 1e-5 and wrong > 3000
    assert f"aten::tanh at {place}, result 0:" in text and kernel in text


def test_a_step_of_several_plans_is_compared_throughout(device):
    x = helpers.drawn(64, device=device)

    def step():
        y = (x * 2).exp()
        if y.sum().item() > 0:
            y = y + 1
        return y.log()

    found = torchacc.verify(step)
    assert found and found.plans == 2
    torch.testing.assert_close(found.result.cpu(), ((x.cpu() * 2).exp() + 1).log())


def test_views_in_place_and_integers_are_compared(device):
    base = torch.arange(24.0, device=device).reshape(4, 6)

    def step():
        base[1:3, ::2] += base[0, 1::2]
        base.t()[2] *= 3
        order = base.argsort(dim=1, descending=True)
        return torch.where(base > 5, base, -base).sum(0), order, base.to(torch.bfloat16).exp()

    found = torchacc.verify(step)
    assert found, str(found)
    assert found.result[1].shape == (4, 6)


def test_a_terminal_shows_how_far_it_is(device, monkeypatch):
    """The line goes at the end."""
    x = helpers.drawn(64, device=device)
    stream = said_to(monkeypatch, terminal=True)

    def step():
        (x * 2).sum().item()
        stream.wait_for("[verify] 2 operators in 1 plans, ")

    assert torchacc.verify(step)
    lines = re.findall(r"\r\x1b\[K([^\r]*)", stream.getvalue())
    assert lines[-1] == "" and lines.count("") == 1
    assert re.fullmatch(r"\[verify\] \d+ operators in \d+ plans, \d+ s", lines[0])


def test_elsewhere_nothing_is_shown(device, monkeypatch):
    stream = said_to(monkeypatch, terminal=False)
    assert torchacc.verify(lambda: (torch.ones(2, device=device) + 1, time.sleep(0.1)))
    assert stream.getvalue() == ""


def test_a_step_that_fails_says_so_and_ends_the_verification(device):
    with pytest.raises(ZeroDivisionError):
        torchacc.verify(lambda: torch.ones(2, device=device) / (1 // 0))
    with pytest.raises(RuntimeError, match="recorded nothing"):
        torchacc.verify(lambda: 5)
    with pytest.raises(RuntimeError, match=r"\[torchacc.verify\] was called by a step"):
        torchacc.verify(lambda: torchacc.verify(lambda: None))
    assert torchacc.verify(lambda: torch.ones(2, device=device) + 1)
