"""Values that backward needs are computed again where that lowers the peak of memory: same bits,
less memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

Activation = Callable[[Tensor, Tensor], Tensor]

ROWS, WIDTH, LAYERS = 1024, 128, 4


def gelu_by_hand(x: Tensor, _: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mish(x: Tensor, _: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


def in_place_behind(x: Tensor, gate: Tensor) -> Tensor:
    y = F.silu(x) * gate
    return y.add_(1).mul_(0.5)


ACTIVATIONS: dict[str, Activation] = {
    "GELU by hand": gelu_by_hand,
    "SwiGLU": lambda x, gate: F.silu(x) * gate,
    "GLU": lambda x, gate: torch.sigmoid(gate) * x,
    "squared ReLU": lambda x, _: x.relu().square(),
    "leaky by hand": lambda x, _: torch.where(x > 0, x, 0.1 * x) * (1 + x),
    "in place behind": in_place_behind,
    "masked": lambda x, gate: (x * (gate > 0)) * (1 + gate),
    "mish": mish,
}


class Net(nn.Module):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.first = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(self.activation(*first(x).chunk(2, -1)))
        return x


@pytest.fixture(autouse=True)
def all_passes() -> Iterator[None]:
    helpers.extension().skip_passes("")
    yield
    helpers.extension().skip_passes("")


def trained(
    activation: Activation, skip: str, autocast: bool = False, steps: int = 5
) -> tuple[list[Tensor], int, int]:
    """Loss and gradients of the last step, its launches of kernels, its peak in bytes
    above what was there before."""
    helpers.extension().skip_passes(skip)
    torch.manual_seed(0)
    net = Net(activation).to(helpers.DEVICE)
    x = helpers.drawn(ROWS, WIDTH, device=helpers.DEVICE)
    for _ in range(steps):
        net.zero_grad()
        helpers.synchronize()
        torch.acc.reset_peak_memory_stats()
        before = torch.acc.memory_allocated()
        with helpers.counting() as counted, torch.autocast("acc", torch.bfloat16, autocast):
            loss = net(x).square().mean()
            loss.backward()
            helpers.synchronize()
        peak = torch.acc.max_memory_allocated() - before
    found = [loss.detach().cpu(), *(p.grad.cpu() for p in net.parameters())]
    return found, counted["kernel_launches"], peak


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_same_bits(name, monkeypatch):
    monkeypatch.setenv("ACC_DETERMINISTIC", "1")
    plain, launches, _ = trained(ACTIVATIONS[name], "recompute")
    mine, launches_again, _ = trained(ACTIVATIONS[name], "")
    helpers.assert_same(mine, plain)
    # A product alone is ATen's, with what it is computed from it is a kernel.
    assert launches_again <= launches + LAYERS


@pytest.mark.usefixtures("recording", "only_this_frees")
@pytest.mark.parametrize(("name", "saved"), [("GELU by hand", 2), ("SwiGLU", 1), ("GLU", 1)])
def test_less_memory(name, saved):
    """By so many of the activations of each layer, but for those of the last, which are there at
    the peak."""
    _, _, plain = trained(ACTIVATIONS[name], "recompute")
    _, _, mine = trained(ACTIVATIONS[name], "")
    activation = ROWS * WIDTH * 4
    assert plain - mine >= saved * (LAYERS - 2) * activation


def test_under_autocast_as_exact_as_without():
    """What is not stored between is not rounded to bfloat16 either."""
    exact, _, _ = trained(ACTIVATIONS["SwiGLU"], "")
    plain, _, _ = trained(ACTIVATIONS["SwiGLU"], "recompute", autocast=True)
    mine, _, _ = trained(ACTIVATIONS["SwiGLU"], "", autocast=True)
    for right, kept, again in zip(exact, plain, mine, strict=True):
        assert (again - right).norm() <= 1.1 * (kept - right).norm()


def test_a_value_that_the_user_keeps_is_not_made_twice():
    kept: list[Tensor] = []

    def activation(x: Tensor, gate: Tensor) -> Tensor:
        kept.append(F.silu(x))
        return kept[-1] * gate

    peaks = []
    for skip in ("recompute", ""):
        kept.clear()
        peaks.append(trained(activation, skip)[2])
    assert peaks[0] == peaks[1]


# The nodes of a plan with and without passes that pay with kernels only, after so many steps.
NODES = """
import json
from torch.nn import functional as F
from tests import helpers
from tests.python import test_recompute as recompute
weight, bias = (torch.ones(recompute.WIDTH, device=DEVICE, requires_grad=True) for _ in range(2))
def activation(x, gate):
    return F.layer_norm(recompute.gelu_by_hand(x, gate), (recompute.WIDTH,), weight, bias)
nodes = []
for skip in ("", SKIP):
    launches = recompute.trained(activation, skip, steps=STEPS)[1]
    nodes.append(len(helpers.extension().plan_data(torch.acc.current_device())["nodes"]))
print(json.dumps([*nodes, launches]))
"""


CAPTURED = """
import json
from tests import helpers
from tests.python import test_recompute as recompute
import torchacc
net = recompute.Net(recompute.gelu_by_hand).to(DEVICE)
x = helpers.drawn(recompute.ROWS, recompute.WIDTH, device=DEVICE)
def fn(x):
    net.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss
step = torchacc.capture(fn, warmup=2)
nodes = []
for _ in range(5):
    step(x)
    torch.acc.synchronize()
    nodes.append(len(helpers.extension().plan_data(torch.acc.current_device())["nodes"]))
assert step.replays == 3
print(json.dumps([nodes[1], nodes[-1]]))
"""


def nodes(folder: Path, skip: str, steps: int, compiler: str, **env: str) -> tuple[list[int], str]:
    """The numbers of nodes, and the last run's launches of kernels; what was said besides."""
    script = folder / "compiler"
    script.write_text(compiler)
    script.chmod(0o755)
    done = helpers.run_python(
        NODES.replace("STEPS", str(steps)).replace("SKIP", repr(skip)),
        ACC_MODE="full",
        ACC_CXX=str(script),
        ACC_CACHE_DIR=str(folder / "cache"),
        **env,
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_without_kernels_nothing_is_computed_again(tmp_path):
    """Nor is a backward split: operators run as eager's would."""
    tmp_path.chmod(0o700)
    skip = "recompute,split"
    (mine, plain, launches), _ = nodes(tmp_path, skip, 5, '#!/bin/sh\nexec g++ "$@"\n')
    assert mine > plain and launches > 0
    (mine, plain, launches), _ = nodes(tmp_path, skip, 5, "#!/bin/sh\nexit 1\n")
    assert mine == plain and launches == 0


def test_a_captured_step_without_kernels_computes_nothing_again(tmp_path):
    """It was captured before it was known that none can be made."""
    tmp_path.chmod(0o700)
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    done = helpers.run_python(
        CAPTURED, ACC_MODE="full", ACC_CXX=str(compiler), ACC_CACHE_DIR=str(tmp_path / "cache")
    )
    first, last = json.loads(done.stdout.splitlines()[-1])
    assert last < first
