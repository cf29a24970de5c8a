"""Result geometry of common operators is known without PyTorch's Python kernels."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import DEVICE, run_python

pytestmark = pytest.mark.usefixtures("acc_only")

NO_ALGEBRA = """
import sys
import torch.nn as nn
net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4), nn.ReLU(),
                    nn.Softmax(-1)).to(DEVICE)
x = torch.ones(8, 16, device=DEVICE)
out = net(x)
y = (out.abs() * 2 + 1).sqrt().log() - out.mean(1, keepdim=True) / 3
y = y + y.detach().clamp(-1, 1)
y.square().mean().backward()
assert net[0].weight.grad.cpu().isfinite().all().item()
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules
"""


def test_a_first_step_imports_no_symbolic_algebra() -> None:
    run_python(NO_ALGEBRA)


SHAPES = [((3, 1, 4), (2, 1)), ((2, 3), (3,)), ((), (2,)), ((0, 3), (1, 3)), ((4, 1), (1, 5))]
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.int64),
    (torch.int32, torch.bool),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.complex64),
]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
@pytest.mark.parametrize("types", PAIRS, ids=str)
def test_binary_operators_promise_what_eager_makes(
    name: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    for left, right in SHAPES:
        a = torch.ones(left, dtype=types[0])
        b = torch.ones(right, dtype=types[1])
        if name == "sub" and torch.bool in types:
            continue
        expected = getattr(torch, name)(a.mT if a.dim() > 1 else a, 3)
        made = getattr(torch, name)(a.to(DEVICE).mT if a.dim() > 1 else a.to(DEVICE), 3)
        assert (made.shape, made.stride(), made.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        expected = getattr(torch, name)(a, b)
        made = getattr(torch, name)(a.to(DEVICE), b.to(DEVICE))
        assert (made.shape, made.stride(), made.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )
        assert torch.equal(made.cpu(), expected)


def test_layer_norm_promises_what_eager_makes() -> None:
    for shape, dims in [((2, 3, 4), (4,)), ((2, 3, 4), (3, 4)), ((0, 4), (4,)), ((4,), (4,))]:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = torch.randn(shape, dtype=dtype)
            for view in (x, x.mT.contiguous().mT if x.dim() > 1 else x):
                expected = torch.native_layer_norm(view, dims, None, None, 1e-5)
                made = torch.native_layer_norm(view.to(DEVICE), dims, None, None, 1e-5)
                for a, b in zip(made, expected, strict=True):
                    assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                    assert torch.equal(a.cpu(), b)


def test_wrong_arguments_say_so_at_the_line() -> None:
    x = torch.ones(2, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match="must match the size"):
        x + torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match="normalized_shape"):
        torch.nn.functional.layer_norm(x, (4,))
