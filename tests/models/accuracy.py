"""How far training steps are from float64, the device's and eager's side by side.

Each step starts from eager's parameters, buffers and optimizer state, on the device and in a
float64 twin on the CPU. What a step then computes - loss, gradients, updates of parameters, buffers
- has an error against the twin, in relative L2 per tensor; the device's may be twice eager's.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests import helpers
from tests.models import zoo

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

# Per value: the device's error, eager's, and what the rounding of a parameter allows.
Errors = dict[str, tuple[float, float, float]]

# From how many starts a doubtful step is repeated, and how far these are from eager's, relative to
# each parameter. So many of them tell what the median is at most.
STARTS = 8
MAJORITY = STARTS // 2 + 1
NEARBY = 1e-3


@dataclass
class Change:
    """An update: a parameter after and before a step."""

    after: Tensor
    before: Tensor


@dataclass
class Step:
    """What one step computed; the names say what and of which tensor.

    Gradients, parameters and buffers are the trainee's own: they are valid until its next step.
    """

    values: dict[str, Tensor | Change] = field(default_factory=dict)


def together(*values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The values' elements in row-major order, side by side, as float64 on the CPU: so many at once
    as caches hold. Whole copies of a large model's tensors take more time than its steps.
    """
    for row in zip(*(v.detach().to("cpu").reshape(-1).split(2**15) for v in values), strict=True):
        yield tuple(piece.to(torch.float64) for piece in row)


def shape(value: Tensor | Change) -> torch.Size:
    """Its sizes."""
    return value.after.shape if isinstance(value, Change) else value.shape


def wide(value: Tensor | Change) -> Tensor:
    """The value as float64 on the CPU."""
    if isinstance(value, Change):
        return wide(value.after) - wide(value.before)
    return value.detach().to("cpu", torch.float64)


def norms(rows: Iterable[Sequence[Tensor]]) -> list[float]:
    """The L2 norms of values in pieces, of which each row has one of every value."""
    # Squares of what float32 can hold are far within float64's range.
    squares = zip(*([float(p.dot(p)) for p in row] for row in rows), strict=True)
    return [math.sqrt(sum(column)) for column in squares]


def mean(values: Sequence[float]) -> float:
    """The root mean square."""
    return (sum(e**2 for e in values) / len(values)) ** 0.5


class Trainee:
    """One of the three that take each step from the same state."""

    def __init__(
        self, case: zoo.Case, optimizer: zoo.MakeOptimizer, device: str, dtype: torch.dtype
    ) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self.model = copy.deepcopy(case.model).to(device, dtype)
        self.optimizer = optimizer(list(self.model.parameters()))

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the parameters, by name."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

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

    def step(self, batch: zoo.Batch, before: dict[str, Tensor], seed: int) -> Step:
        """Forward, backward and the optimizer's step.

        `before` are the parameters that all started from. `seed` is for what the model draws on the
        CPU, so that all draw the same.
        """
        batch = self.move(batch)
        helpers.flush()
        torch.manual_seed(seed)
        loss = self.case.loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        helpers.flush()
        made = Step({"loss": loss.detach()})
        for name, p in self.model.named_parameters():
            made.values[f"gradient of {name}"] = p.grad
            made.values[f"update of {name}"] = Change(p, before[name])
        for name, b in self.model.named_buffers():
            made.values[f"buffer {name}"] = b
        return made


def errors(mine: Step, eager: Step, exact: Step) -> Errors:
    """Per value, how far the device and eager are from float64, and what rounding allows.

    Relative to the value's norm. The steps themselves need not be kept.
    """
    found = {}
    for name, x in exact.values.items():
        compared = [mine.values[name], eager.values[name], x]
        assert len(set(map(shape, compared))) == 1
        if isinstance(x, Change):
            # All began with the same: their updates differ by what they led to differs by.
            assert len({id(value.before) for value in compared}) == 1
            rows = together(*(value.after for value in compared), x.before)
            of_mine, of_eager, size, start = norms((m - x, e - x, x - b, b) for m, e, x, b in rows)
        else:
            of_mine, of_eager, size = norms((m - x, e - x, x) for m, e, x in together(*compared))
            start = 0.0
        size = size or 1.0
        # A parameter is a float32: its update is known to half of its last bit.
        found[name] = (of_mine / size, of_eager / size, 2.0**-24 * start / size)
    return found


