"""What a captured step is called with, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import torchacc
from tests import helpers
from tests.python.captured import ACC, captured
from torchacc_device import _C

pytestmark = [
    pytest.mark.usefixtures("acc_only"),
    pytest.mark.skipif(_C.mode() in ("eager", "nofuse"), reason="nothing is recorded as a whole"),
]


def test_arguments_that_begin_to_require_gradients() -> None:
    """A replay would leave them without one."""
    weight = torch.ones(2, device=ACC, requires_grad=True)

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss = (x * weight).sum()
        loss.backward()
        return loss

    x = torch.ones(2, device=ACC)
    step = captured(fn, x)
    with pytest.raises(RuntimeError, match=r"args\[0\] requires gradients and did not at capture"):
        step(x.clone().requires_grad_())
    step(x)
    given = x.clone().requires_grad_()
    step = captured(lambda x: torch.autograd.grad((x * x).sum(), x)[0], given)
    assert step(given).tolist() == [2.0, 2.0]


class Wrapper(torch.Tensor):
    """Has the device of what it is made of, and no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        def unwrapped(each: Any) -> Any:
            return each.inner if isinstance(each, Wrapper) else each

        made = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return Wrapper(made) if isinstance(made, torch.Tensor) else made


def jagged(inner: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor([0, 1, 2], device=ACC)
    return torch.nested.nested_tensor_from_jagged(inner[:, None], offsets)


@pytest.mark.parametrize("make", [Wrapper, jagged])
def test_tensors_that_are_made_of_others(make: Callable[..., torch.Tensor]) -> None:
    """They have no storage of acc's, though their device is acc."""
    plain = torch.ones(2, device=ACC)
    wrapped = make(plain)
    assert wrapped.device.type == ACC
    step = torchacc.capture(lambda x: x * 2)
    with pytest.raises(RuntimeError, match=r"args\[0\] is a (Wrapper|NestedTensor) of layout"):
        step(wrapped)
    step = captured(lambda x: x * 2, plain)
    with pytest.raises(RuntimeError, match=r"args\[0\] is a (Wrapper|NestedTensor) of layout"):
        step(wrapped)
    assert step(plain).tolist() == [2.0, 2.0]
    step = torchacc.capture(lambda x: (x, make(x * 2)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"result 0 is a (Wrapper|NestedTensor) of layout"):
            step(plain)
    assert (plain + 1).tolist() == [2.0, 2.0]


def test_parameters_that_are_made_of_others() -> None:
    """They are no state of the step's that a guard could look at; those in them are."""
    model, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2, device=ACC)
    inner = torch.ones(2, 2, device=ACC)
    model.weight = nn.Parameter(Wrapper(inner), requires_grad=False)
    step = captured(lambda x: x @ model.weight.inner, x)
    inner.mul_(2)
    assert step(x).tolist() == [[4.0, 4.0]]


def test_optimizers_of_parameters_that_are_made_of_others() -> None:
    """As of a layer that is split among processes."""
    helpers.run_python(
        """
import torch, torch.distributed as dist, torchacc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
dist.init_process_group("acc", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(4, 4).to("acc")
parallelize_module(model, init_device_mesh("acc", (1,)), ColwiseParallel())
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
def fn(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
step = torchacc.capture(fn)
x = torch.ones(2, 4, device="acc")
losses = [step(x).item() for _ in range(5)]
assert step.replays == 2 and len(set(losses)) == 5
def refused(text):
    try:
        step(x)
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"replayed in spite of {text}")
optimizer.param_groups[0]["lr"] = 0.5
refused("'lr' of SGD is 0.5 and was 0.1")
optimizer.param_groups[0]["lr"] = 0.1
step(x)
model.weight.requires_grad_(False)
refused("requires_grad of parameter 'weight' of a Linear is False and was True")
model.weight.requires_grad_(True)
state = optimizer.state[model.weight]
before = state["momentum_buffer"]
state["momentum_buffer"] = before.clone()
refused("state 'momentum_buffer' of SGD is another object")
state["momentum_buffer"] = before
step(x)
dist.destroy_process_group()
"""
    )


def test_keywords_in_another_order() -> None:
    x, y = torch.ones(2, device=ACC), torch.full((2,), 3.0, device=ACC)
    step = captured(lambda x, y: x - y, x=x, y=y)
    assert step(y=y, x=x).tolist() == [-2.0, -2.0]
    with pytest.raises(RuntimeError, match="nested in another way"):
        step(x=x, z=y)


class Trainer:
    @torchacc.capture
    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @torchacc.capture
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_captures_in_the_body_of_a_class() -> None:
    x = torch.ones(2, device=ACC)
    with pytest.raises(TypeError, match=r"body of class Trainer.* self\.step = torchacc\.capture"):
        Trainer().step(x)
    assert repr(Trainer.step).startswith("<torchacc.capture of")
    for _ in range(4):
        assert Trainer().double(x).tolist() == [2.0, 2.0]
    assert Trainer.double.replays == 1
