"""Training with generated kernels is as accurate as eager: errors against float64 side by side.

Each of 20 steps starts from eager's parameters, buffers and optimizer state, on the device and in a
float64 twin on the CPU. What a step then computes - loss, gradients, updates of parameters, buffers
- has an error against the twin, in relative L2 per tensor; the device's may be twice eager's. Runs
that are let free drift apart as runs of eager do whose start differs in the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from tests import helpers
from tests.models import bench, zoo

STEPS = 20

# How much of eager's error fused steps may have, as the root mean square over the steps.
FACTOR = 2.0

# The same for a single step, against the largest of eager's: one error is one draw, and of some
# thousand pairs of equal distribution (median of the quotients: 1.00) some are 2.7 apart.
FACTOR_OF_ONE = 4.0

# What they may have beyond that, relative to the tensor: eager's value can be right by chance, and
# a tensor of one element is one chance. Two roundings to float32, five in a single step.
FLOOR = 2 * 2.0**-24
FLOOR_OF_ONE = 5 * 2.0**-24

# The first run of a plan is not fused, and the first two steps differ from the others: gradients
# and the optimizer's state are made.
FIRST_FUSED = 4

CASES: dict[str, Callable[[], zoo.Case]] = {
    **{name: lambda name=name: zoo.make(name) for name in zoo.MODELS},
    **{f"bench_{name}": lambda name=name: bench.make(name) for name in bench.MODELS},
}


@dataclass
class Step:
    """What one step computed, as float64 on the CPU; the names say what and of which tensor."""

    values: dict[str, Tensor] = field(default_factory=dict)
    # The parameters and buffers that the results were added to: they are stored with its rounding.
    carriers: dict[str, Tensor] = field(default_factory=dict)


def wide(t: Tensor) -> Tensor:
    """A copy as float64 on the CPU."""
    return t.detach().to("cpu", torch.float64, copy=True)


class Trainee:
    """One of the three that take each step from the same state."""

    def __init__(self, case: zoo.Case, optimizer: str, device: str, dtype: torch.dtype) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self.model = copy.deepcopy(case.model).to(device, dtype)
        self.optimizer = zoo.OPTIMIZERS[optimizer](list(self.model.parameters()))

    def load(self, other: Trainee) -> None:
        """Takes over the other's parameters, buffers and optimizer state."""
        with torch.no_grad():
            for mine, theirs in zip(
                helpers.state_tensors(self.model), helpers.state_tensors(other.model), strict=True
            ):
                mine.copy_(theirs)
        # A copy, as the tensors of it that need no conversion would be shared.
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        helpers.flush()

    def move(self, batch: zoo.Batch) -> zoo.Batch:
        """The batch on this one's device, floating point as its dtype."""
        return tuple(
            t.to(self.device, self.dtype) if t.is_floating_point() else t.to(self.device)
            for t in batch
        )

    def step(self, batch: zoo.Batch) -> Step:
        """Forward, backward and the optimizer's step."""
        before = {n: wide(p) for n, p in self.model.named_parameters()}
        batch = self.move(batch)
        helpers.flush()
        loss = self.case.loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        helpers.flush()
        made = Step()
        made.values["loss"] = wide(loss)
        for name, p in self.model.named_parameters():
            made.values[f"gradient of {name}"] = wide(p.grad)
            made.values[f"update of {name}"] = wide(p) - before[name]
            made.carriers[f"update of {name}"] = before[name]
        for name, b in self.model.named_buffers():
            made.values[f"buffer {name}"] = wide(b)
        return made


def norm(t: Tensor) -> float:
    """The L2 norm."""
    return float(torch.linalg.vector_norm(t))


def mean(values: Sequence[float]) -> float:
    """The root mean square."""
    return (sum(e**2 for e in values) / len(values)) ** 0.5


def errors(mine: Step, eager: Step, exact: Step) -> dict[str, tuple[float, float, float]]:
    """Per value, how far the device and eager are from float64, and what rounding allows.

    Relative to the value's norm. The steps themselves need not be kept.
    """
    found = {}
    for name, right in exact.values.items():
        size = norm(right) or 1.0
        # A parameter is a float32: its update is known to half of its last bit.
        carrier = exact.carriers.get(name)
        found[name] = (
            norm(mine.values[name] - right) / size,
            norm(eager.values[name] - right) / size,
            0.0 if carrier is None else 2.0**-24 * norm(carrier) / size,
        )
    return found


def excesses(runs: list[dict[str, tuple[float, float, float]]]) -> list[str]:
    """What of the device's steps is further from float64 than it may be, given eager's distance."""
    lines = []
    for name in runs[0]:
        mine, eager, rounding = zip(*(run[name] for run in runs), strict=True)
        allowed = FACTOR * mean(eager) + FLOOR + mean(rounding)
        if not mean(mine) <= allowed:
            lines.append(f"{name}: {mean(mine):.3g}, eager's {mean(eager):.3g}, allowed {allowed}")
        for number, error in enumerate(mine, start=1):
            allowed = FACTOR_OF_ONE * max(eager) + FLOOR_OF_ONE + rounding[number - 1]
            if not error <= allowed:
                worst = max(eager)
                lines.append(f"step {number}: {name}: {error:.3g}, eager's {worst:.3g} at most")
    return lines