def allowances(runs: Sequence[Errors], name: str) -> tuple[float, list[float]]:
    """What a value's errors may be: the root mean square over the steps, and each step's."""
    _, eager, rounding = zip(*(run[name] for run in runs), strict=True)
    each = [FACTOR_OF_ONE * max(eager) + FLOOR_OF_ONE + own for own in rounding]
    return FACTOR * mean(eager) + FLOOR + mean(rounding), each


def excesses(runs: Sequence[Errors]) -> list[str]:
    """What of the device's steps is further from float64 than it may be, given eager's distance."""
    lines = []
    for name in runs[0]:
        mine, eager, _ = zip(*(run[name] for run in runs), strict=True)
        allowed, each = allowances(runs, name)
        if not mean(mine) <= allowed:
            lines.append(
                f"{name}: {mean(mine):.3g}, eager's {mean(eager):.3g}, allowed {allowed:.3g}"
            )
        for number, (error, limit) in enumerate(zip(mine, each, strict=True), start=1):
            if not error <= limit:
                worst = max(eager)
                lines.append(f"step {number}: {name}: {error:.3g}, eager's {worst:.3g} at most")
    return lines


def doubtful(runs: Sequence[Errors]) -> list[int]:
    """The steps, from 1, with an error beyond what the root mean square of all steps may be; the
    step furthest beyond it comes first.
    """
    limits = {name: allowances(runs, name)[0] for name in runs[0]}
    worst = {
        number: max(_relative(mine, limits[name]) for name, (mine, _, _) in run.items())
        for number, run in enumerate(runs, start=1)
    }
    return sorted((n for n in worst if worst[n] > 1), key=lambda n: -worst[n])


def _relative(error: float, limit: float) -> float:
    return error / limit if error <= math.inf else math.inf  # NaN is beyond every limit


