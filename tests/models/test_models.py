"""Losses, gradients and parameters of five models under four optimizers: bit-equal to eager CPU.

Generated kernels round differently and are left out here; test_fused.py has them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch

from tests import helpers
from tests.models import zoo

STEPS = 20

# Besides float32. Of the two half types make test has the one.
DTYPES = (torch.bfloat16, torch.float64, *([torch.float16] if helpers.FULL else []))


@dataclass
class Trace:
    """What one training run showed."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def train(case: zoo.Case, optimizer: str, device: str, steps: int = STEPS) -> Trace:
    """Trains a copy of the case's model; losses stay on the device until the end."""
    model = copy.deepcopy(case.model).to(device)
    opt = zoo.OPTIMIZERS[optimizer](list(model.parameters()))
    trace = Trace()
    for step in range(steps):
        batch = zoo.move(case.batches[step % len(case.batches)], device)
        loss = case.loss(model, batch)
        opt.zero_grad()
        loss.backward()
        if step == 0:
            trace.gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        opt.step()
        trace.losses.append(loss.detach())
    trace.losses = [loss.cpu() for loss in trace.losses]
    trace.gradients = {n: g.cpu() for n, g in trace.gradients.items()}
    trace.parameters = {n: p.detach().cpu() for n, p in model.named_parameters()}
    trace.buffers = {n: b.cpu() for n, b in model.named_buffers()}
    return trace


def differences(mine: Trace, theirs: Trace) -> list[str]:
    """What differs, in the order in which a difference spreads."""
    lines = []
    for name, g in theirs.gradients.items():
        found = helpers.tensor_differences(mine.gradients[name], g)
        lines += [f"gradient of step 1, {name}: {kind}: {text}" for kind, text in found]
    for step, (a, b) in enumerate(zip(mine.losses, theirs.losses, strict=True), start=1):
        if not torch.equal(a, b):
            lines.append(f"loss of step {step}: {a.item()!r} instead of {b.item()!r}")
    for what in ("parameters", "buffers"):
        for name, t in getattr(theirs, what).items():
            found = helpers.tensor_differences(getattr(mine, what)[name], t)
            lines += [f"{what} after the last step, {name}: {k}: {text}" for k, text in found]
    return lines


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], Trace]:
    """The CPU's runs, made when first asked for."""

    class Runs(dict[tuple[str, str], Trace]):
        def __missing__(self, key: tuple[str, str]) -> Trace:
            self[key] = train(zoo.make(key[0]), key[1], "cpu")
            return self[key]

    return Runs()


@pytest.mark.parametrize("optimizer", zoo.OPTIMIZERS)
@pytest.mark.parametrize("model", zoo.MODELS)
def test_bit_equal_to_the_cpu(one_thread, unfused, references, device, model, optimizer):
    theirs = references[model, optimizer]
    mine = train(zoo.make(model), optimizer, device)
    assert all(loss.isfinite() for loss in theirs.losses)
    lines = differences(mine, theirs)
    shown = "\n".join(lines[:20])
    assert not lines, f"{len(lines)} differences from the CPU:\n{shown}"


@pytest.mark.parametrize("model", zoo.MODELS)
def test_bit_equal_with_two_threads(unfused, device, model):
    before = torch.get_num_threads()
    # The thread that runs backward may be older than the setting: it must follow it nevertheless.
    torch.set_num_threads(1)
    torch.ones(2, device=device, requires_grad=True).sum().backward()
    torch.set_num_threads(2)
    try:
        case = zoo.make(model)
        theirs = train(case, "adamw", "cpu", steps=3)
        lines = differences(train(case, "adamw", device, steps=3), theirs)
    finally:
        torch.set_num_threads(before)
    assert not lines, "\n".join(lines[:20])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", zoo.MODELS)
def test_bit_equal_in_other_precisions(one_thread, unfused, device, model, dtype):
    case = zoo.make(model)
    case.model.to(dtype)
    case.batches = [
        tuple(t.to(dtype) if t.is_floating_point() else t for t in batch) for batch in case.batches
    ]
    theirs = train(case, "sgd", "cpu", steps=4)
    lines = differences(train(case, "sgd", device, steps=4), theirs)
    assert not lines, "\n".join(lines[:20])


def test_the_optimizers_defaults_train_equally_well(one_thread, device):
    # Defaults differ (lists on the device, one by one on the CPU), the training must not.
    def run(where: str) -> list[float]:
        case = zoo.make("mlp")
        model = case.model.to(where)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(40):
            loss = case.loss(model, zoo.move(case.batches[step % 4], where))
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        return losses

    mine, theirs = run(device), run("cpu")
    assert theirs[-1] < 0.5 * theirs[0]
    assert mine == pytest.approx(theirs, rel=1e-2, abs=1e-3)


def test_the_comparison_sees_one_changed_bit(one_thread):
    case = zoo.make("mlp")
    a, b = (train(case, "sgd", "cpu", steps=2) for _ in range(2))
    assert differences(a, b) == []
    name = "0.weight"
    a.gradients[name].view(torch.int32)[0, 0] ^= 1
    a.parameters[name].view(torch.int32)[0, 0] ^= 1
    assert len(differences(a, b)) == 2
