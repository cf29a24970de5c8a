"""Products with epilogues (kernels/library/epilogues.h), as steps for GPUs have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

ROWS, TERMS, COLUMNS = 24, 16, 128
ACTIVATION = "acc::addmm_activation"
BACKWARD = "acc::mm_activation_backward"
BIAS_GRADIENT = "acc::mm_bias_gradient"
OURS = (ACTIVATION, BACKWARD, BIAS_GRADIENT)


@pytest.fixture(autouse=True)
def for_gpus(device: str) -> Iterator[None]:
    helpers.emulate_gpu()
    try:
        yield
    finally:
        helpers.emulate_gpu(on=False)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def train(
    layers: Callable[[], nn.Module], x: Tensor, runs: int = 4
) -> tuple[list[Tensor], list[Tensor], Counter[str]]:
    """Loss and gradients of the last run on the device, those in double precision, operators."""
    found = {}
    for device, dtype in (("cpu", torch.float64), (helpers.DEVICE, x.dtype)):
        torch.manual_seed(0)
        model = layers().to(device, dtype)
        inputs = x.to(device, dtype).requires_grad_()
        for _ in range(runs):
            model.zero_grad()
            inputs.grad = None
            helpers.flush()
            loss = model(inputs).square().mean()
            loss.backward()
            helpers.flush()
        tensors = [loss.detach(), inputs.grad, *(p.grad for p in model.parameters())]
        found[device] = [each.cpu() for each in tensors]
    plan = helpers.extension().plan_data(torch.acc.current_device())
    ops = Counter(node["op"] for node in plan["nodes"])
    return found[helpers.DEVICE], found["cpu"], Counter({n: ops[n] for n in OURS if ops[n]})


def check(made: list[Tensor], exact: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(made, exact, strict=True):
        assert a.stride() == b.stride()
        assert (a.double() - b).norm() <= tolerance * b.norm()


class Gelu(nn.GELU):
    def __init__(self) -> None:
        super().__init__(approximate="tanh")


def two_layers(activation: Callable[[], nn.Module], bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(TERMS, COLUMNS), activation(), nn.Linear(COLUMNS, TERMS, bias=bias)
    )


LAYERS = {
    "gelu": (Gelu, (ROWS, TERMS)),
    "gelu of a batch": (Gelu, (4, 6, TERMS)),
    "relu": (nn.ReLU, (ROWS, TERMS)),
    "relu of a batch": (nn.ReLU, (4, 6, TERMS)),
    "relu in place": (lambda: nn.ReLU(inplace=True), (ROWS, TERMS)),
}


@pytest.mark.parametrize(("activation", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_layer_and_its_activation(activation, shape):
    made, exact, ops = train(two_layers(activation), normal(*shape))
    assert (ops[ACTIVATION], ops[BACKWARD]) == (1, 1)
    check(made, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", [Gelu, nn.ReLU])
def test_half_types(activation, dtype):
    made, exact, ops = train(two_layers(activation), normal(ROWS, TERMS).to(dtype))
    assert (ops[ACTIVATION], ops[BACKWARD]) == (1, 1)
    check(made, exact, tolerance=0.02)


@pytest.mark.parametrize("activation", [gelu, F.relu])
def test_inference(activation):
    torch.manual_seed(0)
    layer = nn.Linear(TERMS, COLUMNS)
    x = normal(ROWS, TERMS)
    expected = activation(layer(x)).detach()
    layer.to(helpers.DEVICE)
    with torch.no_grad():
        for _ in range(4):
            moved = x.to(helpers.DEVICE)
            helpers.flush()
            made = activation(layer(moved))
            helpers.flush()
    plan = helpers.extension().plan_data(torch.acc.current_device())
    ops = Counter(node["op"] for node in plan["nodes"])
    assert ops[ACTIVATION] == 1
    torch.testing.assert_close(made.cpu(), expected)


def test_nan_and_infinities_pass():
    x = normal(ROWS, TERMS)
    x[3, 4], x[5, 6], x[7, 8] = torch.nan, torch.inf, -torch.inf
    layer = nn.Linear(TERMS, COLUMNS)
    found = []
    for device in ("cpu", helpers.DEVICE):
        layer.to(device)
        for _ in range(4):
            layer.zero_grad()
            made = layer(x.to(device)).relu()
            torch.mm(made, normal(COLUMNS, 8).to(device)).sum().backward()
            helpers.flush()
        found.append([t.detach().cpu() for t in (made, layer.weight.grad, layer.bias.grad)])
        layer.zero_grad()
    for mine, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4, equal_nan=True)


def attention_like(x: Tensor) -> Tensor:
    """Not a generated kernel."""
    return torch.cumsum(x, 0)


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return attention_like(x)


def test_the_gradient_of_a_bias_comes_with_that_of_the_weight():
    """Where what is summed is made by an operator, not by a kernel that can sum it as well."""
    made, exact, ops = train(
        lambda: nn.Sequential(nn.Linear(TERMS, COLUMNS), Opaque()), normal(ROWS, TERMS)
    )
    assert ops == {BIAS_GRADIENT: 1}
    check(made, exact)


def test_a_kernel_that_makes_the_gradient_sums_it():
    made, exact, ops = train(
        lambda: nn.Sequential(nn.Linear(TERMS, COLUMNS), nn.Tanh()), normal(ROWS, TERMS)
    )
    assert not ops
    check(made, exact)


LEFT_ALONE = {
    "the other gelu": nn.GELU,
    "a kernel reads it next": lambda: nn.Sequential(Gelu(), nn.Tanh()),
    "another threshold": lambda: nn.Threshold(0.1, 0.0),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_others_stay(name):
    made, exact, ops = train(two_layers(LEFT_ALONE[name]), normal(ROWS, TERMS))
    assert ops[ACTIVATION] == 0
    check(made, exact)


def test_rows_that_the_library_cannot_read():
    """Bits of ReLU lie in rows of 128, inputs of GELU in rows of 8."""
    for activation, width in ((nn.ReLU, 64), (Gelu, 12)):
        made, exact, ops = train(
            lambda a=activation, w=width: nn.Sequential(
                nn.Linear(TERMS, w), a(), nn.Linear(w, TERMS)
            ),
            normal(ROWS, TERMS),
        )
        assert (ops[ACTIVATION], ops[BACKWARD]) == (activation is nn.ReLU, 0)
        check(made, exact)


def test_the_input_of_gelu_may_be_kept():
    torch.manual_seed(0)
    layer = nn.Linear(TERMS, COLUMNS)
    eager = layer(normal(ROWS, TERMS)).detach()
    layer.to(helpers.DEVICE)
    kept = []
    for _ in range(4):
        x = normal(ROWS, TERMS).to(helpers.DEVICE)
        helpers.flush()
        before = layer(x)
        kept.append((before.detach(), gelu(before).detach()))
        helpers.flush()
    for before, after in kept:
        torch.testing.assert_close(before.cpu(), eager)
        torch.testing.assert_close(after.cpu(), gelu(eager))


@pytest.mark.parametrize("activation", [Gelu, nn.ReLU], ids=["gelu", "relu"])
def test_captured_steps(activation):
    """A step with an optimizer, replayed: what it trains is what eager trains."""
    x, y = normal(ROWS, TERMS), normal(ROWS, TERMS, seed=2)
    found = []
    for device in ("cpu", helpers.DEVICE):
        torch.manual_seed(0)
        model = two_layers(activation)().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(12):
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            helpers.flush()
        found.append([p.detach().cpu() for p in model.parameters()])
    for mine, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-5)
