"""What TI-ACC's second generation has for the computation of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tiacc_training.torch.adaptive_precision import MixedPrecision_TrainingPolicy

__all__ = ["MixedPrecision_TrainingPolicy", "get_fused_optimizer"]

SomeOptimizer = TypeVar("SomeOptimizer", bound=Optimizer)

# Those of torch that have `fused=True`, and where.
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_DEVICES = ("acc", "cpu", "cuda")


def get_fused_optimizer(optimizer: SomeOptimizer) -> SomeOptimizer:
    """Makes a built optimizer what it is with `fused=True`, and returns it.

    It is the same object, so that schedulers go on with it, and may have taken steps. One step of
    all parameters is one operator then. On acc it was one kernel before, too; what is saved is
    the loops over the parameters that record it.

    Concerned are torch's SGD, Adam and AdamW. Others, classes made of these, differentiable ones,
    those with parameters that are wrappers of tensors (DTensors) or have no such kernel, and SGD
    with dampening before its first step are returned as they are; the log says why at the level
    INFO. Sparse gradients are then an error of torch's.
    """
    why = _why_not(optimizer)
    if why:
        logging.getLogger("TorchAcc").info(
            "get_fused_optimizer leaves %s as it is: %s", type(optimizer).__name__, why
        )
        return optimizer
    for group in (optimizer.defaults, *optimizer.param_groups):
        group["fused"] = True
        group["foreach"] = None  # torch takes one of the two
    for parameter in _without_buffer(optimizer):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)
    # What torch's constructors note beside the group's entry: their step does its own unscaling.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return optimizer


def _without_buffer(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters whose momentum SGD has not begun.

    torch's fused step begins it in memory that was never written, and where the gradients of that
    step have overflowed leaves it so (`_fused_sgd` in torch/optim/sgd.py). With zeros the first
    step is the same, as long as there is no dampening, which it does not have.
    """
    for group in optimizer.param_groups:
        if group.get("momentum"):
            for parameter in group["params"]:
                if optimizer.state.get(parameter, {}).get("momentum_buffer") is None:
                    yield parameter


def _why_not(optimizer: Optimizer) -> str:
    """Why an optimizer has no fused step; "" where it has one."""
    if type(optimizer) not in _FUSED:
        return "only torch's SGD, Adam and AdamW have a fused step"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "it is differentiable"
        if group.get("dampening") and list(_without_buffer(optimizer)):
            return "its first step does without dampening"
        for parameter in group["params"]:
            if is_traceable_wrapper_subclass(parameter):
                return f"a parameter is a {type(parameter).__name__}"
            if parameter.device.type not in _DEVICES or not parameter.is_floating_point():
                return f"a parameter is {parameter.dtype} on {parameter.device}"
    return ""