def batch_of(case: zoo.Case, step: int) -> zoo.Batch:
    """A batch whose targets change places every time it comes again.

    What cannot be learned keeps the loss away from zero, where it has hardly any correct bits.
    """
    count = len(case.batches)
    *inputs, target = case.batches[step % count]
    return (*inputs, target.roll(step // count, 0))


def steps(case: zoo.Case, optimizer: str, device: str) -> Iterator[tuple[int, Step, Step, Step]]:
    """Number from 1, and what the device, eager and the float64 twin made of it."""
    eager = Trainee(case, optimizer, "cpu", torch.float32)
    mine = Trainee(case, optimizer, device, torch.float32)
    exact = Trainee(case, optimizer, "cpu", torch.float64)
    for step in range(STEPS):
        mine.load(eager)
        exact.load(eager)
        batch = batch_of(case, step)
        yield step + 1, mine.step(batch), eager.step(batch), exact.step(batch)


def check_steps(case: zoo.Case, optimizer: str, device: str) -> None:
    """The test: every step within bounds, and fused."""
    runs = []
    launches = helpers.stats().get("kernel_launches", 0)
    for number, mine, eager, exact in steps(case, optimizer, device):
        assert exact.values["loss"].isfinite()
        now = helpers.stats().get("kernel_launches", 0)
        if helpers.ON_ACC and number >= FIRST_FUSED:
            assert now > launches, f"step {number} was not fused"
        launches = now
        runs.append(errors(mine, eager, exact))
    lines = excesses(runs)
    assert not lines, f"{len(lines)} values less accurate than eager's:\n" + "\n".join(lines[:20])


@pytest.mark.parametrize("optimizer", zoo.OPTIMIZERS)
@pytest.mark.parametrize("model", zoo.MODELS)
def test_as_accurate_as_eager(one_thread, device, model, optimizer):
    check_steps(CASES[model](), optimizer, device)


@pytest.mark.parametrize("model", bench.MODELS)
def test_the_benchmarks_models_are_as_accurate_as_eager(one_thread, device, model):
    check_steps(CASES[f"bench_{model}"](), "adamw", device)


def free_run(case: zoo.Case, optimizer: str, device: str, *, seed: int | None = None) -> Tensor:
    """Losses of 20 steps. With a seed every parameter starts up to one rounding aside."""
    trainee = Trainee(case, optimizer, device, torch.float32)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in trainee.model.parameters():
                p *= 1 + (torch.rand(p.shape, generator=generator) - 0.5) * 2.0**-22
    losses = []
    for step in range(STEPS):
        loss = case.loss(trainee.model, trainee.move(batch_of(case, step)))
        trainee.optimizer.zero_grad()
        loss.backward()
        trainee.optimizer.step()
        losses.append(loss.detach())
    return torch.stack([loss.cpu().double() for loss in losses])


@pytest.mark.parametrize("model", CASES)
def test_free_runs_stay_within_eagers_spread(one_thread, device, model):
    optimizer = "sgd" if model in zoo.MODELS else "adamw"
    eager = free_run(CASES[model](), optimizer, "cpu")
    others = [free_run(CASES[model](), optimizer, "cpu", seed=seed) for seed in range(3)]
    spread = torch.stack([(other - eager).abs() for other in others]).amax(0).cummax(0).values
    with helpers.counting() as counted:
        mine = free_run(CASES[model](), optimizer, device)
    assert not helpers.ON_ACC or counted["kernel_launches"] > 0
    # Three runs are a small sample of the spread.
    allowed = 3 * spread + 1e-6 * eager.abs()
    wrong = ((mine - eager).abs() > allowed).nonzero().flatten().tolist()
    assert not wrong, [
        f"step {i + 1}: {mine[i]} instead of {eager[i]} +- {allowed[i]}" for i in wrong
    ]


@pytest.mark.parametrize(
    ("what", "error"), [("gradient of 0.weight", 1e-5), ("update of 4.bias", 1e-4), ("loss", 1e-5)]
)
def test_the_comparison_sees_a_small_error(one_thread, what, error):
    _, mine, eager, exact = next(steps(zoo.make("mlp"), "sgd", "cpu"))
    assert excesses([errors(mine, eager, exact)]) == []
    mine.values[what] = mine.values[what] * (1 + error)
    assert excesses([errors(mine, eager, exact)]) != []


class Crooked(nn.Module):
    """A network with one operation that is wrong by 1e-4."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.wrong = device

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] -> [batch, 4]."""
        y = torch.tanh(self.linear(x)) * 2.0
        return y * 1.0001 if y.device.type == self.wrong and y.dtype == torch.float32 else y


def test_a_wrong_operator_is_seen(one_thread, acc_only):
    torch.manual_seed(0)
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]
    case = zoo.Case(Crooked(acc_only), batches, zoo.classify)
    with pytest.raises(AssertionError, match="less accurate than eager's"):
        check_steps(case, "sgd", acc_only)
