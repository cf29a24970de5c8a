"""PyTorch's own database of modules on the device: results, gradients and buffers of the CPU.

float32 and bfloat16, and evaluation where it differs from training; with `ACC_TEST_FULL=1` float16
and float64 too, and evaluation of all.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, module_db

from tests import helpers
from tests.opinfo.check import on_both

DTYPES = [torch.float32, torch.bfloat16]
if helpers.FULL:
    DTYPES += [torch.float16, torch.float64]

# They draw their weights when they see the first input, from the generator of its device.
MODULES = [
    info
    for info in module_db
    if not issubclass(info.module_cls, torch.nn.modules.lazy.LazyModuleMixin)
]


# The CPU has no kernels of these in half precision.
NOT_IN_HALVES = {
    "nn.AvgPool3d",
    "nn.CTCLoss",
    "nn.LPPool3d",
    "nn.MultiLabelMarginLoss",
    "nn.MultiMarginLoss",
}


def samples(info: ModuleInfo, dtype: torch.dtype, training: bool) -> list[Any]:
    """The database's inputs of a module."""
    made = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    return [sample for sample in made if sample.forward_input is not None]


def train(module: torch.nn.Module, given: Any, device: str) -> list[torch.Tensor]:
    """Results of the module, gradients of parameters and inputs, and buffers."""
    args, kwargs = helpers.copy_tree((given.args, given.kwargs), device)
    module = copy.deepcopy(module).to(device)
    torch.manual_seed(1)
    results = helpers.tensors(module(*args, **kwargs))
    differentiable = [r for r in results if r.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(r) for r in differentiable])
    inputs = [*module.parameters(), *helpers.tensors((args, kwargs))]
    gradients = [t.grad for t in inputs if t.grad is not None]
    return [t.detach() for t in (*results, *gradients, *module.buffers())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("info", MODULES, ids=lambda info: info.name)
def test_a_module(one_thread: None, device: str, info: ModuleInfo, dtype: torch.dtype) -> None:
    found = []
    compared = 0
    both = info.train_and_eval_differ or helpers.FULL
    for training in (True, False) if both else (True,):
        for index, sample in enumerate(samples(info, dtype, training)):
            torch.manual_seed(0)
            make = sample.constructor_input
            module = info.module_cls(*make.args, **make.kwargs).to(dtype).train(training)
            given = sample.forward_input
            told = on_both(lambda where, m=module, g=given: train(m, g, where))
            if told is None:
                continue
            compared += 1
            mode = "training" if training else "evaluating"
            found += [f"#{index} {mode} {sample.desc}: {text}" for text in told]
    assert not found, "\n".join(found)
    halves = dtype in (torch.bfloat16, torch.float16)
    assert (compared == 0) == (halves and info.name in NOT_IN_HALVES), f"{compared} compared"
