"""The benchmark cases: what one step is, its inputs, its modes and what is required of it.

A case is data until `build` is called, in the worker process of one mode, to make a program
(programs.py): the model, the optimizer and the input batches on one device. Models and inputs are
made on the CPU from fixed seeds and then moved, so every mode starts from the same numbers.
Dropout is absent everywhere, so modes can be compared. This module imports torch only in `build`
(through models.py), so the driving process needs no torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.programs import (
    FromLoader,
    OptimizerOnly,
    Pointwise,
    Program,
    Repeated,
    Setting,
    Training,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tolerance:
    """How far a mode that is not bit-equal by contract may be from eager.

    `first` bounds the relative difference of the value that step 1 returns, `later` that of the
    following steps, `outputs` the difference of each output's norm and projection, relative to
    the norm. Training amplifies rounding differences, hence the wider bounds after step 1.
    """

    first: float = 1e-4
    later: float = 2e-2
    outputs: float = 2e-2


@dataclass(frozen=True)
class Case:
    """One benchmark case.

    `compile_variants` are the forms of torch.compile that make sense for it on the host, in the
    order in which they are tried; `must` holds the required speed of mode acc on the host, with one
    thread, against another mode (1.0 = as fast as), `goal` the speed against eager that is aimed
    at; `gpu_must` and `gpu_goal` are those of a GPU; `memory_must` bounds its peak on the host over
    eager's; `compile_timeout_s` the first 20 steps of a variant. `precision` is that of autocast
    (see programs.Setting). `hand_captured`: it is a training step, which users capture by hand as a
    CUDA graph. A case for GPUs only is measured on the host when it is named, and is
    then small: it shows that it runs.
    """

    name: str
    title: str
    convolutional: bool = False
    has_optimizer: bool = True
    hand_captured: bool = True
    gpu_only: bool = False
    precision: str = "float32"
    compile_variants: tuple[str, ...] = ("model", "step", "max-autotune")
    must: dict[str, float] = field(default_factory=dict)
    goal: float | None = None
    gpu_must: dict[str, float] = field(default_factory=dict)
    gpu_goal: float | None = None
    memory_must: float = 1.05
    compile_timeout_s: float = 600.0
    tolerance: Tolerance = Tolerance()


# Half precision, where two ways to compute the same differ so much.
LESS_PRECISE = Tolerance(1e-2, 5e-2, 0.1)

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
        ),
        Case(
            "resnet18_cifar",
            "ResNet-18 with a 3x3 stem, batch 16, 32^2, SGD momentum 0.9, weight decay 5e-4",
            convolutional=True,
            must={"eager": 1.05, "compile": 1.0},
            goal=1.2,
            gpu_must={"eager": 3.0},
            gpu_goal=10.0,
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
        Case(
            "seed",
            "ResNet-50 of 100 classes, batch 64 of a DataLoader with 4 workers, AdamW",
            convolutional=True,
            gpu_only=True,
            gpu_must={"eager": 1.25},
            gpu_goal=1.5,
            tolerance=LESS_PRECISE,  # cuDNN's convolutions round to tf32
        ),
        Case(
            "seed_amp",
            "the same in fp16 with a scaler",
            convolutional=True,
            gpu_only=True,
            precision="float16",
            gpu_must={"eager": 2.0},
            gpu_goal=2.5,
            tolerance=LESS_PRECISE,
        ),
        Case(
            "resnet50",
            "ResNet-50, batch 256, 224^2, fp16 with a scaler, SGD momentum 0.9",
            convolutional=True,
            gpu_only=True,
            precision="float16",
            gpu_must={"compile": 1.0},
            gpu_goal=1.3,
            tolerance=LESS_PRECISE,
        ),
        Case(
            "swin",
            "Swin-T, batch 160, 224^2, fp16 with a scaler, AdamW",
            gpu_only=True,
            precision="float16",
            gpu_must={"eager": 1.83, "compile": 1.0},
            gpu_goal=2.2,
            tolerance=LESS_PRECISE,
        ),
        Case(
            "gpt2",
            "12 layers, 12 heads, 768 wide, 50,304 words, 1,024 tokens, batch 16, bf16, AdamW",
            gpu_only=True,
            precision="bfloat16",
            gpu_must={"compile": 1.0},
            gpu_goal=1.1,
            tolerance=LESS_PRECISE,
        ),
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


def _classify(forward: Callable, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(forward(inputs), labels)


def _classification(
    setting: Setting,
    model: torch.nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer],
    shape: tuple[int, ...],
    rows: int,
    classes: int,
) -> Training:
    import torch

    def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        inputs = torch.randn(shape, generator=generator)
        return inputs, torch.randint(classes, (rows,), generator=generator)

    return Training(setting, model, _classify, optimizer, make_batch)


def _adamw(parameters: Any, lr: float = 1e-4, **options: Any) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(parameters, lr=lr, **options)


def _sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=5e-4, **options)


def _next_token(forward: Callable, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(forward(tokens).flatten(0, 1), targets.flatten())


def _language(setting: Setting, model: torch.nn.Module, rows: int, tokens: int) -> Training:
    import torch

    def text(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        drawn = torch.randint(model.vocabulary, (rows, tokens + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return Training(setting, model, _next_token, _adamw, text)


# The networks of the cases for GPUs; of each its name, how it is made and, for images, how many
# there are in a batch and of how many classes.
_IMAGES = {
    "seed": ("resnet50", 64, 100),
    "seed_amp": ("resnet50", 64, 100),
    "resnet50": ("resnet50", 256, 1000),
    "swin": ("swin_tiny", 160, 1000),
}


def _for_gpus(name: str, setting: Setting, small: bool) -> Program:
    """The cases for GPUs, or the same programs with a little network and little data."""
    import torch

    from benchmarks import models

    if name == "gpt2":
        if small:
            return _language(setting, models.Gpt(2, 2, 32, 16, vocabulary=64), 2, 16)
        return _language(setting, models.gpt2(), 16, 1024)
    network, rows, classes = _IMAGES[name]
    size = 224
    if small:
        network, rows, size = "small_network", 4, 16
    model = getattr(models, network)(classes)
    if not name.startswith("seed"):
        optimizer = _adamw if name == "swin" else _sgd
        return _classification(setting, model, optimizer, (rows, 3, size, size), rows, classes)
    # What the documents that this project answers train, see `tests/seeds`: epochs of a hundred
    # batches. Ten are drawn: a worker of each mode has them in memory, and waits for them first.
    batches, drawn = (3, 2) if small else (100, 10)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn((drawn * rows, 3, size, size), generator=generator)
    labels = torch.randint(classes, (drawn * rows,), generator=generator)
    data = Repeated(images, labels, batches * rows)
    # Of gradients that are nothing but rounding AdamW makes whole steps: these are small.
    optimizer = functools.partial(_adamw, lr=1e-6)
    return FromLoader(setting, model, _classify, optimizer, data, rows)


def build(
    name: str, device: str, variant: str, small: bool = False, precision: str = ""
) -> Program:
    """Builds case `name` on `device` in the form `variant` (see variants_of).

    Learning rates are small, so that thousands of steps on the same four batches stay in the
    range of ordinary values (no overflow, no denormal numbers that change the speed). `small`
    concerns the cases for GPUs. `precision` is the case's own unless one is named (see Setting).
    """
    import torch

    from benchmarks import models

    if name not in CASES:
        raise ValueError(f"[benchmarks.cases] no case {name!r}. Cases: {', '.join(CASES)}")
    setting = Setting(device, frozenset(variant.split("+")), precision or CASES[name].precision)
    torch.manual_seed(0)
    if CASES[name].gpu_only:
        return _for_gpus(name, setting, small)
    if name == "mlp":
        return _classification(setting, models.mlp(3, 256), _adamw, (64, 256), 64, 256)
    if name == "mlp_small":
        return _classification(setting, models.mlp(4, 64), _adamw, (16, 64), 16, 64)
    if name == "resnet18":
        return _classification(setting, models.resnet18(False), _sgd, (8, 3, 224, 224), 8, 10)
    if name == "resnet18_cifar":
        return _classification(setting, models.resnet18(True), _sgd, (16, 3, 32, 32), 16, 10)
    if name == "lstm":
        return _classification(setting, models.Lstm(), _adamw, (64, 16, 256), 16, 10)
    if name == "lstm_unrolled":
        return _classification(setting, models.UnrolledLstm(), _adamw, (64, 16, 256), 16, 10)
    if name == "gpt":
        return _language(setting, models.Gpt(), 4, 256)
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
