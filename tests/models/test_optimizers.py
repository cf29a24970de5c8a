"""The update of all parameters is one step of the plan, whatever numbers it takes, and accurate.

Each optimizer runs in the forms that eager has: over lists of tensors (`foreach=True`), tensor by
tensor, and as one call of ATen's (`fused=True`). Left out are `capturable=True`, which eager
refuses on the CPU, so that there is nothing to compare with, and `differentiable=True`, whose
update is part of the graph that autograd keeps: its values are not temporary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import helpers
from tests.models import accuracy, zoo

pytestmark = pytest.mark.usefixtures("one_thread", "recording")


class Lion(torch.optim.Optimizer):
    """A user's optimizer (Chen et al., arXiv:2302.06675), written as PyTorch's are."""

    def __init__(self, params: Iterable[Tensor], foreach: bool, **options: Any) -> None:
        super().__init__(params, {"foreach": foreach, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["average"] = torch.zeros_like(p)
            averages = [self.state[p]["average"] for p in params]
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            if group["foreach"]:
                torch._foreach_mul_(params, 1 - lr * decay)
                updates = torch._foreach_mul(averages, beta1)
                torch._foreach_add_(updates, grads, alpha=1 - beta1)
                torch._foreach_sign_(updates)
                torch._foreach_add_(params, updates, alpha=-lr)
                torch._foreach_lerp_(averages, grads, 1 - beta2)
                continue
            for p, g, average in zip(params, grads, averages, strict=True):
                p.mul_(1 - lr * decay)
                p.add_((average * beta1 + g * (1 - beta1)).sign(), alpha=-lr)
                average.mul_(beta2).add_(g, alpha=1 - beta2)


Make = Callable[..., torch.optim.Optimizer]

# Optimizer and its options; each number is varied from step to step.
CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD with momentum": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-3},
    ),
    "SGD of Nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "Adam with decay": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-2, "maximize": True}),
    "AMSGrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW with amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 1e-2}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "NAdam with decay": (
        torch.optim.NAdam,
        {"lr": 1e-2, "weight_decay": 1e-2, "decoupled_weight_decay": True},
    ),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "RAdam with decay": (torch.optim.RAdam, {"lr": 1e-2, "weight_decay": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "centered RMSprop": (
        torch.optim.RMSprop,
        {"lr": 1e-3, "momentum": 0.5, "centered": True, "weight_decay": 1e-3},
    ),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 1e-3, "weight_decay": 1e-3}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 1e-3}),
    "Lion": (Lion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.01}),
}

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)

FORMS = [
    (name, form)
    for name, (make, _) in CASES.items()
    for form in ("foreach", "single", "fused")
    if form != "fused" or make in FUSED
]


def create(name: str, form: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """One of the optimizers, in one of its forms."""
    make, options = CASES[name]
    chosen = {"fused": True} if form == "fused" else {"foreach": form == "foreach"}
    return make(parameters, **chosen, **options)


def vary(optimizer: torch.optim.Optimizer) -> None:
    """Changes each number of the optimizer a little, as schedules do."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            if isinstance(value, float):
                group[key] = value * 0.999
            elif isinstance(value, tuple):
                group[key] = tuple(part * 0.999 for part in value)


