"""The benchmark cases: what one step is, its inputs, its modes and what is required of it.

A case is data until `build` is called, in the worker process of one mode, to make a program
(programs.py): the model, the optimizer and the input batches on one device. Models and inputs are
made on the CPU from fixed seeds and then moved, so every mode starts from the same numbers.
Dropout is absent everywhere, so modes can be compared. This module imports torch only in `build`
(through trainings.py), so the driving process needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.case import LESS_PRECISE, Case, Tolerance
from benchmarks.gpu_cases import GPU_CASES
from benchmarks.programs import OptimizerOnly, Pointwise, Program, Setting, Training

if TYPE_CHECKING:
    import torch

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "mlp",
            "3 x 256, batch 64, AdamW",
            must={"eager": 1.3, "compile": 1.3},
            goal=2.0,
        ),
        Case(
            "mlp_small",
            "4 layers of 64, batch 16, AdamW",
            must={"eager": 2.0, "compile": 2.0},
            goal=4.0,
            gpu_must={"eager": 3.0},
            gpu_goal=10.0,
        ),
        Case(
            "resnet18",
            "ResNet-18, batch 8, 224^2, SGD momentum 0.9, weight decay 5e-4",
            convolutional=True,
            must={"eager": 1.05, "compile": 1.0},
            goal=1.2,
            memory_must=0.9,
            # after 20 steps on their own torch.compile is 4.4e-2 from eager
            tolerance=Tolerance(outputs=0.1),
            gpu_tolerance=LESS_PRECISE,
        ),
        Case(
            "resnet18_cifar",
            "ResNet-18 with a 3x3 stem, batch 16, 32^2, SGD momentum 0.9, weight decay 5e-4",
            convolutional=True,
            must={"eager": 1.05, "compile": 1.0},
            goal=1.2,
            gpu_must={"eager": 3.0},
            gpu_goal=10.0,
            gpu_tolerance=LESS_PRECISE,
        ),
        Case(
            "gpt",
            "6 layers, 6 heads, 384 wide, 256 tokens, batch 4, AdamW",
            must={"eager": 1.05, "compile": 1.0},
            goal=1.12,
            gpu_must={"eager": 3.0},
            gpu_goal=10.0,
            memory_must=0.9,
        ),
        Case(
            "lstm",
            "nn.LSTM 2 x 256, 64 steps, batch 16, AdamW",
            must={"eager": 1.0, "compile": 1.0},
            goal=1.2,
            gpu_must={"eager": 3.0},
            gpu_goal=10.0,
            gpu_tolerance=LESS_PRECISE,
        ),
        Case(
            "lstm_unrolled",
            "LSTM 2 x 256 by hand, 64 steps, batch 16, AdamW",
            must={"eager": 1.5, "compile": 1.5},
            goal=3.0,
            compile_timeout_s=180.0,
        ),
        Case(
            "block",
            "2 x (LayerNorm, 384 -> 1536 -> 384 with GELU), 1,024 rows, forward and backward",
            has_optimizer=False,
            must={"eager": 1.05, "compile": 1.0},
            goal=1.15,
        ),
        Case(
            "pointwise",
            "20 operators, 7 of them transcendental, on 4 M floats, no grad",
            has_optimizer=False,
            hand_captured=False,
            must={"eager": 4.0, "compile": 2.0},
            compile_variants=("model", "max-autotune"),
            tolerance=Tolerance(1e-5, 1e-5, 1e-5),
        ),
        Case(
            "optimizer",
            "AdamW alone, 100 tensors, 10 M parameters",
            hand_captured=False,
            must={"eager": 2.5, "eager_tuned": 1.0},
            compile_variants=("model", "max-autotune"),
            tolerance=Tolerance(1e-5, 1e-5, 1e-5),
        ),
        # The same where the script itself asks for the fused implementation, in every mode.
        Case(
            "optimizer_fused",
            "AdamW(fused=True) alone, 100 tensors, 10 M parameters",
            hand_captured=False,
            must={"eager": 1.0},
            compile_variants=("model", "max-autotune"),
            tolerance=Tolerance(1e-5, 1e-5, 1e-5),
        ),
        *GPU_CASES,
    )
}


def names_of(suite: str) -> list[str]:
    """The cases that a suite measures unless told which."""
    return [name for name, case in CASES.items() if suite == "gpu" or not case.gpu_only]


def variants_of(case: Case, mode: str, suite: str = "host") -> tuple[str, ...]:
    """The variants among which `mode` is the fastest; ("plain",) where there is no choice.

    Variants are words joined by "+": model, step, max-autotune, reduce-overhead (how torch.compile
    is applied), channels_last (layout of model and inputs), fused (the optimizer's fused
    implementation), benchmark (cuDNN measures its algorithms), graph (the step is a CUDA graph that
    the script captures), capture (the step under torchacc.capture, which has the optimizer count on
    the device).
    """
    on_gpu = suite == "gpu"
    if mode == "compile":
        return ("model", "reduce-overhead", "max-autotune") if on_gpu else case.compile_variants
    if mode == "graph":
        return (_tuned(case, on_gpu)[-1] + "+graph",)
    if mode == "eager_tuned":
        return _tuned(case, on_gpu)
    return ("capture",) if mode == "capture" else ("plain",)


def _tuned(case: Case, on_gpu: bool) -> tuple[str, ...]:
    """What a user who knows eager PyTorch turns on; the last one everything."""
    first = "fused" if case.has_optimizer else "plain"
    if not case.convolutional:
        return (first,)
    first += "+benchmark" if on_gpu else ""
    return (first, first + "+channels_last")


def build(
    name: str, device: str, variant: str, small: bool = False, precision: str = ""
) -> Program:
    """Builds case `name` on `device` in the form `variant` (see variants_of).

    Learning rates are small, so that thousands of steps on the same four batches stay in the
    range of ordinary values (no overflow, no denormal numbers that change the speed). `small`
    concerns the cases for GPUs. `precision` is the case's own unless one is named (see Setting).
    """
    import torch

    from benchmarks import models, trainings

    if name not in CASES:
        raise ValueError(f"[benchmarks.cases] no case {name!r}. Cases: {', '.join(CASES)}")
    setting = Setting(device, frozenset(variant.split("+")), precision or CASES[name].precision)
    torch.manual_seed(0)
    if CASES[name].gpu_only:
        program, *arguments = CASES[name].program
        return getattr(trainings, program)(setting, small, *arguments)
    adamw, sgd = trainings.adamw, trainings.sgd
    classification = trainings.classification
    if name == "mlp":
        return classification(setting, models.mlp(3, 256), adamw, (64, 256), 64, 256)
    if name == "mlp_small":
        return classification(setting, models.mlp(4, 64), adamw, (16, 64), 16, 64)
    if name == "resnet18":
        return classification(setting, models.resnet18(False), sgd, (8, 3, 224, 224), 8, 10)
    if name == "resnet18_cifar":
        return classification(setting, models.resnet18(True), sgd, (16, 3, 32, 32), 16, 10)
    if name == "lstm":
        return classification(setting, models.Lstm(), adamw, (64, 16, 256), 16, 10)
    if name == "lstm_unrolled":
        return classification(setting, models.UnrolledLstm(), adamw, (64, 16, 256), 16, 10)
    if name == "gpt":
        return trainings.language(setting, models.Gpt(), (4, 256))
    if name == "block":

        def rows(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
            return (torch.randn(1024, 384, generator=generator),)

        def mean_square(forward: Callable, inputs: torch.Tensor) -> torch.Tensor:
            return forward(inputs).square().mean()

        return Training(setting, models.feed_forward_blocks(), mean_square, None, rows)
    if name == "pointwise":
        return Pointwise(setting)
    if name == "optimizer":
        return OptimizerOnly(setting)
    return OptimizerOnly(dataclasses.replace(setting, words=setting.words | {"fused"}))