def batch_of(case: zoo.Case, step: int) -> zoo.Batch:
    """A batch whose targets change places every time it comes again.

    What cannot be learned keeps the loss away from zero, where it has hardly any correct bits.
    """
    count = len(case.batches)
    *inputs, target = case.batches[step % count]
    return (*inputs, target.roll(step // count, 0))


def steps(
    case: zoo.Case, optimizer: zoo.MakeOptimizer, device: str, count: int = STEPS
) -> Iterator[tuple[int, Step, Step, Step]]:
    """Number from 1, and what the device, eager and the float64 twin made of it."""
    eager = Trainee(case, optimizer, "cpu", torch.float32)
    mine = Trainee(case, optimizer, device, torch.float32)
    exact = Trainee(case, optimizer, "cpu", torch.float64)
    for step in range(count):
        mine.load(eager)
        exact.load(eager)
        before = eager.parameters()
        batch = batch_of(case, step)
        trainees = (mine, eager, exact)
        made = [trainee.step(batch, before, seed=step) for trainee in trainees]
        yield (step + 1, *made)


def measure(
    case: zoo.Case, optimizer: zoo.MakeOptimizer, device: str, count: int = STEPS
) -> list[Errors]:
    """The errors of each step. Fails when a loss is not finite or a step was not fused."""
    runs = []
    launches = helpers.stats().get("kernel_launches", 0)
    for number, mine, eager, exact in steps(case, optimizer, device, count):
        assert wide(exact.values["loss"]).isfinite()
        now = helpers.stats().get("kernel_launches", 0)
        if helpers.ON_ACC and number >= FIRST_FUSED:
            assert now > launches, f"step {number} was not fused"
        launches = now
        runs.append(errors(mine, eager, exact))
    return runs


class Repetitions:
    """Single steps, each taken again from starts near eager's.

    Where float32 and float64 take different sides of a kink (of a ReLU, of a maximum), whole
    gradients differ by ten or a thousand times what rounding does. That happens to a few steps of
    every run and layout, to others in each, and in some networks in every second step.
    """

    def __init__(self, case: zoo.Case, optimizer: zoo.MakeOptimizer, device: str) -> None:
        self.case, self.optimizer = case, optimizer
        self.start = Trainee(case, optimizer, "cpu", torch.float32)
        self.mine = Trainee(case, optimizer, device, torch.float32)
        self.exact = Trainee(case, optimizer, "cpu", torch.float64)
        self.taken = STEPS + 1  # by `eager`: to be begun

    def _go_to(self, number: int) -> None:
        """Takes eager to where the step begins."""
        if self.taken >= number:
            self.eager, self.taken = Trainee(self.case, self.optimizer, "cpu", torch.float32), 0
        for earlier in range(self.taken, number - 1):
            batch = batch_of(self.case, earlier)
            self.eager.step(batch, self.eager.parameters(), seed=earlier)
        self.taken = number - 1

    def take(self, number: int, seeds: range) -> list[Errors]:
        """The errors of a step, from 1, from one start per seed."""
        self._go_to(number)
        found = []
        for seed in seeds:
            self.start.load(self.eager)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for p in self.start.model.parameters():
                    p *= 1 + (torch.rand(p.shape, generator=generator) - 0.5) * 2 * NEARBY
            self.mine.load(self.start)
            self.exact.load(self.start)
            before = self.start.parameters()
            batch = batch_of(self.case, number - 1)
            launches = helpers.stats().get("kernel_launches", 0)
            made = [
                each.step(batch, before, seed=number - 1)
                for each in (self.mine, self.start, self.exact)
            ]
            if helpers.ON_ACC and number >= FIRST_FUSED:
                now = helpers.stats().get("kernel_launches", 0)
                assert now > launches, f"step {number} was not fused when it was repeated"
            found.append(errors(*made))
        return found


def of_all(several: Sequence[Errors]) -> Errors:
    """What takes a step's place: the device's median, and eager's largest.

    A median of eight and another may be on different sides of a kink, but hardly a median and the
    largest.
    """
    return {
        name: (
            statistics.median(each[name][0] for each in several),
            max(each[name][1] for each in several),
            several[0][name][2],
        )
        for name in several[0]
    }


def at_worst(several: Sequence[Errors]) -> Errors:
    """The same after the first starts: how bad it can still become. Whatever numbers the others
    give, the median is not above the largest of a majority, and eager's largest not below a part's.
    """
    bounds = {}
    for name, (_, eager, rounding) in of_all(several).items():
        mine = sorted(math.inf if math.isnan(e[name][0]) else e[name][0] for e in several)
        bounds[name] = (mine[MAJORITY - 1], eager, rounding)
    return bounds


def failures(
    case: zoo.Case, optimizer: zoo.MakeOptimizer, device: str, runs: Sequence[Errors]
) -> tuple[list[int], list[str]]:
    """The steps that had to be repeated, and what is less accurate than it may be.

    The worst one first, and none once what is left is within bounds.
    """
    runs, again = list(runs), list[int]()
    repetitions = None
    while excesses(runs) and (left := [n for n in doubtful(runs) if n not in again]):
        repetitions = repetitions or Repetitions(case, optimizer, device)
        number = left[0]
        again.append(number)
        found = repetitions.take(number, range(MAJORITY))
        runs[number - 1] = at_worst(found)
        if number in doubtful(runs):
            found += repetitions.take(number, range(MAJORITY, STARTS))
            runs[number - 1] = of_all(found)
    return sorted(again), excesses(runs)


def check_steps(case: zoo.Case, optimizer: zoo.MakeOptimizer, device: str) -> None:
    """The test: every step within bounds, and fused."""
    _, lines = failures(case, optimizer, device, measure(case, optimizer, device))
    assert not lines, f"{len(lines)} values less accurate than eager's:\n" + "\n".join(lines[:20])