def parameters_of(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    made = [helpers.drawn(*shape, device="cpu", seed=i) for i, shape in enumerate(shapes)]
    return [torch.nn.Parameter(t.to(dtype).to(helpers.DEVICE)) for t in made]


def train(optimizer: torch.optim.Optimizer, parameters: list[Tensor], steps: int) -> list[dict]:
    """Steps with other gradients and numbers each; what was counted in each."""
    counts = []
    for step in range(steps):
        for i, p in enumerate(parameters):
            drawn = helpers.drawn(*p.shape, device="cpu", seed=100 * step + i)
            p.grad = drawn.to(p.dtype).to(helpers.DEVICE)
        helpers.flush()
        with helpers.counting() as counted:
            optimizer.step()
            vary(optimizer)
            helpers.flush()
        # Kernels come with plans; that of a plan that ran once may be compiled later, beside these.
        names = ("steps", "kernel_launches", "plans_built")
        counts.append({name: counted[name] for name in names})
    return counts


SHAPES: list[tuple[int, ...]] = [(7, 5), (5,), (3, 2, 4), (), (40,), (65, 33), (1,)]

# From here on every step is of one plan, with its kernels. RAdam's sixth is of a new one.
SETTLED = 9


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_the_update_of_all_parameters_is_one_kernel(acc_only, name, form):
    parameters = parameters_of(SHAPES, torch.float32)
    optimizer = create(name, form, parameters)
    counts = train(optimizer, parameters, SETTLED + 4)[SETTLED:]
    wanted = {"steps": 1, "kernel_launches": len(SHAPES), "plans_built": 0}
    if form == "fused":
        # One call of ATen's, and a kernel that counts the steps where the state has such a count.
        counts_steps = "step" in optimizer.state[parameters[0]]
        wanted["steps"] = 2 if counts_steps else 1
        wanted["kernel_launches"] = len(SHAPES) if counts_steps else 0
    assert counts == [wanted] * 4
    plan = helpers.extension().plan_data(torch.acc.current_device())
    assert len(plan["steps"]) == wanted["steps"]
    kernels = [s for s in plan["steps"] if s["kernel"] is not None]
    assert sum(s["launches"] for s in kernels) == wanted["kernel_launches"]


@pytest.mark.parametrize("form", ["foreach", "single"])
def test_clipping_by_the_norm_is_part_of_the_update(acc_only, form):
    """Kernels for the norms of the gradients, for their norm with what follows, for the updates."""
    shapes = SHAPES[:3]
    parameters = parameters_of(shapes, torch.float32)
    optimizer = create("AdamW", form, parameters)
    drawn = [helpers.drawn(*shape, device="cpu", seed=i) for i, shape in enumerate(shapes)]
    for _ in range(SETTLED):
        for p, gradient in zip(parameters, drawn, strict=True):
            p.grad = gradient.to(helpers.DEVICE)
        helpers.flush()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        helpers.flush()
    plan = helpers.extension().plan_data(torch.acc.current_device())
    steps = [[plan["nodes"][i]["op"] for i in step["nodes"]] for step in plan["steps"]]
    launches = [step["launches"] for step in plan["steps"]]
    assert launches == [len(shapes), 0, 1, len(shapes)]
    norms, joined, total, update = steps
    assert set(norms) == {"aten::linalg_vector_norm"}
    assert joined == ["aten::stack"]
    assert total[0] == "aten::linalg_vector_norm" and "aten::clamp" in total
    assert {"aten::mul_.Tensor", "aten::addcdiv_"} <= set(update)


@pytest.mark.parametrize("form", ["foreach", "single"])
@pytest.mark.parametrize("bucket", [False, True])
def test_the_update_of_a_whole_step_is_one_kernel(acc_only, form, bucket):
    """Of gradients that the step itself makes, large ones, and of views of one buffer (DDP's)."""
    width, layers = 160, 4
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    model.to(helpers.DEVICE)
    parameters = list(model.parameters())
    optimizer = create("AdamW", form, parameters)
    if bucket:
        buffer = torch.zeros(sum(p.numel() for p in parameters), device=helpers.DEVICE)
        for p, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view(p.shape)
    x = helpers.drawn(8, width, device="cpu").to(helpers.DEVICE)
    for _ in range(SETTLED):
        optimizer.zero_grad(set_to_none=not bucket)
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
        helpers.flush()
    plan = helpers.extension().plan_data(torch.acc.current_device())
    steps = [[plan["nodes"][i]["op"] for i in step["nodes"]] for step in plan["steps"]]
    (update,) = [i for i, nodes in enumerate(steps) if "aten::addcdiv_" in nodes]
    assert steps[update].count("aten::addcdiv_") == len(parameters)
    assert plan["steps"][update]["kernel"] is not None


@pytest.mark.parametrize("form", ["foreach", "single"])
def test_there_is_a_kernel_for_each_type(acc_only, form):
    types = (torch.float32, torch.float64)
    parameters = [p for dtype in types for p in parameters_of(SHAPES, dtype)]
    counts = train(create("AdamW", form, parameters), parameters, SETTLED + 1)
    assert counts[-1]["steps"] == len(types)
    assert counts[-1]["kernel_launches"] == len(parameters)


@pytest.mark.parametrize("form", ["foreach", "single"])
def test_there_is_a_kernel_for_each_group_that_computes_something_else(acc_only, form):
    parameters = parameters_of(SHAPES, torch.float32)
    groups = [
        {"params": parameters[:3], "weight_decay": 0.1},
        {"params": parameters[3:], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.Adam(groups, lr=1e-2, foreach=form == "foreach")
    counts = train(optimizer, parameters, SETTLED + 1)
    assert counts[-1]["steps"] == len(groups)
    assert counts[-1]["kernel_launches"] == len(parameters)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_each_step_is_as_accurate_as_eagers(device, name, form):
    accuracy.check_steps(zoo.make("mlp"), lambda p: create(name, form, p), device)
