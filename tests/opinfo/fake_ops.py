"""Operators that misbehave on purpose, in the form of PyTorch's database, to test the harness.

The worker imports this module in the place of the database. Which side is running is told by the
order of the calls: the harness runs the CPU first, so a call with an odd number is the CPU's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput

from tests import helpers

SAMPLES = 4


class FakeOp:
    """The part of OpInfo's interface that the harness uses."""

    variant_test_name = ""
    inplace_variant = None
    supports_autograd = True
    supports_gradgrad = False
    supports_out = False
    error_inputs_func = None

    def __init__(self, name: str, fn: Callable[[torch.Tensor, bool, int], Any]) -> None:
        self.name = name
        self.fn = fn
        self.calls = 0

    def supported_dtypes(self, device: str) -> set[torch.dtype]:
        """float32 only."""
        return {torch.float32}

    supported_backward_dtypes = supported_dtypes

    def sample_inputs(
        self, device: str, dtype: torch.dtype, requires_grad: bool = False
    ) -> Iterator[SampleInput]:
        """`SAMPLES` samples; the first element of each is its index."""
        for i in range(SAMPLES):
            t = torch.full((2, 3), float(i), dtype=dtype, device=device)
            yield SampleInput(t.requires_grad_(requires_grad))

    def op(self, x: torch.Tensor) -> Any:
        """Calls the function with the argument, whether the CPU is meant, and the index."""
        self.calls += 1
        return self.fn(x, self.calls % 2 == 1, int(x.detach().cpu()[0, 0]))

    @staticmethod
    def gradcheck_wrapper(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The database's hook for gradients: nothing."""
        return op(*args, **kwargs)


def _value(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    return x + 1 if cpu or index != 2 else x + 1.5


def _close(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    return x + 1 if cpu else (x + 1) * (1 + 2**-22)


def _shape(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    return x + 1 if cpu else (x + 1).reshape(3, 2)


def _stride(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    return x + 1 if cpu else (x + 1).t().contiguous().t()


def _dtype(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    return x + 1 if cpu else (x + 1).double()


def _nan(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    return x * float("nan")


def _input(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    with torch.no_grad():
        return x + 1 if cpu else x.add_(1).clone()


def _alias(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    return x.t() if cpu else x.t().clone()


def _raises(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    if not cpu and index == 1:
        raise RuntimeError("no such kernel")
    return x + 1


def _accepts(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    if cpu:
        raise ValueError("not for this sample")
    return x + 1


def _crash(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    if not cpu and index == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x + 1


def _leave(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    if not cpu:
        os._exit(3)
    return x + 1


def _lost(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    if helpers.ON_ACC and not cpu and index == 1:
        helpers.extension().fail_waits(710)  # as an assertion in a kernel does
    return x + 1


def _hang(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    if not cpu and index == 3:
        time.sleep(1000)
    return x + 1


def _gradient(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    return x * 2 + 1 if cpu else x * 2 + (x - x.detach()) + 1


def _draws(x: torch.Tensor, cpu: bool, index: int) -> torch.Tensor:
    return torch.rand(100) if cpu else torch.zeros(100)


op_db = [
    FakeOp("good", lambda x, cpu, index: x + 1),
    *(
        FakeOp(fn.__name__.strip("_"), fn)
        for fn in (
            *(_value, _close, _shape, _stride, _dtype, _nan, _input, _alias, _raises, _accepts),
            *(_crash, _leave, _lost, _hang, _gradient, _draws),
        )
    ),
]
