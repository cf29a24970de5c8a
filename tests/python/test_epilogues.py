"""Linear layers with what stands behind them, as one call on a GPU: here by ATen's operators."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording")

RUNS = 5


@pytest.fixture(autouse=True)
def all_passes(plans_of_a_gpu) -> Iterator[None]:
    yield
    helpers.extension().skip_passes("")


def operators() -> list[str]:
    """Those of the last plan that are products, and what they take over."""
    plan = helpers.extension().plan_data(torch.acc.current_device())
    names = [node["op"].partition("::")[2] for node in plan["nodes"]]
    mine = ("mm", "addmm", "_addmm_activation", "addmm_gelu", "mm_gelu_backward", "mm_and_sum")
    return sorted(name for name in names if name in mine)


def train(make: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32):
    """Losses, gradients and parameters of some steps, and the operators of the last one."""
    torch.manual_seed(0)
    model = make().to(helpers.DEVICE, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(RUNS):
        x = torch.randn(shape, generator=generator).to(helpers.DEVICE, dtype)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        helpers.flush()
    names = operators()
    return [t.cpu() for t in (*seen, *(p.detach() for p in model.parameters()))], names


def block(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), activation, nn.Linear(24, 16))


def steps_of(make: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32):
    """The operators of the plan of a step, and of the plan without the pass."""
    with_it, names = train(make, *shape, dtype=dtype)
    helpers.extension().skip_passes("epilogues")
    without, plain = train(make, *shape, dtype=dtype)
    near = {"atol": 1e-2, "rtol": 1e-2} if dtype.itemsize == 2 else {"atol": 1e-6, "rtol": 1e-5}
    for mine, other in zip(with_it, without, strict=True):  # ATen's sums, and those of kernels
        torch.testing.assert_close(mine, other, **near)
    return names, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)], ids=str)
def test_gelu_by_tanh(shape, dtype):
    names, plain = steps_of(lambda: block(nn.GELU("tanh")), *shape, dtype=dtype)
    assert plain == ["addmm"] * 2 + ["mm"] * 4
    assert names == ["addmm", "addmm_gelu", "mm", "mm_and_sum", "mm_and_sum", "mm_gelu_backward"]


def test_relu():
    names, _ = steps_of(lambda: block(nn.ReLU()), 6, 16)
    assert names == ["_addmm_activation", "addmm", "mm", "mm", "mm_and_sum", "mm_and_sum"]


def test_other_functions_have_none():
    names, _ = steps_of(lambda: block(nn.GELU()), 6, 16)
    assert names == ["addmm", "addmm", "mm", "mm", "mm_and_sum", "mm_and_sum"]


def test_double_precision_has_none():
    names, plain = steps_of(lambda: block(nn.GELU("tanh")), 6, 16, dtype=torch.float64)
    assert names == plain


class Watched(nn.Module):
    """A layer whose result before the ReLU is seen as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        before = self.layer(x)
        return before.relu() + before.mean()


def test_what_is_seen_before_a_relu_is_computed():
    names, plain = steps_of(Watched, 6, 16)
    assert "_addmm_activation" not in names
    assert "addmm" in names


class InPlace(nn.Module):
    """The result of a layer changes between its GELU and the backward of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        before = self.layer(x)
        after = torch.nn.functional.gelu(before.clone(), approximate="tanh")
        before.mul_(2)
        return after + before


def test_a_result_that_changes_is_used_as_it_was():
    steps_of(InPlace, 6, 16)


def test_a_gelu_has_none_where_each_operator_rounds():
    """A ReLU commutes with rounding."""
    code = """
        import torch
        from torch import nn
        from tests.python import test_epilogues as t
        from tests import helpers
        helpers.load_device()
        helpers.emulate_gpu()
        for made in (lambda: nn.GELU("tanh"), nn.ReLU):
            for dtype in (torch.float16, torch.float32):
                print(t.train(lambda: t.block(made()), 6, 16, dtype=dtype)[1].count("addmm"))
    """
    done = helpers.run_python(textwrap.dedent(code), ACC_EXACT="1", ACC_MODE="full")
    assert done.stdout.split() == ["2", "2", "1", "1"], done.stderr


OPERATORS = {
    "acc::addmm_gelu": lambda *given: torch.ops.acc.addmm_gelu(*given),
    "acc::mm_gelu_backward": lambda *given: torch.ops.acc.mm_gelu_backward(*given),
    "acc::mm_and_sum": lambda *given: torch.ops.acc.mm_and_sum(*given, True),
}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("acc::addmm_gelu", [torch.ones(8), torch.ones(4, 3), torch.ones(2, 8)]),
        ("acc::addmm_gelu", [torch.ones(7), torch.ones(4, 3), torch.ones(3, 8)]),
        ("acc::addmm_gelu", [torch.ones(16)[::2], torch.ones(4, 3), torch.ones(3, 8)]),
        ("acc::addmm_gelu", [torch.ones(8).half(), torch.ones(4, 3), torch.ones(3, 8)]),
        ("acc::mm_gelu_backward", [torch.ones(4, 3), torch.ones(3, 8), torch.ones(4, 7)]),
        ("acc::mm_gelu_backward", [torch.ones(4, 3), torch.ones(3, 8), torch.ones(8, 4).t()]),
        ("acc::mm_gelu_backward", [torch.ones(4, 3), torch.ones(3, 8), torch.ones(4, 8).half()]),
        ("acc::mm_and_sum", [torch.ones(4, 3), torch.ones(3, 8).half()]),
        ("acc::mm_and_sum", [torch.ones(4), torch.ones(4, 3)]),
    ],
)
def test_what_does_not_go_together_is_refused(name, given):
    """Programs can call the operators, and on a GPU nobody else would ask."""
    with pytest.raises(RuntimeError, match=rf"\[{name}\] .*, not "):
        OPERATORS[name](*given)
